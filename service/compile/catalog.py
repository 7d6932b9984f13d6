"""The TPU topologies that can be weighed, found by user name or by shape, with every count derived from the dimensions; no JAX here.

User names count differently by family: v4 and v5p names count TensorCores, two a chip; tpu7x names count devices, two a chip; v5e and
v6e names count chips. So a name is looked up here and never computed with. Every entry is held against libtpu by
tests/compile/test_topology.py.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One TPU generation as libtpu names it."""

    name: str
    title: str
    num_dims: int
    max_dims: tuple[int, ...]
    devices_per_chip: int
    name_counts_per_chip: int
    """What the number in a user's name counts, per chip: 2 where names count cores or devices, 1 where they count chips."""
    chip_config: str | None = None
    """libtpu's chip configuration; megacore makes a v4 chip one device."""


@dataclass(frozen=True)
class Topology:
    """One or more identical slices of TPU chips."""

    family: str
    dims: tuple[int, ...]
    """Chips along each dim of one slice."""
    num_slices: int
    devices_per_chip: int
    chip_config: str | None

    @property
    def chips_per_slice(self) -> int:
        return math.prod(self.dims)

    @property
    def num_chips(self) -> int:
        """Chips in all slices together."""
        return self.chips_per_slice * self.num_slices

    @property
    def num_devices(self) -> int:
        """JAX devices in all slices together."""
        return self.num_chips * self.devices_per_chip

    @property
    def shape(self) -> str:
        """Dimensions as users write them: `4x8x8`."""
        return "x".join(map(str, self.dims))

    @property
    def jax_name(self) -> str:
        """The name libtpu takes: `v5p:4x8x8`."""
        return f"{self.family}:{self.shape}"

    @property
    def name(self) -> str:
        """The user's name (`v5p-512`), or the shape where no name stands for these dimensions (`v5p:8x4x4`)."""
        if self.dims not in _named_dims(self.family):
            return self.jax_name
        return f"{self.family}-{self.chips_per_slice * FAMILIES[self.family].name_counts_per_chip}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which dims close to a ring: multiples of 4 on 3D families, 16 on 2D ones (a full pod's side)."""
        side = 4 if FAMILIES[self.family].num_dims == 3 else 16
        return tuple(dim % side == 0 for dim in self.dims)

    @property
    def host_bounds(self) -> tuple[int, ...]:
        """Chips of one host along each dim."""
        return tuple(min(dim, bound) for dim, bound in zip(self.dims, (2, 2, 1), strict=False))

    def describe(self) -> dict[str, object]:
        """Everything shown of a topology, counts included; part of a result's identity."""
        return {
            "name": self.name,
            "family": self.family,
            "shape": self.shape,
            "num_slices": self.num_slices,
            "num_chips": self.num_chips,
            "num_devices": self.num_devices,
            "devices_per_chip": self.devices_per_chip,
            "chip_config": self.chip_config,
            "wraps": list(self.wraps),
            "host_bounds": list(self.host_bounds),
        }

    def arguments(self) -> dict[str, object]:
        """What is asked of libtpu, by argument name."""
        arguments: dict[str, object] = {"topology_name": self.jax_name}
        if self.num_slices > 1:
            arguments["num_slices"] = self.num_slices
        if self.chip_config:
            arguments["chip_config_name"] = self.chip_config
        return arguments


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("v4", "TPU v4", 3, (16, 16, 16), devices_per_chip=1, name_counts_per_chip=2, chip_config="megacore"),
        Family("v5e", "TPU v5e", 2, (16, 16), devices_per_chip=1, name_counts_per_chip=1),
        Family("v5p", "TPU v5p", 3, (16, 16, 24), devices_per_chip=1, name_counts_per_chip=2),
        Family("v6e", "TPU v6e", 2, (16, 16), devices_per_chip=1, name_counts_per_chip=1),
        Family("tpu7x", "TPU7x", 3, (16, 24, 24), devices_per_chip=2, name_counts_per_chip=2),
    )
}

_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "tpu7": "tpu7x"}

_DIMS_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_DIMS_3D = (
    (1, 1, 1),
    (2, 2, 1),
    (2, 2, 2),
    (2, 2, 4),
    (2, 4, 4),
    (4, 4, 4),
    (4, 4, 8),
    (4, 8, 8),
    (8, 8, 8),
    (8, 8, 12),
    (8, 8, 16),
    (8, 16, 16),
    (16, 16, 16),
)


def named_topologies(family: str) -> list[Topology]:
    """Every topology of a family that has a user name, smallest first."""
    return [_topology(FAMILIES[family], dims, 1) for dims in _named_dims(family)]


def find_topology(name: str, num_slices: int = 1) -> Topology:
    """The topology a user means by a name (`v5p-512`) or a shape (`v5p:4x8x8`).

    Raises:
        ValueError: no such family, name or shape; says what is legal.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d{1,6})|:(\d{1,4}(?:x\d{1,4})*))", name.strip().lower())
    families = ", ".join(FAMILIES)
    if match is None:
        raise ValueError(f"topology {name!r} is neither a name like v5p-512 nor a shape like v5p:4x8x8; families: {families}")
    family_name, count, shape = match.groups()
    family = FAMILIES.get(_ALIASES.get(family_name, family_name))
    if family is None:
        near = difflib.get_close_matches(family_name, FAMILIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"topology family {family_name!r} is not a TPU that can be mocked{hint}; families: {families}")
    if shape is not None:
        dims = tuple(int(part) for part in shape.split("x"))
        _check_dims(family, dims, name)
        return _topology(family, dims, num_slices)
    for topology in named_topologies(family.name):
        if topology.chips_per_slice * family.name_counts_per_chip == int(count):
            return _topology(family, topology.dims, num_slices)
    legal = ", ".join(t.name for t in named_topologies(family.name))
    counts = {1: "chips", 2: "devices, two a chip" if family.devices_per_chip == 2 else "cores, two a chip"}[family.name_counts_per_chip]
    raise ValueError(
        f"topology {name!r} is not a named slice ({family.name} names count {counts}); legal: {legal}; or a shape {_example(family)}"
    )


def _named_dims(family: str) -> tuple[tuple[int, ...], ...]:
    return _DIMS_2D if FAMILIES[family].num_dims == 2 else _DIMS_3D


def _topology(family: Family, dims: tuple[int, ...], num_slices: int) -> Topology:
    return Topology(family.name, dims, num_slices, family.devices_per_chip, family.chip_config)


def _example(family: Family) -> str:
    return f"{family.name}:4x4" if family.num_dims == 2 else f"{family.name}:4x4x4"


def _check_dims(family: Family, dims: tuple[int, ...], name: str) -> None:
    if len(dims) != family.num_dims:
        raise ValueError(f"topology {name!r} has {len(dims)} dims; {family.name} has {family.num_dims}, like {_example(family)}")
    if any(not 1 <= dim <= bound for dim, bound in zip(dims, family.max_dims, strict=True)):
        limit = "x".join(map(str, family.max_dims))
        raise ValueError(f"topology {name!r} is outside what {family.name} is built as: each dim from 1 to {limit}")
    # libtpu lays hosts of 2x2x1 chips; a single chip is the one exception it takes.
    if math.prod(dims) != 1 and any(dim % 2 for dim in dims[:2]):
        raise ValueError(f"topology {name!r} is not whole hosts of 2x2 chips; make the first two dims even, like {_example(family)}")
