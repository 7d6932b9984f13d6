"""Gradients of stacked layers in the dtype they are computed in, where JAX alone would store them in the parameters'.

A weight at rest in float32 is used in bfloat16, so its gradient leaves a layer's backward pass in bfloat16; widened and stacked over the
layers it takes twice the memory and holds no more information. Differentiating with respect to the weight itself forces that, since JAX
gives a gradient the dtype of its primal. So the step differentiates with respect to probes instead: arrays of the right shape and dtype,
attached to the weights inside the scan, whose values are never read and which the compiler therefore never makes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

_FLOAT32_AXES = frozenset({"router_experts"})
"""Weights with one of these axes are used in float32, whatever the compute dtype."""


def make_probes(params: Any, arrays: Any, dtype: str) -> Any:
    """A probe for each of `arrays`, the stacked parameters that `params` describes; in `dtype` for weights that are cast to it for use."""

    def probe(variable: nnx.Param, array: Array) -> Array:
        is_cast = len(variable.axes) > 1 and not _FLOAT32_AXES & set(variable.axes)
        return jnp.zeros(array.shape, dtype if is_cast else array.dtype)

    variables = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    leaves, tree = jax.tree.flatten(arrays)
    return jax.tree.unflatten(tree, [probe(*pair) for pair in zip(variables, leaves, strict=True)])


@jax.custom_vjp
def attach(weight: Array, probe: Array) -> Array:
    """`weight` at the precision of `probe`, which receives its gradient.

    Rounding here, and not by the cast alone, keeps the compiler's bfloat16 propagation from casting the whole stack of layers ahead of
    the loop, where the copy would stand beside the original for the whole step.
    """
    if weight.dtype == probe.dtype:
        return weight
    precision = jnp.finfo(probe.dtype)
    return jax.lax.reduce_precision(weight, precision.nexp, precision.nmant)


def _attach_forward(weight: Array, probe: Array) -> tuple[Array, Array]:
    return attach(weight, probe), jnp.zeros((), probe.dtype)


def _attach_backward(like: Array | np.ndarray, gradient: Array) -> tuple[None, Array]:
    return None, gradient.astype(like.dtype)


attach.defvjp(_attach_forward, _attach_backward)
