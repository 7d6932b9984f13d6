"""The devices of a steps child: its environment before JAX is loaded, and what is said when they are not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from service.steps.config import StepsConfig
from service.steps.devices import (
    NoDevicesError,
    attached_devices,
    device_memory_bytes,
    host_memory_bytes,
    peak_device_bytes,
    steps_environment,
)

HOST = {
    "PATH": "/bin",
    "XLA_FLAGS": "--xla_dump_to=x",
    "JAX_PLATFORMS": "tpu",
    "CUDA_VISIBLE_DEVICES": "1",
    "TPU_WORKER_ID": "0",
    "PYTHONPATH": "x",
}


def environment(devices: str, num_devices: int = 6) -> dict[str, str]:
    return steps_environment(StepsConfig(devices=devices), num_devices, Path("/w"), HOST)


def test_virtual_devices_are_set_before_jax_is_loaded() -> None:
    variables = environment("cpu:6")
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert "--xla_force_host_platform_device_count=6" in variables["XLA_FLAGS"]
    assert int(variables["PJRT_NPROC"]) > 6, "collectives block threads; as many as devices are too few"


def test_an_accelerator_allocates_as_it_needs_so_that_its_peak_says_something() -> None:
    variables = environment("gpu")
    assert variables["JAX_PLATFORMS"] == "cuda"
    assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "--xla_gpu_deterministic_ops=true" in variables["XLA_FLAGS"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"


def test_nothing_of_the_host_can_change_a_result_unseen() -> None:
    for devices in ("cpu:6", "gpu", "tpu", "auto"):
        variables = environment(devices)
        assert "xla_dump_to" not in variables["XLA_FLAGS"]
        assert variables["PYTHONPATH"] != "x"
        assert variables["PATH"] == "/bin"
    assert "TPU_WORKER_ID" not in environment("cpu:6")
    assert environment("tpu")["TPU_WORKER_ID"] == "0"
    assert "JAX_PLATFORMS" not in environment("auto"), "auto takes whatever is attached"


def test_the_first_devices_are_taken_and_described() -> None:
    devices, facts = attached_devices(StepsConfig(devices="cpu:3"), 3, memory_limit_bytes=1 << 20)
    assert list(devices) == jax.devices()[:3]
    assert (facts.platform, facts.num_devices, facts.memory_bytes, facts.memory_is_shared) == ("cpu", 3, 1 << 20, True)


def test_too_few_devices_are_counted() -> None:
    with pytest.raises(NoDevicesError, match="multiply to 64 devices and 8 cpu devices are attached"):
        attached_devices(StepsConfig(devices="auto"), 64, memory_limit_bytes=None)


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend 'cuda'"), AssertionError()])
def test_a_platform_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nothing() -> Any:
        raise error

    monkeypatch.setattr(jax, "devices", nothing)
    with pytest.raises(NoDevicesError, match=r"steps\.devices is gpu .*(Unable to initialize|not installed).*use cpu:2"):
        attached_devices(StepsConfig(devices="gpu"), 2, memory_limit_bytes=None)


def chip(**stats: int) -> Any:
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_the_smallest_device_decides_and_silence_is_not_zero() -> None:
    assert device_memory_bytes([chip(bytes_limit=7, peak_bytes_in_use=3), chip(bytes_limit=5, peak_bytes_in_use=4)]) == 5
    assert peak_device_bytes([chip(bytes_limit=7, peak_bytes_in_use=3), chip(bytes_limit=5, peak_bytes_in_use=4)]) == 4
    assert device_memory_bytes([chip(), chip(bytes_limit=5)]) is None
    assert peak_device_bytes([chip(), chip()]) is None


def test_the_hosts_memory_is_bounded_by_the_childs_limit() -> None:
    assert host_memory_bytes(12345) == 12345
    assert host_memory_bytes(None) > 12345
