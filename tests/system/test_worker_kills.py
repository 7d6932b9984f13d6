"""A worker or its child is killed at any phase: the job ends recorded or is taken up again, and nothing is left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from service.records import FailureKind, JobStatus
from tests.system.sites import Site, stop

pytestmark = pytest.mark.system


@pytest.mark.parametrize("point", ["candidate.start", "candidate.compile", "candidate.analyse", "dropless.compile"])
def test_a_killed_workers_job_is_taken_up_where_it_was(site: Site, point: str) -> None:
    job = site.post()
    site.hold(point)
    first = site.start("worker_process")
    site.wait_for_child(point)
    first.kill()
    first.wait()
    site.wait_until_nothing_runs()
    assert site.store.get_job(job.id).status is JobStatus.RUNNING
    left_behind = list(site.settings.work_dir.iterdir())
    assert left_behind

    site.let_go(point)
    site.expire_leases()
    second = site.start("worker_process")
    ended = site.wait_until_ended(job.id)
    assert (ended.status, ended.attempts) == (JobStatus.SUCCEEDED, 2)
    assert [report.program for report in site.store.list_reports(job.id)] == ["candidate", "dropless"]
    measured_before = ["report"] if point.startswith("dropless") else []
    measured_after = ["report"] * (2 - len(measured_before))
    assert site.event_names(job.id) == ["queued", "claimed", *measured_before, "lease_lost", "claimed", *measured_after, "finished"]
    assert len(site.children_at("candidate.start")) == 2 - len(measured_before), "what was measured is not measured again"
    assert not set(left_behind) & set(site.settings.work_dir.iterdir())
    assert stop(second) == 0
    site.wait_until_nothing_runs()
    assert list(site.settings.work_dir.iterdir()) == []


def test_a_job_whose_worker_dies_three_times_is_recorded_as_lost(site: Site) -> None:
    job = site.post()
    site.hold("candidate.compile")
    for attempt in (1, 2, 3):
        worker = site.start("worker_process")
        site.wait_for_child("candidate.compile", count=attempt)
        worker.kill()
        worker.wait()
        site.expire_leases()
        site.wait_until_nothing_runs()
    last = site.start("worker_process")
    ended = site.wait_until_ended(job.id)
    assert (ended.status, ended.attempts, ended.failure.kind) == (JobStatus.FAILED, 3, FailureKind.LOST)
    assert stop(last) == 0
    assert len(site.children_at("candidate.compile")) == 3


def test_a_killed_child_is_a_recorded_failure_and_the_worker_goes_on(site: Site) -> None:
    killed = site.post(programs=["candidate"])
    site.hold("candidate.compile")
    worker = site.start("worker_process")
    os.kill(site.wait_for_child("candidate.compile"), signal.SIGKILL)
    ended = site.wait_until_ended(killed.id)
    assert (ended.status, ended.attempts, ended.failure.kind) == (JobStatus.FAILED, 1, FailureKind.CRASHED)
    assert "SIGKILL during compile" in ended.failure.message
    assert "the log's last line" in ended.failure.log_tail
    site.let_go("candidate.compile")
    assert site.wait_until_ended(site.post(programs=["candidate"]).id).status is JobStatus.SUCCEEDED
    assert stop(worker) == 0


def test_a_worker_that_is_asked_to_stop_gives_its_job_back_at_once(site: Site) -> None:
    job = site.post()
    site.hold("candidate.compile")
    worker = site.start("worker_process")
    child = site.wait_for_child("candidate.compile")
    assert stop(worker) == 0
    assert not psutil.pid_exists(child)
    given_back = site.store.get_job(job.id)
    assert (given_back.status, given_back.attempts) == (JobStatus.QUEUED, 0)
    assert site.event_names(job.id) == ["queued", "claimed", "released"]
    assert list(site.settings.work_dir.iterdir()) == []


def test_a_worker_that_wakes_after_its_lease_has_passed_on_is_refused(make_site: Callable[..., Site]) -> None:
    """The real clock and the real lease: a worker is frozen, as on a suspended host, and its job given to another."""
    site = make_site(lease_seconds=5)
    job = site.post(programs=["candidate"])
    site.hold("candidate.compile")
    frozen = site.start("worker_process")
    site.wait_for_child("candidate.compile")
    site.freeze(frozen)
    # Its child goes on, and has its report ready for when the worker wakes.
    site.let_go("candidate.compile")
    # The other one's lease is long: it must not lose the job too where the machine is busy.
    site.settings = site.settings.model_copy(update={"lease_seconds": 60.0})
    other = site.start("worker_process")
    ended = site.wait_until_ended(job.id)
    assert (ended.status, ended.attempts) == (JobStatus.SUCCEEDED, 2)
    events = site.store.list_events(job.id)
    frozen.send_signal(signal.SIGCONT)
    # It is well again: it takes the next job once the other one is gone.
    assert stop(other) == 0
    assert site.wait_until_ended(site.post(programs=["dropless"]).id).status is JobStatus.SUCCEEDED
    assert site.store.list_events(job.id) == events
    assert stop(frozen) == 0


def test_two_jobs_run_at_once_and_both_succeed(site: Site) -> None:
    jobs = [site.post(programs=[program]) for program in ("candidate", "dropless")]
    for job in jobs:
        site.hold(f"{job.spec['programs'][0]}.compile")
    worker = site.start("worker_process")
    for job in jobs:
        site.wait_for_child(f"{job.spec['programs'][0]}.compile")
    for job in jobs:
        site.let_go(f"{job.spec['programs'][0]}.compile")
    assert [site.wait_until_ended(job.id).status for job in jobs] == [JobStatus.SUCCEEDED] * 2
    assert stop(worker) == 0
