"""What the page of a steps job shows beside what every job's page has: curves over the steps, checks, memory and expert load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.api.charts import Tick, percent
from service.api.contexts import Verdict
from service.api.steps_report import find_steps_report
from service.records import Event, Job
from service.steps_records import CheckResult, CheckStatus, MemoryComparison, StepRecord, StepsReport, StepsStatus
from service.storage.interface import Store
from service.units import UNKNOWN, format_bytes, format_count, format_parameters, format_seconds

STATUS_VERDICTS = {
    StepsStatus.OK: Verdict("fits", "Passed"),
    StepsStatus.CHECKS_FAILED: Verdict("over", "A check failed"),
    StepsStatus.DOES_NOT_FIT: Verdict("over", "Does not fit"),
    StepsStatus.FAILED: Verdict("failed", "Failed"),
}
CHECK_VERDICTS = {
    CheckStatus.PASSED: Verdict("fits", "passed"),
    CheckStatus.FAILED: Verdict("failed", "failed"),
    CheckStatus.NOT_APPLICABLE: Verdict("cancelled", "does not apply"),
}
_MEMORY_SOURCES = {
    "allocator": "peak bytes in use, by the devices’ allocator",
    "host_rss_growth": "growth of the child’s resident memory over its devices: the host’s own noise is in it",
    "unknown": "the backend does not tell",
}
_TOP_MARGIN = 0.08
_MOST_LINES = 200
"""Steps listed in the table; the curves show all."""


@dataclass(frozen=True)
class Fact:
    """One figure of the headline row, as text."""

    label: str
    value: str
    hint: str
    strong: bool = False


@dataclass(frozen=True)
class CurveLine:
    """One series as an SVG path in a box of 1000 by 240."""

    name: str
    css_class: str
    path: str
    last: str
    """The newest value."""


@dataclass(frozen=True)
class Curve:
    """One quantity over the steps."""

    title: str
    caption: str
    lines: tuple[CurveLine, ...]
    ticks: tuple[Tick, ...]
    """Values, by their distance from the top in percent."""
    marks: tuple[float, ...]
    """Replayed steps, from the left in percent."""
    warmup_width: float
    last_step: int


@dataclass(frozen=True)
class StepRow:
    """One step in the table."""

    record: StepRecord
    loss: str
    mtp_loss: str
    note: str


@dataclass(frozen=True)
class SeriesRow:
    """One series that a check compared."""

    name: str
    values: str


@dataclass(frozen=True)
class CheckRow:
    """One check with its numbers."""

    check: CheckResult
    title: str
    verdict: Verdict
    deviation: str
    tolerance: str
    series: tuple[SeriesRow, ...]


@dataclass(frozen=True)
class LoadRow:
    """The load of each expert of one layer, as heights in percent of the layer's largest."""

    name: str
    heights: tuple[tuple[float, float, float], ...]
    """Left edge, width and height of each expert's bar, in percent."""
    mean_height: float
    spread: float
    """Largest over mean."""


@dataclass(frozen=True)
class StepsView:
    """steps.html, which job.html includes."""

    report: StepsReport
    verdict: Verdict | None
    """None while the job runs."""
    sentence: str
    facts: tuple[Fact, ...]
    curves: tuple[Curve, ...]
    checks: tuple[CheckRow, ...]
    memory_source: str
    load: tuple[LoadRow, ...]
    rows: tuple[StepRow, ...]
    num_hidden_rows: int
    reduction: tuple[tuple[str, str, str], ...]


def find_steps(store: Store, job: Job) -> StepsView:
    """What is known of a steps job: its report, or, where none came (yet, or ever), what its events tell."""
    report, is_final = find_steps_report(store, job)
    return steps_view(report, is_final=is_final)


def steps_sentence(spec: Mapping[str, Any]) -> str:
    """What runs where, for the page's head: `12 real steps of deepseek-custom on cpu:8`."""
    steps, preset = spec.get("steps") or {}, (spec.get("model") or {}).get("preset", "")
    count = steps.get("warmup_steps", 0) + steps.get("num_steps", 0)
    reduced = ", tiny of same shape," if steps.get("model") == "tiny-of-same-shape" else ""
    return f"{count} real steps of {preset}{reduced} on {steps.get('devices', '')}"


