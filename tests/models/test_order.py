"""The order of the sequence over context ranks: permutations, how the order is chosen, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.models.config import ContextConfig
from service.models.order import Order, check_sequence, resolve_order, time_index, to_array_order, to_time_order

ORDERS = st.sampled_from(list(Order))
RUNS = st.sampled_from([Order.NATURAL, Order.DUAL_CHUNK_SWAP])


def test_each_rank_holds_a_chunk_from_the_front_and_its_mirror_from_the_back() -> None:
    np.testing.assert_array_equal(time_index(12, 2, Order.DUAL_CHUNK_SWAP), [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(time_index(6, 3, Order.DUAL_CHUNK_SWAP), [0, 5, 1, 4, 2, 3])


def test_striped_rank_holds_every_cp_th_token() -> None:
    np.testing.assert_array_equal(time_index(6, 3, Order.STRIPED), [0, 3, 1, 4, 2, 5])


@settings(deadline=None)
@given(cp=st.integers(1, 8), chunk=st.integers(1, 7), order=ORDERS)
def test_time_index_names_each_time_once(cp: int, chunk: int, order: Order) -> None:
    seq_len = 2 * cp * chunk
    by_time = time_index(seq_len, cp, order)
    np.testing.assert_array_equal(np.sort(by_time), np.arange(seq_len))
    assert by_time.dtype == np.int32


@settings(deadline=None)
@given(cp=st.integers(1, 8), chunk=st.integers(1, 9))
def test_load_balance_gives_every_rank_the_same_causal_work(cp: int, chunk: int) -> None:
    times = time_index(2 * cp * chunk, cp, Order.DUAL_CHUNK_SWAP).reshape(cp, -1)
    assert len(set((times + 1).sum(axis=1).tolist())) == 1


@settings(max_examples=20, deadline=None)
@given(cp=st.integers(1, 4), chunk=st.integers(1, 3), order=ORDERS)
def test_reordering_agrees_with_the_index_for_numpy_and_jax(cp: int, chunk: int, order: Order) -> None:
    natural = np.arange(2 * 2 * cp * chunk * 3).reshape(2, 2 * cp * chunk, 3)
    expected = natural[:, time_index(2 * cp * chunk, cp, order)]
    moved = to_array_order(natural, cp=cp, order=order)
    np.testing.assert_array_equal(moved, expected)
    np.testing.assert_array_equal(to_array_order(jnp.asarray(natural), cp=cp, order=order), expected)
    np.testing.assert_array_equal(to_time_order(moved, cp=cp, order=order), natural)
    np.testing.assert_array_equal(to_time_order(jnp.asarray(moved), cp=cp, order=order), natural)


@pytest.mark.parametrize("mode", ["prefill", "autoregressive"])
def test_inference_calls_are_never_reordered(mode: str) -> None:
    assert resolve_order(ContextConfig(), cp=4, mode=mode, has_engram=True) is Order.NATURAL
    assert resolve_order(ContextConfig(order="striped"), cp=4, mode=mode, has_engram=True) is Order.NATURAL


def test_auto_and_its_own_name_mean_dual_chunk_swap_in_training() -> None:
    for name in ("auto", "dual_chunk_swap"):
        assert resolve_order(ContextConfig(order=name), cp=2, mode="train", has_engram=True) is Order.DUAL_CHUNK_SWAP
    assert resolve_order(ContextConfig(order="striped"), cp=2, mode="train", has_engram=False) is Order.STRIPED


def test_order_is_natural_without_balance_or_without_ranks_to_balance() -> None:
    assert resolve_order(ContextConfig(load_balance=False, order="striped"), cp=2, mode="train", has_engram=True) is Order.NATURAL
    assert resolve_order(ContextConfig(order="striped"), cp=1, mode="train", has_engram=True) is Order.NATURAL


def test_striped_is_refused_for_engram() -> None:
    with pytest.raises(ValueError, match=r"context.order is striped and the model has Engram layers.*use auto or dual_chunk_swap$"):
        resolve_order(ContextConfig(order="striped"), cp=2, mode="train", has_engram=True)


def test_a_sequence_that_does_not_divide_is_refused_with_its_neighbours() -> None:
    with pytest.raises(
        ValueError, match=r"sequence of 18 tokens does not divide into 8 chunks \(dual_chunk_swap, 4 context ranks\).*16 or 24"
    ):
        time_index(18, 4, Order.DUAL_CHUNK_SWAP)
    with pytest.raises(ValueError, match=r"sequence of 3 tokens does not divide into 4 chunks .*; use 4"):
        check_sequence(3, cp=4, order=Order.NATURAL)


@settings(deadline=None)
@given(
    cp=st.integers(2, 8), chunk=st.integers(1, 20), halo=st.integers(0, 20), order=st.sampled_from([Order.NATURAL, Order.DUAL_CHUNK_SWAP])
)
def test_a_chunk_shorter_than_the_halo_is_refused_with_the_numbers(cp: int, chunk: int, halo: int, order: Order) -> None:
    seq_len = chunk * cp * (2 if order is Order.DUAL_CHUNK_SWAP else 1)
    if halo <= chunk:
        check_sequence(seq_len, cp=cp, order=order, halo=halo)
    else:
        with pytest.raises(ValueError, match=f"halo of {halo} tokens exceeds the {chunk} in each chunk"):
            check_sequence(seq_len, cp=cp, order=order, halo=halo)


def test_one_rank_needs_no_chunk_as_long_as_the_halo() -> None:
    check_sequence(3, cp=1, order=Order.NATURAL, halo=9)


def test_orders_and_table_sizes_are_known_without_jax() -> None:
    code = "import sys, service.models.order, service.models.primes; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
