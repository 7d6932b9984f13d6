"""What the compare page is made of: two jobs' reports of one program, and what makes up the difference of their peaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.api import charts
from service.api.contexts import VERDICTS, Moment, Verdict, moment, topology_sentence
from service.compile.diff import diff_reports
from service.diff_records import BufferDiff, FieldDiff, PartDiff, ReportDiff
from service.records import Job, Report
from service.units import format_bytes, format_delta
from service.verdict_text import governing


@dataclass(frozen=True)
class Choice:
    """A job that can be compared."""

    id: str
    label: str


@dataclass(frozen=True)
class Side:
    """One of the two: which job, and what its program takes, drawn on a scale that both share."""

    role: str
    job: Job
    href: str
    topology: str
    commit: str | None
    created: Moment | None
    verdict: Verdict
    report: Report
    gauge: charts.Gauge | None


@dataclass(frozen=True)
class ChangeRow:
    """One part of a total on both sides, with a bar to the right for more and to the left for less."""

    name: str
    base_bytes: int | None
    head_bytes: int | None
    delta_bytes: int | None
    css_class: str
    start: float
    width: float


@dataclass(frozen=True)
class BufferChange:
    """Buffers of one kind that are not the same on both sides."""

    entry: BufferDiff
    title: str
    type: str
    css_class: str
    class_name: str
    direction: str


@dataclass(frozen=True)
class Difference:
    """Everything that differs between the two programs."""

    diff: ReportDiff
    headline: str
    direction: str
    detail: str
    incomparable: tuple[FieldDiff, ...]
    spec: tuple[FieldDiff, ...]
    totals: tuple[ChangeRow, ...]
    classes: tuple[ChangeRow, ...]
    modules: tuple[ChangeRow, ...]
    buffers: tuple[BufferChange, ...]
    num_equal_buffers: int
    halo: tuple[ChangeRow, ...]


@dataclass(frozen=True)
class CompareContext:
    """compare.html; without two measured programs it only offers the choice, and says in `notice` why."""

    title: str
    base_id: str
    head_id: str
    programs: tuple[str, ...]
    """Programs that both sides have."""
    program: str
    choices: tuple[Choice, ...]
    notice: str
    sides: tuple[Side, ...]
    difference: Difference | None


def compare_context(
    *,
    base: tuple[Job, Sequence[Report]] | None,
    head: tuple[Job, Sequence[Report]] | None,
    program: str | None,
    recent: Sequence[Job],
    notice: str = "",
) -> CompareContext:
    """The page for these two jobs; either may not be chosen yet. `recent` are offered to choose from.

    `notice` says what the choice lacks.
    """
    base_reports, head_reports = (_measured(side) for side in (base, head))
    shared = tuple(name for name in base_reports if name in head_reports)
    # Of two jobs with one program each the names need not agree.
    alone = len(base_reports) == len(head_reports) == 1 and not shared
    chosen = program if program in shared else _most_allocated([head_reports[name] for name in shared])
    sides: tuple[Side, ...] = ()
    difference = None
    if base is not None and head is not None:
        if chosen is None and not alone:
            notice = _why_not(base_reports, head_reports)
        else:
            left = next(iter(base_reports.values())) if alone else base_reports[str(chosen)]
            right = next(iter(head_reports.values())) if alone else head_reports[str(chosen)]
            full = max(*(n for r in (left, right) for n in (r.allocated_bytes or 0, r.capacity_bytes or 0)))
            sides = (_side("base", base[0], left, full), _side("head", head[0], right, full))
            difference = _difference(diff_reports(left, right, base_spec=base[0].spec, head_spec=head[0].spec))
    return CompareContext(
        title="Compare",
        base_id=base[0].id if base else "",
        head_id=head[0].id if head else "",
        programs=shared,
        program=chosen or "",
        choices=tuple(_choice(job) for job in recent),
        notice=notice,
        sides=sides,
        difference=difference,
    )


def _measured(side: tuple[Job, Sequence[Report]] | None) -> dict[str, Report]:
    return {} if side is None else {report.program: report for report in side[1] if report.peak_bytes is not None}


def _most_allocated(reports: Sequence[Report]) -> str | None:
    decides = governing(reports)
    return None if decides is None else decides.program


def _why_not(base: Mapping[str, Report], head: Mapping[str, Report]) -> str:
    for role, reports in (("base", base), ("head", head)):
        if not reports:
            return f"Nothing was measured in the {role} job, so there is nothing to compare."
    return f"The two have no program in common: the base has {', '.join(base)}, the head {', '.join(head)}."


def _choice(job: Job) -> Choice:
    created = moment(job.created_at)
    commit = f" {job.git.commit_sha[:10]}" if job.git.commit_sha else ""
    return Choice(job.id, f"{job.scenario}{commit}, {created.text if created else ''}")


def _side(role: str, job: Job, report: Report, full: int) -> Side:
    mesh = job.spec.get("mesh") or {}
    return Side(
        role=role,
        job=job,
        href=f"/jobs/{job.id}?program={report.program}",
        topology=topology_sentence(mesh.get("topology"), int(mesh.get("slices", 1))),
        commit=job.git.commit_sha[:10] if job.git.commit_sha else None,
        created=moment(job.created_at),
        verdict=VERDICTS[report.status],
        report=report,
        gauge=charts.gauge(report, full=full),
    )


def _difference(diff: ReportDiff) -> Difference:
    totals = {part.name: part for part in diff.totals}
    peak, allocated = totals["peak_bytes"], totals["allocated_bytes"]
    return Difference(
        diff=diff,
        headline=_headline(peak),
        direction=_direction(peak.delta),
        detail=f"Peak {format_bytes(peak.base)} → {format_bytes(peak.head)}; allocated {format_delta(allocated.delta)}, "
        f"{format_bytes(allocated.base)} → {format_bytes(allocated.head)}.",
        incomparable=tuple(_readable(field) for field in diff.incomparable),
        spec=tuple(_readable(field) for field in diff.spec),
        totals=_rows([part for part in diff.totals if part.name.endswith("_bytes")]),
        classes=_rows([part for part in diff.classes if part.delta]),
        modules=_rows([part for part in diff.modules if part.delta], label=str),
        buffers=tuple(_buffer(entry) for entry in diff.buffers if entry.change != "equal"),
        num_equal_buffers=sum(entry.head_count for entry in diff.buffers if entry.change == "equal"),
        halo=_rows([part for part in diff.halo if part.delta]),
    )


def _headline(peak: PartDiff) -> str:
    if not peak.delta:
        return "The peak is the same, to the byte"
    share = f" ({100 * peak.delta / peak.base:+.2f} %)" if peak.base else ""
    return f"The peak {'grew' if peak.delta > 0 else 'fell'} by {format_bytes(abs(peak.delta))}{share}"


def _direction(delta: int | None) -> str:
    """CSS class of a change: more bytes are not wrong by themselves, but they are what one looks for."""
    return "same" if not delta else "more" if delta > 0 else "less"


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _rows(parts: Iterable[PartDiff], *, label: Callable[[str], str] = _words) -> tuple[ChangeRow, ...]:
    listed = list(parts)
    longest = max((abs(part.delta or 0) for part in listed), default=0)
    rows = []
    for part in listed:
        width = charts.percent(abs(part.delta or 0), 2 * longest)
        rows.append(
            ChangeRow(
                name=label(part.name),
                base_bytes=part.base,
                head_bytes=part.head,
                delta_bytes=part.delta,
                # Less head-room is the change to look at, as more bytes are elsewhere.
                css_class=_direction(-part.delta if part.delta and part.name == "headroom_bytes" else part.delta),
                start=50.0 if (part.delta or 0) >= 0 else round(50.0 - width, 3),
                width=width,
            )
        )
    return tuple(rows)


def _readable(field: FieldDiff) -> FieldDiff:
    """The same difference with values as text: JSON for what is not a plain word."""
    return FieldDiff(path=field.path, base=_text(field.base), head=_text(field.head))


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _buffer(entry: BufferDiff) -> BufferChange:
    shapes = [f"{entry.dtype}[{','.join(map(str, shape))}]" for shape in (entry.base_shape, entry.head_shape) if shape is not None]
    unlisted = entry.change == "unlisted"
    return BufferChange(
        entry=entry,
        title="all buffers below the lists" if unlisted else entry.scope or entry.module,
        type=" → ".join(dict.fromkeys(shapes)),
        css_class=charts.class_css(entry.class_),
        class_name=entry.class_.replace("_", " "),
        direction=_direction(entry.delta_bytes),
    )
