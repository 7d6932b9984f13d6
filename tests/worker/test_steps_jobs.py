"""Jobs of kind steps: their reports are kept as far as they came, and their devices are one job's at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.errors import NotFoundError
from service.identity import identify
from service.records import Failure, FailureKind, Job, JobStatus
from service.spec import parse_spec
from service.steps_records import CheckResult, CheckStatus, StepsReport, StepsStatus
from service.storage.interface import NewJob, Platform
from service.storage.store import SqlStore
from service.worker.devices import attached_platforms
from tests.worker.conftest import Running
from tests.worker.held_compiler import HeldCompiler
from tests.worker.held_steps import HeldSteps

PostSteps = Callable[..., Job]
Wait = Callable[[Callable[[], bool]], None]

CHECKS = (
    CheckResult(name="replay", status=CheckStatus.PASSED, claim="a replay equals dropless alone", deviation=0.0, tolerance=0.0),
    CheckResult(name="loss_falls", status=CheckStatus.FAILED, claim="the loss falls", detail="6.25 to 6.5"),
)


@pytest.fixture
def post_steps(store: SqlStore) -> PostSteps:
    def add(seed: int = 0, *, platform: Platform | None = "cpu") -> Job:
        spec = parse_spec(
            {
                "scenario": f"steps-{seed}",
                "model": {"preset": "tiny"},
                "train": {"seq_len": 64},
                "mesh": {"fsdp": 2},
                "steps": {"devices": "cpu:2", "seed": seed},
            }
        )
        return store.add_job(
            NewJob(
                kind="steps",
                scenario=spec.scenario,
                spec=spec.as_json(),
                spec_hash=spec.canonical_hash(),
                identity=identify(spec, "steps"),
                programs=("steps",),
                child_memory_bytes=1 << 30,
                platform=platform,
            ),
            force=True,
        ).job

    return add


def is_ended(store: SqlStore, job: Job) -> Callable[[], bool]:
    return lambda: store.get_job(job.id).finished_at is not None


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (StepsStatus.OK, JobStatus.SUCCEEDED),
        (StepsStatus.CHECKS_FAILED, JobStatus.SUCCEEDED),
        (StepsStatus.DOES_NOT_FIT, JobStatus.SUCCEEDED),
        (StepsStatus.FAILED, JobStatus.FAILED),
    ],
)
def test_what_the_steps_showed_is_kept_and_only_broken_off_steps_fail_the_job(
    store: SqlStore, steps: HeldSteps, running: Running, post_steps: PostSteps, wait_until: Wait, status: StepsStatus, expected: JobStatus
) -> None:
    job = post_steps()
    failure = Failure(kind=FailureKind.CRASHED, message="signal 6") if status is StepsStatus.FAILED else None
    report = StepsReport(status=status, phase="done", checks=CHECKS, failure=failure, mesh={"fsdp": 2})
    with running():
        assert steps.next_request().spec == job.spec
        steps.outcomes.put(report)
        wait_until(is_ended(store, job))
    assert (store.get_job(job.id).status, store.get_job(job.id).failure) == (expected, failure)
    assert store.get_steps_report(job.id) == report
    events = store.list_events(job.id)
    assert [event.name for event in events] == ["queued", "claimed", "progress", "report", "finished"]
    assert events[2].data["data"] == {"steps": [{"step": 0, "loss": 6.25}]}, "losses come while the steps run"
    assert events[3].data == {"status": status, "phase": "done", "num_steps": 0, "num_replays": 0, "num_checks_failed": 1}


def test_a_cancelled_run_keeps_what_was_known_until_then(
    store: SqlStore, steps: HeldSteps, running: Running, post_steps: PostSteps, wait_until: Wait
) -> None:
    job = post_steps()
    with running():
        steps.next_request()
        store.request_cancel(job.id)
        wait_until(is_ended(store, job))
    assert store.get_job(job.id).status is JobStatus.CANCELLED
    assert store.get_steps_report(job.id).phase == "steps"


def test_a_worker_that_stops_gives_the_run_back_whole(store: SqlStore, steps: HeldSteps, running: Running, post_steps: PostSteps) -> None:
    job = post_steps()
    with running():
        steps.next_request()
    assert (store.get_job(job.id).status, store.get_job(job.id).attempts) == (JobStatus.QUEUED, 0)
    with pytest.raises(NotFoundError, match="which is queued and of kind steps, has no report of steps"):
        store.get_steps_report(job.id)


@pytest.mark.parametrize("slots_of_workers", [(3,), (1, 1)], ids=["one_worker", "two_workers_of_one_host"])
def test_steps_run_one_job_at_a_time_and_compiles_go_on_beside_them(
    store: SqlStore,
    steps: HeldSteps,
    compiler: HeldCompiler,
    running: Running,
    post_steps: PostSteps,
    post: Callable[..., Job],
    wait_until: Wait,
    slots_of_workers: tuple[int, ...],
) -> None:
    first, second = post_steps(1), post_steps(2)
    compiling = post()
    with ExitStack() as workers:
        for slots in slots_of_workers:
            workers.enter_context(running(worker_slots=slots))
        assert steps.next_request().spec["scenario"] == "steps-1"
        # It came last, so whoever takes it has passed over the second steps job.
        compiler.next_call().end()
        wait_until(is_ended(store, compiling))
        assert store.get_job(second.id).status is JobStatus.QUEUED, "its devices are taken, a slot is free"
        for job in (first, second):
            steps.outcomes.put(StepsReport(status=StepsStatus.OK, phase="done"))
            wait_until(is_ended(store, job))


def test_a_run_waits_for_a_worker_with_its_devices(
    store: SqlStore, steps: HeldSteps, running: Running, post_steps: PostSteps, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.worker import loop

    monkeypatch.setattr(loop, "attached_platforms", lambda: ("cpu",))
    elsewhere, here, anywhere = post_steps(1, platform="gpu"), post_steps(2), post_steps(3, platform=None)
    with running():
        for job in (here, anywhere):
            steps.outcomes.put(StepsReport(status=StepsStatus.OK, phase="done"))
            wait_until(is_ended(store, job))
    assert store.get_job(elsewhere.id).status is JobStatus.QUEUED
    monkeypatch.setattr(loop, "attached_platforms", lambda: ("cpu", "gpu"))
    with running():
        steps.outcomes.put(StepsReport(status=StepsStatus.OK, phase="done"))
        wait_until(is_ended(store, elsewhere))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], ("cpu",)),
        (["nvidiactl"], ("cpu",)),
        (["nvidia0", "nvidiactl"], ("cpu", "gpu")),
        (["accel3"], ("cpu", "tpu")),
        (["vfio/vfio"], ("cpu",)),
        (["vfio/12", "kfd"], ("cpu", "gpu", "tpu")),
    ],
)
def test_attached_devices_are_told_from_their_files(tmp_path: Path, files: list[str], expected: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert attached_platforms(tmp_path) == expected
