"""The child's half of `service.supervision`: takes its request, sends its messages, and never outlives who asked; no JAX here."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


class Lifeline:
    """What ties a child process to its parent. Make one at the start of the entry point, before anything heavy is imported."""

    def __init__(self) -> None:
        """Takes over stdin and stdout: what any library prints on stdout goes to the log from here on."""
        self.started = _process_start()
        _die_with_parent()
        self._lock = threading.Lock()
        self._messages = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._stdin = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, sys.stdin.fileno())
        os.close(null)

    @property
    def seconds(self) -> float:
        """Since this process started, interpreter start included."""
        return time.monotonic() - self.started

    def receive(self) -> Any:
        """The request; from here on the process ends itself when its parent closes stdin or dies.

        Raises:
            ValueError: what came is not a line of JSON.
        """
        line = self._stdin.readline()
        if not line.endswith(b"\n"):
            raise ValueError("no request on stdin: one line of JSON is expected, and stdin stays open while the answer is wanted")
        threading.Thread(target=self._end_with_stdin, name="lifeline", daemon=True).start()
        return json.loads(line)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message, whole; callable from any thread."""
        self._write(json.dumps(message).encode() + b"\n")

    def finish(self, message: Mapping[str, Any]) -> NoReturn:
        """Write the last message and end the process at once, whatever its other threads are doing."""
        sys.stderr.flush()
        self.send(message)
        os._exit(0)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[os.write(self._messages, view) :]

    def _end_with_stdin(self) -> None:
        while self._stdin.read(1 << 16):
            pass
        # A child is the leader of its own group; run by hand it is not, and the group is someone else's.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def peak_rss_bytes() -> int:
    """The largest resident memory this process had, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            # getrusage's figure starts with that of the parent, which may have been larger.
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage << 10


def _process_start() -> float:
    """When this process was started, on the clock of `time.monotonic`."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    # The kernel counts from boot, as CLOCK_BOOTTIME does; both clocks are read together, so a suspended host does no harm.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    A thread that watches stdin is not enough: a compile that holds the interpreter's lock keeps it waiting.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
