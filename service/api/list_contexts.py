"""What the pages that list jobs are made of: the list itself, and the overview with its counts, newest answers and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from urllib.parse import urlencode

from service.api.charts import percent
from service.api.contexts import JOB_STATES, VERDICTS, Moment, Verdict, moment
from service.api.steps_context import STATUS_VERDICTS
from service.records import TERMINAL, FailureKind, Job, JobKind, JobStatus, ReportStatus
from service.storage.interface import ReportSummary, StepsSummary, WorkerStatus


@dataclass(frozen=True)
class ProgramLine:
    """One program in a list of jobs: its verdict, and a small gauge."""

    name: str
    verdict: Verdict
    allocated_bytes: int | None
    capacity_bytes: int | None
    fill: float
    """Allocated as a percentage of the gauge, which ends 20 % beyond the capacity, or where the program does if that is further."""
    limit: float | None
    """Where the capacity stands on the same gauge."""


@dataclass(frozen=True)
class NewerJob:
    """A job that came after the answer shown, and has none itself (yet)."""

    href: str
    state: Verdict


@dataclass(frozen=True)
class JobLine:
    """One job in a list."""

    id: str
    href: str
    kind: str
    scenario: str
    state: Verdict
    topology: str
    programs: tuple[ProgramLine, ...]
    outcome: Verdict | None
    """How the steps of a job of that kind ended; None of every other."""
    note: str
    """What there is to say where no program is shown."""
    project: str | None
    commit: str | None
    branch: str | None
    created: Moment
    seconds: float | None
    """What the last attempt took; None until it ended, where nobody saw its end, and where it did not run."""
    reused: bool
    """Answered from the store, without a compile."""
    is_comparable: bool
    """A program of it was measured."""
    newer: NewerJob | None = None


def job_line(job: Job, summaries: Sequence[ReportSummary], steps: StepsSummary | None = None) -> JobLine:
    """A job as a row of a list."""
    created = moment(job.created_at)
    assert created is not None
    return JobLine(
        id=job.id,
        href=f"/jobs/{job.id}",
        kind=job.kind,
        scenario=job.scenario,
        state=JOB_STATES[job.status],
        topology=_subject(job),
        programs=tuple(_program_line(summary) for summary in summaries),
        outcome=None if steps is None else STATUS_VERDICTS[steps.status],
        note=("no report" if job.status in TERMINAL else "no report yet") if steps is None else _steps_note(steps),
        project=job.git.project,
        commit=job.git.commit_sha[:10] if job.git.commit_sha else None,
        branch=job.git.branch,
        created=created,
        seconds=_seconds(job),
        reused=job.answered_from is not None,
        is_comparable=any(summary.peak_bytes is not None for summary in summaries),
    )


def _seconds(job: Job) -> float | None:
    # A lost job ends when its silence is noticed, and an answered one with the job that it waited for: neither is time it took.
    if job.answered_from is not None or (job.failure is not None and job.failure.kind is FailureKind.LOST):
        return None
    return (job.finished_at - job.started_at).total_seconds() if job.finished_at and job.started_at else None


def _steps_note(steps: StepsSummary) -> str:
    return "1 step" if steps.num_steps == 1 else f"{steps.num_steps:,} steps"


def _program_line(summary: ReportSummary) -> ProgramLine:
    allocated, capacity = summary.allocated_bytes, summary.capacity_bytes
    full = max(1.2 * (capacity or 0), allocated or 0) or 1
    return ProgramLine(
        name=summary.program,
        verdict=VERDICTS[ReportStatus(summary.status)],
        allocated_bytes=allocated,
        capacity_bytes=capacity,
        fill=percent(allocated or 0, full),
        limit=percent(capacity, full) if capacity else None,
    )


def _subject(job: Job) -> str:
    """What it is compiled for; of real steps, what they run on."""
    mesh = job.spec.get("mesh") or {}
    if job.kind == "steps" or mesh.get("topology") is None:
        return str((job.spec.get("steps") or {}).get("devices", ""))
    slices = mesh.get("slices", 1)
    return f"{slices} × {mesh['topology']}" if slices != 1 else str(mesh["topology"])


@dataclass(frozen=True)
class JobsContext:
    """jobs.html: the list of jobs, newest first."""

    title: str
    jobs: tuple[JobLine, ...]
    filters: Mapping[str, str]
    notice: str
    """What of the filter was not understood; empty where all was."""
    statuses: tuple[str, ...]
    next_href: str | None
    is_live: bool
    """Whether a job shown is still on its way, so that the list is worth fetching again soon."""


def jobs_context(
    jobs: Sequence[Job],
    summaries: Mapping[str, Sequence[ReportSummary]],
    *,
    filters: Mapping[str, str],
    next_cursor: str | None,
    steps: Mapping[str, StepsSummary] | None = None,
    unknown_status: str = "",
) -> JobsContext:
    """The jobs page for one page of the store's answer; `unknown_status` was asked for and is no state of a job."""
    known = tuple(status.value for status in JobStatus)
    kept = {name: value for name, value in filters.items() if value}
    return JobsContext(
        title="Jobs",
        jobs=tuple(job_line(job, summaries.get(job.id, ()), (steps or {}).get(job.id)) for job in jobs),
        filters={"status": "", "scenario": ""} | kept,
        notice=f"No job has a state {unknown_status!r}, so jobs of any state are shown. States: {', '.join(known)}."
        if unknown_status
        else "",
        statuses=known,
        next_href=f"/jobs?{urlencode(kept | {'cursor': next_cursor})}" if next_cursor else None,
        is_live=any(job.status not in TERMINAL for job in jobs),
    )


