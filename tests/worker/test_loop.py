"""What a worker does with the jobs it claims."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from service.records import Failure, FailureKind, Job, JobStatus
from service.settings import Settings
from service.storage.database import read, write
from service.storage.store import SqlStore
from service.storage.tables import jobs
from tests.worker.conftest import Running
from tests.worker.held_compiler import HeldCompiler

Post = Callable[..., Job]
Wait = Callable[[Callable[[], bool]], None]

BOTH = {"programs": ["candidate", "dropless"], "moe": {"ragged_buffer_factor": 1.0, "retry_when_tokens_dropped": True}}


def is_ended(store: SqlStore, job: Job) -> Callable[[], bool]:
    return lambda: store.get_job(job.id).finished_at is not None


def names(store: SqlStore, job: Job) -> list[str]:
    return [event.name for event in store.list_events(job.id)]


def test_a_job_is_weighed_program_by_program_and_its_files_are_kept(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait, settings: Settings
) -> None:
    job = post(**BOTH)
    with running(child_wall_seconds=77.0):
        candidate = compiler.next_call()
        assert (candidate.request.program, candidate.request.depth, candidate.limits.wall_seconds) == ("candidate", "memory", 77.0)
        assert candidate.request.spec == job.spec
        assert store.list_reports(job.id) == ()
        candidate.end(candidate.report(peak_bytes=111))
        dropless = compiler.next_call()
        assert [report.peak_bytes for report in store.list_reports(job.id)] == [111], "kept as soon as it is there"
        dropless.end(dropless.report(peak_bytes=222))
        wait_until(is_ended(store, job))
    assert store.get_job(job.id).status is JobStatus.SUCCEEDED
    assert [report.peak_bytes for report in store.list_reports(job.id)] == [111, 222]
    assert names(store, job) == ["queued", "claimed", "progress", "report", "progress", "report", "finished"]
    assert store.list_events(job.id)[2].data == {"program": "candidate", "name": "compile", "seconds": 0.25, "data": {}}
    assert [artifact.name for artifact in store.list_artifacts(job.id)] == ["candidate.module.pb", "dropless.module.pb"]
    assert b"".join(store.open_artifact(job.id, "dropless.module.pb").chunks()) == b"HLO of dropless"
    assert list(settings.work_dir.iterdir()) == [], "nothing is left of the worker's directory"


def test_a_program_that_cannot_be_weighed_fails_the_job_and_the_other_is_weighed_all_the_same(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post(**BOTH)
    failure = Failure(kind=FailureKind.KILLED_RSS, message="too large", log_tail="…")
    with running():
        candidate = compiler.next_call()
        candidate.end(candidate.report(failure=failure))
        compiler.next_call().end()
        wait_until(is_ended(store, job))
    ended = store.get_job(job.id)
    assert (ended.status, ended.failure) == (JobStatus.FAILED, failure)
    assert [report.failure for report in store.list_reports(job.id)] == [failure, None]


def test_two_jobs_run_at_once_and_a_third_waits_for_a_slot(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    first, second, third = post(64), post(128), post(256)
    with running(worker_slots=2):
        calls = [compiler.next_call(), compiler.next_call()]
        assert {call.request.spec["scenario"] for call in calls} == {"s64", "s128"}
        assert store.get_job(third.id).status is JobStatus.QUEUED
        calls[0].end()
        late = compiler.next_call()
        assert late.request.spec["scenario"] == "s256"
        for call in (calls[1], late):
            call.end()
        for job in (first, second, third):
            wait_until(is_ended(store, job))


def test_a_job_waits_until_its_child_is_expected_to_fit_in_memory(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    post(64, child_memory_bytes=3 << 30)
    large = post(128, child_memory_bytes=6 << 30)
    with running(worker_slots=2, worker_memory_bytes=8 << 30):
        first = compiler.next_call()
        # Some looks at the queue later it still waits; then there is room for it.
        posted = post(256)
        assert store.get_job(large.id).status is JobStatus.QUEUED
        first.end()
        for call in (compiler.next_call(), compiler.next_call()):
            call.end()
        wait_until(is_ended(store, posted))
        wait_until(is_ended(store, large))
    assert store.get_job(large.id).started_at < store.get_job(posted.id).started_at, "the smaller one behind it did not overtake it"


def test_a_job_larger_than_all_memory_runs_alone(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post(child_memory_bytes=99 << 30)
    with running(worker_memory_bytes=1 << 30):
        compiler.next_call().end()
        wait_until(is_ended(store, job))


def test_cancelling_kills_the_child_and_is_recorded_with_its_last_words(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post(**BOTH)
    with running(heartbeat_seconds=3600.0, lease_seconds=7200.0):
        call = compiler.next_call()
        store.request_cancel(job.id)
        assert call.was_stopped.wait(60), "seen long before the next heartbeat"
        wait_until(is_ended(store, job))
    ended = store.get_job(job.id)
    assert (ended.status, ended.failure.kind, ended.failure.log_tail) == (JobStatus.CANCELLED, FailureKind.CANCELLED, "last words")
    assert store.list_reports(job.id) == ()
    assert compiler.num_calls == 1


def test_a_worker_that_is_told_to_stop_kills_its_child_and_gives_the_job_back(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post(**BOTH)
    with running():
        compiler.next_call().end()
        call = compiler.next_call()
    assert call.was_stopped.is_set()
    given_back = store.get_job(job.id)
    assert (given_back.status, given_back.attempts) == (JobStatus.QUEUED, 0)
    assert store.list_workers() == ()
    with running():
        again = compiler.next_call()
        assert again.request.program == "dropless", "the candidate was measured already"
        again.end()
        wait_until(is_ended(store, job))
    assert store.get_job(job.id).status is JobStatus.SUCCEEDED
    assert "released" in names(store, job)


def test_a_worker_that_lost_its_lease_kills_its_child_and_writes_nothing(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post()
    with running(lease_seconds=60.0):
        call = compiler.next_call()
        # As after a long silence: another worker has taken the job up.
        with write(store._engine) as connection:
            connection.exec_driver_sql(f"UPDATE jobs SET lease_token = '{'e' * 32}', lease_worker_id = 'other'")
        assert call.was_stopped.wait(60)
    assert store.get_job(job.id).status is JobStatus.RUNNING, "it is the other worker's"
    assert store.list_reports(job.id) == ()
    assert names(store, job) == ["queued", "claimed", "progress"]


def test_each_heartbeat_moves_the_end_of_the_lease(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post()

    def lease_end() -> datetime:
        with read(store._engine) as connection:
            return connection.execute(select(jobs.c.lease_expires_at).where(jobs.c.id == job.id)).scalar_one()

    with running(heartbeat_seconds=0.05):
        call = compiler.next_call()
        for _ in range(3):
            before = lease_end()
            wait_until(lambda before=before: lease_end() > before)
        call.end()
        wait_until(is_ended(store, job))
    assert store.get_job(job.id).attempts == 1


def test_what_breaks_in_the_worker_is_the_jobs_outcome_and_the_worker_goes_on(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    broken, sound = post(64), post(128)
    with running(worker_slots=1):
        compiler.next_call().end(RuntimeError("no such directory"))
        compiler.next_call().end()
        wait_until(is_ended(store, sound))
    failed = store.get_job(broken.id)
    assert (failed.status, failed.attempts, failed.failure.kind) == (JobStatus.FAILED, 1, FailureKind.CRASHED)
    assert "RuntimeError: no such directory" in failed.failure.message
    assert "Traceback" in failed.failure.log_tail
    assert store.get_job(sound.id).status is JobStatus.SUCCEEDED


def test_a_spec_that_this_version_refuses_is_a_recorded_outcome(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    job = post()
    with write(store._engine) as connection:
        connection.exec_driver_sql("UPDATE jobs SET spec = json_set(spec, '$.mesh.fsdp', 3)")
    with running():
        wait_until(is_ended(store, job))
    failure = store.get_job(job.id).failure
    assert failure.kind is FailureKind.UNSUPPORTED
    assert "not for this version" in failure.message
    assert compiler.num_calls == 0


def test_the_workers_toolchain_decides_what_is_answered_from_the_store(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait
) -> None:
    measured = post()
    with running():
        compiler.next_call().end()
        wait_until(is_ended(store, measured))
        # A server with another toolchain sees another identity; for the worker it is the same.
        misjudged = post(identity="of another toolchain")
        wait_until(is_ended(store, misjudged))
    assert store.get_job(misjudged.id).answered_from == measured.id
    assert store.get_job(misjudged.id).identity == measured.identity
    assert compiler.num_calls == 1


def test_a_worker_makes_its_capabilities_known(store: SqlStore, running: Running, wait_until: Wait) -> None:
    with running(worker_slots=3, worker_memory_bytes=5 << 30):
        wait_until(lambda: len(store.list_workers()) == 1)
        (worker,) = store.list_workers()
        assert (worker.kinds, worker.slots, worker.memory_bytes) == (("compile", "steps"), 3, 5 << 30)
        assert worker.platforms[0] == "cpu"


def test_directories_of_dead_workers_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    from service.worker.directories import own_directory, remove_abandoned

    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "dump").write_text("large")
    (tmp_path / "dead.lock").touch()
    with own_directory(tmp_path, "alive") as directory:
        (directory / "dump").write_text("in use")
        assert {path.name for path in tmp_path.iterdir()} == {"alive", "alive.lock"}
        remove_abandoned(tmp_path)
        assert (directory / "dump").read_text() == "in use"
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_locked_for_a_while_is_waited_out(
    store: SqlStore, compiler: HeldCompiler, running: Running, post: Post, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.storage.interface import StoreUnavailableError
    from service.worker import held

    monkeypatch.setattr(held, "UNAVAILABLE_PAUSE_SECONDS", 0.01)
    refusals = iter(range(3))
    real = SqlStore.save_report

    def refuse_thrice(*arguments: object, **options: object) -> None:
        if next(refusals, None) is not None:
            raise StoreUnavailableError("the database does not answer: database is locked")
        real(*arguments, **options)

    monkeypatch.setattr(SqlStore, "save_report", refuse_thrice)
    job = post()
    with running():
        compiler.next_call().end()
        wait_until(is_ended(store, job))
    assert store.get_job(job.id).status is JobStatus.SUCCEEDED
    assert next(refusals, None) is None
