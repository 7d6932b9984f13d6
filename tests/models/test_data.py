"""Synthetic batches: documents, targets, positions and padding, packed and not, in both orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.models.data import Batch, synthetic_batch
from service.models.order import Order, to_time_order

ROWS = {"batch": 3, "vocab_size": 11}


def check_row(tokens: np.ndarray, targets: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> list[int]:
    """Assert one natural-order row document by document; return the segment ids in order of appearance."""
    seen = []
    for segment, group in itertools.groupby(range(len(tokens)), key=lambda t: int(segments[t])):
        times = list(group)
        seen.append(segment)
        if segment == 0:
            assert not tokens[times].any()
            assert not targets[times].any()
            assert not positions[times].any()
            continue
        np.testing.assert_array_equal(positions[times], range(len(times)))
        np.testing.assert_array_equal(targets[times], [*tokens[times][1:], 0])
        assert tokens[times].min() > 0
    return seen


@settings(deadline=None)
@given(seq_len=st.integers(2, 70), max_documents=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_packed_rows_are_whole_documents_then_padding(seq_len: int, max_documents: int, seed: int) -> None:
    batch = synthetic_batch(seq_len=seq_len, max_documents=max_documents, seed=seed, **ROWS)
    for row in zip(*batch, strict=True):
        seen = check_row(*row)
        documents = [segment for segment in seen if segment]
        assert documents == list(range(1, len(documents) + 1))
        assert 2 <= len(documents) <= max_documents
        assert seen in (documents, [*documents, 0])
        assert (row[2] == 0).sum() <= seq_len // 8
    assert {array.dtype for array in batch} == {np.dtype(np.int32)}


def test_packing_varies_between_rows_and_pads_some() -> None:
    batch = synthetic_batch(batch=64, seq_len=64, vocab_size=1000)
    assert {int(row.max()) for row in batch.segment_ids} == {2, 3, 4}
    assert (batch.segment_ids == 0).any()


def test_unpacked_rows_are_one_document() -> None:
    batch = synthetic_batch(seq_len=13, packing=False, **ROWS)
    assert [check_row(*row) for row in zip(*batch, strict=True)] == [[1], [1], [1]]


@settings(deadline=None)
@given(cp=st.sampled_from([1, 2, 4]), order=st.sampled_from(list(Order)), packing=st.booleans())
def test_order_permutes_the_same_batch(cp: int, order: Order, packing: bool) -> None:
    moved = synthetic_batch(seq_len=24, cp=cp, order=order, packing=packing, **ROWS)
    natural = Batch(*(to_time_order(array, cp=cp, order=order) for array in moved))
    for array, expected in zip(natural, synthetic_batch(seq_len=24, packing=packing, **ROWS), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_batches_repeat_by_seed_and_step_and_differ_between() -> None:
    first = synthetic_batch(seq_len=32, seed=4, step=1, **ROWS)
    for array, again in zip(first, synthetic_batch(seq_len=32, seed=4, step=1, **ROWS), strict=True):
        np.testing.assert_array_equal(array, again)
    for other in ({"seed": 4, "step": 2}, {"seed": 1, "step": 4}, {"seed": 5, "step": 1}):
        assert (first.tokens != synthetic_batch(seq_len=32, **other, **ROWS).tokens).any()


def test_rows_too_short_to_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="packing needs 2 documents in a row: seq_len 1, max_documents 4"):
        synthetic_batch(seq_len=1, **ROWS)
    with pytest.raises(ValueError, match="max_documents 1; use 2 or more"):
        synthetic_batch(seq_len=8, max_documents=1, **ROWS)
    with pytest.raises(ValueError, match="vocab_size is 1; use 2 or more"):
        synthetic_batch(batch=1, seq_len=8, vocab_size=1)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence of 10 tokens does not divide into 4 chunks"):
        synthetic_batch(seq_len=10, cp=2, order=Order.DUAL_CHUNK_SWAP, **ROWS)
