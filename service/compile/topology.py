"""Mock devices of a TPU topology, in the order a mesh wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from service.compile.catalog import Topology
from service.models.config import AXIS_NAMES, MeshAxes


def mock_devices(topology: Topology) -> list[jax.Device]:
    """The devices of `topology` as libtpu describes them; no TPU is needed. Takes under 0.1 s.

    Raises:
        jax.errors.JaxRuntimeError: libtpu does not know the topology.
        ValueError: libtpu gives another number of devices than the catalogue derives from the dimensions.
    """
    arguments: dict[str, Any] = topology.arguments()
    devices = topologies.get_topology_desc(platform="tpu", **arguments).devices
    if len(devices) != topology.num_devices:
        raise ValueError(
            f"{topology.name} has {topology.num_devices} devices by its dimensions and {len(devices)} by libtpu; correct the catalogue"
        )
    return list(devices)


def arrange_devices(devices: Sequence[jax.Device], topology: Topology, axes: MeshAxes) -> list[jax.Device]:
    """Devices in mesh order (row-major over `AXIS_NAMES`), so that neighbours along an axis are neighbours on the torus.

    The same topology and axes always give the same order, since JAX's assignment is deterministic. Where the axes do not factor over the
    torus' dims, the order is libtpu's own. With several slices the `data` axis crosses them, slice after slice.

    Raises:
        ValueError: the mesh has another number of devices, or `data` is not a multiple of the slices.
    """
    shape = [getattr(axes, name) for name in AXIS_NAMES]
    if axes.num_devices != len(devices):
        raise ValueError(f"mesh {axes.as_dict()} has {axes.num_devices} devices and {topology.name} has {len(devices)}; change an axis")
    if topology.num_slices == 1:
        return _arrange_slice(devices, shape)
    if axes.data % topology.num_slices:
        raise ValueError(f"data is {axes.data}; it crosses the slices, so make it a multiple of {topology.num_slices}")
    shape[AXIS_NAMES.index("data")] //= topology.num_slices
    # `data` is the outermost axis, so slices stand one after another.
    assert AXIS_NAMES[0] == "data"
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(device.slice_index, []).append(device)
    return [device for index in sorted(slices) for device in _arrange_slice(slices[index], shape)]


def device_slices(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """The slice each device is in, counted from 0; all 0 where there is one slice."""
    return tuple(getattr(device, "slice_index", None) or 0 for device in devices)


def _arrange_slice(devices: Sequence[jax.Device], shape: Sequence[int]) -> list[jax.Device]:
    try:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except NotImplementedError:
        return list(devices)
    return list(np.asarray(grid, dtype=object).ravel())
