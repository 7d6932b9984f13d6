"""Which devices the steps run on: the child's environment before JAX is loaded, and what was found after.

The first half imports no JAX: the runner uses it. The second half runs in the child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

import service
from service.steps.config import StepsConfig
from service.steps_records import DeviceFacts

if TYPE_CHECKING:
    import jax

INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")
"""All a child gets from its parent beside TPU hosts' own variables: flags would change results without a trace in their identity."""
_TPU_HOST_PREFIXES = ("TPU_", "CLOUD_TPU_", "MEGASCALE_")

_FLAGS: Mapping[str, tuple[str, ...]] = {
    # Machine code for the host takes minutes to optimise and seconds to run; what runs there is run for its mathematics.
    "cpu": ("--xla_backend_optimization_level=0",),
    # A GPU's scatter-adds run in no fixed order otherwise, and no two runs would be equal bit for bit.
    "gpu": ("--xla_gpu_deterministic_ops=true",),
}
_HOST_FLAGS = (
    # On a busy host the slowest of many virtual devices may come late to a collective; 40 seconds, the default, then abort the process.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
_THREADS_PER_HOST_DEVICE = 4
"""A virtual device blocks a thread of the one pool in each collective it waits in, and starts independent ones in any order: with as many
threads as devices, which is what a small host gets, all can be blocked in different collectives, each waiting for the others."""

_PLATFORMS: Mapping[str, str] = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


class NoDevicesError(Exception):
    """What was asked for is not attached; says what is."""


def steps_environment(steps: StepsConfig, num_devices: int, work_dir: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a process that runs steps on `num_devices` devices, and writes only under `work_dir`.

    The host is always cut in `num_devices` virtual devices, which other platforms do not see: `auto` on a host without accelerators then
    finds the mesh's size.
    """
    environ = os.environ if environ is None else environ
    platform = steps.devices.partition(":")[0]
    inherited = {name: environ[name] for name in INHERITED if name in environ}
    if platform in ("tpu", "auto"):
        inherited |= {name: value for name, value in environ.items() if name.startswith(_TPU_HOST_PREFIXES)}
    variables = inherited | {
        "PYTHONPATH": str(Path(service.__file__).parent.parent),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(work_dir),
        "TMPDIR": str(work_dir),
        "TPU_LOG_DIR": str(work_dir),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": " ".join((f"--xla_force_host_platform_device_count={num_devices}", *_HOST_FLAGS, *_FLAGS.get(platform, ()))),
        "PJRT_NPROC": str(_THREADS_PER_HOST_DEVICE * num_devices),
        # Allocated as needed, so that the allocator's peak is what the steps took and not what was set aside; up to nearly all there is.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    }
    if platform in _PLATFORMS:
        variables["JAX_PLATFORMS"] = _PLATFORMS[platform]
    return variables


def attached_devices(steps: StepsConfig, num_devices: int, *, memory_limit_bytes: int | None) -> tuple[Sequence[jax.Device], DeviceFacts]:
    """The first `num_devices` of the devices asked for, and what they are. Loads JAX.

    Raises:
        NoDevicesError: the platform is not attached, or has fewer devices.
    """
    import jax

    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX 0.12 fails an assertion, without words, where the platform's plugin is not installed.
        reason = next(iter(str(error).splitlines()), "its plugin is not installed")
        raise NoDevicesError(
            f"steps.devices is {steps.devices} and JAX finds no such device on this host ({reason}); "
            f"use cpu:{num_devices}, or run on a host that has one"
        ) from error
    platform = devices[0].platform
    if len(devices) < num_devices:
        raise NoDevicesError(
            f"the mesh axes multiply to {num_devices} devices and {len(devices)} {platform} devices are attached; "
            f"use axes that multiply to {len(devices)} or fewer, or steps.devices cpu:{num_devices}"
        )
    chosen = devices[:num_devices]
    is_host = platform == "cpu"
    return chosen, DeviceFacts(
        platform=_platform(platform),
        kind=chosen[0].device_kind,
        num_devices=num_devices,
        memory_bytes=host_memory_bytes(memory_limit_bytes) if is_host else device_memory_bytes(chosen),
        memory_is_shared=is_host,
    )


def _platform(name: str) -> Literal["cpu", "gpu", "tpu"]:
    if name in ("cpu", "tpu"):
        return name  # type: ignore[return-value]
    return "gpu"


def host_memory_bytes(limit: int | None) -> int:
    """Memory that a process of this host may still take: what is available, within the container's and the given limit."""
    available: int = psutil.virtual_memory().available
    try:
        maximum = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if maximum.isdigit():
            available = min(available, int(maximum) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except OSError:
        pass
    return available if limit is None else min(available, limit)


def device_memory_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Memory of the smallest of these devices that its allocator may hand out; None where the backend does not tell."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit]
    return min(known) if len(known) == len(limits) else None


def peak_device_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Most bytes in use at once on any of these devices since the process began; None where the backend does not tell."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(peaks) else None
