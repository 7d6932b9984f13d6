"""The contract between whoever wants real steps run and the child process that runs them; no JAX here.

The child (`python -m service.steps.child`) reads one `StepsRequest` as one line of JSON on stdin, which stays open as long as the answer is
wanted, and writes JSON lines on stdout: `{"event": "progress", …}` while it works, and `{"event": "report", "report": {…}}` last. Every
step and every check is a progress event of its own, so that a child that is killed leaves what was known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import Field

from service.compile.interface import ChildLimits, ProgressEvent
from service.records import Record, Toolchain
from service.steps_records import StepsReport

STEPS_PROGRAM = "steps"
"""What a steps job's one child is called where compile jobs name their programs."""

PHASES = ("start", "devices", "build", "estimate", "compile", "init", "warmup", "steps", "memory", "checks", "done")
"""In order; each is a progress event of its name. Between them, `step` carries a StepRecord, `check` a CheckResult, and `known` fields of
the report as they become known."""


class StepsRequest(Record):
    """Real steps to run."""

    spec: Mapping[str, Any] = Field(description="a validated spec with a steps section, as `Spec.as_json()` gives it")
    work_dir: str = Field(description="this child's own directory, not there yet; the runner makes and removes it")
    memory_limit_bytes: int | None = Field(
        default=None, description="resident memory at which the child is killed; filled in by the runner"
    )
    toolchain: Toolchain | None = Field(default=None, description="put in the report; filled in by the runner")


class StepsRunner(Protocol):
    """Runs the steps; `service.steps.runner.ChildSteps` is the real one, tests bring their own."""

    def __call__(
        self,
        request: StepsRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> StepsReport:
        """Return the report; every way a child can end is a report, never an exception."""
        ...
