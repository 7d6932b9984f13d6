"""What the store offers to the API, the pages and the worker: records in, records out, every method one transaction.

Methods may be called from any thread and from any number of processes on one database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from service.errors import ServiceError
from service.records import (
    Depth,
    Event,
    Failure,
    FailureKind,
    GitFacts,
    Job,
    JobKind,
    JobStatus,
    Record,
    Report,
    ReportStatus,
)
from service.steps_records import StepsReport, StepsStatus

Platform = Literal["cpu", "gpu", "tpu"]
"""What real steps run on."""

MAX_PAGE = 200
"""Most jobs in one page of `list_jobs`."""


class LeaseLostError(ServiceError):
    """The job was given to another worker, or ended, while this one still worked on it: what it has to say is refused."""

    status = 409
    title = "Lease lost"


class StoreUnavailableError(ServiceError):
    """The database does not answer now, or its tables are not those of this version; nothing was changed."""

    status = 503
    title = "Database not ready"


class CursorError(ServiceError):
    """A cursor that no page gave."""

    status = 422
    title = "Unknown cursor"


class NewJob(Record):
    """What is asked for, after validation."""

    kind: JobKind = "compile"
    scenario: str
    spec: Mapping[str, Any] = Field(description="the spec as validated, defaults filled in")
    spec_hash: str
    identity: str = Field(description="hash of spec, model source and toolchain: equal identity, equal result")
    programs: tuple[str, ...] = Field(min_length=1, description="programs to weigh, in order")
    child_memory_bytes: int = Field(description="resident memory that one child of this job is expected to take, for admission")
    platform: Platform | None = Field(default=None, description="devices the worker must have; null where any worker will do")
    git: GitFacts = GitFacts()


class Idempotency(Record):
    """A client's promise that two requests with one key are one request."""

    key: str = Field(min_length=1, max_length=200)
    scope: str = Field(default="", description="project the key belongs to; keys of two projects never meet")
    request_hash: str = Field(description="hash of the request's meaning; the same key with another hash is a conflict")


class AddedJob(Record):
    job: Job
    is_new: bool = Field(description="false where the idempotency key answered with a job that stood already")


class JobFilter(Record):
    """Which jobs to list; None does not restrict."""

    status: JobStatus | None = None
    scenario: str | None = None
    kind: JobKind | None = None
    project: str | None = None
    commit_sha: str | None = None
    identity: str | None = None


class JobPage(Record):
    jobs: tuple[Job, ...]
    next_cursor: str | None = Field(description="give it to the next call for older jobs; null on the last page")


class Lease(Record):
    """The right to work on one job, until it expires or is given up. `token` is new with each claim."""

    job_id: str
    worker_id: str
    token: str
    attempt: int = Field(description="1 for the first claim")
    expires_at: datetime


class Claim(Record):
    """A job to work on, and what an earlier attempt already measured of it."""

    job: Job
    lease: Lease
    programs: tuple[str, ...]
    measured_programs: tuple[str, ...] = ()
    child_memory_bytes: int


class LeaseState(Record):
    """What a worker learns when it renews."""

    expires_at: datetime
    cancel_requested: bool


class ReportSummary(Record):
    """The numbers of a report that lists show; read from columns, without the report's body."""

    job_id: str
    program: str
    status: ReportStatus
    depth: Depth
    failure_kind: FailureKind | None
    topology: str | None
    num_devices: int | None
    capacity_bytes: int | None
    peak_bytes: int | None
    allocated_bytes: int | None
    headroom_bytes: int | None
    child_peak_rss_bytes: int | None
    total_seconds: float | None


class StepsSummary(Record):
    """The numbers of a steps job's report that lists show; read from columns, without the report's body."""

    job_id: str
    status: StepsStatus
    num_steps: int = Field(description="warm-up included")
    num_replays: int
    num_checks_failed: int


class Artifact(Record):
    """A file kept with a job, by the hash of its content."""

    name: str = Field(description="unique within the job")
    program: str
    sha256: str = Field(description="of the content, uncompressed")
    size_bytes: int
    stored_bytes: int = Field(description="size on disk, compressed")


class ArtifactReader(Protocol):
    """An artifact's content, decompressed as it is read."""

    @property
    def artifact(self) -> Artifact: ...

    def chunks(self) -> Iterator[bytes]: ...


class WorkerStatus(Record):
    """A worker as it last made itself known."""

    id: str
    host: str
    pid: int
    kinds: tuple[JobKind, ...]
    platforms: tuple[Platform, ...] = Field(default=(), description="of the devices that are attached to its host")
    slots: int
    memory_bytes: int
    started_at: datetime
    seen_at: datetime


