"""Topology names mean what users mean by them, whatever the family counts."""

from __future__ import annotations

import pytest

from service.compile.catalog import FAMILIES, find_topology, named_topologies


@pytest.mark.parametrize(
    ("name", "shape", "chips", "devices"),
    [
        ("v5p-8", "2x2x1", 4, 4),
        ("v5p-128", "4x4x4", 64, 64),
        ("v5p-256", "4x4x8", 128, 128),
        ("v5p-512", "4x8x8", 256, 256),
        ("v4-8", "2x2x1", 4, 4),
        ("v5e-4", "2x2", 4, 4),
        ("v6e-256", "16x16", 256, 256),
        ("tpu7x-8", "2x2x1", 4, 8),
        ("v5litepod-16", "4x4", 16, 16),
    ],
)
def test_a_user_name_counts_what_its_family_counts(name: str, shape: str, chips: int, devices: int) -> None:
    topology = find_topology(name)
    assert (topology.shape, topology.num_chips, topology.num_devices) == (shape, chips, devices)


def test_slices_multiply_chips_and_devices() -> None:
    topology = find_topology("tpu7x-8", 3)
    assert (topology.num_chips, topology.num_devices) == (12, 24)
    assert topology.arguments() == {"topology_name": "tpu7x:2x2x1", "num_slices": 3}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_finds_itself_by_name_and_by_shape(family: str) -> None:
    for topology in named_topologies(family):
        assert find_topology(topology.name) == topology == find_topology(topology.jax_name)


def test_a_shape_without_a_name_is_called_by_its_shape() -> None:
    assert find_topology("v5p:8x4x4").name == "v5p:8x4x4"


def test_only_whole_rings_wrap() -> None:
    assert find_topology("v5p:2x4x8").wraps == (False, True, True)
    assert find_topology("v5e:8x16").wraps == (False, True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5p-7", "v5p names count cores, two a chip"),
        ("v5q-8", "did you mean v5p"),
        ("a100-8", "not a TPU that can be mocked"),
        ("v5p:4x4x400", "outside what v5p is built as"),
        ("v5e:3x3", "not whole hosts"),
        ("v5e:2x2x2", "has 3 dims; v5e has 2"),
        ("everything", "neither a name like v5p-512 nor a shape"),
    ],
)
def test_what_is_no_topology_is_refused_with_what_is(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_topology(name)
