"""Keeps one worker process running beside the server: started with it, started again when it dies, stopped with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import service

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "service", "worker", "--stop-on-eof")
"""-P: the working directory is not a place to import from."""

STOP_SECONDS = 15.0
"""What a worker that is told to stop gets to kill its children and give their jobs back."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Before a worker is started again; doubled each time, and back to the first once one has lived longer than the longest."""


class WorkerKeeper:
    """A thread that starts `command` and starts it again whenever it ends.

    The worker holds the read end of a pipe on its stdin. When this process dies, by kill -9 too, the kernel closes the other
    end, and the worker stops in order.
    """

    def __init__(self, environment: Mapping[str, str], *, command: Sequence[str] = WORKER_COMMAND) -> None:
        """`environment` holds what is different from this process's: the settings."""
        self._command = tuple(command)
        paths = [str(Path(service.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        self._environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._is_stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="worker-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the worker, and return when it has ended: in order within `STOP_SECONDS`, by force after them."""
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._is_stopping.is_set():
            started = time.monotonic()
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=self._environment)
            self._wait(process)
            if self._is_stopping.is_set():
                return
            lived = time.monotonic() - started
            pause = FIRST_PAUSE_SECONDS if lived > LONGEST_PAUSE_SECONDS else pause
            logger.error("the worker ended with code %s after %.1f s; starting another in %.1f s", process.returncode, lived, pause)
            self._is_stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the worker has ended, by itself or because this keeper stops."""
        assert process.stdin is not None
        with process.stdin:
            while process.poll() is None and not self._is_stopping.wait(0.1):
                pass
        # Its stdin is closed from here on, which is what asks it to stop.
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error(
                "the worker did not stop within %.0f s and is killed; its jobs are taken up again when their leases expire", STOP_SECONDS
            )
            process.kill()
            process.wait()
