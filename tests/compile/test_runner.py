"""Every way a child can end is a report, and nothing of the child is left. The child here is tests/compile/scripted_child.py."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from service import supervision
from service.compile import runner as runner_module
from service.compile.interface import ChildLimits, CompileRequest, ProgressEvent
from service.compile.runner import ChildCompiler
from service.errors import SpecError
from service.records import FailureKind, Report, ReportStatus
from tests.clocks import StandingClock

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("scripted_child.py")))
GENEROUS = ChildLimits(wall_seconds=60, rss_bytes=2 << 30)


DIES_LOUDLY = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("*** SIGTERM received; stack trace: ***", file=sys.stderr, flush=True))
print("the log's last line", file=sys.stderr, flush=True)
print('{"event": "progress", "name": "compile", "seconds": 1, "data": {"loud": true}}', flush=True)
time.sleep(600)
"""
"""As libtpu does on SIGTERM. No lifeline, whose closed stdin may end a child before the signal comes."""


def make_spec(scenario: str, **sections: Any) -> dict[str, Any]:
    model = {"preset": "tiny", "engram": None, "mtp": {"depth": 0}, "mhc": {"num_streams": 1}}
    return {"scenario": scenario, "model": model, "train": {"seq_len": 64}, "mesh": {"topology": "v5e-4", "fsdp": 4}, **sections}


class Trial:
    """One run of the scripted child, and what was seen of it."""

    def __init__(self, tmp_path: Path, scenario: str) -> None:
        self.work_dir = tmp_path / "jobs" / "one"
        self.request = CompileRequest(spec=make_spec(scenario), program="candidate", work_dir=str(self.work_dir))
        self.events: list[ProgressEvent] = []
        self.cache = tmp_path / "capacity.json"

    def run(
        self,
        limits: ChildLimits = GENEROUS,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        on_event: Callable[[ProgressEvent], None] = lambda event: None,
        command: tuple[str, ...] = COMMAND,
    ) -> Report:
        def hear(event: ProgressEvent) -> None:
            self.events.append(event)
            on_event(event)

        report = ChildCompiler(self.cache, command=command)(self.request, limits=limits, on_event=hear, is_cancelled=is_cancelled)
        self.assert_nothing_is_left()
        return report

    @property
    def data(self) -> Mapping[str, Any]:
        """What the child said in all its events together."""
        return {key: value for event in self.events for key, value in event.data.items()}

    def assert_nothing_is_left(self) -> None:
        assert not self.work_dir.exists()
        for name in ("pid", "grandchild"):
            pid = self.data.get(name)
            assert pid is None or not is_running(pid), name


def is_running(pid: int) -> bool:
    # An orphan killed a moment ago may be a zombie until init looks.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def trial(tmp_path: Path) -> Callable[[str], Trial]:
    return lambda scenario: Trial(tmp_path, scenario)


def test_report_comes_back_and_stdout_of_libraries_does_not_disturb_it(trial: Callable[[str], Trial]) -> None:
    run = trial("reports")
    report = run.run()
    assert (report.status, report.peak_bytes, report.failure) == (ReportStatus.OK, 4321, None)
    assert [event.name for event in run.events] == ["compile"]
    assert 0 < run.events[0].seconds < 30


def test_a_child_that_lingers_after_its_report_is_not_waited_for(trial: Callable[[str], Trial]) -> None:
    assert trial("reports-then-hangs").run().status is ReportStatus.OK


def test_a_report_larger_than_any_pipe_comes_whole(trial: Callable[[str], Trial]) -> None:
    report = trial("reports-much").run()
    assert sum(len(warning) for warning in report.warnings) == 9_000_000


