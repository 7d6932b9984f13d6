"""RMSNorm, SwiGLU, rope and YaRN against NumPy written from the formulas; parameters and gathered weights on a mesh."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from service.models.axes import make_mesh
from service.models.config import MeshAxes, YarnConfig
from service.models.primitives import RmsNorm, SwiGlu, gather, parameter, rope_frequencies, rope_tables, rotate, score_scale

B, S, D, F = 2, 5, 6, 10


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = np.random.default_rng(0).normal(size=(B, S, D)).astype(np.float32)
    norm = RmsNorm(D, eps=1e-6, param_dtype="float32", rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.arange(1.0, D + 1)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.arange(1, D + 1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-6)


def test_rms_norm_takes_its_statistics_in_float32() -> None:
    x = jnp.full((1, 1, 512), 3.0, jnp.bfloat16).at[0, 0, 0].set(100.0)
    out = RmsNorm(512, eps=0.0, param_dtype="float32", rngs=nnx.Rngs(0))(x)
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0, 1]) == pytest.approx(3 / math.sqrt((511 * 9 + 10000) / 512), rel=2**-8)


def test_swiglu_gates_with_silu() -> None:
    x = np.random.default_rng(1).normal(size=(B, S, D)).astype(np.float32)
    mlp = SwiGlu(D, F, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(3))
    gate, up, down = (np.asarray(weight[...]) for weight in (mlp.gate, mlp.up, mlp.down))
    pre = x @ gate
    expected = (pre / (1 + np.exp(-pre)) * (x @ up)) @ down.T
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=2e-5, atol=1e-6)


def test_rope_turns_interleaved_pairs_as_complex_numbers() -> None:
    dim, theta = 8, 100.0
    x = np.random.default_rng(2).normal(size=(B, S, dim))
    positions = np.array([[0, 1, 2, 0, 1], [3, 1, 4, 1, 5]])
    frequencies = rope_frequencies(dim, theta=theta, yarn=None)
    angle = positions[..., None] / theta ** (np.arange(dim // 2) * 2 / dim)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    out = rotate(jnp.asarray(x, jnp.float32), *rope_tables(jnp.asarray(positions, jnp.int32), frequencies))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_ramps_between() -> None:
    dim, theta, yarn = 64, 10000.0, YarnConfig(factor=40, original_seq_len=4096, beta_fast=32, beta_slow=1)
    plain, slowed = rope_frequencies(dim, theta=theta, yarn=None), rope_frequencies(dim, theta=theta, yarn=yarn)
    # The pair that turns n times over the original length, from length * theta^(-2i/d) / 2π = n.
    first, last = (math.log(4096 / (n * 2 * math.pi)) / math.log(theta) * dim / 2 for n in (32, 1))
    for pair in range(dim // 2):
        share = min(max((pair - math.floor(first)) / (math.ceil(last) - math.floor(first)), 0), 1)
        assert slowed[pair] == pytest.approx(plain[pair] * (1 - share) + plain[pair] / 40 * share, rel=1e-6)
    assert slowed[0] == plain[0]
    assert slowed[-1] == pytest.approx(plain[-1] / 40, rel=1e-6)


def test_yarn_multiplies_the_score_scale_by_mscale_squared() -> None:
    assert score_scale(192, None) == pytest.approx(1 / math.sqrt(192))
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert score_scale(192, YarnConfig(factor=40, mscale=0.707)) == pytest.approx(mscale**2 / math.sqrt(192))


def test_a_gathered_weight_is_whole_in_use_and_its_gradient_is_cut() -> None:
    mesh = make_mesh(MeshAxes(fsdp=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        weight = jax.device_put(
            jnp.arange(48.0).reshape(8, 6), jax.NamedSharding(mesh, PartitionSpec(("fsdp", "expert", "context"), "tensor"))
        )
        used, pull = jax.jit(lambda w: jax.vjp(lambda w: gather(w, ("embed", "mlp"), "bfloat16"), w))(weight)
        (gradient,) = jax.jit(lambda pull, g: pull(g))(pull, jnp.ones((8, 6), jnp.bfloat16))
    assert used.dtype == jnp.bfloat16
    assert used.addressable_shards[0].data.shape == (8, 3)
    assert gradient.dtype == jnp.float32
    assert gradient.addressable_shards[0].data.shape == (2, 3)


def test_a_parameter_names_one_axis_for_each_dim() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3\) has 2 dims and 1 logical axes"):
        parameter(nnx.Rngs(0), (4, 3), ("embed",), dtype="float32")
