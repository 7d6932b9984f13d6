"""Where each mark of a chart stands: pure geometry from records to percentages, so that templates and scripts only draw.

Positions and widths are percentages of the drawing, 0 to 100. The same figures are drawn twice: as SVG by the server, readable without
JavaScript, and by Plotly from `timeline_data` where scripts run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.breakdown import module_tree
from service.records import BUFFER_CLASSES, Report, Timeline, TimelinePoint
from service.units import format_bytes

_GIB = 1 << 30
_MIB = 1 << 20
_MARGIN = 1.04
"""Room beyond the longest mark, so that a label at the end of a scale can be read."""

_VISIBLE = 0.25
"""Percent of a gauge below which a segment is thinner than a line."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a stacked bar."""

    name: str
    css_class: str
    num_bytes: int
    start: float
    width: float


@dataclass(frozen=True)
class Tick:
    """A labelled line of a scale."""

    position: float
    label: str


@dataclass(frozen=True)
class Gauge:
    """What a program takes beside what the chip has: the bytes at the peak by class, the free space between, the capacity."""

    segments: tuple[Segment, ...]
    legend: tuple[Segment, ...]
    """The segments wide enough to be seen."""
    ticks: tuple[Tick, ...]
    allocated_position: float
    capacity_position: float | None
    over_width: float
    """Width of the part beyond the capacity; 0 where the program fits."""


@dataclass(frozen=True)
class Bar:
    """One row of a breakdown: bytes, and their share of the whole."""

    name: str
    css_class: str
    num_bytes: int
    share: float
    """Of the whole, 0 to 1."""
    width: float
    """Of the longest row, so that small rows can still be compared."""
    depth: int = 0
    """How deep the row stands in a tree; 0 for a flat breakdown."""


@dataclass(frozen=True)
class TimelineDrawing:
    """The HBM timeline as an SVG path in a box of 1000 by 240, and where its marks stand."""

    path: str
    peak_x: float
    peak_y: float
    spans: tuple[Segment, ...]
    ticks: tuple[Tick, ...]
    capacity_y: float | None


def percent(part: float, whole: float) -> float:
    """`part` of `whole` as a percentage with three decimals, which is finer than a pixel; 0 of nothing is 0."""
    return round(100 * part / whole, 3) if whole else 0.0


def gauge(report: Report, *, full: int | None = None) -> Gauge | None:
    """The gauge of a measured program, on a scale of at least `full` bytes; None where nothing was measured."""
    if report.allocated_bytes is None or report.peak_bytes is None:
        return None
    whole = max(report.allocated_bytes, report.capacity_bytes or 0, full or 0) * _MARGIN
    parts = [(name, class_css(name), report.classes[name]) for name in _ordered_classes(report.classes)]
    if not parts:
        parts = [("alive at the peak", "c-temporaries", report.peak_bytes)]
    parts.append(("fragmentation", "c-fragmentation", report.allocated_bytes - report.peak_bytes))
    segments, start = [], 0
    for name, css_class, num_bytes in parts:
        if num_bytes > 0:
            segments.append(Segment(name, css_class, num_bytes, percent(start, whole), percent(num_bytes, whole)))
        start += num_bytes
    capacity = report.capacity_bytes
    over = 0 if capacity is None else max(0, report.allocated_bytes - capacity)
    return Gauge(
        segments=tuple(segments),
        legend=tuple(segment for segment in segments if segment.width >= _VISIBLE),
        ticks=scale_ticks(whole),
        allocated_position=percent(report.allocated_bytes, whole),
        capacity_position=None if capacity is None else percent(capacity, whole),
        over_width=percent(over, whole),
    )


def scale_ticks(full: float, most: int = 8) -> tuple[Tick, ...]:
    """At most `most` + 1 round values from 0 to `full` bytes, in the one unit that suits them all."""
    unit, unit_name = (_GIB, "GiB") if full >= _GIB else (_MIB, "MiB") if full >= _MIB else (1 << 10, "KiB")
    raw = max(full / unit / most, 1e-9)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw)
    count = int(full / unit / step)
    return tuple(Tick(percent(i * step * unit, full), f"{i * step:g}" + (f" {unit_name}" if i == count else "")) for i in range(count + 1))


def class_css(name: str) -> str:
    """The CSS class that carries a buffer class's colour; one rule per class in web/static/site.css."""
    return "c-" + name.replace("_", "-")


def class_bars(classes: Mapping[str, int], whole: int | None) -> tuple[Bar, ...]:
    """Bytes at the peak by class, in the fixed order of classes, so that two programs are read side by side."""
    return _bars([(name, class_css(name), classes[name]) for name in _ordered_classes(classes)], whole)


