"""The sentence that says whether a program fits, in the words that pages and the command line share."""

from __future__ import annotations

from collections.abc import Sequence

from service.records import Report, ReportStatus
from service.units import format_bytes

TITLES = {
    ReportStatus.OK: "Fits",
    ReportStatus.DOES_NOT_FIT: "Does not fit",
    ReportStatus.UNKNOWN: "Undecided",
    ReportStatus.FAILED: "Failed",
}


def verdict_sentence(report: Report) -> str:
    """What is needed, what there is, and how far apart they are: `needs 41.50 GiB, 95.73 GiB available per device: 54.23 GiB free`."""
    if report.status == ReportStatus.FAILED:
        return report.failure.message if report.failure else "no report"
    sides = f"needs {format_bytes(report.allocated_bytes)}, {format_bytes(report.capacity_bytes)} available per device"
    if report.status == ReportStatus.UNKNOWN:
        return f"{sides}: too close to tell before code generation; weigh at depth full"
    if report.status == ReportStatus.DOES_NOT_FIT:
        over = None if report.headroom_bytes is None else -report.headroom_bytes
        if over is not None and over <= 0:
            return f"{sides} before program code, which takes the rest"
        return f"{sides}: {format_bytes(over)} too much"
    return f"{sides}: {format_bytes(report.headroom_bytes)} free"


def governing(reports: Sequence[Report]) -> Report | None:
    """The program that decides: a failed one before any other, then the most allocated; None of none."""
    return max(reports, key=lambda report: (report.status == ReportStatus.FAILED, report.allocated_bytes or 0), default=None)
