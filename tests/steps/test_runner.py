"""Every way a steps child can end is a report with what was known until then; the child is a fake one without JAX."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from service import supervision
from service.compile.interface import ChildLimits, ProgressEvent
from service.records import FailureKind
from service.spec import parse_spec
from service.steps.interface import StepsRequest
from service.steps.runner import CHILD, ChildSteps
from service.steps_records import StepsReport, StepsStatus
from tests.clocks import StandingClock

FAKE = (sys.executable, str(Path(__file__).with_name("fake_child.py")))


def request(tmp_path: Path, scenario: str) -> StepsRequest:
    spec: dict[str, Any] = {
        "scenario": scenario,
        "model": {"preset": "tiny"},
        "train": {"seq_len": 128},
        "mesh": {"fsdp": 4},
        "steps": {"devices": "cpu:4"},
    }
    return StepsRequest(spec=parse_spec(spec).as_json(), work_dir=str(tmp_path / "work"))


def run(
    tmp_path: Path, scenario: str, *, cancel_at: str = "", events: list[ProgressEvent] | None = None, **limits: Any
) -> tuple[StepsReport, list[ProgressEvent]]:
    events = [] if events is None else events
    report = ChildSteps(FAKE)(
        request(tmp_path, scenario),
        limits=ChildLimits(**limits),
        on_event=events.append,
        is_cancelled=lambda: any(event.name == cancel_at for event in events),
    )
    return report, events


def test_a_child_that_ends_well_is_believed(tmp_path: Path) -> None:
    report, events = run(tmp_path, "good")
    assert report.status is StepsStatus.OK
    assert [check.name for check in report.checks] == ["same_seed"]
    assert [event.name for event in events] == ["devices", "known", "steps", "step", "step", "check", "done"]
    assert not (tmp_path / "work").exists()


def test_a_failed_check_is_the_reports_status(tmp_path: Path) -> None:
    assert run(tmp_path, "failing")[0].status is StepsStatus.CHECKS_FAILED


@pytest.mark.parametrize(
    ("scenario", "limits", "status", "kind", "words"),
    [
        ("killed", {}, StepsStatus.FAILED, FailureKind.CRASHED, "ended by SIGKILL in phase steps"),
        ("silent", {}, StepsStatus.FAILED, FailureKind.CRASHED, "exited with code 3 and without a report in phase steps"),
        ("endless", {"wall_seconds": 1.5}, StepsStatus.FAILED, FailureKind.KILLED_WALL, "2 s; raise WEIGHBRIDGE_CHILD_WALL_SECONDS"),
        ("hungry", {"rss_bytes": 300 << 20}, StepsStatus.DOES_NOT_FIT, FailureKind.KILLED_RSS, "the limit is 300.00 MiB"),
    ],
)
def test_a_child_that_ends_badly_leaves_what_was_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    limits: dict[str, Any],
    status: StepsStatus,
    kind: FailureKind,
    words: str,
) -> None:
    # However long a child takes to start here: its time runs from its last step.
    events: list[ProgressEvent] = []
    monkeypatch.setattr(supervision, "time", StandingClock(lambda: len([event for event in events if event.name == "step"]) == 2))
    report = run(tmp_path, scenario, events=events, **limits)[0]
    assert report.status is status
    assert report.failure is not None
    assert report.failure.kind is kind
    assert words in report.failure.message
    assert "3 steps" in report.failure.message
    assert [step.metrics.loss for step in report.steps] == [7.5, 7.25, 7.125]
    assert report.phase == "steps"
    assert (report.mesh, report.num_parameters) == ({"fsdp": 4}, 1234)
    assert report.times is not None
    assert report.times.median_seconds == 2.5
    assert report.child_peak_rss_bytes != 0, "a child that was gone before it was looked at has no figure"


def test_a_cancelled_child_says_so(tmp_path: Path) -> None:
    report, _ = run(tmp_path, "endless", cancel_at="step")
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CANCELLED


def test_a_message_that_is_not_understood_is_no_success(tmp_path: Path) -> None:
    report, _ = run(tmp_path, "garbled")
    assert report.status is StepsStatus.FAILED
    assert report.failure is not None
    assert "no_such_field" in report.failure.message
    assert len(report.steps) == 3


def test_the_child_is_a_module_of_its_own() -> None:
    assert CHILD[-1] == "service.steps.child"
