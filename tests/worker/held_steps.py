"""A steps runner that does what a test lets it: it announces each request, and goes on when it is told how."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

from service.compile.interface import ChildLimits, ProgressEvent
from service.records import Failure, FailureKind
from service.steps.interface import StepsRequest
from service.steps_records import StepsReport, StepsStatus


class HeldSteps:
    """`service.steps.interface.StepsRunner`. Reports put in `outcomes` end the runs, one each."""

    def __init__(self) -> None:
        self.outcomes: queue.SimpleQueue[StepsReport] = queue.SimpleQueue()
        self.requests: queue.SimpleQueue[StepsRequest] = queue.SimpleQueue()

    def next_request(self) -> StepsRequest:
        """Wait for the next request."""
        return self.requests.get(timeout=60)

    def __call__(
        self,
        request: StepsRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> StepsReport:
        work_dir = Path(request.work_dir)
        work_dir.mkdir()
        try:
            on_event(ProgressEvent(name="step", seconds=1.5, data={"steps": [{"step": 0, "loss": 6.25}]}))
            self.requests.put(request)
            while True:
                try:
                    return self.outcomes.get(timeout=0.02)
                except queue.Empty:
                    if is_cancelled():
                        failure = Failure(kind=FailureKind.CANCELLED, message="cancelled after 1 step")
                        return StepsReport(status=StepsStatus.FAILED, phase="steps", failure=failure)
        finally:
            work_dir.rmdir()
