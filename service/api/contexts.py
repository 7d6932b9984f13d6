"""What each page is made of: one frozen dataclass per template, built from records; templates print these and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from service.api.charts import percent
from service.compile.catalog import FAMILIES, find_topology, named_topologies
from service.errors import Problem
from service.models.config import PRESETS, ModelConfig
from service.records import TERMINAL, Job, JobKind, JobStatus, ReportStatus
from service.storage.interface import ReportSummary, WorkerStatus
from service.verdict_text import TITLES


@dataclass(frozen=True)
class Verdict:
    """An answer in words, and the CSS class that colours it; colour never stands alone."""

    css_class: str
    title: str
    sentence: str = ""


VERDICTS: Mapping[ReportStatus, Verdict] = {
    ReportStatus.OK: Verdict("fits", TITLES[ReportStatus.OK]),
    ReportStatus.DOES_NOT_FIT: Verdict("over", TITLES[ReportStatus.DOES_NOT_FIT]),
    ReportStatus.UNKNOWN: Verdict("open", TITLES[ReportStatus.UNKNOWN]),
    ReportStatus.FAILED: Verdict("failed", TITLES[ReportStatus.FAILED]),
}

JOB_STATES: Mapping[JobStatus, Verdict] = {
    JobStatus.QUEUED: Verdict("waiting", "Queued"),
    JobStatus.RUNNING: Verdict("running", "Running"),
    JobStatus.SUCCEEDED: Verdict("done", "Done"),
    JobStatus.FAILED: Verdict("failed", "Failed"),
    JobStatus.CANCELLED: Verdict("cancelled", "Cancelled"),
}


@dataclass(frozen=True)
class Moment:
    """An instant as people read it, and as machines do."""

    text: str
    iso: str


def moment(instant: datetime | None) -> Moment | None:
    """`instant` in UTC to the second; None stays None."""
    if instant is None:
        return None
    utc = instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    return Moment(f"{utc:%Y-%m-%d %H:%M:%S}", utc.isoformat())


@dataclass(frozen=True)
class ProgramLine:
    """One program in a list of jobs: its verdict, and a small gauge."""

    name: str
    verdict: Verdict
    allocated_bytes: int | None
    capacity_bytes: int | None
    fill: float
    """Allocated as a percentage of the gauge, which ends 20 % beyond the capacity."""
    limit: float | None
    """Where the capacity stands on the same gauge."""


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
    commit: str | None
    branch: str | None
    created: Moment
    seconds: float | None
    """From start to end; None until it ended."""
    reused: bool
    """Answered from the store, without a compile."""


def job_line(job: Job, summaries: Sequence[ReportSummary]) -> JobLine:
    """A job as a row of a list."""
    topology = _mesh_topology(job.spec)
    took = (job.finished_at - job.started_at).total_seconds() if job.finished_at and job.started_at else None
    created = moment(job.created_at)
    assert created is not None
    return JobLine(
        id=job.id,
        href=f"/jobs/{job.id}",
        kind=job.kind,
        scenario=job.scenario,
        state=JOB_STATES[job.status],
        topology=topology,
        programs=tuple(_program_line(summary) for summary in summaries),
        commit=job.git.commit_sha[:10] if job.git.commit_sha else None,
        branch=job.git.branch,
        created=created,
        seconds=took,
        reused=job.answered_from is not None,
    )


def _program_line(summary: ReportSummary) -> ProgramLine:
    allocated, capacity = summary.allocated_bytes, summary.capacity_bytes
    full = 1.2 * capacity if capacity else allocated or 1
    return ProgramLine(
        name=summary.program,
        verdict=VERDICTS[ReportStatus(summary.status)],
        allocated_bytes=allocated,
        capacity_bytes=capacity,
        fill=min(100.0, percent(allocated or 0, full)),
        limit=percent(capacity, full) if capacity else None,
    )


def _mesh_topology(spec: Mapping[str, Any]) -> str:
    mesh = spec.get("mesh") or {}
    if mesh.get("topology") is None:
        return str((spec.get("steps") or {}).get("devices", ""))
    slices = mesh.get("slices", 1)
    name = mesh.get("topology") or "real devices"
    return f"{slices} × {name}" if slices != 1 else str(name)


@dataclass(frozen=True)
class JobsContext:
    """jobs.html: the list of jobs, newest first."""

    title: str
    jobs: tuple[JobLine, ...]
    filters: Mapping[str, str]
    statuses: tuple[str, ...]
    next_href: str | None
    is_live: bool
    """Whether a job shown is still on its way, so that the list is worth fetching again soon."""


def jobs_context(
    jobs: Sequence[Job], summaries: Mapping[str, Sequence[ReportSummary]], *, filters: Mapping[str, str], next_cursor: str | None
) -> JobsContext:
    """The jobs page for one page of the store's answer."""
    kept = {name: value for name, value in filters.items() if value}
    return JobsContext(
        title="Jobs",
        jobs=tuple(job_line(job, summaries.get(job.id, ())) for job in jobs),
        filters={"status": "", "scenario": ""} | kept,
        statuses=tuple(status.value for status in JobStatus),
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
    """The newest finished job of each scenario."""
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
) -> OverviewContext:
    """The overview; of `newest`, newest first, the first finished job of each scenario is shown."""
    scenarios: dict[str, Job] = {}
    for job in newest:
        if job.status in TERMINAL:
            scenarios.setdefault(job.scenario, job)
    totals = {status: sum(count for (_, state), count in counts.items() if state == status) for status in JobStatus}
    lines = []
    for worker in workers:
        seen = moment(worker.seen_at)
        assert seen is not None
        is_silent = (now - worker.seen_at).total_seconds() > lease_seconds
        lines.append(WorkerLine(worker.host, ", ".join(worker.kinds), worker.slots, worker.memory_bytes, seen, is_silent))
    return OverviewContext(
        title="Overview",
        counts=tuple(Count(JOB_STATES[status], totals[status], f"/jobs?status={status.value}") for status in JobStatus),
        scenarios=tuple(job_line(job, summaries.get(job.id, ())) for job in scenarios.values()),
        workers=tuple(lines),
        is_live=totals[JobStatus.QUEUED] + totals[JobStatus.RUNNING] > 0,
    )


