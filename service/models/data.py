"""Synthetic training batches: packed documents or whole rows, seeded, in the order that training input has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int32

from service.models.order import Order, to_array_order


class Batch(NamedTuple):
    """What one train step reads: four int32 [batch, seq] arrays in one array order."""

    tokens: Int32[Array | np.ndarray, "batch seq"]
    targets: Int32[Array | np.ndarray, "batch seq"]
    """The next token in time of the same document; 0, which is never a synthetic token, where there is none."""
    segment_ids: Int32[Array | np.ndarray, "batch seq"]
    """1, 2, … by document; 0 is padding."""
    positions: Int32[Array | np.ndarray, "batch seq"]
    """Place in the document, from 0; 0 on padding."""


def synthetic_batch(
    *,
    batch: int,
    seq_len: int,
    vocab_size: int,
    packing: bool = True,
    max_documents: int = 4,
    cp: int = 1,
    order: Order = Order.NATURAL,
    seed: int = 0,
    step: int = 0,
) -> Batch:
    """The batch of one step; the same arguments give the same batch, and another order gives the same tokens, permuted.

    Packed rows hold 2 to `max_documents` documents of random lengths, then up to an eighth of padding. Without packing a row is one
    document without padding. Targets are made in time, before the permutation.

    Raises:
        ValueError: a row is too short for two documents, fewer than two are allowed, the vocabulary has no token but 0, or the
            sequence does not divide for `cp` and `order`.
    """
    if packing and (seq_len < 2 or max_documents < 2):
        raise ValueError(f"packing needs 2 documents in a row: seq_len {seq_len}, max_documents {max_documents}; use 2 or more of each")
    if vocab_size < 2:
        raise ValueError(f"vocab_size is {vocab_size}; use 2 or more, since token 0 is padding")
    generator = np.random.default_rng([seed, step])
    tokens = generator.integers(1, vocab_size, size=(batch, seq_len), dtype=np.int32)
    segment_ids = np.ones((batch, seq_len), dtype=np.int32)
    if packing:
        segment_ids = np.stack([_packed_segments(generator, seq_len, max_documents) for _ in range(batch)])
    tokens[segment_ids == 0] = 0
    same_document = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    targets = np.zeros_like(tokens)
    targets[:, :-1] = np.where(same_document, tokens[:, 1:], 0)
    natural = Batch(tokens, targets, segment_ids, _positions(segment_ids))
    return Batch(*(to_array_order(array, cp=cp, order=order) for array in natural))


def _packed_segments(generator: np.random.Generator, seq_len: int, max_documents: int) -> Int32[np.ndarray, " seq"]:
    """One row of segment ids: 1, 2, … and zeros at the end."""
    used = seq_len - int(generator.integers(0, max(0, min(seq_len // 8, seq_len - 2)) + 1))
    num_documents = int(generator.integers(2, min(max_documents, used) + 1))
    starts = generator.choice(np.arange(1, used), size=num_documents - 1, replace=False)
    segment_ids = np.zeros(seq_len, dtype=np.int32)
    segment_ids[starts] = 1
    segment_ids = np.cumsum(segment_ids, dtype=np.int32) + 1
    segment_ids[used:] = 0
    return segment_ids.astype(np.int32)


def _positions(segment_ids: Int32[np.ndarray, "batch seq"]) -> Int32[np.ndarray, "batch seq"]:
    """Distance from the start of each document; 0 on padding."""
    time = np.broadcast_to(np.arange(segment_ids.shape[1], dtype=np.int32), segment_ids.shape)
    starts = np.ones(segment_ids.shape, dtype=bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = np.maximum.accumulate(np.where(starts, time, 0), axis=1)
    return np.where(segment_ids == 0, 0, time - first).astype(np.int32)
