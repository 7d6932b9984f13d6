"""Which devices are attached to this host, as far as its device files tell; no JAX here."""

from __future__ import annotations

from pathlib import Path

from service.storage.interface import Platform

_DEVICE_FILES: dict[Platform, tuple[str, ...]] = {"gpu": ("nvidia[0-9]*", "kfd"), "tpu": ("accel[0-9]*", "vfio/[0-9]*")}


def attached_platforms(dev: Path = Path("/dev")) -> tuple[Platform, ...]:
    """Platforms that real steps could run on here; whether JAX can drive them, and how many there are, only a child can tell."""
    return ("cpu", *(platform for platform, patterns in _DEVICE_FILES.items() if any(next(dev.glob(p), None) for p in patterns)))
