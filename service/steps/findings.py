"""What is known of a steps job so far, as a sequence of events from which the report can be made at any time; no JAX here.

The child writes its findings as it makes them, the runner and the steps page read them: so a child that was killed, a worker that died
and a job that still runs all show the same report, as far as it came.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from service.records import Failure
from service.steps_records import CheckResult, CheckStatus, StepRecord, StepsReport, StepsStatus, StepTimes

KNOWN_FIELDS = frozenset(StepsReport.model_fields) - {"steps_schema", "status", "failure", "phase", "steps", "times", "checks"}


class Findings:
    """Events in, report out."""

    def __init__(self) -> None:
        self.phase = "start"
        self._known: dict[str, Any] = {}
        self._steps: list[StepRecord] = []
        self._checks: list[CheckResult] = []

    @property
    def steps(self) -> Sequence[StepRecord]:
        return self._steps

    def apply(self, name: str, data: Mapping[str, Any]) -> None:
        """Take up one progress event: `known` (fields of the report), `step`, `check`, or the name of the phase that was entered.

        Raises:
            ValueError: the event's data is not what its name says.
        """
        if name == "known":
            if unknown := sorted(set(data) - KNOWN_FIELDS):
                raise ValueError(f"known event names {unknown}, which are no such fields of the report; legal: {sorted(KNOWN_FIELDS)}")
            self._known |= data
        elif name == "step":
            self._steps += [StepRecord.model_validate(step) for step in data["steps"]]
        elif name == "check":
            self._checks.append(CheckResult.model_validate(data))
        else:
            self.phase = name

    def restart(self) -> None:
        """Forget what an earlier attempt found: the job was taken up again from its beginning."""
        self.__init__()  # type: ignore[misc]

    def report(self, status: StepsStatus | None = None, failure: Failure | None = None) -> StepsReport:
        """The report as far as it came; without a status, the checks decide it."""
        if status is None:
            failed = any(check.status is CheckStatus.FAILED for check in self._checks)
            status = StepsStatus.CHECKS_FAILED if failed else StepsStatus.OK
        return StepsReport.model_validate(
            {
                **self._known,
                "status": status,
                "failure": failure,
                "phase": self.phase,
                "steps": tuple(self._steps),
                "times": step_times(self._steps),
                "checks": tuple(self._checks),
            }
        )


def step_times(steps: Sequence[StepRecord]) -> StepTimes | None:
    """Distribution over the steps after the warm-up; None where there is none."""
    timed = [step for step in steps if not step.is_warmup]
    if not timed:
        return None
    seconds = sorted(step.seconds for step in timed)
    deciles = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    return StepTimes(
        num_steps=len(timed),
        mean_seconds=statistics.fmean(seconds),
        min_seconds=seconds[0],
        p10_seconds=deciles[0],
        median_seconds=statistics.median(seconds),
        p90_seconds=deciles[8],
        max_seconds=seconds[-1],
        tokens_per_second=sum(step.metrics.tokens for step in timed) / max(sum(seconds), 1e-9),
    )
