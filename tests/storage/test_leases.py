"""Who may work on a job, for how long, and what becomes of it when that worker falls silent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from service.records import FailureKind, JobKind, JobStatus
from service.storage import database
from service.storage.interface import Claim, Lease, LeaseLostError, Platform, WorkerStatus
from service.storage.store import SqlStore
from tests.storage.samples import Clock, new_job, report_of

Claiming = Callable[..., Claim]


def worker_status(worker_id: str, clock: Clock) -> WorkerStatus:
    return WorkerStatus(
        id=worker_id, host="mill", pid=17, kinds=("compile",), slots=2, memory_bytes=999, started_at=clock.now, seen_at=clock.now
    )


def test_jobs_are_given_in_the_order_they_came(store: SqlStore, claim: Claiming) -> None:
    ids = [store.add_job(new_job(identity)).job.id for identity in "abc"]
    assert [claim(f"w{n}").job.id for n in range(3)] == ids
    assert claim() is None


def test_only_jobs_of_the_asked_kinds_are_given(store: SqlStore, claim: Claiming) -> None:
    store.add_job(new_job(kind="steps"))
    compiling = store.add_job(new_job("b")).job
    assert claim().job.id == compiling.id


def steps_job(store: SqlStore, identity: str, platform: Platform | None) -> str:
    return store.add_job(new_job(identity, kind="steps", programs=("steps",), platform=platform), force=True).job.id


def test_a_platform_of_a_host_is_given_to_one_steps_job_at_a_time(store: SqlStore, clock: Clock) -> None:
    def claim(worker_id: str, *kinds: JobKind) -> str | None:
        claim = store.claim_job(worker_id, kinds=kinds, memory_bytes=None, lease_seconds=60, max_attempts=3, platforms=("cpu", "gpu"))
        leases.update({} if claim is None else {claim.job.id: claim.lease})
        return None if claim is None else claim.job.id

    leases: dict[str, Lease] = {}
    for worker_id, host in (("w1", "mill"), ("w2", "mill"), ("w3", "barn")):
        store.record_worker(worker_status(worker_id, clock).model_copy(update={"host": host}))
    gpu = [steps_job(store, identity, "gpu") for identity in "abc"]
    compiling = store.add_job(new_job("d")).job.id
    cpu, anything = steps_job(store, "e", "cpu"), steps_job(store, "f", None)
    assert claim("w1", "steps") == gpu[0]
    assert claim("w2", "steps", "compile") == compiling, "the GPUs of mill are taken, its compiler is not"
    assert claim("w2", "steps") == cpu, "nor are its other devices"
    assert claim("w2", "steps") is None, "what takes any devices may meet those"
    assert claim("w3", "steps") == gpu[1], "another host has GPUs of its own"
    assert claim("unheard-of", "steps") is None, "it may be on either host"
    store.finish_job(leases[gpu[0]], JobStatus.SUCCEEDED)
    assert claim("w2", "steps") == gpu[2]
    clock.advance(61)
    # Every lease has expired, so nothing is held any more.
    assert claim("w1", "steps") == gpu[1]
    assert anything not in leases


def test_a_job_that_needs_more_memory_than_is_free_waits_and_is_not_overtaken(store: SqlStore, claim: Claiming) -> None:
    large = store.add_job(new_job(child_memory_bytes=900)).job
    store.add_job(new_job("b", child_memory_bytes=100))
    assert claim(memory_bytes=899) is None
    assert claim(memory_bytes=900).job.id == large.id


def test_a_lease_in_time_keeps_the_job(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    store.add_job(new_job())
    lease = claim(lease_seconds=60).lease
    for _ in range(5):
        clock.advance(50)
        assert not store.renew_lease(lease, lease_seconds=60).cancel_requested
        assert claim("w2") is None
    assert store.get_job(lease.job_id).attempts == 1


def test_a_lease_begins_when_it_is_given_however_long_the_database_was_locked(
    store: SqlStore, database_url: str, claim: Claiming, clock: Clock
) -> None:
    store.add_job(new_job())
    engine = database.create_store_engine(database_url)
    with ThreadPoolExecutor(1) as pool:
        with database.write(engine) as connection:
            database.serialise_queue(connection)
            claimed = pool.submit(claim, lease_seconds=60)
            wait([claimed], timeout=0.2)
            clock.advance(50)
        lease = claimed.result(60).lease
        assert (lease.expires_at - clock.now).total_seconds() == 60
    engine.dispose()


def test_an_expired_lease_is_taken_up_by_another_worker_and_the_first_is_refused(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    job = store.add_job(new_job()).job
    late = claim("w1", lease_seconds=60).lease
    clock.advance(61)
    taken = claim("w2")
    assert (taken.job.id, taken.lease.attempt) == (job.id, 2)
    for write in (
        lambda: store.renew_lease(late, lease_seconds=60),
        lambda: store.append_event(late, "progress", {}),
        lambda: store.save_report(late, report_of()),
        lambda: store.finish_job(late, JobStatus.SUCCEEDED),
        lambda: store.release_job(late, reason="stop"),
        lambda: store.restate_identity(late, "z"),
    ):
        with pytest.raises(LeaseLostError, match="worker w1 no longer holds job"):
            write()
    assert [e.name for e in store.list_events(job.id)] == ["queued", "claimed", "lease_lost", "claimed"]
    assert store.list_reports(job.id) == ()


def test_a_jobs_time_is_its_last_attempts_and_not_that_of_a_dead_worker(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    job = store.add_job(new_job()).job
    claim("w1", lease_seconds=60)
    clock.advance(500)
    lease = claim("w2").lease
    clock.advance(7)
    done = store.finish_job(lease, JobStatus.SUCCEEDED)
    assert done.started_at is not None
    assert done.finished_at is not None
    assert (done.finished_at - done.started_at).total_seconds() == 7
    first = next(event for event in store.list_events(job.id) if event.name == "claimed")
    assert (done.started_at - first.created_at).total_seconds() == 500, "the first start stands in the events"


def test_a_job_that_waits_again_has_not_started(store: SqlStore, claim: Claiming) -> None:
    job = store.add_job(new_job()).job
    store.release_job(claim().lease, reason="the worker was told to stop")
    assert store.get_job(job.id).started_at is None
    assert store.request_cancel(job.id).started_at is None


def test_a_late_worker_that_nobody_replaced_may_go_on(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    store.add_job(new_job())
    lease = claim(lease_seconds=60).lease
    clock.advance(3_600)
    store.save_report(lease, report_of())
    assert store.finish_job(lease, JobStatus.SUCCEEDED).status is JobStatus.SUCCEEDED


def test_after_three_deaths_the_job_is_recorded_as_lost(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    job = store.add_job(new_job()).job
    for attempt in (1, 2, 3):
        assert claim(f"w{attempt}", lease_seconds=60).lease.attempt == attempt
        clock.advance(61)
    assert claim() is None
    lost = store.get_job(job.id)
    assert (lost.status, lost.attempts, lost.failure.kind, lost.finished_at) == (JobStatus.FAILED, 3, FailureKind.LOST, clock.now)
    assert "3 times" in lost.failure.message
    assert "w3" in lost.failure.message


def test_a_released_job_keeps_its_place_and_its_attempts(store: SqlStore, claim: Claiming) -> None:
    first = store.add_job(new_job()).job
    store.add_job(new_job("b"))
    for _ in range(5):
        store.release_job(claim().lease, reason="the worker was told to stop")
    again = claim()
    assert (again.job.id, again.lease.attempt) == (first.id, 1)


def test_what_an_earlier_attempt_measured_is_not_measured_again(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    job = store.add_job(new_job(programs=("candidate", "dropless"))).job
    store.save_report(claim(lease_seconds=60).lease, report_of("candidate"))
    clock.advance(61)
    taken = claim("w2")
    assert (taken.programs, taken.measured_programs) == (("candidate", "dropless"), ("candidate",))
    store.save_report(taken.lease, report_of("dropless", peak_bytes=77))
    store.finish_job(taken.lease, JobStatus.SUCCEEDED)
    assert [report.peak_bytes for report in store.list_reports(job.id)] == [1_300, 77]


def test_cancelling_ends_a_waiting_job_and_tells_the_worker_of_a_running_one(store: SqlStore, claim: Claiming) -> None:
    running, waiting = store.add_job(new_job()).job, store.add_job(new_job("b")).job
    lease = claim().lease
    assert store.request_cancel(waiting.id).status is JobStatus.CANCELLED
    assert store.request_cancel(running.id).status is JobStatus.RUNNING
    assert store.renew_lease(lease, lease_seconds=60).cancel_requested
    store.request_cancel(running.id)
    done = store.finish_job(lease, JobStatus.CANCELLED)
    assert store.request_cancel(running.id) == done
    assert [e.name for e in store.list_events(running.id)] == ["queued", "claimed", "cancel_requested", "finished"]


def test_a_cancelled_job_is_not_run_again_when_its_worker_dies_or_stops(store: SqlStore, claim: Claiming, clock: Clock) -> None:
    dying, stopping = store.add_job(new_job()).job, store.add_job(new_job("b")).job
    claim(lease_seconds=60)
    lease = claim(lease_seconds=600).lease
    for job in (dying, stopping):
        store.request_cancel(job.id)
    store.release_job(lease, reason="stop")
    clock.advance(61)
    assert claim() is None
    assert {store.get_job(job.id).status for job in (dying, stopping)} == {JobStatus.CANCELLED}


def test_workers_make_themselves_known_and_sign_off(store: SqlStore, clock: Clock) -> None:
    status = worker_status("w1", clock)
    store.record_worker(status)
    clock.advance(10)
    seen = status.model_copy(update={"seen_at": clock.now})
    store.record_worker(seen)
    assert store.list_workers() == (seen,)
    store.remove_worker("w1")
    assert store.list_workers() == ()


def test_a_worker_that_was_not_seen_for_a_day_is_forgotten(store: SqlStore, clock: Clock) -> None:
    killed = worker_status("w1", clock)
    store.record_worker(killed)
    clock.advance(86_400)
    store.record_worker(worker_status("w2", clock))
    assert {worker.id for worker in store.list_workers()} == {"w1", "w2"}
    clock.advance(1)
    store.record_worker(worker_status("w2", clock))
    assert [worker.id for worker in store.list_workers()] == ["w2"]
