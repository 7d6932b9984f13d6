"""Compiles in a thread of its own and tells when the dump of its buffer assignment is complete, long before code generation ends.

All that is known of memory stands in `….after_optimizations.hlo.pb`. The compiler writes it whole before it begins
`….after_optimizations_after_buffer_assignment.hlo.pb`, so the second's being there is what makes the first safe to read. A program
that does not fit never gets the second: then the end of the compile makes it safe (tests/compile/test_watch.py).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

POLL_SECONDS = 0.01

_ASSIGNED = "after_optimizations.hlo.pb"
_NEXT = "after_optimizations_after_buffer_assignment.hlo.pb"
_REFUSED = "oom_intermediate_module.hlo.pb"
"""In place of `_NEXT` where the program does not fit; both hold the module of `_ASSIGNED` once more."""
COPY_SECONDS = 10.0
"""What writing a module may take; a 20 MB one takes some milliseconds."""


class Compiled(Protocol):
    """The part of `jax.stages.Compiled` that is read here."""

    def memory_analysis(self) -> object: ...


class Lowered(Protocol):
    """The part of `jax.stages.Lowered` that is used here."""

    def compile(self, compiler_options: Mapping[str, str | int | bool] | None = None) -> Compiled: ...


class Compilation:
    """One running compile and its dump."""

    def __init__(self, lowered: Lowered, *, module: str, options: Mapping[str, str | int | bool], dump_dir: Path) -> None:
        """Starts it. `module` is the name of the lowered module: the compiler may dump helper modules beside it."""
        self._lowered, self._options, self._dump_dir = lowered, options, dump_dir
        # Files are named module_NUMBER.NAME.cl_CHANGE.STAGE.
        self._pattern = re.compile(rf"module_(\d+)\.{re.escape(module)}\.(?:[^.]+\.)?({re.escape(_ASSIGNED)}|{re.escape(_NEXT)})")
        self._ended = threading.Event()
        self._compiled: Compiled | None = None
        self._error: Exception | None = None
        # A daemon: at depth memory the process ends while it runs.
        threading.Thread(target=self._compile, name="compile", daemon=True).start()

    def wait_for_dump(self) -> Path | None:
        """Wait for the buffer assignment or for the compile's end; the dump, None where the compile ended without one."""
        while not self._ended.wait(POLL_SECONDS) and not self.is_assigned:
            pass
        complete = self._find(_NEXT)
        if complete is not None:
            return complete.with_name(complete.name.removesuffix(_NEXT) + _ASSIGNED)
        return self._find(_ASSIGNED)

    def wait_for_copy(self, dump: Path, size: int) -> bytes | None:
        """The second copy of the module in `dump`, read when it has `size` bytes; what there is of it where that never comes about.

        None where the compiler ended without writing one.
        """
        names = [dump.name.removesuffix(_ASSIGNED) + stage for stage in (_NEXT, _REFUSED)]
        deadline = time.monotonic() + COPY_SECONDS
        while True:
            # Looked at before reading: what the compiler wrote before it ended is there by then.
            has_ended = self._ended.is_set()
            copies = [path.read_bytes() for path in map(self._dump_dir.joinpath, names) if path.exists()]
            content = copies[0] if copies else None
            if has_ended or len(content or b"") >= size or time.monotonic() > deadline:
                return content
            time.sleep(POLL_SECONDS)

    def wait(self) -> Compiled:
        """Wait for the whole compile.

        Raises:
            Exception: whatever the compiler raised.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._compiled is not None
        return self._compiled

    @property
    def is_assigned(self) -> bool:
        """Whether the compiler has passed buffer assignment, its check of allocated bytes against the capacity included."""
        return self._find(_NEXT) is not None

    def _compile(self) -> None:
        try:
            self._compiled = self._lowered.compile({**self._options, "xla_dump_to": str(self._dump_dir), "xla_dump_hlo_as_proto": True})
        except Exception as error:  # handed to `wait`, which raises it in the thread that can answer for it
            self._error = error
        finally:
            self._ended.set()

    def _find(self, stage: str) -> Path | None:
        """The newest file of this stage: where the compiler starts over, the last attempt is the one that counts."""
        try:
            names = os.listdir(self._dump_dir)
        except FileNotFoundError:
            return None
        found = [(int(match[1]), name) for name in names if (match := self._pattern.fullmatch(name)) and match[2] == stage]
        return self._dump_dir / max(found)[1] if found else None


def yield_cores() -> None:
    """Let this thread run before the other threads of its process, from here on.

    Called when nothing more is wanted of a compile that cannot be stopped: what is left of it (code generation) would take cores from the
    analysis. Niceness and not the idle class: a thread that is never scheduled may hold a lock that the analysis waits for.
    """
    try:
        own = threading.get_native_id()
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        for thread in os.listdir("/proc/self/task"):
            if int(thread) != own:
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    except OSError:
        # A courtesy, without which the answer comes a little later: no /proc, or a thread that has just ended.
        return
