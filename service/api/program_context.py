"""What the part of a job's page about one program is made of: verdict, figures, timeline, breakdowns, buffers, links and toolchain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.api import charts
from service.api.contexts import VERDICTS, Verdict
from service.records import BUFFER_CLASSES, Buffer, Collective, Report, Timeline, Timings
from service.verdict_text import advice, verdict_sentence

PHASES: Mapping[str, str] = {
    "start_seconds": "start",
    "topology_seconds": "topology",
    "build_seconds": "build",
    "trace_seconds": "trace",
    "lower_seconds": "lower",
    "buffer_assignment_seconds": "compile to buffer assignment",
    "analysis_seconds": "analysis",
    "code_generation_seconds": "code generation",
}

_SMALL_SHARE = 0.001

_ARGUMENT_CLASSES = frozenset(BUFFER_CLASSES[: BUFFER_CLASSES.index("other_arguments") + 1])
"""Arguments come from outside the program: the source line the compiler gives them is that of the call, the same for all."""


@dataclass(frozen=True)
class Figure:
    """One number of the headline row; `hint` says what it is made of."""

    label: str
    num_bytes: int | None
    hint: str
    strong: bool = False


@dataclass(frozen=True)
class BufferRow:
    """One buffer alive at the peak."""

    rank: int
    name: str
    scope: str
    class_name: str
    css_class: str
    module: str
    module_inferred: bool
    phase: str
    type: str
    """Dtype and shape: `bf16[58,16,7168,128]`."""
    layout: str
    logical_bytes: int | None
    padded_bytes: int
    padding_bytes: int | None
    padding_ratio: float | None
    """Padded over logical bytes; None where the logical size is unknown."""
    source: str | None
    life_start: float
    life_width: float
    start_index: int
    end_index: int
    search: str
    """What the filter looks in, in lower case."""


@dataclass(frozen=True)
class PeakRow:
    """A maximum of the timeline that stands out."""

    rank: int
    index: int
    live_bytes: int
    below_bytes: int
    """How far below the peak it stands."""
    drop_bytes: int
    module: str
    phase: str
    instruction: str
    largest: tuple[BufferRow, ...]


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over the same devices in the same module and phase."""

    entry: Collective
    axes: str
    phase: str
    origin: str
    width: float
    """Wire bytes as a percentage of the largest row's."""


@dataclass(frozen=True)
class Phase:
    """Wall seconds of one phase, and its share of the whole."""

    name: str
    seconds: float
    width: float


@dataclass(frozen=True)
class ProgramView:
    """Everything shown of one program."""

    report: Report
    verdict: Verdict
    advice: str
    """Where to begin with a program that does not fit; empty otherwise."""
    gauge: charts.Gauge | None
    figures: tuple[Figure, ...]
    timeline: charts.TimelineDrawing | None
    timeline_json: str
    """For the script; `<` is escaped, so that no instruction's name can end the element it stands in."""
    classes: tuple[charts.Bar, ...]
    small_classes: tuple[charts.Bar, ...]
    modules: tuple[charts.Bar, ...]
    small_modules: tuple[charts.Bar, ...]
    """The rows below a thousandth of the peak, as `small_classes` are: shown on demand."""
    buffers: tuple[BufferRow, ...]
    num_buffers_at_peak: int | None
    peak_position: float | None
    peaks: tuple[PeakRow, ...]
    inferred_share: float | None
    unattributed_share: float | None
    collectives: tuple[CollectiveRow, ...]
    phases: tuple[Phase, ...]
    toolchain: tuple[tuple[str, str], ...]


def program_view(report: Report) -> ProgramView:
    """Everything shown of one program."""
    data = charts.timeline_data(report)
    classes = charts.class_bars(report.classes, report.peak_bytes)
    modules = charts.module_bars(report.modules, report.peak_bytes)
    return ProgramView(
        report=report,
        verdict=verdict_of(report),
        advice=advice(report),
        gauge=charts.gauge(report),
        figures=_figures(report) if report.peak_bytes is not None else (),
        timeline=charts.draw_timeline(report),
        timeline_json="" if data is None else json_for_script(data),
        classes=tuple(row for row in classes if row.share >= _SMALL_SHARE),
        small_classes=tuple(row for row in classes if row.share < _SMALL_SHARE),
        modules=tuple(row for row in modules if row.share >= _SMALL_SHARE),
        small_modules=tuple(row for row in modules if row.share < _SMALL_SHARE),
        buffers=tuple(_buffer_row(rank, buffer, report.timeline) for rank, buffer in enumerate(report.buffers, start=1)),
        num_buffers_at_peak=report.num_buffers_at_peak,
        peak_position=charts.peak_position(report.timeline),
        peaks=_peaks(report),
        inferred_share=_share(report.module_inferred_bytes, report.peak_bytes),
        unattributed_share=_share(report.unattributed_bytes, report.peak_bytes),
        collectives=_collectives(report.collectives),
        phases=_phases(report.timings),
        toolchain=_toolchain(report),
    )


