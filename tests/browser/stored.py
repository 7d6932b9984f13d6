"""Puts sample jobs into a real store the way a worker does: claimed under a lease, reported, finished."""

from __future__ import annotations

import uuid

from service.records import Failure, JobStatus, Report
from service.storage.interface import Lease, NewJob
from service.storage.store import SqlStore
from tests.browser.samples import make_job


def start(store: SqlStore, scenario: str, programs: tuple[str, ...] = ("candidate",)) -> tuple[str, Lease]:
    """A job that a worker has taken and begun; its id, and the lease to go on with it."""
    spec = dict(make_job().spec) | {"scenario": scenario}
    # An identity of its own, or a second job of the scenario would be answered from the first.
    identity = uuid.uuid4().hex
    new = NewJob(scenario=scenario, spec=spec, spec_hash=identity, identity=identity, programs=programs, child_memory_bytes=1)
    job = store.add_job(new).job
    claim = store.claim_job("worker", kinds=("compile",), memory_bytes=None, lease_seconds=3600, max_attempts=3)
    assert claim is not None
    assert claim.job.id == job.id
    store.append_event(claim.lease, "progress", {"program": programs[0], "name": "trace", "seconds": 2.25, "data": {}})
    return job.id, claim.lease


def add(store: SqlStore, scenario: str, reports: list[Report], *, failure: Failure | None = None) -> str:
    """A job that ended with these reports; its id."""
    job_id, lease = start(store, scenario, tuple(report.program for report in reports))
    for report in reports:
        store.save_report(lease, report)
    store.finish_job(lease, JobStatus.FAILED if failure else JobStatus.SUCCEEDED, failure=failure)
    return job_id
