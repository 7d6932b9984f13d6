"""Runs real train steps here, without a server, and prints what they proved."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.compile.interface import ChildLimits, ProgressEvent
from service.records import FailureKind
from service.spec import Spec
from service.steps.interface import StepsRequest, StepsRunner
from service.steps_records import CheckStatus, MemoryComparison, StepsReport, StepsStatus
from service.units import UNKNOWN, format_bytes, format_count, format_parameters, format_seconds
from weighbridge import exits
from weighbridge.progress import Progress

_TITLES = {
    StepsStatus.OK: ("✓ every step ran and every check passed", "bold green"),
    StepsStatus.CHECKS_FAILED: ("✗ a check failed", "bold red"),
    StepsStatus.DOES_NOT_FIT: ("✗ does not fit these devices", "bold red"),
    StepsStatus.FAILED: ("✗ failed", "bold red"),
}
_MARKS = {CheckStatus.PASSED: ("✓", "green"), CheckStatus.FAILED: ("✗", "red"), CheckStatus.NOT_APPLICABLE: ("–", "dim")}


def run_steps(spec: Spec, runner: StepsRunner, *, limits: ChildLimits, errors: Console) -> StepsReport:
    """The report of `spec`'s steps, with progress on `errors`. On KeyboardInterrupt the child is killed and waited for first."""
    cancelled = threading.Event()
    with tempfile.TemporaryDirectory(prefix="weighbridge-") as scratch, Progress(("steps",), errors) as progress:
        request = StepsRequest(spec=spec.as_json(), work_dir=str(Path(scratch) / "steps"))
        with ThreadPoolExecutor(max_workers=1) as pool:
            future = pool.submit(
                runner,
                request,
                limits=limits,
                on_event=lambda event: tell(progress, event),
                is_cancelled=cancelled.is_set,
            )
            try:
                report = future.result()
            except BaseException:
                cancelled.set()
                raise
        progress.finished("steps", report.status.value.replace("_", " "))
    return report


def tell(progress: Progress, event: ProgressEvent) -> None:
    """Show one event of a steps child: a phase, the loss of a step, the outcome of a check."""
    data: dict[str, Any] = dict(event.data)
    if event.name == "step":
        for step in data["steps"]:
            loss = step["metrics"]["loss"]
            progress.phase("steps", f"step {step['step']}, loss {'not finite' if loss is None else format(loss, '.6f')}", event.seconds)
    elif event.name == "check":
        progress.phase("steps", f"check {str(data.get('name')).replace('_', ' ')}: {data.get('status')}", event.seconds)
    elif event.name != "known":
        progress.phase("steps", event.name, event.seconds)


def exit_code(report: StepsReport) -> int:
    """0 everything passed; 1 a check failed or the devices are too small; 3 failed; 5 timed out."""
    if report.failure is not None and report.failure.kind == FailureKind.KILLED_WALL:
        return exits.EXIT_TIMED_OUT
    return {
        StepsStatus.OK: exits.EXIT_FITS,
        StepsStatus.CHECKS_FAILED: exits.EXIT_DOES_NOT_FIT,
        StepsStatus.DOES_NOT_FIT: exits.EXIT_DOES_NOT_FIT,
        StepsStatus.FAILED: exits.EXIT_FAILED,
    }[report.status]


def print_steps(console: Console, scenario: str, report: StepsReport) -> None:
    """Verdict, steps, checks and memory, as a person reads them."""
    title, style = _TITLES[report.status]
    console.print(Text.assemble((scenario, "bold"), "  ", (_subject(report), "dim")), soft_wrap=True)
    console.print(Text(title, style=style))
    if report.failure is not None:
        console.print(Text(report.failure.message), soft_wrap=True)
        if report.failure.log_tail:
            console.print(Text("\nEnd of the log", style="dim"))
            console.print(Text(report.failure.log_tail.rstrip()), soft_wrap=True)
    sections: list[RenderableType] = []
    if report.steps:
        sections.append(_steps(report))
    if report.checks:
        sections.append(_checks(report))
    if report.memory is not None:
        sections.append(_memory(report.memory))
    for section in sections:
        console.print()
        console.print(section)
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _subject(report: StepsReport) -> str:
    words = []
    if report.devices is not None:
        words.append(f"{report.devices.num_devices} × {report.devices.kind}")
    axes = [f"{name} {size}" for name, size in report.mesh.items() if size > 1]
    if axes:
        words.append(" × ".join(axes))
    if report.num_parameters is not None:
        words.append(f"{format_parameters(report.num_parameters)} parameters")
    return " · ".join(words)


def _table() -> Table:
    return Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")


def _steps(report: StepsReport) -> Group:
    table = _table()
    for name in ("Step", "Loss", "MTP loss", "Time", "Tokens/s", "Dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for step in report.steps:
        metrics = step.metrics
        dropped = max((step.discarded or metrics).dropped_fraction, default=0.0)
        notes = ["warm-up"] if step.is_warmup else []
        if step.was_replayed:
            notes.append("overflowed, replayed dropless")
        if not step.flags_equal:
            notes.append("devices disagreed on the overflow flag")
        table.add_row(
            str(step.step),
            _loss(metrics.loss),
            _loss(metrics.mtp_loss),
            format_seconds(step.seconds),
            format_count(round(step.tokens_per_second)),
            f"{100 * dropped:.2f} %",
            Text(", ".join(notes), style="dim"),
        )
    times = report.times
    title = "Steps"
    if times is not None:
        title += (
            f": median {format_seconds(times.median_seconds)}, 90 % within {format_seconds(times.p90_seconds)}, "
            f"{format_count(round(times.tokens_per_second))} tokens/s, {report.num_replays} of {len(report.steps)} replayed"
        )
    return Group(Text(title, style="dim"), table)


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.8f}"


def _checks(report: StepsReport) -> Group:
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("Check", no_wrap=True)
    table.add_column("Deviation", justify="right", no_wrap=True)
    table.add_column("Tolerance", justify="right", no_wrap=True)
    table.add_column("What was found", overflow="fold")
    for check in report.checks:
        mark, style = _MARKS[check.status]
        deviation = "" if check.deviation is None else f"{check.deviation:.3g}"
        tolerance = "" if check.tolerance is None else f"{check.tolerance:.3g}"
        table.add_row(Text(mark, style=style), check.name.replace("_", " "), deviation, tolerance, Text(check.detail or check.claim))
    return Group(Text("Checks", style="dim"), table)


def _memory(memory: MemoryComparison) -> Text:
    source = {
        "allocator": "by the allocator",
        "host_rss_growth": "growth of the child's resident memory over its devices: the host's own noise is in it",
        "unknown": "the backend does not tell",
    }
    ratio = "" if memory.ratio is None else f", {memory.ratio:.3f} of it"
    return Text(
        f"Memory per device: predicted {format_bytes(memory.predicted_bytes)}, "
        f"measured {format_bytes(memory.measured_bytes)} ({source[memory.source]}){ratio}; "
        f"{memory.num_states_held} states of {format_bytes(memory.state_bytes)} held"
    )
