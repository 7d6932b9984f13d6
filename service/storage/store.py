"""The store on an SQL database: each method one transaction, rows turned into records at its edge."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from service.errors import ConflictError, NotFoundError
from service.records import Depth, Event, Failure, Job, JobKind, JobStatus, Report
from service.settings import Settings
from service.steps_records import StepsReport
from service.storage import queue
from service.storage.artifacts import ArtifactDirectory, StoredArtifact, StoredFile
from service.storage.database import check_database, create_store_engine, newest_revision, read, serialise_queue, upgrade_database, write
from service.storage.interface import (
    MAX_PAGE,
    AddedJob,
    Artifact,
    Claim,
    CursorError,
    Idempotency,
    JobFilter,
    JobPage,
    Lease,
    LeaseState,
    NewJob,
    Platform,
    ReportSummary,
    StepsSummary,
    WorkerStatus,
)
from service.storage.rows import (
    STEPS_SUMMARY_COLUMNS,
    SUMMARY_COLUMNS,
    artifact_from_row,
    event_from_row,
    job_from_row,
    measuring_job_id,
    report_from_body,
    select_artifacts,
    steps_report_from_body,
    steps_summary_from_row,
    summary_from_row,
    values_of_new_job,
    values_of_report,
    values_of_steps_report,
    worker_from_row,
)
from service.storage.tables import artifacts, events, idempotency_keys, job_artifacts, jobs, reports, steps_reports, workers

FORGET_WORKERS_AFTER = timedelta(days=1)


def open_store(settings: Settings) -> SqlStore:
    """The store that the settings name, its database at the newest migration.

    Raises:
        SettingsError: the database's URL cannot be used.
        StoreUnavailableError: the database does not answer.
    """
    engine = create_store_engine(settings.resolved_database_url)
    upgrade_database(engine)
    return SqlStore(engine, ArtifactDirectory(settings.artifact_dir))


def utc_now() -> datetime:
    return datetime.now(UTC)


class SqlStore:
    """`service.storage.interface.Store` on SQLAlchemy; what each method promises stands there.

    `clock` gives the time for leases and records. Workers on several hosts compare it with each other, so their clocks must agree to a
    fraction of the lease; that a replaced worker is refused does not depend on it.
    """

    def __init__(self, engine: Engine, artifact_directory: ArtifactDirectory, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._engine = engine
        self._artifacts = artifact_directory
        self._clock = clock

    @cached_property
    def _revision(self) -> str:
        return newest_revision()

    def ping(self) -> None:
        check_database(self._engine, self._revision)

    def close(self) -> None:
        """Close the pool's connections."""
        self._engine.dispose()

    # Jobs, as those who ask for them see them

    def add_job(self, new: NewJob, *, force: bool = False, idempotency: Idempotency | None = None) -> AddedJob:
        now = self._clock()
        with write(self._engine) as connection:
            if idempotency is not None:
                # Two requests with one key at once: the second waits here, and then sees what the first one wrote.
                serialise_queue(connection)
                key = (idempotency_keys.c.scope == idempotency.scope) & (idempotency_keys.c.key == idempotency.key)
                known = connection.execute(select(idempotency_keys).where(key)).mappings().one_or_none()
                if known is not None:
                    if known["request_hash"] != idempotency.request_hash:
                        raise ConflictError(
                            f"Idempotency-Key {idempotency.key!r} was used for another request (job {known['job_id']}); "
                            "send the same request again, or use a new key"
                        )
                    return AddedJob(job=job_from_row(queue.lock_job(connection, known["job_id"])), is_new=False)
            job_id = secrets.token_hex(8)
            connection.execute(insert(jobs).values(**values_of_new_job(new, job_id=job_id, force=force, now=now)))
            if idempotency is not None:
                connection.execute(insert(idempotency_keys).values(**idempotency.model_dump(), job_id=job_id, created_at=now))
            queue.add_event(connection, job_id, "queued", {}, now)
            queue.answer_if_measured(connection, queue.lock_job(connection, job_id), now)
            return AddedJob(job=job_from_row(queue.lock_job(connection, job_id)), is_new=True)

    def get_job(self, job_id: str) -> Job:
        with read(self._engine) as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().one_or_none()
        if row is None:
            raise NotFoundError(f"there is no job {job_id!r} here; the list of jobs has the ids")
        return job_from_row(row)

    def list_jobs(self, filters: JobFilter | None = None, *, cursor: str | None = None, limit: int = 50) -> JobPage:
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            raise CursorError(f"cursor {cursor!r} is not one that a page of jobs gave; start without a cursor")
        assert 1 <= limit <= MAX_PAGE
        # One row more than asked for tells whether another page follows.
        query = select(jobs).order_by(jobs.c.number.desc()).limit(limit + 1)
        for name, value in (filters or JobFilter()).model_dump(mode="json", exclude_none=True).items():
            query = query.where(jobs.c[name] == value)
        if cursor is not None:
            query = query.where(jobs.c.number < int(cursor))
        with read(self._engine) as connection:
            rows = connection.execute(query).mappings().all()
        shown = rows[:limit]
        return JobPage(jobs=tuple(map(job_from_row, shown)), next_cursor=str(shown[-1]["number"]) if len(rows) > limit else None)

    def count_jobs(self) -> Mapping[tuple[JobKind, JobStatus], int]:
        query = select(jobs.c.kind, jobs.c.status, func.count()).group_by(jobs.c.kind, jobs.c.status)
        with read(self._engine) as connection:
            return {(kind, JobStatus(status)): count for kind, status, count in connection.execute(query)}

    def find_child_rss(self, scenario: str, depth: Depth) -> int | None:
        latest = (
            select(reports.c.child_peak_rss_bytes)
            .join(jobs, jobs.c.id == reports.c.job_id)
            .where(jobs.c.scenario == scenario, reports.c.depth == depth)
            .order_by(jobs.c.number.desc())
            .limit(5)
            .subquery()
        )
        with read(self._engine) as connection:
            return connection.execute(select(func.max(latest.c.child_peak_rss_bytes))).scalar_one()

    def request_cancel(self, job_id: str) -> Job:
        now = self._clock()
        with write(self._engine) as connection:
            row = queue.lock_job(connection, job_id)
            if row["status"] in (queue.QUEUED, queue.RUNNING) and not row["cancel_requested"]:
                connection.execute(update(jobs).where(jobs.c.id == job_id).values(cancel_requested=True))
                queue.add_event(connection, job_id, "cancel_requested", {}, now)
            if row["status"] == queue.QUEUED:
                queue.end_job(connection, job_id, JobStatus.CANCELLED, now)
            return job_from_row(queue.lock_job(connection, job_id))

    def list_events(self, job_id: str, *, after: int = 0, limit: int = 500) -> tuple[Event, ...]:
        query = select(events).where(events.c.job_id == job_id, events.c.sequence > after).order_by(events.c.sequence).limit(limit)
        with read(self._engine) as connection:
            rows = connection.execute(query).mappings().all()
        if not rows:
            self.get_job(job_id)
        return tuple(map(event_from_row, rows))

    # What was measured

    def list_reports(self, job_id: str) -> tuple[Report, ...]:
        query = select(reports.c.body).join(jobs, measuring_job_id() == reports.c.job_id)
        with read(self._engine) as connection:
            bodies = connection.execute(query.where(jobs.c.id == job_id).order_by(reports.c.position)).scalars().all()
        if not bodies:
            self.get_job(job_id)
        return tuple(map(report_from_body, bodies))

    def get_report(self, job_id: str, program: str) -> Report:
        query = select(reports.c.body).join(jobs, measuring_job_id() == reports.c.job_id)
        with read(self._engine) as connection:
            body = connection.execute(query.where(jobs.c.id == job_id, reports.c.program == program)).scalar_one_or_none()
        if body is None:
            job = self.get_job(job_id)
            raise NotFoundError(f"job {job_id}, which is {job.status}, has no report of a program {program!r}")
        return report_from_body(body)

    def get_steps_report(self, job_id: str) -> StepsReport:
        query = select(steps_reports.c.body).where(steps_reports.c.job_id == job_id)
        with read(self._engine) as connection:
            body = connection.execute(query).scalar_one_or_none()
        if body is None:
            job = self.get_job(job_id)
            raise NotFoundError(f"job {job_id}, which is {job.status} and of kind {job.kind}, has no report of steps")
        return steps_report_from_body(body)

    def list_report_summaries(self, job_ids: Sequence[str]) -> Mapping[str, tuple[ReportSummary, ...]]:
        query = (
            select(jobs.c.id.label("asked_id"), *SUMMARY_COLUMNS)
            .join(reports, measuring_job_id() == reports.c.job_id)
            .where(jobs.c.id.in_(job_ids))
            .order_by(reports.c.position)
        )
        found: dict[str, list[ReportSummary]] = {job_id: [] for job_id in job_ids}
        with read(self._engine) as connection:
            for row in connection.execute(query).mappings():
                found[row["asked_id"]].append(summary_from_row(row, row["asked_id"]))
        return {job_id: tuple(summaries) for job_id, summaries in found.items()}

    def list_steps_summaries(self, job_ids: Sequence[str]) -> Mapping[str, StepsSummary]:
        query = select(*STEPS_SUMMARY_COLUMNS).where(steps_reports.c.job_id.in_(job_ids))
        with read(self._engine) as connection:
            return {row["job_id"]: steps_summary_from_row(row) for row in connection.execute(query).mappings()}

    def find_previous_answer(self, job_id: str) -> Job | None:
        this = select(jobs).where(jobs.c.id == job_id).subquery()
        query = (
            select(jobs)
            .join(this, jobs.c.number < this.c.number)
            .where(
                jobs.c.scenario == this.c.scenario,
                jobs.c.kind == this.c.kind,
                jobs.c.project.is_not_distinct_from(this.c.project),
                jobs.c.status == JobStatus.SUCCEEDED.value,
                measuring_job_id() != func.coalesce(this.c.answered_from, this.c.id),
            )
            .order_by(jobs.c.number.desc())
            .limit(1)
        )
        with read(self._engine) as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            self.get_job(job_id)
        return None if row is None else job_from_row(row)

    def list_artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        with read(self._engine) as connection:
            rows = connection.execute(select_artifacts(job_id)).mappings().all()
        if not rows:
            self.get_job(job_id)
        return tuple(map(artifact_from_row, rows))

    def open_artifact(self, job_id: str, name: str) -> StoredArtifact:
        with read(self._engine) as connection:
            row = connection.execute(select_artifacts(job_id).where(job_artifacts.c.name == name)).mappings().one_or_none()
        if row is None:
            self.get_job(job_id)
            raise NotFoundError(f"job {job_id} has no artifact {name!r}")
        return self._artifacts.open(artifact_from_row(row))

    # The queue, as workers see it

    def claim_job(
        self,
        worker_id: str,
        *,
        kinds: Sequence[JobKind],
        memory_bytes: int | None,
        lease_seconds: float,
        max_attempts: int,
        platforms: Sequence[Platform] = (),
    ) -> Claim | None:
        if not self._may_have_work():
            return None
        with write(self._engine) as connection:
            serialise_queue(connection)
            # Not before: a lease begins when it is given, however long others kept this transaction waiting.
            now = self._clock()
            queue.take_back_expired(connection, now, max_attempts=max_attempts)
            row = queue.oldest_claimable(connection, worker_id, kinds, platforms)
            while row is not None and queue.answer_if_measured(connection, row, now):
                row = queue.oldest_claimable(connection, worker_id, kinds, platforms)
            if row is None or (memory_bytes is not None and row["child_memory_bytes"] > memory_bytes):
                return None
            lease = Lease(
                job_id=row["id"],
                worker_id=worker_id,
                token=secrets.token_hex(16),
                attempt=row["attempts"] + 1,
                expires_at=now + timedelta(seconds=lease_seconds),
            )
            connection.execute(
                update(jobs)
                .where(jobs.c.id == lease.job_id)
                .values(
                    status=queue.RUNNING,
                    attempts=lease.attempt,
                    lease_token=lease.token,
                    lease_worker_id=worker_id,
                    lease_expires_at=lease.expires_at,
                    started_at=now,
                )
            )
            queue.add_event(connection, lease.job_id, "claimed", {"attempt": lease.attempt, "worker": worker_id}, now)
            return Claim(
                job=job_from_row(queue.lock_job(connection, lease.job_id)),
                lease=lease,
                programs=tuple(row["programs"]),
                measured_programs=queue.measured_programs(connection, row),
                child_memory_bytes=row["child_memory_bytes"],
            )

    def _may_have_work(self) -> bool:
        """Whether anything waits or has a lease that could have expired; spares idle workers the write lock."""
        active = select(jobs.c.number).where(jobs.c.status.in_([queue.QUEUED, queue.RUNNING])).limit(1)
        with read(self._engine) as connection:
            return connection.execute(active).first() is not None

    def renew_lease(self, lease: Lease, *, lease_seconds: float) -> LeaseState:
        with write(self._engine) as connection:
            row = queue.hold_lease(connection, lease)
            expires_at = self._clock() + timedelta(seconds=lease_seconds)
            connection.execute(update(jobs).where(jobs.c.id == lease.job_id).values(lease_expires_at=expires_at))
        return LeaseState(expires_at=expires_at, cancel_requested=row["cancel_requested"])

    def append_event(self, lease: Lease, name: str, data: Mapping[str, Any]) -> Event:
        with write(self._engine) as connection:
            queue.hold_lease(connection, lease)
            return queue.add_event(connection, lease.job_id, name, data, self._clock())

    def save_report(self, lease: Lease, report: Report, *, artifacts: Mapping[str, Path] | None = None) -> None:
        # Files first: content that no row names is harmless, a row that names no content is not.
        stored = {name: self._artifacts.add(path) for name, path in (artifacts or {}).items()}
        now = self._clock()
        with write(self._engine) as connection:
            programs = queue.hold_lease(connection, lease)["programs"]
            values = values_of_report(report, job_id=lease.job_id, position=programs.index(report.program), now=now)
            connection.execute(insert(reports).values(**values))
            for name, file in stored.items():
                connection.execute(self._insert_new_artifact(file, now))
                row = {"job_id": lease.job_id, "name": name, "program": report.program, "sha256": file.sha256}
                connection.execute(insert(job_artifacts).values(**row))
            shown = ("program", "status", "peak_bytes", "allocated_bytes", "capacity_bytes")
            queue.add_event(connection, lease.job_id, "report", {name: values[name] for name in shown}, now)

    def save_steps_report(self, lease: Lease, report: StepsReport) -> None:
        now = self._clock()
        with write(self._engine) as connection:
            queue.hold_lease(connection, lease)
            values = values_of_steps_report(report, job_id=lease.job_id, now=now)
            connection.execute(insert(steps_reports).values(**values))
            shown = ("status", "phase", "num_steps", "num_replays", "num_checks_failed")
            queue.add_event(connection, lease.job_id, "report", {name: values[name] for name in shown}, now)

    def _insert_new_artifact(self, file: StoredFile, now: datetime) -> Any:
        # ON CONFLICT is spelled alike by both databases, and is not part of the common dialect.
        dialect = postgresql if self._engine.dialect.name == "postgresql" else sqlite
        values = {"sha256": file.sha256, "size_bytes": file.size_bytes, "stored_bytes": file.stored_bytes, "created_at": now}
        return dialect.insert(artifacts).values(**values).on_conflict_do_nothing()

    def finish_job(self, lease: Lease, status: JobStatus, *, failure: Failure | None = None) -> Job:
        now = self._clock()
        with write(self._engine) as connection:
            row = queue.hold_lease(connection, lease)
            queue.end_job(connection, lease.job_id, status, now, failure=failure)
            if status is JobStatus.SUCCEEDED:
                queue.answer_waiting(connection, row["identity"], lease.job_id, now)
            return job_from_row(queue.lock_job(connection, lease.job_id))

    def release_job(self, lease: Lease, *, reason: str) -> None:
        now = self._clock()
        with write(self._engine) as connection:
            row = queue.hold_lease(connection, lease)
            queue.add_event(connection, lease.job_id, "released", {"reason": reason}, now)
            if row["cancel_requested"]:
                queue.end_job(connection, lease.job_id, JobStatus.CANCELLED, now)
            else:
                queue.requeue_job(connection, lease.job_id, attempts=row["attempts"] - 1)

    def restate_identity(self, lease: Lease, identity: str) -> Job:
        now = self._clock()
        with write(self._engine) as connection:
            queue.hold_lease(connection, lease)
            connection.execute(update(jobs).where(jobs.c.id == lease.job_id).values(identity=identity))
            queue.answer_if_measured(connection, queue.lock_job(connection, lease.job_id), now)
            return job_from_row(queue.lock_job(connection, lease.job_id))

    # Workers

    def record_worker(self, worker: WorkerStatus) -> None:
        values = worker.model_dump(mode="python") | {"kinds": list(worker.kinds), "platforms": list(worker.platforms)}
        with write(self._engine) as connection:
            # A worker that was killed did not sign off.
            connection.execute(delete(workers).where(workers.c.seen_at < worker.seen_at - FORGET_WORKERS_AFTER))
            changed = connection.execute(update(workers).where(workers.c.id == worker.id).values(**values))
            if changed.rowcount == 0:
                connection.execute(insert(workers).values(**values))

    def remove_worker(self, worker_id: str) -> None:
        with write(self._engine) as connection:
            connection.execute(delete(workers).where(workers.c.id == worker_id))

    def list_workers(self) -> tuple[WorkerStatus, ...]:
        with read(self._engine) as connection:
            rows = connection.execute(select(workers).order_by(workers.c.seen_at.desc())).mappings().all()
        return tuple(map(worker_from_row, rows))
