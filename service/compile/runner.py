"""Has a program weighed by a child process, under limits, and turns every way the child can end into a report; no JAX here."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.compile.capacity_cache import CapacityCache
from service.compile.environment import child_environment, child_log, log_dir, temporary_dir
from service.compile.failures import LOCK_FILE_MESSAGE, find_check_failure, read_log_tail
from service.compile.interface import ChildLimits, CompileRequest, ProgressEvent
from service.compile.toolchain import read_toolchain
from service.records import Failure, FailureKind, Report, ReportStatus
from service.settings import PREFIX
from service.spec import Spec, parse_spec
from service.supervision import Ended, Ending, supervise
from service.units import format_bytes, format_seconds

CHILD_COMMAND = (sys.executable, "-P", "-m", "service.compile.child")
"""-P: the child's working directory is not a place to import from."""

LOCK_ATTEMPTS = 5
LOCK_PAUSE_SECONDS = 0.5


class ChildCompiler:
    """The real `Compiler`: one child process per request, and nothing of it left afterwards."""

    def __init__(
        self,
        capacity_cache: Path | None = None,
        *,
        command: Sequence[str] = CHILD_COMMAND,
        wall_setting: str = f"{PREFIX}CHILD_WALL_SECONDS",
    ) -> None:
        """`capacity_cache` is the file HBM capacities are remembered in; without it each child asks the compiler again.

        `wall_setting` is what whoever is at the wall limit is told to raise.
        """
        self._cache = CapacityCache(capacity_cache) if capacity_cache is not None else None
        self._command = tuple(command)
        self._wall_setting = wall_setting

    def __call__(
        self,
        request: CompileRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> Report:
        """The report of the child, or one that says how it ended. An exception of `on_event` or `is_cancelled` passes through.

        Raises:
            SpecError: the request's spec was not checked.
        """
        spec = parse_spec(request.spec)
        request = self._complete(request, spec)
        deadline = time.monotonic() + limits.wall_seconds
        for attempt in range(1, LOCK_ATTEMPTS + 1):
            run = _Run(request, on_event)
            left = limits.model_copy(update={"wall_seconds": max(0.0, deadline - time.monotonic())})
            ending = run.start(self._command, spec, left, is_cancelled)
            if not run.is_locked:
                report = run.report or report_of_ending(request, spec, ending, limits, run.phase, wall_setting=self._wall_setting)
                break
            if attempt < LOCK_ATTEMPTS:
                on_event(ProgressEvent(name="retry", seconds=ending.seconds, data={"reason": "libtpu was being loaded by another process"}))
                time.sleep(LOCK_PAUSE_SECONDS * attempt)
        else:
            report = _failed(request, spec, ending, Failure(kind=FailureKind.COMPILER, message=LOCK_FILE_MESSAGE))
        if self._cache is not None and report.capacity_bytes is not None and report.toolchain is not None:
            self._cache.store(report.toolchain, report.capacity_bytes)
        return report

    def _complete(self, request: CompileRequest, spec: Spec) -> CompileRequest:
        toolchain = request.toolchain or read_toolchain(spec.topology.arguments(), spec.compiler_options)
        capacity = request.capacity_bytes
        if capacity is None and self._cache is not None:
            capacity = self._cache.find(toolchain)
        return request.model_copy(update={"toolchain": toolchain, "capacity_bytes": capacity})


class _Run:
    """One child, from the making of its directory to its removal."""

    def __init__(self, request: CompileRequest, on_event: Callable[[ProgressEvent], None]) -> None:
        self._request, self._on_event = request, on_event
        self.report: Report | None = None
        self.is_locked = False
        self.phase = "start"

    def start(self, command: Sequence[str], spec: Spec, limits: ChildLimits, is_cancelled: Callable[[], bool]) -> Ending:
        """Run the child to its end; afterwards `report`, `is_locked` and `phase` tell what it said."""
        work_dir = Path(self._request.work_dir).absolute()
        # Not there yet: whatever else is in a directory would be removed with it.
        work_dir.mkdir(parents=True)
        try:
            for directory in (temporary_dir(work_dir), log_dir(work_dir)):
                directory.mkdir()
            ending = supervise(
                command,
                request=self._request.model_copy(update={"work_dir": str(work_dir)}).model_dump(mode="json"),
                environment=child_environment(spec.topology, work_dir),
                work_dir=work_dir,
                log_path=child_log(work_dir),
                wall_seconds=limits.wall_seconds,
                rss_bytes=limits.rss_bytes,
                on_message=self._hear,
                is_wanted=lambda: not is_cancelled(),
            )
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
        if self.report is not None:
            self.report = _with_log(self.report, ending)
        return ending

    def _hear(self, message: Mapping[str, Any]) -> bool:
        """Take a message of the child; whether it is its last."""
        match message.get("event"):
            case "progress":
                event = ProgressEvent.model_validate({key: value for key, value in message.items() if key != "event"})
                self.phase = event.name
                self._on_event(event)
                return False
            case "locked":
                self.is_locked = True
                return True
            case "report":
                self.report = _read_report(self._request, message)
                return True
        return False


def report_of_ending(request: CompileRequest, spec: Spec, ending: Ending, limits: ChildLimits, phase: str, *, wall_setting: str) -> Report:
    """The report of a child that sent none: killed at a limit, cancelled, crashed, or never started."""
    where = f"during {phase}"
    after = f"after {format_seconds(ending.seconds)}"
    log = read_log_tail(ending.log)
    match ending.ended:
        case Ended.CANCELLED:
            failure = Failure(kind=FailureKind.CANCELLED, message=f"cancelled {where}, {after}")
        case Ended.WALL_LIMIT:
            message = f"killed {where}: it ran longer than {format_seconds(limits.wall_seconds)}; raise {wall_setting} to allow more"
            failure = Failure(kind=FailureKind.KILLED_WALL, message=message)
        case Ended.RSS_LIMIT:
            message = (
                f"killed {where}: it held {format_bytes(ending.peak_rss_bytes)} of memory, more than {format_bytes(limits.rss_bytes)};"
                f" raise {PREFIX}CHILD_RSS_LIMIT_BYTES to allow more"
            )
            failure = Failure(kind=FailureKind.KILLED_RSS, message=message)
        case Ended.NOT_STARTED:
            failure = Failure(kind=FailureKind.CRASHED, message=f"the child process could not be started: {ending.detail}")
        case Ended.SIGNALLED if ending.killed_for_host_memory:
            message = f"killed by the kernel {where}, {after}: the host had no memory left; it held {format_bytes(ending.peak_rss_bytes)}"
            failure = Failure(kind=FailureKind.HOST_MEMORY, message=message)
        case Ended.SIGNALLED:
            assert ending.signal_number is not None
            name = signal.Signals(ending.signal_number).name
            reason = find_check_failure(log)
            failure = Failure(kind=FailureKind.CRASHED, message=f"ended by {name} {where}, {after}" + (f": {reason}" if reason else ""))
        case _:
            reason = find_check_failure(log) or (log.splitlines() or ["it printed nothing"])[-1]
            failure = Failure(kind=FailureKind.CRASHED, message=f"exited with code {ending.exit_code} {where}, {after}: {reason}")
    return _failed(request, spec, ending, failure)


def _failed(request: CompileRequest, spec: Spec, ending: Ending, failure: Failure) -> Report:
    return Report(
        program=request.program,
        status=ReportStatus.FAILED,
        depth=request.depth,
        failure=failure.model_copy(update={"log_tail": read_log_tail(ending.log)}),
        topology=spec.topology.describe(),
        num_devices=spec.topology.num_devices,
        child_peak_rss_bytes=ending.peak_rss_bytes or None,
        toolchain=request.toolchain,
    )


def _read_report(request: CompileRequest, message: Mapping[str, Any]) -> Report:
    try:
        return Report.model_validate(message["report"])
    except (KeyError, ValidationError) as error:
        failure = Failure(kind=FailureKind.ANALYSIS, message=f"the child sent a report that cannot be read: {error}")
        return Report(
            program=request.program, status=ReportStatus.FAILED, depth=request.depth, failure=failure, toolchain=request.toolchain
        )


def _with_log(report: Report, ending: Ending) -> Report:
    """A failure the child told of itself, with the end of its log, which only the parent has whole."""
    if report.failure is None or report.failure.log_tail:
        return report
    return report.model_copy(update={"failure": report.failure.model_copy(update={"log_tail": read_log_tail(ending.log)})})
