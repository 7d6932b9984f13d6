"""The life of a job, as steps inside a transaction: events, leases, answers from what was measured, and the end.

Every function takes the connection of a transaction that `service.storage.store` opened. A job moves queued → running →
succeeded, failed or cancelled; back to queued when its lease expires or is given up; and from queued straight to an end when it is
cancelled or answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, exists, insert, or_, select, true, update

from service.errors import NotFoundError
from service.records import Event, Failure, FailureKind, JobStatus
from service.storage.interface import Lease, LeaseLostError
from service.storage.tables import events, jobs, reports, steps_reports, workers

QUEUED, RUNNING = JobStatus.QUEUED.value, JobStatus.RUNNING.value


def lock_job(connection: Connection, job_id: str) -> RowMapping:
    """The job's row, held against other writers until the transaction ends. Raises NotFoundError."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no job {job_id!r} here; the list of jobs has the ids")
    return row


def hold_lease(connection: Connection, lease: Lease) -> RowMapping:
    """The job's row, if `lease` is still the one that it runs under.

    The token decides, not the clock: a worker that is late but was not replaced may go on, and one that was replaced may not,
    whatever its own clock says.

    Raises:
        LeaseLostError: the job was taken up by another worker, or ended.
    """
    row = lock_job(connection, lease.job_id)
    if row["lease_token"] != lease.token:
        raise LeaseLostError(
            f"worker {lease.worker_id} no longer holds job {lease.job_id}, which is {row['status']} at attempt {row['attempts']}; "
            f"its attempt {lease.attempt} is void"
        )
    return row


def add_event(connection: Connection, job_id: str, name: str, data: Mapping[str, Any], now: datetime) -> Event:
    """Append to the job's events under the next sequence."""
    counted = update(jobs).where(jobs.c.id == job_id).values(num_events=jobs.c.num_events + 1).returning(jobs.c.num_events)
    event = Event(job_id=job_id, sequence=connection.execute(counted).scalar_one(), name=name, data=data, created_at=now)
    connection.execute(insert(events).values(**event.model_dump()))
    return event


def end_job(
    connection: Connection,
    job_id: str,
    status: JobStatus,
    now: datetime,
    *,
    failure: Failure | None = None,
    answered_from: str | None = None,
) -> None:
    """Write the end and its event; the lease, if there was one, is void from here on."""
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id)
        .values(
            status=status.value,
            finished_at=now,
            answered_from=answered_from,
            failure=None if failure is None else failure.model_dump(mode="json"),
            lease_token=None,
            lease_worker_id=None,
            lease_expires_at=None,
        )
    )
    data = {"status": status.value, "answered_from": answered_from, "failure_kind": None if failure is None else failure.kind.value}
    add_event(connection, job_id, "finished", data, now)


def requeue_job(connection: Connection, job_id: str, *, attempts: int) -> None:
    """Put a running job back in its old place in the queue, where it has not started: what ends it there took none of its time."""
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id)
        .values(status=QUEUED, attempts=attempts, started_at=None, lease_token=None, lease_worker_id=None, lease_expires_at=None)
    )


def find_measured(connection: Connection, identity: str) -> str | None:
    """The newest job that measured `identity` itself and succeeded."""
    return connection.execute(
        select(jobs.c.id)
        .where(jobs.c.identity == identity, jobs.c.status == JobStatus.SUCCEEDED.value, jobs.c.answered_from.is_(None))
        .order_by(jobs.c.number.desc())
        .limit(1)
    ).scalar_one_or_none()


def answer_if_measured(connection: Connection, row: RowMapping, now: datetime) -> bool:
    """End a job that is not forced with what an identical one measured; False where none did."""
    source = None if row["force"] else find_measured(connection, row["identity"])
    if source is None:
        return False
    end_job(connection, row["id"], JobStatus.SUCCEEDED, now, answered_from=source)
    return True


def answer_waiting(connection: Connection, identity: str, source: str, now: datetime) -> None:
    """Answer every waiting job of `identity` from `source`, which has just succeeded."""
    waiting = select(jobs.c.id).where(jobs.c.identity == identity, jobs.c.status == QUEUED, jobs.c.force.is_(False)).with_for_update()
    for job_id in connection.execute(waiting).scalars().all():
        end_job(connection, job_id, JobStatus.SUCCEEDED, now, answered_from=source)


def take_back_expired(connection: Connection, now: datetime, *, max_attempts: int) -> None:
    """End every lease that has expired: the job waits again, is cancelled if that was asked for, or is lost after `max_attempts`."""
    expired = select(jobs).where(jobs.c.status == RUNNING, jobs.c.lease_expires_at < now).with_for_update()
    for row in connection.execute(expired).mappings().all():
        add_event(connection, row["id"], "lease_lost", {"attempt": row["attempts"], "worker": row["lease_worker_id"]}, now)
        if row["cancel_requested"]:
            end_job(connection, row["id"], JobStatus.CANCELLED, now)
        elif row["attempts"] >= max_attempts:
            message = (
                f"the worker died or fell silent {row['attempts']} times during this job, the last one being {row['lease_worker_id']}; "
                "see the workers' logs, then post the job again"
            )
            end_job(connection, row["id"], JobStatus.FAILED, now, failure=Failure(kind=FailureKind.LOST, message=message))
        else:
            requeue_job(connection, row["id"], attempts=row["attempts"])


def oldest_claimable(connection: Connection, worker_id: str, kinds: Sequence[str], platforms: Sequence[str]) -> RowMapping | None:
    """The oldest waiting job of these kinds, for a worker with these devices, that waits neither for an identical one to end nor for
    devices that other steps hold.
    """
    twin = jobs.alias("twin")
    twin_runs = exists().where(twin.c.identity == jobs.c.identity, twin.c.status == RUNNING)
    return (
        connection.execute(
            select(jobs)
            .where(
                and_(
                    jobs.c.status == QUEUED,
                    jobs.c.kind.in_(kinds),
                    or_(jobs.c.platform.is_(None), jobs.c.platform.in_(platforms)),
                    or_(jobs.c.force, ~twin_runs),
                    or_(jobs.c.kind != "steps", ~_devices_are_taken(connection, worker_id)),
                )
            )
            .order_by(jobs.c.number)
            .limit(1)
            .with_for_update()
        )
        .mappings()
        .one_or_none()
    )


def _devices_are_taken(connection: Connection, worker_id: str) -> ColumnElement[bool]:
    """Whether steps run on this worker's host and on the platform that a job of `jobs` asks for: two at once would measure each other.

    A job that takes whatever is attached may meet any other. A host that its worker has not made known yet may be this one.
    """
    host = connection.execute(select(workers.c.host).where(workers.c.id == worker_id)).scalar_one_or_none()
    other = jobs.alias("other")
    return (
        exists()
        .select_from(other.outerjoin(workers, workers.c.id == other.c.lease_worker_id))
        .where(
            other.c.kind == "steps",
            other.c.status == RUNNING,
            or_(other.c.platform.is_(None), jobs.c.platform.is_(None), other.c.platform == jobs.c.platform),
            true() if host is None else or_(workers.c.host.is_(None), workers.c.host == host),
        )
    )


def measured_programs(connection: Connection, row: RowMapping) -> tuple[str, ...]:
    """Programs of a job that an earlier attempt kept a report of."""
    if row["kind"] == "steps":
        is_kept = connection.execute(select(steps_reports.c.status).where(steps_reports.c.job_id == row["id"])).first() is not None
        return tuple(row["programs"]) if is_kept else ()
    return tuple(connection.execute(select(reports.c.program).where(reports.c.job_id == row["id"])).scalars())