def steps_view(report: StepsReport, *, is_final: bool) -> StepsView:
    """What is shown of a steps report; `is_final` where nothing will come after it."""
    steps = report.steps
    return StepsView(
        report=report,
        verdict=STATUS_VERDICTS[report.status] if is_final else None,
        sentence=_sentence(report, is_final=is_final),
        facts=_facts(report, is_final=is_final),
        curves=_curves(steps),
        checks=tuple(map(_check_row, report.checks)),
        memory_source="" if report.memory is None else _MEMORY_SOURCES[report.memory.source],
        load=_load_rows(report),
        rows=tuple(map(_step_row, steps[-_MOST_LINES:])),
        num_hidden_rows=max(0, len(steps) - _MOST_LINES),
        reduction=tuple((path, before, after) for path, (before, after) in sorted(report.reduction.items())),
    )


def _sentence(report: StepsReport, *, is_final: bool) -> str:
    if report.failure is not None:
        return report.failure.message
    if not is_final and not report.steps and not report.checks:
        return "no step has ended yet"
    passed = sum(check.status is CheckStatus.PASSED for check in report.checks)
    failed = [check.name.replace("_", " ") for check in report.checks if check.status is CheckStatus.FAILED]
    said = f"{len(report.steps)} steps, {report.num_replays} replayed; {passed} checks passed"
    return said + (f", failed: {', '.join(failed)}" if failed else "")


_NOT_YET = "—"


def _facts(report: StepsReport, *, is_final: bool) -> tuple[Fact, ...]:
    """The figures of the headline row; what a running job has not come to is not called unknown."""
    times, memory, devices = report.times, report.memory, report.devices
    rate = report.overflow_rate
    mode = f"retry, look-ahead {report.look_ahead}" if report.retry else "no retry"
    retry = report.retry_seconds
    replay = (Fact("A replay adds", format_seconds(retry[1]), f"to a step of {format_seconds(retry[0])}"),) if retry else ()
    last = _number(report.steps[-1].metrics.loss) if report.steps else UNKNOWN
    of_steps = f"of the steps; {mode}" if report.steps else "of the steps"
    facts = (
        Fact("Last loss", last, f"after {len(report.steps)} steps", strong=True),
        Fact("Median step", format_seconds(times.median_seconds if times else None), "warm-up apart", strong=True),
        Fact("Tokens/s", format_count(round(times.tokens_per_second) if times else None), "all devices together", strong=True),
        Fact("Overflow", UNKNOWN if rate is None else f"{100 * rate:.0f} %", of_steps, strong=True),
        Fact("Predicted", format_bytes(memory.predicted_bytes if memory else None), "peak per device, ahead of time"),
        Fact("Measured", format_bytes(memory.measured_bytes if memory else None), _ratio(memory)),
        Fact("Devices", f"{devices.num_devices} × {devices.kind}" if devices else UNKNOWN, _axes(report)),
        Fact("Parameters", format_parameters(report.num_parameters), "of the model that ran"),
        *replay,
    )
    # The comparison of memory comes whole: once it is there, what is unknown in it stays so.
    return tuple(
        replace(fact, value=_NOT_YET, hint="not yet")
        if not is_final and fact.value == UNKNOWN and not (fact.label == "Measured" and memory is not None)
        else fact
        for fact in facts
    )


def _ratio(memory: MemoryComparison | None) -> str:
    if memory is None:
        return "nothing was measured"
    return "not told by the backend" if memory.ratio is None else f"{memory.ratio:.3f} × the prediction"


def _axes(report: StepsReport) -> str:
    if not report.mesh:
        return "no mesh"
    return " × ".join(f"{name} {size}" for name, size in report.mesh.items() if size > 1) or "one device"


def _curves(steps: Sequence[StepRecord]) -> tuple[Curve, ...]:
    if len(steps) < 2:
        return ()
    losses = {
        "total": ("c-parameters", [step.metrics.loss for step in steps]),
        "main": ("c-saved-activations", [step.metrics.main_loss for step in steps]),
        "MTP": ("c-gradients", [step.metrics.mtp_loss for step in steps]),
    }
    dropped = [max((step.discarded or step.metrics).dropped_fraction, default=0.0) * 100 for step in steps]
    spread = [max(step.metrics.load_spread, default=None) for step in steps]
    curves = (
        _curve("Loss", "per token; dashed lines mark replayed steps", losses, steps, "{:.4f}"),
        _curve("Step time", "seconds, replay included; the shaded steps are warm-up", _one([s.seconds for s in steps]), steps, "{:.3f} s"),
        _curve(
            "Dropped by the candidate", "% of the assignments, in the layer that drops most", _one(dropped), steps, "{:.2f} %", zero=True
        ),
        _curve("Expert load", "largest over mean, in the layer that is least balanced", _one(spread), steps, "{:.2f}×"),
    )
    return tuple(curve for curve in curves if curve is not None)


