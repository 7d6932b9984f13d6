"""What a spec may ask of Engram: layers that are there, rows that int32 can name, chunks that hold its halo; no JAX here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from service.errors import Problem
from service.models.config import EngramConfig
from service.models.costs import num_row_shards
from service.models.primes import INT32_MAX, layer_primes, num_padded_rows, num_table_rows


def check_engram(model: Any) -> Iterator[Problem]:
    engram = model.engram
    if engram is None:
        return
    outside = [layer for layer in engram.layers if layer >= model.num_layers]
    if outside:
        yield Problem(
            "model.engram.layers",
            list(engram.layers),
            f"names layers {outside} of {model.num_layers}",
            f"layers from 0 to {model.num_layers - 1}",
        )
    if engram.pad_id >= model.vocab_size:
        yield Problem(
            "model.engram.pad_id", engram.pad_id, f"is outside the vocabulary of {model.vocab_size}", f"at most {model.vocab_size - 1}"
        )
    yield from _row_problems(engram)


@lru_cache(maxsize=8)
def _row_problems(engram: EngramConfig) -> tuple[Problem, ...]:
    """What is wrong with the tables' rows, looked at once: the search for the primes of tables that are too large is not remembered."""
    # The bases alone, and the sum as it grows, end the search for the primes of a table that is too large.
    rows = sum(engram.base_sizes) * engram.num_heads
    if rows > INT32_MAX:
        beyond = f"the flat table would have at least {rows:,} rows, beyond what int32 row ids can address"
        legal = f"base sizes that sum to at most {INT32_MAX // engram.num_heads:,} with {engram.num_heads} heads"
        return (Problem("model.engram.base_sizes", list(engram.base_sizes), beyond, legal),)
    try:
        layer_primes(engram)
    except ValueError as error:
        taken = f"every head of every order and layer takes a prime of its own, and {error}"
        return (Problem("model.engram.num_heads", engram.num_heads, taken, "fewer heads, smaller base_sizes or a smaller max_ngram"),)
    return ()


def _largest_table_rows(engram: EngramConfig | None) -> int | None:
    """Rows of the largest table, pads apart; None without Engram, and where `_row_problems` says that there are too many."""
    if engram is None or _row_problems(engram):
        return None
    return max(num_table_rows(engram, layer) for layer in engram.layers)


def check_engram_padding(model: Any, mesh: Any) -> Iterator[Problem]:
    engram, rows = model.engram, _largest_table_rows(model.engram)
    if rows is None:
        return
    try:
        num_padded_rows(rows, num_row_shards(engram, mesh) or 1)
    except ValueError as error:
        yield Problem("model.engram.base_sizes", list(engram.base_sizes), str(error), "smaller base sizes, or fewer shards")


def check_engram_row_ids(model: Any, train: Any, mesh: Any) -> Iterator[Problem]:
    """The gradient of a table that is cut by columns numbers its rows and the ids of a data rank's tokens together (`engram_table`)."""
    engram, rows = model.engram, _largest_table_rows(model.engram)
    if rows is None or num_row_shards(engram, mesh) is not None:
        return
    ids = round(train.per_device_batch * mesh.num_devices) // mesh.data * train.seq_len * engram.num_heads * engram.num_orders
    if rows + ids > INT32_MAX:
        yield Problem(
            "train.seq_len",
            train.seq_len,
            f"the {ids:,} row ids of the tokens of each data rank and the {rows:,} rows of an Engram table exceed int32 together",
            "shorter sequences, a smaller per_device_batch, or more data ranks",
        )


def check_engram_order(model: Any, context: Any) -> Iterator[Problem]:
    # Without load balance no order but auto is legal, for any model: `spec_checks` has said so.
    if model.engram is not None and context.load_balance and context.order == "striped":
        yield Problem("context.order", "striped", "Engram reads neighbours, which the striped order scatters", "auto or dual_chunk_swap")


def check_engram_halo(model: Any, train: Any, mesh: Any, context: Any) -> Iterator[Problem]:
    if model.engram is None or mesh.context == 1:
        return
    chunks = mesh.context * (2 if context.load_balance else 1)
    chunk = train.seq_len // chunks
    if chunk < model.engram.halo:
        yield Problem(
            "train.seq_len",
            train.seq_len,
            f"Engram's halo of {model.engram.halo} tokens ((kernel_size - 1) × max_ngram) exceeds the {chunk} in each of {chunks} chunks",
            f"at least {chunks * model.engram.halo} positions, or fewer context ranks",
        )
