"""Puts sample jobs into a real store the way a worker does: claimed under a lease, reported, finished."""

from __future__ import annotations

import uuid

from service.records import Failure, JobKind, JobStatus, Report
from service.storage.interface import Lease, NewJob
from service.storage.store import SqlStore
from tests.browser.samples import make_job


def queue(store: SqlStore, scenario: str, programs: tuple[str, ...] = ("candidate",), *, kind: JobKind = "compile", **spec: object) -> str:
    """A job that waits; its id. `spec` replaces sections of the sample's."""
    # An identity of its own, or a second job of the scenario would be answered from the first.
    identity = uuid.uuid4().hex
    new = NewJob(
        kind=kind,
        scenario=scenario,
        spec=dict(make_job().spec) | {"scenario": scenario} | spec,
        spec_hash=identity,
        identity=identity,
        programs=programs,
        child_memory_bytes=1,
    )
    return store.add_job(new).job.id


def claim(store: SqlStore, job_id: str, kind: JobKind = "compile") -> Lease:
    """A worker takes this job, the oldest that waits."""
    taken = store.claim_job("worker", kinds=(kind,), memory_bytes=None, lease_seconds=3600, max_attempts=3)
    assert taken is not None
    assert taken.job.id == job_id
    return taken.lease


def start(store: SqlStore, scenario: str, programs: tuple[str, ...] = ("candidate",)) -> tuple[str, Lease]:
    """A job that a worker has taken and begun; its id, and the lease to go on with it."""
    job_id = queue(store, scenario, programs)
    lease = claim(store, job_id)
    store.append_event(lease, "progress", {"program": programs[0], "name": "trace", "seconds": 2.25, "data": {}})
    return job_id, lease


def add(store: SqlStore, scenario: str, reports: list[Report], *, failure: Failure | None = None) -> str:
    """A job that ended with these reports; its id."""
    job_id, lease = start(store, scenario, tuple(report.program for report in reports))
    for report in reports:
        store.save_report(lease, report)
    store.finish_job(lease, JobStatus.FAILED if failure else JobStatus.SUCCEEDED, failure=failure)
    return job_id