def test_wall_limit_kills_and_says_which_limit(trial: Callable[[str], Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    run = trial("hangs")
    # However long a child takes to start here: its time runs from the first word that it says.
    monkeypatch.setattr(supervision, "time", StandingClock(lambda: bool(run.events)))
    report = run.run(ChildLimits(wall_seconds=1.5))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.KILLED_WALL
    assert "during compile: it ran longer than 1.5 s; raise WEIGHBRIDGE_CHILD_WALL_SECONDS" in report.failure.message
    assert report.failure.log_tail == "the log's last line"


def test_a_child_that_ignores_sigterm_is_killed_all_the_same(trial: Callable[[str], Trial]) -> None:
    run = trial("hangs-and-ignores-sigterm")
    report = run.run(is_cancelled=lambda: "deaf" in run.data)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CANCELLED


@pytest.mark.parametrize("reason", ["cancelled", "wall limit"])
def test_the_log_of_a_child_that_was_ended_stops_where_it_was_told_to_end(trial: Callable[[str], Trial], reason: str) -> None:
    run = trial("any")
    cancelled = {"is_cancelled": lambda: "loud" in run.data} if reason == "cancelled" else {}
    report = run.run(ChildLimits(wall_seconds=60 if cancelled else 3), command=(sys.executable, "-c", DIES_LOUDLY), **cancelled)
    assert "loud" in run.data
    assert report.failure is not None
    assert report.failure.kind is (FailureKind.CANCELLED if cancelled else FailureKind.KILLED_WALL)
    assert report.failure.log_tail == "the log's last line"


def test_rss_limit_kills_with_what_was_held(trial: Callable[[str], Trial]) -> None:
    report = trial("takes-memory").run(ChildLimits(wall_seconds=60, rss_bytes=256 << 20))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.KILLED_RSS
    assert "more than 256.00 MiB" in report.failure.message
    assert report.child_peak_rss_bytes is not None
    assert report.child_peak_rss_bytes > 256 << 20


def test_what_a_child_said_before_it_exceeded_a_limit_is_heard(trial: Callable[[str], Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    run = trial("says-more-when-looked-at")

    def look_slowly(pid: int) -> int:
        (run.work_dir / "looked-at").touch()
        while not (run.work_dir / "said").exists():
            time.sleep(0.01)
        return 3 << 30

    monkeypatch.setattr(supervision, "_group_rss", look_slowly)
    report = run.run()
    assert report.failure is not None
    assert report.failure.kind is FailureKind.KILLED_RSS
    assert [event.name for event in run.events] == ["compile", "analyse"]
    assert "killed during analyse" in report.failure.message


@pytest.mark.parametrize("scenario", ["hangs", "has-a-child-of-its-own"])
def test_cancel_ends_the_whole_group_at_once(trial: Callable[[str], Trial], scenario: str) -> None:
    run = trial(scenario)
    started = time.monotonic()
    report = run.run(is_cancelled=lambda: bool(run.events) and (scenario == "hangs" or "grandchild" in run.data))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CANCELLED
    assert report.status is ReportStatus.FAILED
    assert time.monotonic() - started < 30


def test_what_a_child_leaves_behind_is_ended_too(trial: Callable[[str], Trial]) -> None:
    report = trial("leaves-a-child-behind").run()
    assert report.failure is not None
    assert report.failure.message.startswith("exited with code 3 during compile")


def test_kill_from_outside_is_a_recorded_crash(trial: Callable[[str], Trial]) -> None:
    report = trial("hangs").run(on_event=lambda event: os.kill(event.data["pid"], 9))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CRASHED
    assert report.failure.message.startswith("ended by SIGKILL during compile")


def test_abort_in_the_compiler_is_a_crash_that_names_the_failed_check(trial: Callable[[str], Trial]) -> None:
    report = trial("aborts").run()
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CRASHED
    assert report.failure.message.startswith("ended by SIGABRT during compile")
    assert report.failure.message.endswith("Check failed: a == b (3 vs. 5)")
    assert "Check failed" in report.failure.log_tail


def test_exit_without_a_report_tells_the_code_and_the_last_line(trial: Callable[[str], Trial]) -> None:
    report = trial("exits").run()
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CRASHED
    assert report.failure.message.startswith("exited with code 7 during compile")
    assert report.failure.message.endswith("ImportError: no module named half")


def test_a_report_that_cannot_be_read_is_a_failure_and_nonsense_before_it_is_ignored(trial: Callable[[str], Trial]) -> None:
    report = trial("sends-nonsense").run()
    assert report.failure is not None
    assert report.failure.kind is FailureKind.ANALYSIS
    assert "splendid" in report.failure.message


def test_a_child_that_cannot_be_started_is_a_report(trial: Callable[[str], Trial]) -> None:
    report = trial("reports").run(command=("/nowhere/python",))
    assert report.failure is not None
    assert report.failure.message.startswith("the child process could not be started")


def test_a_held_lock_file_is_tried_again_and_not_told(trial: Callable[[str], Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LOCK_PAUSE_SECONDS", 0.01)
    run = trial("is-locked-twice")
    assert run.run().status is ReportStatus.OK
    assert [event.name for event in run.events] == ["compile", "retry"] * 2 + ["compile"]


def test_a_lock_that_never_opens_fails_without_libtpus_advice(trial: Callable[[str], Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LOCK_PAUSE_SECONDS", 0.01)
    report = trial("is-always-locked").run()
    assert report.failure is not None
    assert report.failure.kind is FailureKind.COMPILER
    assert "submit the job again" in report.failure.message


def test_an_error_of_the_listener_passes_through_and_ends_the_child(trial: Callable[[str], Trial]) -> None:
    def lose_the_lease(event: ProgressEvent) -> None:
        raise RuntimeError("the lease is lost")

    run = trial("hangs")
    with pytest.raises(RuntimeError, match="the lease is lost"):
        run.run(on_event=lose_the_lease)
    run.assert_nothing_is_left()


def test_a_spec_that_was_not_checked_starts_no_child(trial: Callable[[str], Trial]) -> None:
    run = trial("reports")
    run.request = run.request.model_copy(update={"spec": make_spec("reports", mesh={"topology": "v5e-4", "fsdp": 3})})
    with pytest.raises(SpecError):
        run.run()
    assert run.events == []


def test_a_directory_that_is_there_already_is_never_used_and_never_removed(trial: Callable[[str], Trial]) -> None:
    run = trial("reports")
    run.work_dir.mkdir(parents=True)
    (run.work_dir / "precious").write_text("kept")
    with pytest.raises(FileExistsError):
        run.run()
    assert (run.work_dir / "precious").read_text() == "kept"


def test_child_gets_a_scrubbed_environment_and_a_session_of_its_own(trial: Callable[[str], Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "PYTHONSTARTUP", "WEIGHBRIDGE_TOKEN"):
        monkeypatch.setenv(name, "from the host")
    run = trial("shows-its-surroundings")
    run.run()
    environment = run.data["environment"]
    assert "from the host" not in environment.values()
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5e-4"
    for name in ("HOME", "TMPDIR", "TPU_LOG_DIR"):
        assert Path(environment[name]).is_relative_to(run.work_dir)
    assert run.data["directory"] == str(run.work_dir)
    assert run.data["leader"] is True


def test_request_carries_toolchain_and_the_remembered_capacity(trial: Callable[[str], Trial]) -> None:
    run = trial("shows-its-surroundings")
    run.run()
    assert run.data["request"]["capacity_bytes"] is None
    assert run.data["request"]["toolchain"]["topology_arguments"] == {"topology_name": "v5e:2x2"}


def test_children_run_side_by_side(tmp_path: Path) -> None:
    both_run = threading.Barrier(2, timeout=30)
    reports: list[Report] = []

    def run(name: str) -> None:
        own = Trial(tmp_path, "reports-then-hangs")
        own.work_dir = tmp_path / "jobs" / name
        own.request = own.request.model_copy(update={"work_dir": str(own.work_dir)})
        # Each child stays until the other runs too: one after the other would never get here.
        reports.append(own.run(on_event=lambda event: both_run.wait() and None))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.status for report in reports] == [ReportStatus.OK] * 2
