"""Which primes an Engram model hashes with, and so how many rows its tables have; NumPy only, so that a spec can be checked without JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from service.models.config import EngramConfig

INT32_MAX = 2**31 - 1
MAX_WINDOW = 1 << 20


def primes_from(start: int) -> Iterator[int]:
    """The primes >= `start`, ascending, by a segmented sieve whose windows grow with what is asked for."""
    low, width = max(start, 2), 1024
    while True:
        yield from (low + np.flatnonzero(_is_prime(low, low + width))).tolist()
        low, width = low + width, min(2 * width, MAX_WINDOW)


def _is_prime(low: int, high: int) -> NDArray[np.bool_]:
    """bool[high - low]: whether each number of [low, high) is prime; low >= 2."""
    sieve = np.ones(high - low, dtype=np.bool_)
    for prime in _primes_below(math.isqrt(high) + 1):
        sieve[max(prime * prime, -(-low // prime) * prime) - low :: prime] = False
    return sieve


@lru_cache(maxsize=8)
def _primes_below(limit: int) -> tuple[int, ...]:
    sieve = np.ones(max(limit, 2), dtype=np.bool_)
    sieve[:2] = False
    for number in range(2, math.isqrt(limit) + 1):
        if sieve[number]:
            sieve[number * number :: number] = False
    return tuple(np.flatnonzero(sieve).tolist())


@lru_cache(maxsize=32)
def layer_primes(engram: EngramConfig) -> Mapping[int, tuple[tuple[int, ...], ...]]:
    """For each Engram layer, the moduli as [order][head]: the next unused prime >= the order's base size.

    "Unused" counts over all heads, orders and layers, in the order of `engram.layers` (Engram, arXiv 2601.07372, section 2.2).

    Raises:
        ValueError: a layer's primes sum beyond what an int32 row id reaches.
    """
    used: set[int] = set()
    layers: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in engram.layers:
        total = 0
        # Known before any sieving: each modulus is at least its base.
        _check_rows(layer, engram.num_heads * sum(engram.base_sizes))
        orders = []
        for base in engram.base_sizes:
            heads: list[int] = []
            for prime in primes_from(base):
                if len(heads) == engram.num_heads:
                    break
                if prime not in used:
                    used.add(prime)
                    heads.append(prime)
                    total += prime
                    _check_rows(layer, total)
            orders.append(tuple(heads))
        layers[layer] = tuple(orders)
    return layers


def _check_rows(layer: int, num_rows: int) -> None:
    if num_rows > INT32_MAX:
        raise ValueError(
            f"the Engram table of layer {layer} has at least {num_rows:,} rows, and int32 row ids reach {INT32_MAX:,}; "
            "lower base_sizes, num_heads or max_ngram"
        )


def num_table_rows(engram: EngramConfig, layer: int) -> int:
    """Rows of the flat table of one Engram layer: the sum of its primes, pads apart.

    Raises:
        ValueError: `layer` has no Engram, or the rows exceed int32.
    """
    if layer not in engram.layers:
        raise ValueError(f"layer {layer} has no Engram; layers that have one: {list(engram.layers)}")
    return sum(sum(heads) for heads in layer_primes(engram)[layer])


def num_padded_rows(num_rows: int, num_shards: int) -> int:
    """`num_rows` rounded up to a multiple of `num_shards`, so that every shard is of one size; pads are never addressed.

    Raises:
        ValueError: the padded count exceeds int32.
    """
    padded = -(-num_rows // num_shards) * num_shards
    if padded > INT32_MAX:
        raise ValueError(f"{num_rows:,} rows padded for {num_shards} shards are {padded:,}, beyond int32; lower base_sizes")
    return padded