def _one(values: Sequence[float | None]) -> dict[str, tuple[str, Sequence[float | None]]]:
    return {"": ("c-parameters", values)}


def _curve(
    title: str,
    caption: str,
    series: Mapping[str, tuple[str, Sequence[float | None]]],
    steps: Sequence[StepRecord],
    text: str,
    *,
    zero: bool = False,
) -> Curve | None:
    """The series on one scale; None where no value is known."""
    known = [value for _, values in series.values() for value in values if value is not None]
    if not known:
        return None
    low, high = (min(0.0, *known) if zero else min(known)), max(known)
    # A flat line still needs a scale: of one around zero, of a hundredth of the value elsewhere.
    margin = (high - low) * _TOP_MARGIN or abs(high) * 0.01 or 1.0
    bottom, top = (low if zero else low - margin), high + margin
    last = max(1, len(steps) - 1)
    num_warmup = sum(step.is_warmup for step in steps)
    return Curve(
        title=title,
        caption=caption,
        lines=tuple(
            CurveLine(name, css_class, _path(values, last, bottom, top), _newest(values, text))
            for name, (css_class, values) in series.items()
            if any(value is not None for value in values)
        ),
        ticks=tuple(
            Tick(round(100 - percent(value - bottom, top - bottom), 3), text.format(value)) for value in _round_values(bottom, top)
        ),
        marks=tuple(percent(index, last) for index, step in enumerate(steps) if step.was_replayed),
        warmup_width=percent(max(0, min(num_warmup, len(steps)) - 0.5), last) if num_warmup else 0.0,
        last_step=steps[-1].step,
    )


def _path(values: Sequence[float | None], last: int, bottom: float, top: float) -> str:
    """Straight lines between known values; a gap where one is not known."""
    parts, pen = [], "M"
    for index, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{10 * percent(index, last):.2f} {240 - 2.4 * percent(value - bottom, top - bottom):.2f}")
        pen = "L"
    return "".join(parts)


def _newest(values: Sequence[float | None], text: str) -> str:
    known = [value for value in values if value is not None]
    return text.format(known[-1]) if known else "unknown"


def _round_values(low: float, high: float, most: int = 4) -> list[float]:
    """A few round values between two numbers."""
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _check_row(check: CheckResult) -> CheckRow:
    return CheckRow(
        check=check,
        title=(check.name[0].upper() + check.name[1:]).replace("_", " ").replace("Mtp", "MTP"),
        verdict=CHECK_VERDICTS[check.status],
        deviation="" if check.deviation is None else f"{check.deviation:.2e}",
        tolerance="" if check.tolerance is None else "equal bits" if check.tolerance == 0 else f"{check.tolerance:.0e}",
        series=tuple(SeriesRow(name.replace("_", " "), "  ".join(map(_number, values))) for name, values in check.numbers.items()),
    )


def _load_rows(report: StepsReport) -> tuple[LoadRow, ...]:
    rows = []
    for layer, load in enumerate(report.expert_load):
        largest, mean = max(max(load), 1), sum(load) / len(load)
        bars = tuple((percent(i, len(load)), percent(0.8, len(load)), percent(count, largest)) for i, count in enumerate(load))
        rows.append(LoadRow(f"MoE layer {layer}", bars, percent(mean, largest), largest / max(mean, 1e-9)))
    return tuple(rows)


def _step_row(record: StepRecord) -> StepRow:
    notes = ["warm-up"] if record.is_warmup else []
    if record.discarded is not None:
        dropped = max(record.discarded.dropped_fraction, default=0.0)
        notes.append(f"candidate dropped {100 * dropped:.2f} % and gave {_number(record.discarded.loss)}; replayed")
    if record.num_wasted:
        notes.append(f"{record.num_wasted} step ahead thrown away")
    if not record.flags_equal:
        notes.append("devices held different flags")
    return StepRow(record, _number(record.metrics.loss), _number(record.metrics.mtp_loss), "; ".join(notes))


def _number(value: float | None) -> str:
    """Every digit that float32 tells apart; what is not finite is said to be so."""
    return "not finite" if value is None else f"{value:.9g}"


def event_detail(event: Event) -> str | None:
    """What a progress event of a steps job says in the log; None for one that is not worth a line."""
    name, data = event.data.get("name"), event.data.get("data") or {}
    if name == "known":
        return None
    if name == "step":
        last = data["steps"][-1]
        return f"step {last['step']}, loss {_number(last['metrics']['loss'])}"
    if name == "check":
        return f"{data['name'].replace('_', ' ')}: {data['status'].replace('_', ' ')}"
    return f"{event.data.get('seconds', 0):.1f} s"