class Store(Protocol):
    """Jobs, their events, reports and artifacts. Any method may raise StoreUnavailableError."""

    def ping(self) -> None:
        """Return when the database answers and is at the newest migration; raise StoreUnavailableError otherwise."""
        ...

    def add_job(self, new: NewJob, *, force: bool = False, idempotency: Idempotency | None = None) -> AddedJob:
        """Queue a job, or answer it at once where its identity was measured already (`force` measures again).

        Raises:
            ConflictError: the idempotency key was used for a different request.
        """
        ...

    def get_job(self, job_id: str) -> Job:
        """Raises NotFoundError."""
        ...

    def list_jobs(self, filters: JobFilter | None = None, *, cursor: str | None = None, limit: int = 50) -> JobPage:
        """Newest first; `limit` is 1 to MAX_PAGE. Raises CursorError for a cursor that no page gave."""
        ...

    def count_jobs(self) -> Mapping[tuple[JobKind, JobStatus], int]:
        """How many jobs there are of each kind and status; combinations without jobs are absent."""
        ...

    def find_child_rss(self, scenario: str, depth: Depth) -> int | None:
        """Peak resident bytes of the largest child among the scenario's latest reports at this depth; None where there are none."""
        ...

    def request_cancel(self, job_id: str) -> Job:
        """A queued job is cancelled at once, a running one is told to stop, one that ended stays as it is. Raises NotFoundError."""
        ...

    def list_events(self, job_id: str, *, after: int = 0, limit: int = 500) -> tuple[Event, ...]:
        """Events with a sequence above `after`, in order. Raises NotFoundError."""
        ...

    def list_reports(self, job_id: str) -> tuple[Report, ...]:
        """Reports in the order of the job's programs; those of the job that answered this one, where one did. Raises NotFoundError."""
        ...

    def get_report(self, job_id: str, program: str) -> Report:
        """Raises NotFoundError: no such job, or no report of that program (yet)."""
        ...

    def get_steps_report(self, job_id: str) -> StepsReport:
        """Raises NotFoundError: no such job, or not one of kind steps, or it has no report (yet)."""
        ...

    def list_report_summaries(self, job_ids: Sequence[str]) -> Mapping[str, tuple[ReportSummary, ...]]:
        """For each job, the summaries of its reports in the order of its programs; jobs without reports map to ()."""
        ...

    def list_steps_summaries(self, job_ids: Sequence[str]) -> Mapping[str, StepsSummary]:
        """The summary of each job that has a report of steps; the others are absent."""
        ...

    def find_previous_answer(self, job_id: str) -> Job | None:
        """The newest job before this one that succeeded, is of the same project, scenario and kind, and was measured by itself or by
        another job than this one; None where there is none. Raises NotFoundError.
        """
        ...

    def list_artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """Artifacts by name; those of the job that answered this one, where one did. Raises NotFoundError."""
        ...

    def open_artifact(self, job_id: str, name: str) -> ArtifactReader:
        """Raises NotFoundError."""
        ...

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
        """Give the oldest waiting job of these kinds, that needs no other devices than `platforms`, to a worker; or None.

        A job's start is that of its newest claim, so that its duration is the last attempt's; the first claim stands in its events.
        First takes back every job whose lease has expired: it waits again, or is recorded as lost after `max_attempts`. Jobs are
        given strictly in order: where the oldest of these kinds needs more than `memory_bytes` (None: any amount), nothing is given, so
        that a large job is never starved by small ones. A job waits while an identical one runs, and one of kind `steps` while
        another runs on the same platform of the worker's host, as `record_worker` made it known.
        """
        ...

    def renew_lease(self, lease: Lease, *, lease_seconds: float) -> LeaseState:
        """Raises LeaseLostError."""
        ...

    def append_event(self, lease: Lease, name: str, data: Mapping[str, Any]) -> Event:
        """Raises LeaseLostError."""
        ...

    def save_report(self, lease: Lease, report: Report, *, artifacts: Mapping[str, Path] | None = None) -> None:
        """Keep a program's report and its artifacts (name to file), and say so in an event. Raises LeaseLostError."""
        ...

    def save_steps_report(self, lease: Lease, report: StepsReport) -> None:
        """Keep what the steps found, and say so in an event. Raises LeaseLostError."""
        ...

    def finish_job(self, lease: Lease, status: JobStatus, *, failure: Failure | None = None) -> Job:
        """End the job; where it succeeded, identical jobs that wait are answered from it. Raises LeaseLostError."""
        ...

    def release_job(self, lease: Lease, *, reason: str) -> None:
        """Give the job back unfinished, without counting the attempt: an orderly stop is not a death. Raises LeaseLostError."""
        ...

    def restate_identity(self, lease: Lease, identity: str) -> Job:
        """Correct the identity to that of the worker's own toolchain; answers and ends the job where that was measured already.

        The server computes an identity from the toolchain it sees; a worker elsewhere may have another, and its word counts.

        Raises LeaseLostError.
        """
        ...

    def record_worker(self, worker: WorkerStatus) -> None:
        """Make a worker known, or known again; forgets those that were not seen for a day."""
        ...

    def remove_worker(self, worker_id: str) -> None: ...

    def list_workers(self) -> tuple[WorkerStatus, ...]:
        """Every worker that made itself known and did not sign off, the latest seen first."""
        ...
