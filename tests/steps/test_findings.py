"""A report can be made from the events of a steps job at any time, and says what its steps took."""

from __future__ import annotations

from typing import Any

import pytest

from service.steps.findings import Findings, step_times
from service.steps_records import StepRecord, StepsStatus


def record(step: int, seconds: float, *, warmup: bool = False, replayed: bool = False, tokens: int = 60) -> dict[str, Any]:
    metrics = {"loss": 5.0, "main_loss": 4.0, "mtp_loss": 3.0, "balance_loss": 0.5, "tokens": tokens, "has_moe_overflow": False}
    return {
        "step": step,
        "is_warmup": warmup,
        "program": "dropless" if replayed else "candidate",
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "metrics": metrics,
        "discarded": metrics | {"has_moe_overflow": True} if replayed else None,
        "flags_equal": True,
    }


def test_a_report_is_made_of_what_came_so_far() -> None:
    findings = Findings()
    findings.apply("build", {})
    findings.apply("known", {"num_parameters": 77, "retry": True})
    findings.apply("steps", {})
    findings.apply("step", {"steps": [record(0, 1.0, warmup=True), record(1, 2.0, replayed=True)]})
    findings.apply("step", {"steps": [record(2, 4.0)]})
    report = findings.report()
    assert (report.status, report.phase, report.num_parameters, report.retry) == (StepsStatus.OK, "steps", 77, True)
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert report.num_replays == 1
    assert report.overflow_rate == pytest.approx(1 / 3)
    findings.apply("check", {"name": "replay", "status": "not_applicable", "claim": "c"})
    assert findings.report().status is StepsStatus.OK
    findings.apply("check", {"name": "same_seed", "status": "failed", "claim": "c"})
    assert findings.report().status is StepsStatus.CHECKS_FAILED


def test_a_later_attempt_starts_from_nothing() -> None:
    findings = Findings()
    findings.apply("known", {"num_parameters": 77})
    findings.apply("step", {"steps": [record(0, 1.0)]})
    findings.restart()
    report = findings.report(StepsStatus.FAILED)
    assert (report.steps, report.num_parameters, report.phase) == ((), None, "start")


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="steps_schema"):
        Findings().apply("known", {"steps_schema": 3})


def test_times_leave_the_warm_up_out() -> None:
    steps = [
        StepRecord.model_validate(record(index, seconds, warmup=index == 0)) for index, seconds in enumerate((100.0, 1.0, 2.0, 3.0, 6.0))
    ]
    times = step_times(steps)
    assert times is not None
    assert (times.num_steps, times.min_seconds, times.median_seconds, times.mean_seconds, times.max_seconds) == (4, 1.0, 2.5, 3.0, 6.0)
    assert times.tokens_per_second == pytest.approx(4 * 60 / 12.0)
    assert step_times(steps[:1]) is None
    one = step_times(steps[:2])
    assert one is not None
    assert one.p10_seconds == one.p90_seconds == 1.0