def module_bars(modules: Mapping[str, int], whole: int | None) -> tuple[Bar, ...]:
    """Bytes at the peak by module as a tree in reading order; a module's bytes include its parts'."""
    tree = module_tree(modules)
    longest = max((row.num_bytes for row in tree), default=0)
    return tuple(
        Bar(
            row.name,
            "c-module" if row.depth == 0 else "c-module-part",
            row.num_bytes,
            row.num_bytes / whole if whole else 0.0,
            percent(row.num_bytes, longest),
            depth=row.depth,
        )
        for row in tree
    )


def _bars(rows: list[tuple[str, str, int]], whole: int | None) -> tuple[Bar, ...]:
    longest = max((num_bytes for *_, num_bytes in rows), default=0)
    return tuple(
        Bar(name, css_class, num_bytes, num_bytes / whole if whole else 0.0, percent(num_bytes, longest))
        for name, css_class, num_bytes in rows
    )


def _ordered_classes(classes: Mapping[str, int]) -> list[str]:
    known = {name: rank for rank, name in enumerate(BUFFER_CLASSES)}
    return sorted(classes, key=lambda name: (known.get(name, len(known)), name))


def lifetime(start_index: int, end_index: int, timeline: Timeline | None) -> tuple[float, float]:
    """Where a buffer's life begins on the timeline, and how long it is; at least 1 % so that it can be seen."""
    if timeline is None or timeline.num_points < 2:
        return 0.0, 100.0
    last = _last_index(timeline)
    width = max(1.0, percent(end_index - start_index, last))
    return min(percent(start_index, last), 100.0 - width), width


def peak_position(timeline: Timeline | None) -> float | None:
    """Where the peak stands on the timeline; None without one."""
    return None if timeline is None else percent(timeline.peak_index, _last_index(timeline))


def draw_timeline(report: Report) -> TimelineDrawing | None:
    """The timeline as SVG; None where there is none."""
    timeline = report.timeline
    if timeline is None or not timeline.points:
        return None
    top = max(point.live_bytes for point in timeline.points) * 1.12
    last = _last_index(timeline)
    xs = [10 * percent(point.index, last) for point in timeline.points]
    ys = [round(240 - 2.4 * percent(point.live_bytes, top), 2) for point in timeline.points]
    steps = [f"M{xs[0]:.2f} {ys[0]}"] + [f"H{x:.2f}V{y}" for x, y in zip(xs[1:], ys[1:], strict=True)]
    capacity = report.capacity_bytes
    return TimelineDrawing(
        path="".join(steps) + "H1000",
        peak_x=percent(timeline.peak_index, last),
        peak_y=round(100 - percent(max(point.live_bytes for point in timeline.points), top), 3),
        spans=tuple(
            Segment(span.name, "span", 0, percent(span.start_index, last), percent(span.end_index - span.start_index, last))
            for span in timeline.spans
        ),
        ticks=tuple(Tick(round(100 - tick.position, 3), tick.label) for tick in scale_ticks(top, most=4)),
        capacity_y=None if capacity is None or capacity > top else round(100 - percent(capacity, top), 3),
    )


def timeline_data(report: Report) -> dict[str, Any] | None:
    """What the script needs to draw the timeline with Plotly; None where there is none.

    `y` is in GiB, which Plotly's axis labels; the texts shown under the pointer come ready from here.
    """
    timeline = report.timeline
    if timeline is None or not timeline.points:
        return None
    peak = max(timeline.points, key=lambda point: (point.index == timeline.peak_index, point.live_bytes))
    return {
        "x": [point.index for point in timeline.points],
        "y": [round(point.live_bytes / _GIB, 6) for point in timeline.points],
        "text": [_point_text(timeline, point) for point in timeline.points],
        "last": _last_index(timeline),
        "peak": {"x": timeline.peak_index, "y": round(peak.live_bytes / _GIB, 6), "label": f"peak {format_bytes(report.peak_bytes)}"},
        "spans": [{"name": span.name, "start": span.start_index, "end": span.end_index} for span in timeline.spans],
        "capacity": None if report.capacity_bytes is None else round(report.capacity_bytes / _GIB, 6),
    }


def _point_text(timeline: Timeline, point: TimelinePoint) -> str:
    """What the pointer shows: bytes, the innermost loop or call the point stands in, the instruction."""
    around = [span for span in timeline.spans if span.start_index <= point.index <= span.end_index]
    innermost = [min(around, key=lambda span: span.end_index - span.start_index).name] if around else []
    return "<br>".join([format_bytes(point.live_bytes), *innermost, point.instruction])


def _last_index(timeline: Timeline) -> int:
    """The last program point there is a mark for: lifetimes and spans may end after the last point kept by thinning."""
    return max(1, timeline.points[-1].index if timeline.points else timeline.num_points - 1, *(span.end_index for span in timeline.spans))
