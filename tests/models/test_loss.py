"""The next-token loss against NumPy; chunks, vocabulary shards and context ranks change neither value nor gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from service.models.axes import make_mesh
from service.models.config import MeshAxes
from service.models.loss import next_token_loss

B, S, D, V = 4, 12, 6, 10


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def inputs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(B, S, D)), jnp.float32),
        jnp.asarray(rng.normal(size=(D, V)), jnp.float32),
        jnp.asarray(rng.integers(0, V, size=(B, S)), jnp.int32),
        jnp.asarray(rng.random((B, S)) > 0.3),
    )


def run(hidden: jax.Array, head: jax.Array, targets: jax.Array, counts: jax.Array, num_chunks: int) -> Any:
    loss = lambda hidden, head: next_token_loss(hidden, head, targets, counts, num_chunks=num_chunks).mean()  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)


def test_the_loss_is_the_mean_surprise_of_the_tokens_that_count() -> None:
    hidden, head, targets, counts = (np.asarray(x) for x in inputs())
    logits = hidden.astype(np.float64) @ head
    surprise = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    loss = next_token_loss(*inputs(), num_chunks=1)
    assert float(loss.mean()) == pytest.approx(surprise[counts].mean(), rel=1e-6)
    assert int(loss.tokens) == counts.sum()


def test_no_token_that_counts_gives_zero() -> None:
    hidden, head, targets, _ = inputs()
    assert float(next_token_loss(hidden, head, targets, jnp.zeros((B, S), bool), num_chunks=2).mean()) == 0


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_change_neither_value_nor_gradient(num_chunks: int) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), run(*inputs(), 1), run(*inputs(), num_chunks))


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_mesh_changes_neither_value_nor_gradient(num_chunks: int) -> None:
    alone = run(*inputs(), 1)
    with jax.set_mesh(make_mesh(MeshAxes(fsdp=2, context=2, tensor=2))):
        together = jax.jit(run, static_argnums=4)(*inputs(), num_chunks)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), alone, together)


def test_chunks_that_do_not_divide_a_ranks_part_are_refused() -> None:
    with (
        jax.set_mesh(make_mesh(MeshAxes(context=2), jax.devices()[:2])),
        pytest.raises(ValueError, match="seq_len 12 does not divide into 4"),
    ):
        run(*inputs(), 4)
