"""Which primes an Engram model hashes with, and so how many rows its tables have; no JAX and no NumPy here.

A spec is checked against it before a child starts, by clients too, who have neither installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import compress

from service.models.config import EngramConfig

INT32_MAX = 2**31 - 1
MAX_WINDOW = 1 << 20


def primes_from(start: int) -> Iterator[int]:
    """The primes >= `start`, ascending, by a segmented sieve whose windows grow with what is asked for."""
    low, width = max(start, 2), 1024
    while True:
        yield from compress(range(low, low + width), _is_prime(low, low + width))
        low, width = low + width, min(2 * width, MAX_WINDOW)


def _is_prime(low: int, high: int) -> bytearray:
    """For each number of [low, high), 1 where it is prime and 0 where not; low >= 2."""
    sieve = bytearray(b"\x01") * (high - low)
    for prime in _primes_below(math.isqrt(high) + 1):
        _strike(sieve, max(prime * prime, -(-low // prime) * prime) - low, prime)
    return sieve


@lru_cache(maxsize=8)
def _primes_below(limit: int) -> tuple[int, ...]:
    sieve = bytearray(b"\x01") * max(limit, 2)
    sieve[:2] = b"\x00\x00"
    for number in range(2, math.isqrt(limit) + 1):
        if sieve[number]:
            _strike(sieve, number * number, number)
    return tuple(compress(range(limit), sieve))


def _strike(sieve: bytearray, start: int, step: int) -> None:
    sieve[start::step] = bytes(len(range(start, len(sieve), step)))


@lru_cache(maxsize=32)
def layer_primes(engram: EngramConfig) -> Mapping[int, tuple[tuple[int, ...], ...]]:
    """For each Engram layer, the moduli as [order][head]: the next unused prime >= the order's base size.

    "Unused" counts over all heads, orders and layers, in the order of `engram.layers` (Engram, arXiv 2601.07372, section 2.2).

    Raises:
        ValueError: a layer's primes sum beyond what an int32 row id reaches.
    """
    used: set[int] = set()
    # Each base goes on where its last head stopped: what lies before is used, and no layer sieves it again.
    ahead = {base: primes_from(base) for base in engram.base_sizes}
    layers: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in engram.layers:
        total = 0
        # Known before any sieving: each modulus is at least its base.
        _check_rows(layer, engram.num_heads * sum(engram.base_sizes))
        orders = []
        for base in engram.base_sizes:
            heads: list[int] = []
            while len(heads) < engram.num_heads:
                prime = next(ahead[base])
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
