"""Asks the compiler how much HBM it allows a program on a device, to the byte: its texts round, and no table stays true.

What is allowed also depends on the size of the slice (libtpu 0.0.52 reserves 512 bytes more for each chip of it), so a capacity belongs to
a topology and not to a family: v5p 2x2x1 has 102,786,660,352 bytes and v5p 4x8x8 has 102,786,531,328 (tests/compile/test_capacity.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from service.compile.failures import is_before_code_generation, stated_hbm_bytes

UNIT_BYTES = 512
"""One row of the probe's argument, and the grain in which libtpu reserves."""


class CapacityError(RuntimeError):
    """The compiler did not answer as it must for its capacity to be found."""


def measure_capacity(device: jax.Device, compiler_options: Mapping[str, str | int | bool] | None = None) -> int:
    """The largest number of allocated bytes, a multiple of 512, that the compiler's check before code generation lets pass on `device`.

    A program far too large has the compiler state its capacity rounded to 0.01 GiB; bisecting in between takes about 15 compiles of a
    program with one donated argument, whose allocated bytes are exactly that argument's. About 0.8 s.

    Raises:
        CapacityError: the first program was not refused, or not in words that are known.
    """
    options = dict(compiler_options or {})
    sharding = SingleDeviceSharding(device)
    probe = jax.jit(lambda x: x + 1, donate_argnums=0)

    def refusal(num_units: int) -> str | None:
        # One tile row of float32 is 512 bytes without padding, and the result reuses the argument.
        argument = jax.ShapeDtypeStruct((num_units, 1, UNIT_BYTES // 4), jnp.float32, sharding=sharding)
        try:
            probe.lower(argument).compile(options)
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return None

    text = refusal(2**31 - 1) or ""
    bounds = stated_hbm_bytes(text)
    if bounds is None:
        raise CapacityError(
            f"a program of 1 TiB was answered with {text[:200]!r}, which states no capacity; the classifier needs this text"
        )
    passes, fails = bounds[0] // UNIT_BYTES, bounds[1] // UNIT_BYTES + 1
    while fails - passes > 1:
        middle = (passes + fails) // 2
        answer = refusal(middle)
        # Refused after code generation means that the check in question was passed.
        if answer is not None and is_before_code_generation(answer):
            fails = middle
        else:
            passes = middle
    return passes * UNIT_BYTES
