"""Jobs, reports and a clock for tests of the store and of what stands on it, in small sizes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from service.records import GitFacts, Report, ReportStatus, Timings
from service.storage.interface import NewJob


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 5, 7, 11, 13, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def new_job(identity: str = "a", *, scenario: str = "tiny-v5e-4", programs: tuple[str, ...] = ("candidate",), **fields: object) -> NewJob:
    defaults: dict[str, object] = {
        "scenario": scenario,
        "spec": {"scenario": scenario, "mesh": {"fsdp": 2, "context": 3}},
        "spec_hash": identity * 7,
        "identity": identity,
        "programs": programs,
        "child_memory_bytes": 700,
        "git": GitFacts(project="looms", commit_sha="c0ffee", ancestors=("beef", "f00d")),
    }
    return NewJob.model_validate(defaults | fields)


def report_of(program: str = "candidate", *, peak_bytes: int = 1_300, status: ReportStatus = ReportStatus.OK) -> Report:
    return Report(
        program=program,
        status=status,
        depth="memory",
        topology={"name": "v5e-4", "shape": "2x2"},
        num_devices=4,
        capacity_bytes=17_000,
        peak_bytes=peak_bytes,
        allocated_bytes=peak_bytes + 11,
        headroom_bytes=17_000 - peak_bytes - 11,
        classes={"parameters": peak_bytes - 5, "batch": 5},
        timings=Timings(total_seconds=2.5),
        child_peak_rss_bytes=321,
    )