def json_for_script(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a `<script>` element: `<` would let a string end it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def verdict_of(report: Report) -> Verdict:
    """The verdict of a program with its sentence."""
    verdict = VERDICTS[report.status]
    return Verdict(verdict.css_class, verdict.title, verdict_sentence(report))


def _figures(report: Report) -> tuple[Figure, ...]:
    code_hint = "size of the executable" if report.depth == "full" else "known at depth full"
    return (
        Figure("Peak", report.peak_bytes, "most alive at once", strong=True),
        Figure("Allocated", report.allocated_bytes, "reserved, with fragmentation", strong=True),
        Figure("Capacity", report.capacity_bytes, "HBM per device", strong=True),
        Figure("Head-room", report.headroom_bytes, "capacity − allocated", strong=True),
        Figure("Arguments", report.argument_bytes, "state and batch"),
        Figure("Outputs", report.output_bytes, "new state and metrics"),
        Figure("Alias", report.alias_bytes, "outputs in arguments’ memory"),
        Figure("Temporaries", report.temp_bytes, "allocated − arguments − new outputs"),
        Figure("Fragmentation", report.fragmentation_bytes, "allocated − peak"),
        Figure("Padding", report.padding_bytes, "tile padding at the peak"),
        Figure("Host memory", report.host_bytes, "offloaded"),
        Figure("Program code", report.code_bytes, code_hint),
    )


def _buffer_row(rank: int, buffer: Buffer, timeline: Timeline | None) -> BufferRow:
    start, width = charts.lifetime(buffer.start_index, buffer.end_index, timeline)
    shape = f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]"
    logical = buffer.logical_bytes
    return BufferRow(
        rank=rank,
        name=buffer.name,
        scope=buffer.scope,
        class_name=buffer.class_.replace("_", " "),
        css_class=charts.class_css(buffer.class_),
        module=buffer.module,
        module_inferred=buffer.module_inferred,
        phase=buffer.phase or "unknown",
        type=shape,
        layout=buffer.layout,
        logical_bytes=logical,
        padded_bytes=buffer.padded_bytes,
        padding_bytes=None if logical is None else buffer.padded_bytes - logical,
        padding_ratio=buffer.padded_bytes / logical if logical else None,
        source=None if buffer.class_ in _ARGUMENT_CLASSES else buffer.source,
        life_start=start,
        life_width=width,
        start_index=buffer.start_index,
        end_index=buffer.end_index,
        search=f"{buffer.scope} {buffer.name} {buffer.class_} {buffer.class_.replace('_', ' ')} {buffer.module} {shape}".lower(),
    )


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _peaks(report: Report) -> tuple[PeakRow, ...]:
    highest = report.peaks[0].live_bytes if report.peaks else 0
    return tuple(
        PeakRow(
            rank=rank,
            index=peak.index,
            live_bytes=peak.live_bytes,
            below_bytes=highest - peak.live_bytes,
            drop_bytes=peak.drop_bytes,
            module=peak.module,
            phase=peak.phase or "unknown",
            instruction=peak.instruction,
            largest=tuple(_buffer_row(place, buffer, report.timeline) for place, buffer in enumerate(peak.largest[:3], start=1)),
        )
        for rank, peak in enumerate(report.peaks, start=1)
    )


def _collectives(entries: Sequence[Collective]) -> tuple[CollectiveRow, ...]:
    """Largest on the wire first; what is not known comes before all, since it may be the largest."""
    largest = max((entry.wire_bytes or 0 for entry in entries), default=0)
    ordered = sorted(entries, key=lambda entry: (entry.wire_bytes is not None, -(entry.wire_bytes or 0), entry.kind))
    return tuple(
        CollectiveRow(
            entry=entry,
            axes="no whole axes" if entry.axes is None else " × ".join(entry.axes),
            phase=entry.phase or "unknown",
            origin={True: "the compiler", False: "the program", None: "unknown"}[entry.is_compiler_made],
            width=charts.percent(entry.wire_bytes or 0, largest),
        )
        for entry in ordered
    )


def _phases(timings: Timings) -> tuple[Phase, ...]:
    known = [(label, getattr(timings, name)) for name, label in PHASES.items() if getattr(timings, name) is not None]
    whole = timings.total_seconds or sum(seconds for _, seconds in known)
    return tuple(Phase(label, seconds, charts.percent(seconds, whole)) for label, seconds in known)


def _toolchain(report: Report) -> tuple[tuple[str, str], ...]:
    chain = report.toolchain
    if chain is None:
        return ()
    rows = [(name, getattr(chain, name) or "not installed") for name in ("jax", "jaxlib", "libtpu", "flax", "optax", "xprof", "extractor")]
    rows.append(("model source", chain.model_source[:16]))
    rows += [(name.replace("_", " "), str(value)) for name, value in chain.topology_arguments.items()]
    rows += [(name, str(value)) for name, value in chain.compiler_options.items()]
    return tuple(rows)
