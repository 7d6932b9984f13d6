"""A worker or its child is killed in the middle of real steps: a recorded outcome, with what was known until then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from service.api.steps_report import find_steps_report
from service.identity import identify
from service.records import FailureKind, Job, JobStatus
from service.spec import parse_spec
from service.steps_records import StepsStatus
from service.storage.interface import NewJob
from tests.system.sites import Site, stop

pytestmark = pytest.mark.system

LOSSES = [7.5, 7.25, 7.125]
"""Of the steps that the fake child sends before it ends as its scenario says."""


def post(site: Site, scenario: str) -> Job:
    spec = parse_spec(
        {
            "scenario": scenario,
            "model": {"preset": "tiny"},
            "train": {"seq_len": 64},
            "mesh": {"fsdp": 2},
            "steps": {"devices": "cpu:2"},
        }
    )
    return site.store.add_job(
        NewJob(
            kind="steps",
            scenario=scenario,
            spec=spec.as_json(),
            spec_hash=spec.canonical_hash(),
            identity=identify(spec, "steps"),
            programs=("steps",),
            child_memory_bytes=1 << 30,
            platform="cpu",
        ),
        force=True,
    ).job


def num_step_events(site: Site, job: Job) -> int:
    return sum(event.name == "progress" and event.data["name"] == "step" for event in site.store.list_events(job.id))


def child_of(site: Site) -> psutil.Process:
    (child,) = [process for process in site.running() if any("fake_child" in part for part in process.cmdline())]
    return child


def losses_known(site: Site, job: Job) -> tuple[StepsStatus, list[float | None]]:
    report, is_final = find_steps_report(site.store, site.store.get_job(job.id))
    assert is_final
    return report.status, [step.metrics.loss for step in report.steps]


def test_a_job_whose_worker_dies_in_mid_run_three_times_keeps_its_steps(site: Site) -> None:
    job = post(site, "endless")
    for attempt in (1, 2, 3):
        worker = site.start("steps_worker_process")
        site.wait_until(lambda attempt=attempt: num_step_events(site, job) == 2 * attempt)
        worker.kill()
        worker.wait()
        site.wait_until_nothing_runs()
        site.expire_leases()
    last = site.start("steps_worker_process")
    ended = site.wait_until_ended(job.id)
    assert (ended.status, ended.attempts) == (JobStatus.FAILED, 3)
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.LOST
    assert losses_known(site, job) == (StepsStatus.FAILED, LOSSES)
    assert stop(last) == 0


def test_a_killed_steps_child_is_recorded_with_its_steps(site: Site) -> None:
    job = post(site, "endless")
    worker = site.start("steps_worker_process")
    site.wait_until(lambda: num_step_events(site, job) == 2)
    os.kill(child_of(site).pid, signal.SIGKILL)
    ended = site.wait_until_ended(job.id)
    assert (ended.status, ended.attempts) == (JobStatus.FAILED, 1)
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.CRASHED
    assert "SIGKILL in phase steps" in ended.failure.message
    assert losses_known(site, job) == (StepsStatus.FAILED, LOSSES)
    assert stop(worker) == 0


def test_steps_that_hold_too_much_memory_are_a_result_with_the_limit(make_site: Callable[..., Site]) -> None:
    site = make_site(child_rss_limit_bytes=400 << 20)
    job = post(site, "hungry")
    worker = site.start("steps_worker_process")
    ended = site.wait_until_ended(job.id)
    assert ended.status is JobStatus.SUCCEEDED
    report = site.store.get_steps_report(job.id)
    assert report.status is StepsStatus.DOES_NOT_FIT
    assert report.failure is not None
    assert report.failure.kind is FailureKind.KILLED_RSS
    assert "the limit is 400.00 MiB" in report.failure.message
    assert [step.metrics.loss for step in report.steps] == LOSSES
    assert stop(worker) == 0


def test_cancelled_steps_keep_what_was_known(site: Site) -> None:
    job = post(site, "endless")
    worker = site.start("steps_worker_process")
    site.wait_until(lambda: num_step_events(site, job) == 2)
    site.store.request_cancel(job.id)
    ended = site.wait_until_ended(job.id)
    assert ended.status is JobStatus.CANCELLED
    assert [step.metrics.loss for step in site.store.get_steps_report(job.id).steps] == LOSSES
    assert stop(worker) == 0
    site.wait_until_nothing_runs()
