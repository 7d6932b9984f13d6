"""The most memory that is alive during the run: as predicted from the compiled programs, and as measured while they run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import psutil

from service.compile.pair import reserved_bytes
from service.lifeline import peak_rss_bytes
from service.steps.devices import peak_device_bytes
from service.steps_records import DeviceFacts, MemoryComparison, ProgramMemory

_SAMPLE_SECONDS = 0.01


def predict(
    programs: Sequence[ProgramMemory], *, state_bytes: int, num_states_held: int, devices: DeviceFacts, donates: bool
) -> MemoryComparison:
    """The peak of a run from what each program needs by itself.

    What a program takes holds its input state and, undonated, the state it makes: two of those the loop keeps. A candidate that is
    started ahead stands beside the remaining ones; the dropless program runs alone, what was started ahead being freed before it.
    """
    own = 1 if donates else 2
    beside = (num_states_held - own) * state_bytes
    allocated = {memory.program: memory.allocated_bytes for memory in programs}
    predicted = reserved_bytes(allocated.get("candidate", 0), allocated.get("dropless", 0), beside_bytes=beside)
    return MemoryComparison(
        state_bytes=state_bytes,
        num_states_held=num_states_held,
        programs=tuple(programs),
        predicted_bytes=predicted,
        measured_bytes=None,
        source="unknown",
        total_predicted_bytes=predicted * devices.num_devices,
        total_measured_bytes=None,
    )


class PeakMeter:
    """Measures the most memory taken between its making and `stop`.

    Where the devices' allocators keep statistics, their peak since the process began: nothing larger may have run before. On the host, the
    growth of this process's resident memory, which also sees whatever else the process allocates, and not what reuses pages freed before.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._process = psutil.Process()
        self._start: int = self._process.memory_info().rss
        self._peak = self._start
        self._is_exact = _reset_peak_rss()
        self._stopped = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="rss", daemon=True)
        if not self._is_exact:
            self._sampler.start()

    def stop(self, predicted: MemoryComparison) -> MemoryComparison:
        """`predicted` with what was measured beside it."""
        self._stopped.set()
        count = len(self._devices)
        if (peak := peak_device_bytes(self._devices)) is not None:
            return predicted.model_copy(
                update={"measured_bytes": peak, "total_measured_bytes": peak * count, "source": "allocator"},
            )
        if self._devices[0].platform != "cpu":
            return predicted
        grown = max(0, (peak_rss_bytes() if self._is_exact else self._peak) - self._start)
        return predicted.model_copy(
            update={"measured_bytes": grown // count, "total_measured_bytes": grown, "source": "host_rss_growth"},
        )

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._process.memory_info().rss)


def _reset_peak_rss() -> bool:
    """Have the kernel count the peak of resident memory from now on; False where it does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
