"""The page of a steps job: curves, checks and memory of a report, and of one that never came."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from service.api.steps_context import event_detail, steps_sentence, steps_view
from service.api.steps_report import report_from_events
from service.records import Event, Failure, FailureKind
from service.steps.findings import Findings
from service.steps_records import StepsReport, StepsStatus


def metrics(loss: float | None, *, overflow: bool = False, dropped: float = 0.0) -> dict[str, Any]:
    return {
        "loss": loss,
        "main_loss": None if loss is None else loss - 0.5,
        "mtp_loss": None if loss is None else loss + 0.25,
        "balance_loss": 0.001,
        "tokens": 90,
        "has_moe_overflow": overflow,
        "dropped_fraction": [0.0, dropped],
        "load_spread": [1.25, 1.5],
    }


def step(index: int, loss: float | None, *, replayed: bool = False) -> dict[str, Any]:
    return {
        "step": index,
        "is_warmup": index < 1,
        "program": "dropless" if replayed else "candidate",
        "seconds": 0.5,
        "tokens_per_second": 180.0,
        "metrics": metrics(loss),
        "discarded": metrics(7.75, overflow=True, dropped=0.125) if replayed else None,
        "num_wasted": int(replayed),
        "flags_equal": True,
    }


def progress(sequence: int, name: str, data: dict[str, Any]) -> Event:
    return event(sequence, "progress", {"program": "steps", "name": name, "seconds": 1.25, "data": data})


def event(sequence: int, name: str, data: dict[str, Any]) -> Event:
    return Event(job_id="j", sequence=sequence, name=name, data=data, created_at=datetime(2020, 1, 2, tzinfo=UTC))


def make_report(**known: Any) -> StepsReport:
    findings = Findings()
    findings.apply("known", {"expert_load": [[10, 30], [20, 20]], "mesh": {"fsdp": 2, "context": 4}, **known})
    findings.apply("step", {"steps": [step(0, 8.0), step(1, 7.5, replayed=True), step(2, 7.0)]})
    findings.apply(
        "check", {"name": "replay", "status": "passed", "claim": "c", "deviation": 0.0, "tolerance": 0.0, "numbers": {"loss": [8.0, None]}}
    )
    return findings.report()


def test_curves_run_from_the_first_step_to_the_last_with_replays_marked() -> None:
    view = steps_view(make_report(), is_final=True)
    loss = view.curves[0]
    assert [line.name for line in loss.lines] == ["total", "main", "MTP"]
    points = [tuple(map(float, point.split())) for point in loss.lines[0].path[1:].split("L")]
    assert [x for x, _ in points] == [0, 500, 1000]
    assert points[0][1] < points[1][1] < points[2][1], "a falling loss runs down the page"
    assert loss.marks == (50.0,)
    assert loss.last_step == 2
    assert loss.lines[0].last == "7.0000"


def test_a_loss_that_is_not_finite_leaves_a_gap_and_is_named() -> None:
    findings = Findings()
    findings.apply("step", {"steps": [step(0, 8.0), step(1, 7.5), step(2, None)]})
    view = steps_view(findings.report(StepsStatus.FAILED), is_final=True)
    assert view.curves[0].lines[0].path.count("L") == 1
    assert view.rows[-1].loss == "not finite"
    assert view.facts[0].value == "not finite"


def test_both_sets_of_metrics_of_a_replayed_step_are_shown() -> None:
    row = steps_view(make_report(), is_final=True).rows[1]
    assert row.loss == "7.5"
    assert row.note == "candidate dropped 12.50 % and gave 7.75; replayed; 1 step ahead thrown away"


def test_expert_load_is_drawn_against_the_layers_largest() -> None:
    first, second = steps_view(make_report(), is_final=True).load
    assert [height for _, _, height in first.heights] == pytest.approx([33.333, 100.0])
    assert first.spread == 1.5
    assert second.spread == 1.0


def test_a_check_says_whether_equal_bits_were_asked_for() -> None:
    (row,) = steps_view(make_report(), is_final=True).checks
    assert (row.tolerance, row.verdict.title) == ("equal bits", "passed")
    assert row.series[0].values == "8  not finite"


def test_a_running_job_has_no_verdict_yet() -> None:
    assert steps_view(make_report(), is_final=False).verdict is None


def test_what_a_running_job_has_not_come_to_is_not_called_unknown() -> None:
    findings = Findings()
    begun = steps_view(findings.report(), is_final=False)
    assert begun.sentence == "no step has ended yet"
    assert {(fact.value, fact.hint) for fact in begun.facts} == {("—", "not yet")}
    findings.apply("known", {"mesh": {"fsdp": 2, "context": 4}, "num_parameters": 671})
    findings.apply("step", {"steps": [step(0, None)]})
    facts = {fact.label: fact.value for fact in steps_view(findings.report(), is_final=False).facts}
    assert (facts["Last loss"], facts["Median step"], facts["Overflow"], facts["Parameters"]) == ("not finite", "—", "0 %", "671")


def test_what_a_job_that_ended_never_came_to_is_unknown() -> None:
    view = steps_view(StepsReport(status=StepsStatus.FAILED, phase="devices"), is_final=True)
    assert {fact.value for fact in view.facts} == {"unknown"}
    assert view.facts[5].hint == "nothing was measured"


def test_what_a_lost_job_knew_is_shown_from_its_last_attempts_events() -> None:
    events = [
        event(1, "claimed", {"attempt": 1}),
        progress(2, "step", {"steps": [step(0, 9.0)]}),
        event(3, "claimed", {"attempt": 2}),
        progress(4, "steps", {}),
        progress(5, "step", {"steps": [step(0, 8.0), step(1, 7.5)]}),
    ]
    failure = Failure(kind=FailureKind.LOST, message="the worker died")
    report = report_from_events(events, status=StepsStatus.FAILED, failure=failure)
    assert [record.metrics.loss for record in report.steps] == [8.0, 7.5]
    assert report.phase == "steps"
    view = steps_view(report, is_final=True)
    assert view.sentence == "the worker died"
    assert view.verdict is not None
    assert view.verdict.title == "Failed"


def test_the_log_tells_losses_and_checks_and_leaves_the_rest_out() -> None:
    assert event_detail(progress(1, "known", {"mesh": {}})) is None
    assert event_detail(progress(2, "step", {"steps": [step(3, 7.5)]})) == "step 3, loss 7.5"
    assert event_detail(progress(3, "check", {"name": "same_seed", "status": "not_applicable"})) == "same seed: not applicable"
    assert event_detail(progress(4, "compile", {})) == "1.2 s"


def test_the_head_says_what_runs_where() -> None:
    spec = {"model": {"preset": "tiny"}, "steps": {"devices": "cpu:8", "num_steps": 10, "warmup_steps": 2, "model": "tiny-of-same-shape"}}
    assert steps_sentence(spec) == "12 real steps of tiny, tiny of same shape, on cpu:8"


def test_an_empty_report_is_shown_without_curves() -> None:
    view = steps_view(StepsReport(status=StepsStatus.FAILED, phase="devices"), is_final=True)
    assert (view.curves, view.rows, view.load) == ((), (), ())
    assert view.facts[3].value == "unknown"
