"""Prints a report as tables a person can read; the same words and numbers as the job page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.breakdown import module_tree
from service.errors import Problem
from service.records import BUFFER_CLASSES, Pair, Report, ReportStatus, Timings
from service.units import UNKNOWN, format_bytes, format_count, format_parameters, format_seconds, format_share
from service.verdict_text import TITLES, advice, verdict_sentence

_STYLES = {
    ReportStatus.OK: "bold green",
    ReportStatus.DOES_NOT_FIT: "bold red",
    ReportStatus.UNKNOWN: "bold yellow",
    ReportStatus.FAILED: "bold red",
}
_MARKS = {ReportStatus.OK: "✓", ReportStatus.DOES_NOT_FIT: "✗", ReportStatus.UNKNOWN: "?", ReportStatus.FAILED: "✗"}
_SMALLEST_MODULE = 0.002
"""Share of the peak below which a module is not listed."""
_MOST_COLLECTIVES = 8
_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_reports(console: Console, scenario: str, reports: Mapping[str, Report], *, num_buffers: int, pair: Pair | None = None) -> None:
    """Every program of a spec, under one head line with what was weighed, and the pair where they are one."""
    first = next(iter(reports.values()))
    console.print(Text.assemble((scenario, "bold"), "  ", (_subject(first), "dim")), soft_wrap=True)
    for report in reports.values():
        console.print()
        print_report(console, report, num_buffers=num_buffers)
    if pair is not None:
        console.print()
        console.print(_pair(pair), soft_wrap=True)


def print_report(console: Console, report: Report, *, num_buffers: int) -> None:
    """One program: verdict, figures, what the peak is made of, the largest buffers, and where the answer comes from."""
    style = _STYLES[report.status]
    console.print(
        Text.assemble(
            (f"{report.program}  ", "bold"),
            (f"{_MARKS[report.status]} {TITLES[report.status].lower()}", style),
            f"  {verdict_sentence(report)}",
        ),
        soft_wrap=True,
    )
    if begin := advice(report):
        console.print(Text(f"  {begin}"), soft_wrap=True)
    if report.allocated_bytes is not None and report.capacity_bytes is not None:
        console.print(_gauge(report, min(console.width, 100)))
    if report.failure is not None and report.failure.log_tail:
        console.print(Text("\nEnd of the log", style="dim"))
        console.print(Text(report.failure.log_tail.rstrip()), soft_wrap=True)
    for section in _sections(console.width, report, num_buffers):
        console.print()
        console.print(section)


def _sections(width: int, report: Report, num_buffers: int) -> Iterator[RenderableType]:
    """What the report has, in the order of the job page."""
    if report.findings:
        yield _findings(report)
    if report.peak_bytes is not None:
        yield _figures(report)
        classes = _breakdown("Class at the peak", _class_rows(report), report.peak_bytes)
        modules = _breakdown("Module at the peak", _module_rows(report), report.peak_bytes)
        yield _side_by_side(width, classes, modules)
    if report.buffers and num_buffers:
        yield _buffers(report, num_buffers)
    if len(report.peaks) > 1:
        yield _peaks(report)
    if report.collectives:
        yield _collectives(report)
    if report.halo:
        yield _halo(report)
    yield _provenance(report)


def print_problems(console: Console, source: str, problems: Sequence[Problem], *, undone: str = "nothing was compiled") -> None:
    """Everything wrong with a spec: where, what stands there, why it cannot be, what would be legal; and what was therefore not done."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    console.print(Text.assemble((f"{source}: ", "bold"), (f"{count}, {undone}", "bold red")), soft_wrap=True)
    for problem in problems:
        console.print(Text.assemble("\n  ", (problem.path or "(whole spec)", "bold"), f"  {problem.message}"), soft_wrap=True)
        if problem.value is not None:
            console.print(Text.assemble(("    given  ", "dim"), str(problem.value).replace("\n", "\n           ")), soft_wrap=True)
        if problem.legal:
            console.print(Text.assemble(("    legal  ", "dim"), problem.legal), soft_wrap=True)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` cells, to an eighth of a cell; anything above zero shows."""
    eighths = max(1 if share > 0 else 0, round(min(max(share, 0.0), 1.0) * width * 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _subject(report: Report) -> str:
    topology = report.topology
    words = []
    if topology:
        slices = f"{topology['num_slices']} slices of " if topology.get("num_slices", 1) > 1 else ""
        shape = str(topology.get("shape", "")).replace("x", "×")
        words += [f"{slices}{topology.get('name')}", shape, f"{topology.get('num_chips')} chips", f"{topology.get('num_devices')} devices"]
    if report.num_parameters is not None:
        words.append(f"{format_parameters(report.num_parameters)} parameters")
    return " · ".join(words)


def _gauge(report: Report, width: int) -> Text:
    """Allocated bytes against the capacity on one line: filled, free, and what is beyond the mark."""
    assert report.allocated_bytes is not None
    assert report.capacity_bytes is not None
    cells = width - 3  # the indent, and the mark of the capacity
    full = max(report.allocated_bytes, report.capacity_bytes)
    limit = round(cells * report.capacity_bytes / full)
    used = max(1, round(cells * report.allocated_bytes / full))
    text = Text("  ")
    text.append("━" * min(used, limit), style="green" if report.status == ReportStatus.OK else "yellow")
    text.append("─" * max(0, limit - used), style="dim")
    text.append("┃", style="bold")
    text.append("━" * max(0, used - limit - 1), style="red")
    return text


def _figures(report: Report) -> Table:
    left = (
        ("Peak", report.peak_bytes),
        ("Allocated", report.allocated_bytes),
        ("Capacity", report.capacity_bytes),
        ("Head-room", report.headroom_bytes),
    )
    middle = (
        ("Arguments", report.argument_bytes),
        ("Outputs", report.output_bytes),
        ("Alias", report.alias_bytes),
        ("Temporaries", report.temp_bytes),
    )
    right = (
        ("Fragmentation", report.fragmentation_bytes),
        ("Padding", report.padding_bytes),
        ("Host", report.host_bytes),
        ("Code", report.code_bytes),
    )
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(style="dim")
        table.add_column(justify="right")
    for row in zip(left, middle, right, strict=True):
        cells: list[RenderableType] = []
        for index, (label, num_bytes) in enumerate(row):
            cells += [label, Text(format_bytes(num_bytes), style="bold" if index == 0 else "")]
        table.add_row(*cells)
    return table


def _class_rows(report: Report) -> list[tuple[str, int]]:
    ranks = {name: rank for rank, name in enumerate(BUFFER_CLASSES)}
    ordered = sorted(report.classes.items(), key=lambda item: ranks.get(item[0], len(ranks)))
    return [(name.replace("_", " "), num_bytes) for name, num_bytes in ordered]


def _module_rows(report: Report) -> list[tuple[str, int]]:
    """The module tree, indented; rows too small to matter are left to the page."""
    smallest = (report.peak_bytes or 0) * _SMALLEST_MODULE
    return [("  " * row.depth + row.name, row.num_bytes) for row in module_tree(report.modules) if row.num_bytes >= smallest]


def _breakdown(title: str, rows: list[tuple[str, int]], whole: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column(title)
    table.add_column("", width=16)
    table.add_column("Bytes", justify="right")
    table.add_column("Share", justify="right")
    longest = max((num_bytes for _, num_bytes in rows), default=0)
    for name, num_bytes in rows:
        filled = Text(bar(num_bytes / longest if longest else 0.0, 16), style="cyan")
        table.add_row(Text(name), filled, format_bytes(num_bytes), format_share(num_bytes / whole) if whole else "")
    return table


def _side_by_side(width: int, left: Table, right: Table) -> RenderableType:
    if not left.row_count:
        return right
    if width < 130:
        return Group(left, Text(), right)
    grid = Table.grid(padding=(0, 6))
    grid.add_row(left, right)
    return grid


def _buffers(report: Report, num_buffers: int) -> Group:
    shown = report.buffers[:num_buffers]
    total = "" if report.num_buffers_at_peak is None else f" of {format_count(report.num_buffers_at_peak)}"
    table = _table()
    table.add_column("Size", justify="right", no_wrap=True)
    table.add_column("Padding", justify="right", no_wrap=True)
    table.add_column("Class", no_wrap=True)
    table.add_column("Shape", overflow="fold")
    table.add_column("Scope", overflow="fold", ratio=1)
    for buffer in shown:
        padding = (
            UNKNOWN
            if buffer.logical_bytes is None
            else ""
            if buffer.padded_bytes == buffer.logical_bytes
            else format_bytes(buffer.padded_bytes - buffer.logical_bytes)
        )
        where = buffer.scope or f"{buffer.module} (inferred)" if buffer.module_inferred else buffer.scope
        table.add_row(
            format_bytes(buffer.padded_bytes),
            padding,
            buffer.class_.replace("_", " "),
            Text(f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]"),
            Text(where or buffer.name),
        )
    return _titled(f"Largest {len(shown)}{total} buffers at the peak", table)


def _pair(pair: Pair) -> Text:
    """Whether a step that replays dropped tokens fits: both programs, with the state that neither donates."""
    answer, style = {True: ("✓ fit", "bold green"), False: ("✗ do not fit", "bold red"), None: ("? not known to fit", "bold yellow")}[
        pair.fits
    ]
    ahead = {True: "fits", False: "does not fit", None: "is not known to fit"}[pair.fits_with_lookahead]
    if pair.only_lookahead_is_too_much:
        ahead += "; without it the pair does [steps.look_ahead: 0]"
    return Text.assemble(
        ("pair  ", "bold"),
        (answer, style),
        f"  the worse is {pair.worse_program or UNKNOWN}, head-room {format_bytes(pair.headroom_bytes)}, "
        f"with {format_bytes(pair.state_bytes)} of undonated state\n",
        f"      one step ahead of the overflow flag needs {format_bytes(pair.lookahead_allocated_bytes)}, which {ahead}\n",
        f"      expected step time: {pair.retry_cost}; running dropless always is cheaper above {pair.break_even}",
        *_step_costs(pair),
    )


def _step_costs(pair: Pair) -> Iterator[str]:
    """The formulas with the measured times in them."""
    if pair.break_even_probability is None:
        return
    costs = ", ".join(f"{format_seconds(cost.seconds)} at {cost.overflow_probability:.0%}" for cost in pair.step_costs)
    yield f"\n      measured: {costs}; dropless always takes {format_seconds(pair.dropless_seconds)}, "
    yield f"cheaper above {pair.break_even_probability:.1%} of overflowing steps"


def _findings(report: Report) -> Text:
    text = Text("Findings", style="dim")
    for finding in report.findings:
        size = "" if finding.bytes is None else f" ({format_bytes(finding.bytes)})"
        text.append(f"\n! {finding.message}{size}", style="not dim yellow")
        field = "" if finding.spec_field is None else f" [{finding.spec_field}]"
        text.append(f"\n  {finding.suggestion}{field}", style="not dim")
    return text


def _peaks(report: Report) -> Group:
    table = _table()
    for name in ("In use", "Below the peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Module")
    table.add_column("Phase")
    table.add_column("Largest there")
    highest = report.peaks[0].live_bytes
    for peak in report.peaks[1:6]:
        largest = peak.largest[0] if peak.largest else None
        shown = "" if largest is None else f"{format_bytes(largest.padded_bytes)} {largest.dtype}[{','.join(map(str, largest.shape))}]"
        table.add_row(
            format_bytes(peak.live_bytes), format_bytes(highest - peak.live_bytes), peak.module, peak.phase or UNKNOWN, Text(shown)
        )
    return _titled("The next peaks: what is left once the higher ones are fixed", table)


def _collectives(report: Report) -> Group:
    totals = report.collective_totals
    title = "Collectives per step and device"
    if totals is not None:
        title += (
            f": {format_count(totals.per_step_count)}, {format_bytes(totals.ici_wire_bytes)} over ICI, "
            f"{format_bytes(totals.dcn_wire_bytes)} over DCN, at least {format_seconds(totals.link_seconds)} of link time"
        )
    table = _table()
    table.add_column("On the wire", justify="right", no_wrap=True)
    table.add_column("Payload", justify="right", no_wrap=True)
    table.add_column("Per step", justify="right", no_wrap=True)
    table.add_column("Kind", no_wrap=True)
    table.add_column("Over")
    table.add_column("Module")
    table.add_column("Phase")
    # What is not known comes first, since it may be the largest.
    ordered = sorted(report.collectives, key=lambda entry: (entry.wire_bytes is not None, -(entry.wire_bytes or 0)))
    for entry in ordered[:_MOST_COLLECTIVES]:
        axes = "no whole axes" if entry.axes is None else " × ".join(entry.axes)
        table.add_row(
            format_bytes(entry.wire_bytes),
            format_bytes(entry.payload_bytes),
            format_count(entry.per_step_count),
            entry.kind,
            axes if entry.link == "ici" else f"{axes} (DCN)",
            entry.module,
            entry.phase or UNKNOWN,
        )
    left = len(ordered) - _MOST_COLLECTIVES
    if left > 0:
        rest = [entry.wire_bytes for entry in ordered[_MOST_COLLECTIVES:]]
        table.add_row(format_bytes(sum(size or 0 for size in rest)), "", "", Text(f"{left} smaller", style="dim"), "", "", "")
    return _titled(title, table)


def _halo(report: Report) -> Group:
    table = _table()
    table.add_column("Exchange", no_wrap=True)
    table.add_column("Phase", no_wrap=True)
    for name in ("Payload", "Closed form", "On the wire", "Gathering instead"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Verdict")
    for use in report.halo:
        expected = "none" if use.expected_payload_bytes is None else format_bytes(use.expected_payload_bytes)
        table.add_row(
            use.name.replace("_", " "),
            use.phase or UNKNOWN,
            format_bytes(use.payload_bytes),
            expected,
            format_bytes(use.wire_bytes),
            format_bytes(use.gather_bytes),
            use.verdict,
        )
    return _titled("Halo between context ranks, per step and device", table)


def _table() -> Table:
    return Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")


def _titled(title: str, table: Table) -> Group:
    """A table under its title, which unlike rich's own may be wider than the table."""
    return Group(Text(title, style="dim"), table)


def _provenance(report: Report) -> Text:
    text = Text(style="dim")
    phases = [
        f"{name.removesuffix('_seconds').replace('_', ' ')} {format_seconds(getattr(report.timings, name))}"
        for name in Timings.model_fields
        if getattr(report.timings, name) is not None
    ]
    if phases:
        text.append("Took   " + " · ".join(phases) + "\n")
    if report.child_peak_rss_bytes is not None:
        text.append(f"Child  {format_bytes(report.child_peak_rss_bytes)} of memory at most, depth {report.depth}\n")
    chain = report.toolchain
    if chain is not None:
        text.append(
            "With   " + " · ".join(f"{name} {getattr(chain, name)}" for name in ("jax", "jaxlib", "libtpu", "flax", "optax", "extractor"))
        )
    for warning in report.warnings:
        text.append(f"\n{warning}", style="yellow")
    text.rstrip()
    return text