@dataclass(frozen=True)
class Count:
    """A number of jobs in one state."""

    verdict: Verdict
    count: int
    href: str


@dataclass(frozen=True)
class WorkerLine:
    """One worker that was seen lately."""

    host: str
    kinds: str
    slots: int
    memory_bytes: int
    seen: Moment
    is_silent: bool
    """Not heard of for longer than a lease lasts: its jobs are given to others."""


@dataclass(frozen=True)
class OverviewContext:
    """overview.html: what is weighed here, how it stands, and the newest answer of each scenario."""

    title: str
    counts: tuple[Count, ...]
    scenarios: tuple[JobLine, ...]
    """The newest answer of each project's scenario and kind; the newest that ended where it has no answer."""
    workers: tuple[WorkerLine, ...]
    is_live: bool


def overview_context(
    *,
    counts: Mapping[tuple[JobKind, JobStatus], int],
    newest: Sequence[Job],
    summaries: Mapping[str, Sequence[ReportSummary]],
    workers: Sequence[WorkerStatus],
    now: datetime,
    lease_seconds: float,
    steps: Mapping[str, StepsSummary] | None = None,
) -> OverviewContext:
    """The overview; the scenarios are those of `newest`, newest first."""
    totals = {status: sum(count for (_, state), count in counts.items() if state == status) for status in JobStatus}
    lines = []
    for worker in workers:
        seen = moment(worker.seen_at)
        assert seen is not None
        is_silent = not is_alive(worker, now=now, lease_seconds=lease_seconds)
        lines.append(WorkerLine(worker.host, ", ".join(worker.kinds), worker.slots, worker.memory_bytes, seen, is_silent))
    return OverviewContext(
        title="Overview",
        counts=tuple(Count(JOB_STATES[status], totals[status], f"/jobs?status={status.value}") for status in JobStatus),
        scenarios=_newest_answers(newest, summaries, steps or {}),
        workers=tuple(lines),
        is_live=totals[JobStatus.QUEUED] + totals[JobStatus.RUNNING] > 0,
    )


def _newest_answers(
    newest: Sequence[Job], summaries: Mapping[str, Sequence[ReportSummary]], steps: Mapping[str, StepsSummary]
) -> tuple[JobLine, ...]:
    """A line for the answer of each scenario, which names the newest job that came after it."""
    scenarios: dict[tuple[str | None, str, JobKind], list[Job]] = {}
    for job in newest:
        scenarios.setdefault((job.git.project, job.scenario, job.kind), []).append(job)
    lines = []
    for jobs in scenarios.values():
        ended = [job for job in jobs if job.status in TERMINAL]
        answers = [job for job in ended if job.id in steps or any(s.status is not ReportStatus.FAILED for s in summaries.get(job.id, ()))]
        shown = next(iter(answers or ended), None)
        if shown is None:
            continue
        line = job_line(shown, summaries.get(shown.id, ()), steps.get(shown.id))
        newer = None if jobs[0] is shown else NewerJob(f"/jobs/{jobs[0].id}", JOB_STATES[jobs[0].status])
        lines.append(replace(line, newer=newer))
    return tuple(lines)


def is_alive(worker: WorkerStatus, *, now: datetime, lease_seconds: float) -> bool:
    """Whether it was heard of within a lease: after that its jobs are given to others."""
    return (now - worker.seen_at).total_seconds() <= lease_seconds


def why_nobody_takes(kind: JobKind, workers: Sequence[WorkerStatus], *, now: datetime, lease_seconds: float) -> str:
    """Why a waiting job of this kind waits for ever as things stand; empty where a worker will take it."""
    alive = [worker for worker in workers if is_alive(worker, now=now, lease_seconds=lease_seconds)]
    if any(kind in worker.kinds for worker in alive):
        return ""
    return f"No running worker takes jobs of kind {kind}" if alive else "No worker is running"
