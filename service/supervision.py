"""Runs one child process under limits, hears its messages, and leaves nothing of it running; no JAX here.

The parent's half of the contract; `service.lifeline` is the child's. A child is its own session and process group, so that it is killed
whole. It takes one line of JSON on stdin, which stays open for as long as the parent wants it to live, and writes JSON lines on stdout; its
stderr is its log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

TICK_SECONDS = 0.1
"""Between two looks at the limits and at whether the child is still wanted."""
TERMINATE_SECONDS = 0.5
"""Between asking a process group to end and ending it."""
KILLED_SECONDS = 10.0
"""What a killed process group may take to be gone: the kernel first frees all the memory it held."""
PIPE_BYTES = 1 << 20
"""So that a request is written whole even to a child that does not read it."""
MAX_LINE_BYTES = 256 << 20
_LOG_BYTES = 64 << 10


class Ended(Enum):
    """Why a child is no longer running."""

    LAST_MESSAGE = "it sent its last message"
    EXITED = "it exited without its last message"
    SIGNALLED = "a signal that was not sent from here"
    WALL_LIMIT = "it ran for too long"
    RSS_LIMIT = "it held too much memory"
    CANCELLED = "it was no longer wanted"
    NOT_STARTED = "the operating system could not start it"


@dataclass(frozen=True)
class Ending:
    """How a child ended."""

    ended: Ended
    seconds: float
    peak_rss_bytes: int
    """Largest resident memory of the whole group that was seen; looked at every `TICK_SECONDS`."""
    log: bytes
    """The last of what it printed on stderr; of a child that was ended from here, up to the signal that asked it to end."""
    exit_code: int | None = None
    signal_number: int | None = None
    killed_for_host_memory: bool = False
    """The kernel killed a process for want of memory while this one ran, and this one was killed by it or by someone else."""
    detail: str = ""


def supervise(
    command: Sequence[str],
    *,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    work_dir: Path,
    log_path: Path,
    wall_seconds: float,
    rss_bytes: int,
    on_message: Callable[[Mapping[str, Any]], bool],
    is_wanted: Callable[[], bool],
) -> Ending:
    """Run `command` in `work_dir` until it ends, exceeds a limit, or is no longer wanted; then kill and reap its whole group.

    `on_message` gets each JSON object the child writes, and returns whether it was the last: the child is then killed where it stands.
    Call it from a thread that lives until it returns: on Linux the child dies with the thread that started it. An exception of
    `on_message` or `is_wanted` passes through when the group is gone. Lines that are no JSON objects are ignored.
    """
    started = time.monotonic()
    kernel_kills = _count_kernel_kills()
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=work_dir,
                env=dict(environment),
                start_new_session=True,
                pipesize=PIPE_BYTES,
            )
    except OSError as error:
        return Ending(Ended.NOT_STARTED, time.monotonic() - started, 0, b"", detail=str(error))

    peak_rss = 0
    ended: Ended | None = None
    log_bytes: int | None = None
    try:
        with _Messages(process) as messages:
            messages.send(request)
            while ended is None:
                # Looked at before reading: what a child wrote before it exited is in the pipe by then.
                has_exited = process.poll() is not None
                messages.wait(0 if has_exited else TICK_SECONDS)
                peak_rss = max(peak_rss, _group_rss(process.pid))
                # All of them, also those that came meanwhile: what the child said before it held that much must not be lost.
                if any(on_message(message) for message in messages.take()):
                    ended = Ended.LAST_MESSAGE
                elif has_exited:
                    ended = Ended.EXITED
                elif time.monotonic() - started > wall_seconds:
                    ended = Ended.WALL_LIMIT
                elif peak_rss > rss_bytes:
                    ended = Ended.RSS_LIMIT
                elif not is_wanted():
                    ended = Ended.CANCELLED
            if ended is not Ended.EXITED:
                # What is about to be sent makes libtpu print a crash's trace, which would look like the reason of the end.
                log_bytes = log_path.stat().st_size
    finally:
        kill_group(process, at_once=ended is Ended.LAST_MESSAGE)

    assert process.returncode is not None
    signal_number = -process.returncode if process.returncode < 0 else None
    if ended is Ended.EXITED and signal_number is not None:
        ended = Ended.SIGNALLED
    return Ending(
        ended,
        time.monotonic() - started,
        peak_rss,
        _read_end(log_path, log_bytes),
        exit_code=process.returncode if process.returncode >= 0 else None,
        signal_number=signal_number,
        killed_for_host_memory=ended is Ended.SIGNALLED and signal_number == signal.SIGKILL and _count_kernel_kills() > kernel_kills,
    )


def kill_group(process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:
    """End a child and everything it started, and reap it; returns when no process of its group runs any more.

    Only a process stuck in the kernel for longer than `KILLED_SECONDS` is left to it; it ends as soon as the kernel lets go.
    """
    if not at_once and process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_SECONDS)
    # Also where the child itself is gone: what it started may not be.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + KILLED_SECONDS
    while _group_runs(process.pid) and time.monotonic() < deadline:
        time.sleep(0.002)


class _Messages:
    """JSON lines from a child's stdout, without ever blocking on a child that is silent or in the middle of a line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._partial = bytearray()
        self._lines: list[bytes] = []
        self._is_open = True
        os.set_blocking(self._stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    def __enter__(self) -> _Messages:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def send(self, request: Mapping[str, Any]) -> None:
        # A child that died before it read is told by its exit, not here.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()

    def wait(self, seconds: float) -> None:
        """Read what comes within `seconds`, returning as soon as a line is whole."""
        deadline = time.monotonic() + seconds
        if not self._is_open:
            time.sleep(seconds)
        while self._is_open and not self._lines:
            left = deadline - time.monotonic()
            if self._selector.select(max(0, left)):
                self._read()
            if left <= 0:
                return

    def take(self) -> list[Mapping[str, Any]]:
        """The whole messages there are, once each."""
        if self._is_open:
            self._read()
        lines, self._lines = self._lines, []
        messages: list[Mapping[str, Any]] = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def _read(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._is_open = False
            self._selector.unregister(self._stdout)
            return
        *whole, rest = (bytes(self._partial) + data).split(b"\n") if b"\n" in data else (self._partial + data,)
        self._lines += whole
        self._partial = bytearray(rest[:MAX_LINE_BYTES])


def _signal_group(group: int, number: signal.Signals) -> None:
    # The group has the child's pid, which is not given to another while the child is unreaped or a member of the group lives.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_runs(group: int) -> bool:
    """Whether a process of the group still runs. The child's wait says nothing of what the child had started: init reaps that."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    for process in psutil.process_iter():
        # A zombie has ended, and stays in its group until init looks.
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _group_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants; 0 once they are gone."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _count_kernel_kills() -> int:
    """How often this kernel has killed a process for want of memory; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _read_end(path: Path, size_bytes: int | None) -> bytes:
    """The end of the first `size_bytes` of a log, or of all of it."""
    try:
        with path.open("rb") as file:
            start = max(0, (path.stat().st_size if size_bytes is None else size_bytes) - _LOG_BYTES)
            file.seek(start)
            return file.read(-1 if size_bytes is None else size_bytes - start)
    except OSError:
        return b""
