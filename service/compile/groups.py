"""Which devices take part in a collective, in every spelling, and over which mesh axes that is.

A group can be written as lists (`{{0,4},{1,5}}`), as an iota (`[2,2]<=[4]`), over a named mesh (`mesh['fsdp'=2,'expert'=4] {'expert'}`)
or as source-target pairs. All are expanded to lists of positions in the program's device order, which is the mesh's own order, and then
compared with the mesh: names in the module may be invented by the compiler (`axis_0`), so no name is trusted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from service.compile.cross_slice import transfer_groups, transfer_kind
from service.compile.hlo import Instruction
from service.errors import AnalysisError

ICI, DCN = "ici", "dcn"


@dataclass(frozen=True)
class Mesh:
    """Axis names and sizes in mesh order, and the slice that each device of the flattened mesh is in."""

    axes: Mapping[str, int]
    device_slices: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.axes.values())

    @cached_property
    def slices(self) -> list[list[int]]:
        """For each slice the mesh positions of its devices, in order."""
        return [[position for position, on in enumerate(self.device_slices) if on == number] for number in sorted(set(self.device_slices))]

    def coordinates(self, position: int) -> tuple[int, ...]:
        return tuple(int(c) for c in np.unravel_index(position, tuple(self.axes.values()) or (1,)))


@dataclass(frozen=True, slots=True)
class Reach:
    """What a collective spans."""

    groups: tuple[tuple[int, ...], ...]
    """Device positions that exchange with each other; for a permute, one (source, target) per link."""
    axes: tuple[str, ...] | None
    """The mesh axes of size above 1 that it spans, in mesh order; None where the groups are not whole axes, and `reason` says so."""
    reason: str | None
    link: str
    """ici, or dcn where some group crosses slices."""

    @property
    def group_size(self) -> int:
        return max(len(group) for group in self.groups)


def reach_of(instruction: Instruction, mesh: Mesh) -> Reach:
    """The devices and mesh axes of a collective.

    Raises:
        AnalysisError: the groups name devices outside the mesh, or leave devices out.
    """
    proto = instruction.proto
    if (kind := transfer_kind(instruction)) is not None:
        crossing = transfer_groups(instruction, mesh.slices)
        if kind == "collective-permute":
            return _reach_of_pairs(instruction.name, [(source, target) for source, target in crossing], mesh)
        groups = crossing
    elif proto.source_target_pairs:
        pairs = [(pair.source, pair.target) for pair in proto.source_target_pairs]
        return _reach_of_pairs(instruction.name, [(a, b) for a, b in _on_every_slice(pairs, mesh)], mesh)
    else:
        groups = _on_every_slice(_expand(proto, mesh.num_devices), mesh)
    members = sorted(itertools.chain.from_iterable(groups))
    if members != list(range(mesh.num_devices)):
        raise AnalysisError(
            f"{instruction.name} has groups over devices {_short(members)}; the mesh {dict(mesh.axes)} has {mesh.num_devices}, each once"
        )
    axes = _whole_axes(groups, mesh)
    reason = None if axes is not None else f"its groups of {len(groups[0])} follow no whole mesh axes"
    return Reach(groups, axes, reason, _link(groups, mesh))


def _on_every_slice(groups: Sequence[tuple[int, ...]], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Groups of a program that is compiled for one slice, repeated for each; groups over the whole mesh as they are."""
    slices = mesh.slices
    named = set(itertools.chain.from_iterable(groups))
    if len(slices) == 1 or not named or max(named) >= len(slices[0]):
        return tuple(groups)
    return tuple(tuple(positions[device] for device in group) for positions in slices for group in groups)


