"""In which order the tokens of a sequence lie over the `context` axis, and the permutations between that order and time.

Array position is where a token stands in `[batch, seq]`; time is its place in the sequence. NumPy only, so that a spec can be checked
without JAX; for that reason the array types here are NumPy's and shapes stand in the docstrings.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.models.config import ContextConfig

Mode = Literal["train", "prefill", "autoregressive"]
"""What a call of the model is for; one model object serves all three."""


class Order(StrEnum):
    """Which tokens a context rank holds."""

    NATURAL = "natural"
    """Rank r holds the r-th of cp equal pieces."""
    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    """Rank r holds chunks r and 2*cp-1-r of 2*cp, so that every rank has the same share of causal attention."""
    STRIPED = "striped"
    """Rank r holds every cp-th token, from token r."""


def resolve_order(context: ContextConfig, *, cp: int, mode: Mode, has_engram: bool) -> Order:
    """The order that the input of a call has. The only place where `context.order` and `context.load_balance` are read.

    Decided by the mode of the call, never by how the model was built: only training input is reordered.

    Args:
        cp: context-parallel ranks.
        mode: of this call.
        has_engram: the model has Engram layers, whose halo exchange knows DUAL_CHUNK_SWAP alone.

    Raises:
        ValueError: `striped` would apply to a model with Engram.
    """
    if mode != "train" or not context.load_balance or cp == 1:
        return Order.NATURAL
    if context.order == "striped":
        if has_engram:
            raise ValueError(
                "context.order is striped and the model has Engram layers, which read neighbouring tokens; use auto or dual_chunk_swap"
            )
        return Order.STRIPED
    return Order.DUAL_CHUNK_SWAP


def chunks_per_rank(order: Order) -> int:
    """Runs of consecutive tokens that one rank holds, for the orders that keep runs: 2 under DUAL_CHUNK_SWAP, else 1."""
    return 2 if order is Order.DUAL_CHUNK_SWAP else 1


def check_sequence(seq_len: int, *, cp: int, order: Order, halo: int = 0) -> None:
    """Refuse a sequence that cannot lie in this order, or whose chunks are shorter than the history that is read across them.

    Raises:
        ValueError: `seq_len` is not a multiple of cp (2*cp under DUAL_CHUNK_SWAP), or cp > 1 and a chunk is shorter than `halo`.
    """
    chunks = chunks_per_rank(order) * cp
    if seq_len % chunks:
        below, above = seq_len // chunks * chunks, (seq_len // chunks + 1) * chunks
        legal = f"{below} or {above}" if below else str(above)
        raise ValueError(f"sequence of {seq_len} tokens does not divide into {chunks} chunks ({order}, {cp} context ranks); use {legal}")
    if cp > 1 and seq_len // chunks < halo:
        raise ValueError(
            f"halo of {halo} tokens exceeds the {seq_len // chunks} in each chunk (sequence of {seq_len}, {chunks} chunks); "
            "use fewer context ranks, longer sequences or a shorter kernel"
        )


def time_index(seq_len: int, cp: int, order: Order) -> NDArray[np.int32]:
    """int32[seq]: the time of the token at each array position, so that `in_array_order = in_time[:, time_index(...)]`.

    Raises:
        ValueError: as `check_sequence`.
    """
    check_sequence(seq_len, cp=cp, order=order)
    return to_array_order(np.arange(seq_len, dtype=np.int32)[None], cp=cp, order=order)[0]


def to_array_order[ArrayT](x: ArrayT, *, cp: int, order: Order) -> ArrayT:
    """[batch, seq, ...] in time to the same in array order; NumPy or JAX.

    Whole chunks are moved, so that no index array of the sequence's length enters a program.
    """
    array: Any = x  # what NumPy's and JAX's arrays have in common has no type
    batch, seq_len, *rest = array.shape
    check_sequence(seq_len, cp=cp, order=order)
    if order is Order.NATURAL or cp == 1:
        return x
    if order is Order.STRIPED:
        return array.reshape(batch, seq_len // cp, cp, *rest).swapaxes(1, 2).reshape(array.shape)
    return array.reshape(batch, 2 * cp, seq_len // (2 * cp), *rest)[:, _dual_chunks(cp)].reshape(array.shape)


def to_time_order[ArrayT](x: ArrayT, *, cp: int, order: Order) -> ArrayT:
    """[batch, seq, ...] in array order to the same in time; the inverse of `to_array_order`."""
    array: Any = x
    batch, seq_len, *rest = array.shape
    check_sequence(seq_len, cp=cp, order=order)
    if order is Order.NATURAL or cp == 1:
        return x
    if order is Order.STRIPED:
        return array.reshape(batch, cp, seq_len // cp, *rest).swapaxes(1, 2).reshape(array.shape)
    inverse = np.argsort(_dual_chunks(cp)).astype(np.int32)
    return array.reshape(batch, 2 * cp, seq_len // (2 * cp), *rest)[:, inverse].reshape(array.shape)


def _dual_chunks(cp: int) -> NDArray[np.int32]:
    """int32[2*cp]: the chunk, counted in time, at each place of the array: 0, 2cp-1, 1, 2cp-2, …"""
    first = np.arange(cp, dtype=np.int32)
    return np.stack([first, 2 * cp - 1 - first], axis=1).reshape(-1)