@dataclass(frozen=True)
class TopologyLine:
    """One named topology."""

    name: str
    shape: str
    num_chips: int
    num_devices: int
    wraps: str


@dataclass(frozen=True)
class FamilyLine:
    """One TPU generation, with its named slices."""

    name: str
    title: str
    counts: str
    """What the number in a user's name counts."""
    capacity_bytes: int | None
    topologies: tuple[TopologyLine, ...]


@dataclass(frozen=True)
class PresetLine:
    """One model that a spec can start from."""

    name: str
    description: str
    model: ModelConfig
    parts: str
    """Mechanisms switched on beyond attention and feed-forward."""


@dataclass(frozen=True)
class CatalogContext:
    """catalog.html: the models and the topologies that can be named in a spec."""

    title: str
    presets: tuple[PresetLine, ...]
    families: tuple[FamilyLine, ...]


def catalog_context(*, capacities: Mapping[str, int]) -> CatalogContext:
    """The catalogue; `capacities` by family, where they are known."""
    return CatalogContext(
        title="Catalog",
        presets=tuple(_preset_line(name) for name in PRESETS),
        families=tuple(_family_line(name, capacities.get(name)) for name in FAMILIES),
    )


def _preset_line(name: str) -> PresetLine:
    make = PRESETS[name]
    model = make()
    parts = [
        label
        for label, is_on in (
            ("Engram", model.engram is not None),
            (f"mHC {model.mhc.num_streams}", model.mhc.num_streams > 1),
            (f"MTP {model.mtp.depth}", model.mtp.depth > 0),
            ("MoE", model.experts is not None),
        )
        if is_on
    ]
    return PresetLine(name, (make.__doc__ or "").strip().splitlines()[0], model, ", ".join(parts))


def _family_line(name: str, capacity_bytes: int | None) -> FamilyLine:
    family = FAMILIES[name]
    per_chip = "devices, two a chip" if family.devices_per_chip == 2 else "cores, two a chip"
    return FamilyLine(
        name=name,
        title=family.title,
        counts="chips" if family.name_counts_per_chip == 1 else per_chip,
        capacity_bytes=capacity_bytes,
        topologies=tuple(
            TopologyLine(
                name=topology.name,
                shape=topology.shape.replace("x", "×"),
                num_chips=topology.num_chips,
                num_devices=topology.num_devices,
                wraps=" ".join("xyz"[i] for i, wraps in enumerate(topology.wraps) if wraps) or "none",
            )
            for topology in named_topologies(name)
        ),
    )


def topology_sentence(name: str | None, slices: int) -> str:
    """A topology with its counts, `v5p-512 · 4×8×8 · 256 chips · 256 devices`; a name that is no longer known stands alone."""
    if name is None:
        return "no topology: real devices"
    try:
        topology = find_topology(name, slices)
    except ValueError:
        return name
    prefix = f"{slices} slices of " if slices > 1 else ""
    return f"{prefix}{topology.name} · {topology.shape.replace('x', '×')} · {topology.num_chips} chips · {topology.num_devices} devices"


@dataclass(frozen=True)
class Example:
    """A spec to start from."""

    name: str
    text: str


@dataclass(frozen=True)
class SubmitContext:
    """submit.html: a spec to weigh, and everything that is wrong with it."""

    title: str
    text: str
    problems: tuple[Problem, ...] = ()
    examples: tuple[Example, ...] = ()
    depth: str = "memory"
    force: bool = False


@dataclass(frozen=True)
class ErrorContext:
    """error.html: any error of a page, in words."""

    title: str
    status: int
    detail: str
    problems: tuple[Problem, ...]