def _expand(proto: Any, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups as lists of devices; no groups at all means one group of all devices."""
    if explicit := proto.collective_device_list.replica_groups or proto.replica_groups:
        return tuple(tuple(group.replica_ids) for group in explicit)
    iota = proto.iota_collective_device_list
    if iota.num_replica_groups:
        devices = _iota(iota.iota_reshape_dims, iota.iota_transpose_perm)
        return _rows(devices.reshape(iota.num_replica_groups, iota.num_devices_per_group))
    if proto.HasField("mesh_axes_replica_group_list"):
        return _expand_named(proto.mesh_axes_replica_group_list)
    return (tuple(range(num_devices)),)


def _iota(reshape_dims: Sequence[int], transpose_perm: Sequence[int]) -> np.ndarray:
    devices = np.arange(math.prod(reshape_dims)).reshape(tuple(reshape_dims))
    return devices.transpose(tuple(transpose_perm)) if transpose_perm else devices


def _expand_named(named: Any) -> tuple[tuple[int, ...], ...]:
    """Groups over axes of a mesh that the module names; an axis may be taken in part (`(pre_size)size` of its extent)."""
    sizes = [axis.size for axis in named.mesh.axes]
    if named.mesh.device_ids:
        devices = np.array(list(named.mesh.device_ids))
    elif named.mesh.iota_transform.reshape_dims:
        devices = _iota(named.mesh.iota_transform.reshape_dims, named.mesh.iota_transform.transpose_perm)
    else:
        devices = np.arange(math.prod(sizes))
    # Every axis becomes (before, taken, after), so that a whole axis and a part of one are treated alike.
    taken = {
        ref.mesh_axis_index: (ref.sub_axis_info.pre_size, ref.sub_axis_info.size)
        if ref.HasField("sub_axis_info")
        else (1, sizes[ref.mesh_axis_index])
        for ref in named.axes
    }
    split, grouped = [], []
    for position, size in enumerate(sizes):
        before, part = taken.get(position, (size, 1))
        if before * part == 0 or size % (before * part):
            raise AnalysisError(f"a replica group takes {part} after {before} of a mesh axis of {size}; the dump is corrupted")
        split += [before, part, size // (before * part)]
        grouped.append(3 * position + 1)
    rest = [dim for dim in range(len(split)) if dim not in grouped]
    members = math.prod(split[dim] for dim in grouped)
    return _rows(devices.reshape(split).transpose(rest + grouped).reshape(-1, members))


def _rows(table: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in row) for row in table)


def _whole_axes(groups: Sequence[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...] | None:
    """The axes whose product is exactly each group; None where there are none such."""
    varying: set[int] = set()
    for group in groups:
        coordinates = [mesh.coordinates(position) for position in group]
        varying |= {axis for axis in range(len(mesh.axes)) if len({c[axis] for c in coordinates}) > 1}
    names = list(mesh.axes)
    size = math.prod(mesh.axes[names[axis]] for axis in varying)
    # Members of a group differ only along `varying`, so a group is the whole product exactly when it is as large.
    if any(len(set(group)) != size for group in groups):
        return None
    return tuple(names[axis] for axis in sorted(varying))


def _reach_of_pairs(name: str, pairs: list[tuple[int, int]], mesh: Mesh) -> Reach:
    if any(not 0 <= device < mesh.num_devices for pair in pairs for device in pair):
        raise AnalysisError(
            f"{name} sends between devices {_short(list(itertools.chain.from_iterable(pairs)))}; the mesh has {mesh.num_devices}"
        )
    varying: set[int] = set()
    for source, target in pairs:
        differing = zip(mesh.coordinates(source), mesh.coordinates(target), strict=True)
        varying |= {axis for axis, (a, b) in enumerate(differing) if a != b}
    axes = tuple(axis for position, axis in enumerate(mesh.axes) if position in varying)
    return Reach(tuple(pairs), axes, None, _link(pairs, mesh))


def _link(groups: Sequence[tuple[int, ...]], mesh: Mesh) -> str:
    return DCN if any(len({mesh.device_slices[device] for device in group}) > 1 for group in groups) else ICI


def _short(devices: list[int]) -> str:
    return f"{devices[:8]}…" if len(devices) > 8 else str(devices)
