"""Where each dim of each array lies on the mesh: the functions that read the table of `rules`.

Convention of the whole package: the mesh is the one set by `jax.set_mesh(mesh)` around tracing, with every axis of type Auto
(`make_mesh` here sees to it). Parameters carry their logical axes as `axes` metadata of their `nnx.Param`. Activations are pinned
with `constrain`. Inside `shard_map` names are mesh axes. With no mesh set, every axis has size 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from service.models.config import AXIS_NAMES, MeshAxes
from service.models.rules import RULES


def make_mesh(axes: MeshAxes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `axes.num_devices` devices with Auto axes (`jax.make_mesh` makes Explicit ones, on which shard_map raises).

    Raises:
        ValueError: the number of devices is not the product of the axes.
    """
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) != axes.num_devices:
        raise ValueError(f"mesh {axes.as_dict()} needs {axes.num_devices} devices and {len(devices)} are given; change an axis")
    grid = np.asarray(devices, dtype=object).reshape([getattr(axes, name) for name in AXIS_NAMES])
    return Mesh(grid, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))


def axis_size(*names: str) -> int:
    """Product of the sizes of these mesh axes in the mesh that is set; 1 where none is."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(name, 1) for name in names)


def spec(*logical: str | None) -> PartitionSpec:
    """The partition of an array whose dims have these logical axes; None is a dim that is not cut.

    Raises:
        ValueError: an axis has no rule, or two dims would be cut over the same mesh axis.
    """
    parts: list[tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for name in logical:
        if name is None:
            parts.append(None)
            continue
        if name not in RULES:
            raise ValueError(f"logical axis {name!r} has no rule; known axes: {', '.join(sorted(RULES))}")
        for mesh_axis in RULES[name]:
            if mesh_axis in taken:
                raise ValueError(
                    f"logical axes {taken[mesh_axis]!r} and {name!r} are both cut over mesh axis {mesh_axis!r}; change one rule"
                )
            taken[mesh_axis] = name
        parts.append(RULES[name] or None)
    return PartitionSpec(*parts)


def check_divides(name: str, shape: Sequence[int], axes: Sequence[str | None], mesh_shape: Mapping[str, int]) -> None:
    """Refuse an array of which a dim does not divide over the mesh axes that it is cut over.

    Raises:
        ValueError: naming the array and its dim, with the number.
    """
    for size, axis in zip(shape, axes, strict=True):
        over = RULES[axis] if axis is not None else ()
        count = math.prod(mesh_shape[mesh_axis] for mesh_axis in over)
        if size % count:
            product = " * ".join(f"{mesh_axis} {mesh_shape[mesh_axis]}" for mesh_axis in over)
            raise ValueError(
                f"{name}: dim {axis!r} of {size} does not divide over {product} = {count}; change the mesh or the model's size"
            )


def constrain(x: Array, *logical: str | None) -> Array:
    """`x` pinned to the partition its logical axes have; unchanged where no mesh is set.

    Raises:
        ValueError: as `spec`, or `x` has another number of dims than axes were given.
    """
    if x.ndim != len(logical):
        raise ValueError(f"array of shape {x.shape} has {x.ndim} dims and {len(logical)} logical axes were given: {logical}")
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*logical))
