"""Sinkhorn in its exact order and the hyper-connection around a sub-layer, against NumPy written from the formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from service.models.config import MhcConfig, tiny
from service.models.mhc import HyperConnection, expand_streams, reduce_streams, sinkhorn

B, S, G, D = 2, 5, 3, 7


def sinkhorn_reference(logits: np.ndarray, iterations: int) -> np.ndarray:
    """[k, m] of one token, in float64."""
    r = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) + 1e-6
    r = r / (r.sum(axis=0, keepdims=True) + 1e-6)
    for _ in range(iterations - 1):
        r = r / (r.sum(axis=1, keepdims=True) + 1e-6)
        r = r / (r.sum(axis=0, keepdims=True) + 1e-6)
    return r


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_follows_its_order_and_ends_on_columns(iterations: int) -> None:
    logits = np.random.default_rng(0).normal(size=(G, G, B, S)) * 3
    out = np.asarray(sinkhorn(jnp.asarray(logits, jnp.float32), iterations=iterations))
    for row in range(B):
        for t in range(S):
            np.testing.assert_allclose(out[:, :, row, t], sinkhorn_reference(logits[:, :, row, t], iterations), rtol=1e-5)
    np.testing.assert_allclose(out.sum(axis=0), 1, atol=1e-4)  # short of one by epsilon over the sum before


def build(streams: int) -> HyperConnection:
    model = tiny().model_copy(update={"dim": D, "mhc": MhcConfig(num_streams=streams, sinkhorn_iterations=20)})
    connection = HyperConnection(model, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(1))
    if streams > 1:
        connection.alpha[...] = jnp.array([0.7, 0.4, 1.3])
        connection.norm[...] = 1 + 0.1 * jnp.arange(streams * D, dtype=jnp.float32).reshape(streams, D)
    return connection


def test_a_hyper_connection_mixes_runs_and_spreads() -> None:
    connection = build(G)
    x = np.random.default_rng(1).normal(size=(B, S, G, D))
    with jax.default_matmul_precision("highest"):
        out, extra = connection(jnp.asarray(x, jnp.float32), lambda y: (y**2 + 1, "kept"))
    assert extra == "kept"
    projection, norm, alpha, beta = (
        np.asarray(value[...], np.float64) for value in (connection.projection, connection.norm, connection.alpha, connection.beta)
    )
    for row in range(B):
        for t in range(S):
            streams = x[row, t]
            flat = (streams / np.sqrt((streams**2).mean() + 1e-6) * norm).reshape(-1)
            h = projection.reshape(len(projection), -1) @ flat
            pre = 1 / (1 + np.exp(-(alpha[0] * h[:G] + beta[:G]))) + 1e-6
            post = 2 / (1 + np.exp(-(alpha[1] * h[G : 2 * G] + beta[G : 2 * G])))
            residual = sinkhorn_reference((alpha[2] * h[2 * G :] + beta[2 * G :]).reshape(G, G), 20)
            y = (pre @ streams) ** 2 + 1
            expected = np.stack([sum(residual[k, m] * streams[k] for k in range(G)) + post[m] * y for m in range(G)])
            np.testing.assert_allclose(out[row, t], expected, rtol=2e-5, atol=1e-5)


def test_one_stream_is_a_plain_residual_without_parameters() -> None:
    connection = build(1)
    x = jax.random.normal(jax.random.key(0), (B, S, 1, D))
    np.testing.assert_array_equal(connection(x, lambda y: (2 * y, None))[0], x + 2 * x)
    assert not jax.tree.leaves(nnx.state(connection, nnx.Param))


def test_streams_start_as_copies_and_end_summed() -> None:
    x = jax.random.normal(jax.random.key(2), (B, S, D))
    streams = expand_streams(x, G)
    assert streams.shape == (B, S, G, D)
    np.testing.assert_allclose(reduce_streams(streams), G * x, rtol=1e-6)
