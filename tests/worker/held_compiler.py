"""A compiler that does what a test lets it: it announces each request, and goes on when it is told how."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from service.compile.interface import ChildLimits, CompileRequest, ProgressEvent
from service.records import Failure, FailureKind, Report, ReportStatus

Outcome = Report | Exception


class Call:
    """One request in progress."""

    def __init__(self, request: CompileRequest, limits: ChildLimits, on_event: Callable[[ProgressEvent], None]) -> None:
        self.request, self.limits, self.on_event = request, limits, on_event
        self.was_stopped = threading.Event()
        self._outcome: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def end(self, outcome: Outcome | None = None) -> None:
        """Let the compile end: with a report that fits, or as told."""
        self._outcome.put(outcome or self.report())

    def report(self, *, peak_bytes: int = 4_321, failure: Failure | None = None) -> Report:
        common = {"program": self.request.program, "depth": self.request.depth}
        if failure is not None:
            return Report(status=ReportStatus.FAILED, failure=failure, **common)
        return Report(status=ReportStatus.OK, peak_bytes=peak_bytes, **common)


class HeldCompiler:
    """`service.compile.interface.Compiler`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.num_calls = 0

    def next_call(self) -> Call:
        """Wait for the next request."""
        return self._calls.get(timeout=60)

    def __call__(
        self,
        request: CompileRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> Report:
        work_dir = Path(request.work_dir)
        # As the interface says: not there yet, made and removed here.
        work_dir.mkdir()
        self.num_calls += 1
        call = Call(request, limits, on_event)
        try:
            on_event(ProgressEvent(name="compile", seconds=0.25))
            self._calls.put(call)
            while True:
                try:
                    outcome = call._outcome.get(timeout=0.02)
                except queue.Empty:
                    if is_cancelled():
                        call.was_stopped.set()
                        return call.report(failure=Failure(kind=FailureKind.CANCELLED, message="cancelled", log_tail="last words"))
                    continue
                if isinstance(outcome, Exception):
                    raise outcome
                if request.artifact_dir is not None:
                    (Path(request.artifact_dir) / f"{request.program}.module.pb").write_bytes(b"HLO of " + request.program.encode())
                return outcome
        finally:
            work_dir.rmdir()
