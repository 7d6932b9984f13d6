"""Every topology of the catalogue is one that libtpu knows, with the devices its dimensions say, in an order that suits the mesh."""

from __future__ import annotations

import itertools

import pytest

from service.compile.catalog import FAMILIES, Topology, find_topology, named_topologies
from service.compile.topology import arrange_devices, device_slices, mock_devices
from service.models.config import MeshAxes

pytestmark = pytest.mark.tpu

NAMED = [topology for family in FAMILIES for topology in named_topologies(family)]


@pytest.mark.parametrize("topology", NAMED, ids=lambda topology: topology.name)
def test_libtpu_knows_each_named_topology_by_its_dimensions(topology: Topology) -> None:
    devices = mock_devices(topology)
    assert len(devices) == topology.num_devices
    chips = {tuple(device.coords) for device in devices}
    dims = (*topology.dims, 1)[:3]
    assert chips == set(itertools.product(*(range(dim) for dim in dims)))
    assert len(devices) == len(chips) * topology.devices_per_chip


@pytest.mark.parametrize(("name", "kind"), [("v4-8", "TPU v4"), ("v5e-4", "TPU v5 lite"), ("v5p-8", "TPU v5"), ("v6e-4", "TPU v6 lite")])
def test_families_are_the_chips_they_are_named_after(name: str, kind: str) -> None:
    assert {device.device_kind for device in mock_devices(find_topology(name))} == {kind}


def test_slices_multiply_the_devices_and_are_told_apart() -> None:
    topology = find_topology("v5p:2x2x2", 3)
    devices = mock_devices(topology)
    assert len(devices) == 24
    assert sorted(device_slices(devices)) == [0] * 8 + [1] * 8 + [2] * 8
    assert set(device_slices(mock_devices(find_topology("v5p:2x2x2")))) == {0}


def test_neighbours_along_an_axis_are_neighbours_on_the_torus() -> None:
    topology = find_topology("v5p-512")
    axes = MeshAxes(fsdp=32, expert=8)
    arranged = arrange_devices(mock_devices(topology), topology, axes)
    rings = [arranged[start : start + axes.expert] for start in range(0, len(arranged), axes.expert)]
    for ring in rings:
        for one, next_one in itertools.pairwise(ring):
            steps = [min((a - b) % dim, (b - a) % dim) for a, b, dim in zip(one.coords, next_one.coords, topology.dims, strict=True)]
            assert sum(steps) == 1


def test_order_is_the_same_each_time_and_uses_each_device_once() -> None:
    topology, axes = find_topology("v5p:4x4x8"), MeshAxes(fsdp=16, expert=4, context=2)
    first, second = (arrange_devices(mock_devices(topology), topology, axes) for _ in range(2))
    assert [device.id for device in first] == [device.id for device in second]
    assert len({device.id for device in first}) == 128


def test_data_axis_crosses_the_slices_and_no_other_does() -> None:
    topology = find_topology("v5p:2x2x1", 2)
    arranged = arrange_devices(mock_devices(topology), topology, MeshAxes(data=4, fsdp=2))
    assert device_slices(arranged) == (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (MeshAxes(fsdp=8), r"data is 1; it crosses the slices, so make it a multiple of 2"),
        (MeshAxes(data=2, fsdp=3), r"has 6 devices and v5p-8 has 8; change an axis"),
    ],
)
def test_meshes_that_do_not_fit_the_topology_are_refused(axes: MeshAxes, message: str) -> None:
    topology = find_topology("v5p:2x2x1", 2)
    with pytest.raises(ValueError, match=message):
        arrange_devices(mock_devices(topology), topology, axes)
