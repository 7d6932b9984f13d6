"""A random generator for initial weights that is quick to compile: a hash of each element's index, instead of Threefry's loops.

JAX's default generator puts a loop into the program for each array that is drawn, and a CPU's compiler works on every one; this one puts
none (held by tests/models/test_generator.py). A value depends on the key and on its own index alone, so that it is the same on every
mesh, and rows that pad a table change no other. Made for initial weights, not for statistics or secrets. Plugs in under `jax.random` by
JAX's own extension point.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, UInt32

_ODD = np.uint32(0x9E3779B9)


def _mix(x: Array) -> Array:
    """The finalizer of MurmurHash3 (public domain): every input bit moves every output bit with about even odds."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _seed(seed: Any) -> UInt32[Array, " 1"]:
    return _mix(jnp.asarray(seed).astype(jnp.uint32) + _ODD).reshape(1)


def _fold_in(key: UInt32[Array, " 1"], data: Any) -> UInt32[Array, " 1"]:
    return _mix(_mix(key) + _ODD * (jnp.asarray(data).astype(jnp.uint32) + np.uint32(1)))


def _random_bits(key: UInt32[Array, " 1"], bit_width: int, shape: tuple[int, ...]) -> Array:
    """One hash round for each dim, so that no index is ever larger than a dim."""
    if bit_width != 32:
        raise ValueError(f"this generator makes 32 bits at a time and {bit_width} were asked for; draw float32 and cast")
    bits = jnp.broadcast_to(_mix(key)[0], shape)
    for dim in range(len(shape)):
        bits = _mix(bits + _ODD * (jax.lax.broadcasted_iota(jnp.uint32, shape, dim) + np.uint32(1)))
    return bits


def _split(key: UInt32[Array, " 1"], shape: tuple[int, ...]) -> UInt32[Array, "*shape 1"]:
    return _random_bits(_fold_in(key, jnp.uint32(0x5EED)), 32, (*shape, 1))


INDEX_HASH = define_prng_impl(
    key_shape=(1,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="index_hash", tag="ih"
)


def make_key(seed: int) -> Array:
    """A `jax.random` key of this generator."""
    return jax.random.key(seed, impl=INDEX_HASH)
