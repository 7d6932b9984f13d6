"""The capacity is the compiler's own, to the byte, and is remembered by compiler and topology."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from service.compile import capacity as capacity_module
from service.compile.capacity import CapacityError, measure_capacity
from service.compile.capacity_cache import CapacityCache
from service.compile.catalog import find_topology
from service.compile.failures import is_before_code_generation
from service.compile.toolchain import read_toolchain
from service.compile.topology import mock_devices

GIB, MIB = 1 << 30, 1 << 20

# HBM of a chip less what libtpu 0.0.52 reserves: whole MiB, and 512 bytes for each chip of a slice.
EXPECTED = [
    ("v4-8", 1, 31 * GIB - 259 * MIB - 4 * 512),
    ("v5e-4", 1, 16 * GIB - 258 * MIB - 4 * 512),
    ("v5p-8", 1, 96 * GIB - 279 * MIB - 4 * 512),
    ("v5p-512", 1, 96 * GIB - 279 * MIB - 256 * 512),
    ("v5p-16", 2, 96 * GIB - 279 * MIB - 8 * 512),
    ("v6e-4", 1, 32 * GIB - 776 * MIB - 4 * 512),
    ("tpu7x-8", 1, 95 * GIB - 268 * MIB - 8 * 512),
]


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "slices", "expected"), EXPECTED, ids=[f"{name}x{slices}" for name, slices, _ in EXPECTED])
def test_capacity_is_exact_in_each_family(name: str, slices: int, expected: int) -> None:
    assert measure_capacity(mock_devices(find_topology(name, slices))[0]) == expected


@pytest.mark.tpu
def test_a_program_of_another_form_is_refused_from_the_same_byte_on() -> None:
    # Several arguments and outputs, whose pointers take memory too: allocated = arguments + 32 bytes for the tuple of up to four outputs.
    device = mock_devices(find_topology("v5p-8"))[0]
    sharding = SingleDeviceSharding(device)

    def is_refused(num_small: int) -> bool:
        large = jax.ShapeDtypeStruct((25094399, 8, 128), jnp.float32, sharding=sharding)
        small = [jax.ShapeDtypeStruct((1, 128), jnp.float32, sharding=sharding)] * num_small
        step = jax.jit(lambda *arrays: [array + 1 for array in arrays], donate_argnums=tuple(range(1 + num_small)))
        with pytest.raises(jax.errors.JaxRuntimeError) as refusal:
            step.lower(large, *small).compile()
        return is_before_code_generation(str(refusal.value))

    capacity = 102_786_660_352
    assert 25094399 * 4096 + 3 * 512 + 32 <= capacity < 25094399 * 4096 + 4 * 512 + 32
    assert not is_refused(3)
    assert is_refused(4)


@pytest.mark.tpu
def test_a_lower_limit_asked_of_the_compiler_is_the_capacity_found() -> None:
    device = mock_devices(find_topology("v5e-4"))[0]
    assert measure_capacity(device, {"xla_tpu_max_hbm_size_mib": 1400}) == 1400 * MIB


def test_a_compiler_that_states_no_capacity_is_told_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "stated_hbm_bytes", lambda text: None)
    with pytest.raises(CapacityError, match="states no capacity"):
        measure_capacity(mock_devices(find_topology("v5e-4"))[0])


def test_cache_returns_what_was_stored_for_the_same_compiler_and_topology_only(tmp_path: Path) -> None:
    cache = CapacityCache(tmp_path / "deeper" / "capacity.json")
    toolchain = read_toolchain(find_topology("v5e-4").arguments())
    assert cache.find(toolchain) is None
    cache.store(toolchain, 12345)
    cache.store(read_toolchain(find_topology("v5p-8").arguments()), 67890)
    again = CapacityCache(tmp_path / "deeper" / "capacity.json")
    assert again.find(toolchain) == 12345
    assert again.find(toolchain.model_copy(update={"model_source": "0" * 64})) == 12345
    assert again.find(toolchain.model_copy(update={"libtpu": "0.0.1"})) is None
    assert [path.name for path in (tmp_path / "deeper").iterdir()] == ["capacity.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"KEY": -1}', '{"KEY": true}', '{"KEY": "12"}', '{"KEY": 1.5}'])
def test_a_file_that_cannot_be_used_counts_as_unknown_and_is_replaced(tmp_path: Path, content: str) -> None:
    from service.compile.toolchain import compiler_fingerprint

    toolchain = read_toolchain(find_topology("v5e-4").arguments())
    path = tmp_path / "capacity.json"
    path.write_text(content.replace("KEY", compiler_fingerprint(toolchain)))
    cache = CapacityCache(path)
    assert cache.find(toolchain) is None
    cache.store(toolchain, 12345)
    assert cache.find(toolchain) == 12345


def test_readers_never_see_half_a_file_while_others_write(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    toolchains = [read_toolchain(find_topology("v5e-4").arguments(), {"xla_tpu_max_hbm_size_mib": n}) for n in range(1, 4)]
    CapacityCache(path).store(toolchains[0], 1)
    writers = [threading.Thread(target=lambda t=t: [CapacityCache(path).store(t, n) for n in range(1, 40)]) for t in toolchains[1:]]
    for writer in writers:
        writer.start()
    # A writer may overwrite what another has just added, but what stood before both is never lost, not even for a moment.
    while any(writer.is_alive() for writer in writers):
        assert CapacityCache(path).find(toolchains[0]) == 1
    for writer in writers:
        writer.join()
