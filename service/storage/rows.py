"""Rows to records and back."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import zstandard
from sqlalchemy import ColumnElement, RowMapping, Select, func, select

from service.records import Event, Failure, GitFacts, Job, Record, Report
from service.steps_records import CheckStatus, StepsReport
from service.storage.interface import Artifact, NewJob, ReportSummary, StepsSummary, WorkerStatus
from service.storage.tables import artifacts, job_artifacts, jobs, reports, steps_reports

_LEVEL = 3
MAX_REPORT_BYTES = 64 << 20
"""Largest report that is decompressed; 200 buffers and a thinned timeline take about one."""

_SCALARS = (
    "capacity_bytes",
    "peak_bytes",
    "allocated_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "fragmentation_bytes",
    "padding_bytes",
    "host_bytes",
    "code_bytes",
    "headroom_bytes",
    "child_peak_rss_bytes",
    "num_devices",
    "report_schema",
    "depth",
)
"""Fields of a report that are columns of the same name."""

SUMMARY_COLUMNS = tuple(reports.c[name] for name in ReportSummary.model_fields if name != "job_id")
STEPS_SUMMARY_COLUMNS = tuple(steps_reports.c[name] for name in StepsSummary.model_fields)


def job_from_row(row: RowMapping) -> Job:
    return Job(
        id=row["id"],
        kind=row["kind"],
        status=row["status"],
        scenario=row["scenario"],
        spec=row["spec"],
        spec_hash=row["spec_hash"],
        identity=row["identity"],
        git=GitFacts(
            project=row["project"],
            commit_sha=row["commit_sha"],
            branch=row["branch"],
            base_sha=row["base_sha"],
            ancestors=tuple(row["ancestors"]),
            pull_request=row["pull_request"],
        ),
        attempts=row["attempts"],
        cancel_requested=row["cancel_requested"],
        answered_from=row["answered_from"],
        failure=None if row["failure"] is None else Failure.model_validate(row["failure"]),
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
    )


def values_of_new_job(new: NewJob, *, job_id: str, force: bool, now: datetime) -> dict[str, Any]:
    """Column values of a job that has just been queued."""
    return {
        "id": job_id,
        "kind": new.kind,
        "status": "queued",
        "scenario": new.scenario,
        "spec": dict(new.spec),
        "spec_hash": new.spec_hash,
        "identity": new.identity,
        "programs": list(new.programs),
        "force": force,
        "child_memory_bytes": new.child_memory_bytes,
        "platform": new.platform,
        **new.git.model_dump(mode="json"),
        "attempts": 0,
        "cancel_requested": False,
        "num_events": 0,
        "created_at": now,
    }


def event_from_row(row: RowMapping) -> Event:
    return Event(job_id=row["job_id"], sequence=row["sequence"], name=row["name"], data=row["data"], created_at=row["created_at"])


def values_of_report(report: Report, *, job_id: str, position: int, now: datetime) -> dict[str, Any]:
    """Column values of a report; the whole of it is in `body`."""
    return {
        "job_id": job_id,
        "program": report.program,
        "position": position,
        "status": report.status.value,
        "failure_kind": report.failure.kind.value if report.failure else None,
        "topology": report.topology.get("name"),
        "total_seconds": report.timings.total_seconds,
        **{name: getattr(report, name) for name in _SCALARS},
        "body": _compress(report),
        "created_at": now,
    }


def report_from_body(body: bytes) -> Report:
    return Report.model_validate_json(_decompress(body))


def values_of_steps_report(report: StepsReport, *, job_id: str, now: datetime) -> dict[str, Any]:
    """Column values of a steps job's report; the whole of it is in `body`."""
    return {
        "job_id": job_id,
        "steps_schema": report.steps_schema,
        "status": report.status.value,
        "failure_kind": report.failure.kind.value if report.failure else None,
        "phase": report.phase,
        "num_devices": report.devices.num_devices if report.devices else None,
        "num_steps": len(report.steps),
        "num_replays": report.num_replays,
        "num_checks_failed": sum(check.status is CheckStatus.FAILED for check in report.checks),
        "median_step_seconds": report.times.median_seconds if report.times else None,
        "predicted_bytes": report.memory.predicted_bytes if report.memory else None,
        "measured_bytes": report.memory.measured_bytes if report.memory else None,
        "child_peak_rss_bytes": report.child_peak_rss_bytes,
        "body": _compress(report),
        "created_at": now,
    }


def steps_report_from_body(body: bytes) -> StepsReport:
    return StepsReport.model_validate_json(_decompress(body))


def _compress(record: Record) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(json.dumps(record.model_dump(mode="json"), separators=(",", ":")).encode())


def _decompress(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_REPORT_BYTES)


def summary_from_row(row: RowMapping, job_id: str) -> ReportSummary:
    """`job_id` is the job asked about, which may have been answered by the one that holds the report."""
    return ReportSummary(job_id=job_id, **{column.name: row[column.name] for column in SUMMARY_COLUMNS})


def steps_summary_from_row(row: RowMapping) -> StepsSummary:
    return StepsSummary(**row)


def artifact_from_row(row: RowMapping) -> Artifact:
    return Artifact(**{name: row[name] for name in Artifact.model_fields})


def worker_from_row(row: RowMapping) -> WorkerStatus:
    return WorkerStatus(**{**row, "kinds": tuple(row["kinds"]), "platforms": tuple(row["platforms"])})


def measuring_job_id() -> ColumnElement[str]:
    """The job that holds a job's reports and artifacts: itself, or the one that answered it."""
    return func.coalesce(jobs.c.answered_from, jobs.c.id)


def select_artifacts(job_id: str) -> Select[Any]:
    return (
        select(job_artifacts.c.name, job_artifacts.c.program, artifacts)
        .join(artifacts, artifacts.c.sha256 == job_artifacts.c.sha256)
        .join(jobs, measuring_job_id() == job_artifacts.c.job_id)
        .where(jobs.c.id == job_id)
        .order_by(job_artifacts.c.name)
    )
