"""Neighbours across context ranks: history before each chunk and the next token in time, against NumPy on the natural sequence."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from service.models import axes
from service.models.config import MeshAxes
from service.models.halo import chunks_with_history, shift_left_in_time
from service.models.order import Order, chunks_per_rank, time_index, to_array_order, to_time_order

RUNS = [Order.NATURAL, Order.DUAL_CHUNK_SWAP]


def mesh_of(cp: int) -> jax.sharding.Mesh:
    """All 8 CPU devices: `cp` context ranks, the rest shard the batch, as in training."""
    return axes.make_mesh(MeshAxes(fsdp=8 // cp, context=cp))


def histories(natural: np.ndarray, *, halo: int, cp: int, order: Order) -> np.ndarray:
    """[batch, chunks, halo + chunk, ...] by looking up, for each chunk, the times before its first in the padded natural sequence."""
    batch, seq_len, *rest = natural.shape
    num_chunks = cp * chunks_per_rank(order)
    length = seq_len // num_chunks
    padded = np.concatenate([np.zeros((batch, halo, *rest), natural.dtype), natural], axis=1)
    starts = time_index(seq_len, cp, order)[::length]
    return np.stack([padded[:, start : start + halo + length] for start in starts], axis=1)


@pytest.mark.parametrize("order", RUNS)
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_each_chunk_sees_its_natural_predecessor(cp: int, order: Order) -> None:
    halo, natural = 3, np.random.default_rng(0).normal(size=(8, 80, 5)).astype(np.float32)
    if cp == 1:
        order = Order.NATURAL
    with jax.set_mesh(mesh_of(cp)):
        x = jax.device_put(to_array_order(natural, cp=cp, order=order), NamedSharding(mesh_of(cp), axes.spec("batch", "seq", None)))
        seen = jax.jit(partial(chunks_with_history, halo=halo, order=order))(x)
    np.testing.assert_array_equal(seen, histories(natural, halo=halo, cp=cp, order=order))


@settings(max_examples=12, deadline=None)
@given(cp=st.sampled_from([2, 4]), chunk=st.integers(1, 6), halo=st.integers(0, 6), order=st.sampled_from(RUNS), whole=st.booleans())
def test_history_holds_for_any_chunk_and_halo(cp: int, chunk: int, halo: int, order: Order, whole: bool) -> None:
    halo = min(halo, chunk)
    shape = (8, chunk * cp * chunks_per_rank(order)) if whole else (8, chunk * cp * chunks_per_rank(order), 2)
    natural = np.arange(1, 1 + np.prod(shape), dtype=np.int32 if whole else np.float32).reshape(shape)
    with jax.set_mesh(mesh_of(cp)):
        seen = jax.jit(partial(chunks_with_history, halo=halo, order=order))(to_array_order(natural, cp=cp, order=order))
    np.testing.assert_array_equal(seen, histories(natural, halo=halo, cp=cp, order=order))


@pytest.mark.parametrize("order", RUNS)
def test_history_gradient_returns_to_the_token_it_came_from(order: Order) -> None:
    cp, halo = 4, 3
    natural = np.random.default_rng(1).normal(size=(2, 32, 5)).astype(np.float32)
    weights = np.random.default_rng(2).normal(size=histories(natural, halo=halo, cp=cp, order=order).shape).astype(np.float32)

    def weighted(x: jax.Array) -> jax.Array:
        return jnp.sum(chunks_with_history(x, halo=halo, order=order) * weights)

    with jax.set_mesh(mesh_of(cp)):
        gradient = jax.jit(jax.grad(weighted))(to_array_order(natural, cp=cp, order=order))
    length = natural.shape[1] // weights.shape[1]
    expected = np.zeros((2, halo + 32, 5), np.float32)
    for chunk, start in enumerate(time_index(32, cp, order)[::length]):
        expected[:, start : start + halo + length] += weights[:, chunk]
    np.testing.assert_allclose(to_time_order(np.asarray(gradient), cp=cp, order=order), expected[:, halo:], rtol=1e-6, atol=1e-6)


def test_a_halo_of_zero_sends_nothing() -> None:
    x = jnp.ones((8, 16, 3))
    with jax.set_mesh(mesh_of(4)):
        lowered = jax.jit(partial(chunks_with_history, halo=0, order=Order.DUAL_CHUNK_SWAP)).lower(x)
        assert "collective_permute" not in lowered.as_text()
        assert lowered.out_info.shape == (8, 8, 2, 3)


@settings(max_examples=16, deadline=None)
@given(
    cp=st.sampled_from([1, 2, 4]),
    chunk=st.integers(1, 5),
    order=st.sampled_from(list(Order)),
    dtype=st.sampled_from([np.int32, np.float32]),
    depth=st.integers(1, 3),
)
def test_shift_takes_the_next_token_in_time(cp: int, chunk: int, order: Order, dtype: type, depth: int) -> None:
    natural = np.arange(1, 1 + 8 * 2 * cp * chunk, dtype=dtype).reshape(8, 2 * cp * chunk)

    def repeatedly(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = shift_left_in_time(x, order=order)
        return x

    with jax.set_mesh(mesh_of(cp)):
        shifted = jax.jit(repeatedly)(to_array_order(natural, cp=cp, order=order))
    expected = np.concatenate([natural[:, depth:], np.zeros_like(natural[:, :depth])], axis=1)[:, : natural.shape[1]]
    np.testing.assert_array_equal(to_time_order(np.asarray(shifted), cp=cp, order=order), expected)
    assert shifted.dtype == dtype


def test_shift_gradient_is_the_shift_to_the_right() -> None:
    weights = np.random.default_rng(3).normal(size=(8, 16, 3)).astype(np.float32)
    moved = to_array_order(weights, cp=4, order=Order.DUAL_CHUNK_SWAP)
    with jax.set_mesh(mesh_of(4)):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(shift_left_in_time(x, order=Order.DUAL_CHUNK_SWAP) * moved)))(jnp.zeros((8, 16, 3)))
    expected = np.concatenate([np.zeros((8, 1, 3), np.float32), weights[:, :-1]], axis=1)
    np.testing.assert_array_equal(to_time_order(np.asarray(gradient), cp=4, order=Order.DUAL_CHUNK_SWAP), expected)


def test_striped_history_is_refused() -> None:
    with pytest.raises(ValueError, match="striped order keeps no two neighbouring tokens on a rank"):
        chunks_with_history(jnp.ones((2, 8, 3)), halo=1, order=Order.STRIPED)


def test_a_halo_longer_than_a_chunk_is_refused_before_tracing_ends() -> None:
    with jax.set_mesh(mesh_of(8)), pytest.raises(ValueError, match="halo of 9 tokens exceeds the 2 in each chunk"):
        jax.eval_shape(partial(chunks_with_history, halo=9), jnp.ones((8, 16, 3)))


@pytest.mark.parametrize("order", RUNS)
def test_links_do_not_wrap_around(order: Order) -> None:
    with jax.set_mesh(mesh_of(4)):
        text = jax.jit(partial(chunks_with_history, halo=1, order=order)).lower(jnp.ones((8, 32, 3))).as_text()
    pairs = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
    # One group of links for each of the two batch shards, cp - 1 = 3 links in each, or one symbolic group.
    assert len(pairs) == chunks_per_rank(order)
    for links in pairs:
        found = {tuple(map(int, link.split(","))) for link in re.findall(r"\[(\d+, \d+)\]", links)}
        assert all(abs(source - target) == 1 for source, target in found)
        assert len(found) % 3 == 0
