"""Compares two answers in the shell: reports saved by `compile --out`, or jobs of a server by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.compile.diff import diff_reports
from service.diff_records import PartDiff, ReportDiff
from service.records import Report
from service.units import UNKNOWN, format_bytes, format_count, format_delta
from weighbridge.client import Client
from weighbridge.documents import DocumentError, read_document, to_json

_MOST_BUFFERS = 15
_MOST_ROWS = 12


@dataclass(frozen=True)
class Side:
    """One of the two: what it was called on the command line, its reports by program, its spec where that is known."""

    name: str
    reports: dict[str, Report]
    spec: dict[str, Any] | None


def load_side(name: str, server: str | None) -> Side:
    """A saved document where a file of this name exists, otherwise a job of the server.

    Raises:
        click.UsageError: neither, or nothing was measured.
        ClientError: the server does not answer.
    """
    path = Path(name)
    try:
        if path.is_file():
            return Side(name, *read_document(path))
    except DocumentError as error:
        raise click.UsageError(str(error)) from error
    if path.suffix == ".json" or len(path.parts) > 1:
        raise click.UsageError(f"there is no file {name}; give what `weighbridge compile --out FILE` saved, or the id of a job")
    with Client(server) as client:
        job = client.job(name)
        reports = [Report.model_validate(report) for report in client.reports(name)]
    if not reports:
        raise click.UsageError(f"job {name} has no report: it is {job['status']}")
    return Side(name, {report.program: report for report in reports}, job["spec"])


def compare_sides(base: Side, head: Side, program: str | None) -> dict[str, ReportDiff]:
    """The difference of each program that both sides have, or of `program` alone.

    Raises:
        click.UsageError: no program in common, or one that was not measured.
    """
    names = [name for name in base.reports if name in head.reports]
    if program is not None:
        names = [name for name in names if name == program]
    if len(base.reports) == len(head.reports) == 1 and program is None:
        # One program each: compared whatever they are called; the difference in name is shown.
        pairs = [(next(iter(head.reports)), next(iter(base.reports.values())), next(iter(head.reports.values())))]
    else:
        pairs = [(name, base.reports[name], head.reports[name]) for name in names]
    if not pairs:
        has = f"{base.name} has {', '.join(base.reports)}; {head.name} has {', '.join(head.reports)}"
        raise click.UsageError(f"no program {program or 'in common'} on both sides: {has}")
    try:
        return {name: diff_reports(before, after, base_spec=base.spec, head_spec=head.spec) for name, before, after in pairs}
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def compare_reports(console: Console, base: str, head: str, *, program: str | None, server: str | None, as_json: bool) -> None:
    """Print what changed from `base` to `head`."""
    sides = load_side(base, server), load_side(head, server)
    diffs = compare_sides(*sides, program)
    if as_json:
        content: Any = {"base": base, "head": head, "programs": {name: diff.model_dump(mode="json") for name, diff in diffs.items()}}
        click.echo(to_json(content), nl=False)
        return
    for name, diff in diffs.items():
        console.print(Text.assemble((name, "bold"), f"  {base} → {head}"), soft_wrap=True)
        for section in _sections(diff):
            console.print(section)
            console.print()


def _sections(diff: ReportDiff) -> Iterator[RenderableType]:
    totals = {part.name: part for part in diff.totals}
    peak, allocated = totals["peak_bytes"], totals["allocated_bytes"]
    yield Text.assemble("peak ", (_sentence(peak), _style(peak.delta)), "; allocated ", (_sentence(allocated), _style(allocated.delta)))
    if diff.incomparable:
        lines = [f"  {field.path}: {field.base} → {field.head}" for field in diff.incomparable]
        yield Text("Not the same machine or toolchain, so the change is not the program's alone:\n" + "\n".join(lines), style="yellow")
    if diff.spec:
        yield Text("Spec\n" + "\n".join(f"  {field.path}: {field.base} → {field.head}" for field in diff.spec))
    for finding in diff.findings:
        yield Text(f"{finding.message}; {finding.suggestion}", style="yellow")
    yield from _parts("Totals", [part for part in diff.totals if part.delta])
    yield from _parts("Classes at the peak", [part for part in diff.classes if part.delta])
    yield from _parts("Modules at the peak", [part for part in diff.modules if part.delta], label=str)
    changed = [buffer for buffer in diff.buffers if buffer.change != "equal"]
    if changed:
        table = _table("Change", "Was", "Is")
        for name in ("", "Shape", "Scope"):
            table.add_column(name, overflow="fold")
        for buffer in changed[:_MOST_BUFFERS]:
            shape = _shapes(buffer.dtype, buffer.base_shape, buffer.head_shape)
            table.add_row(
                Text(format_delta(buffer.delta_bytes), style=_style(buffer.delta_bytes)),
                format_bytes(buffer.base_bytes),
                format_bytes(buffer.head_bytes),
                buffer.change,
                Text(shape),
                Text(buffer.scope or ("buffers below the lists" if buffer.change == "unlisted" else buffer.module)),
            )
        yield Group(Text(f"Buffers that changed: {len(changed)}", style="dim"), table)
    if diff.collectives:
        table = _table("On the wire", "Was", "Is")
        for name in ("Per step", "Kind", "Over", "Module", "Phase"):
            table.add_column(name)
        for entry in diff.collectives[:_MOST_ROWS]:
            wire, runs = entry.wire_bytes, entry.per_step_count
            table.add_row(
                Text(format_delta(wire.delta), style=_style(wire.delta)),
                format_bytes(wire.base),
                format_bytes(wire.head),
                f"{format_count(runs.base)} → {format_count(runs.head)}",
                entry.kind,
                "no whole axes" if entry.axes is None else " × ".join(entry.axes),
                entry.module,
                entry.phase or UNKNOWN,
            )
        yield Group(Text("Collectives that changed", style="dim"), table)
    yield from _parts("Halo payload", [part for part in diff.halo if part.delta])


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _parts(title: str, parts: Sequence[PartDiff], *, label: Callable[[str], str] = _words) -> Iterator[RenderableType]:
    if not parts:
        return
    table = _table("Change", "Was", "Is")
    table.add_column("")
    for part in parts[:_MOST_ROWS]:
        is_count = part.name.startswith("num_")
        show = format_count if is_count else format_bytes
        delta = _signed(f"{part.delta:+,}") if is_count and part.delta is not None else format_delta(part.delta)
        # Less head-room is the change to look at, as more bytes are elsewhere.
        weight = -part.delta if part.delta and part.name == "headroom_bytes" else part.delta
        table.add_row(Text(delta, style=_style(weight)), show(part.base), show(part.head), label(part.name))
    yield Group(Text(title, style="dim"), table)


def _table(*numbers: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _sentence(part: PartDiff) -> str:
    if not part.delta:
        return f"{format_delta(part.delta)} ({format_bytes(part.head)})"
    share = _signed(f", {100 * part.delta / part.base:+.2f} %") if part.base else ""
    return f"{format_delta(part.delta)} ({format_bytes(part.base)} → {format_bytes(part.head)}{share})"


def _signed(number: str) -> str:
    """With the minus sign that the figures in bytes beside it have."""
    return number.replace("-", "−")


def _style(delta: int | None) -> str:
    return "" if not delta else "red" if delta > 0 else "green"


def _shapes(dtype: str, base: tuple[int, ...] | None, head: tuple[int, ...] | None) -> str:
    sides = [f"{dtype}[{','.join(map(str, shape))}]" for shape in (base, head) if shape is not None]
    return " → ".join(dict.fromkeys(sides))
