"""What is known of a job of kind steps, for the API and the pages alike: its report, or what its events tell of it."""

from __future__ import annotations

from collections.abc import Iterable

from service.errors import NotFoundError
from service.records import TERMINAL, Event, Failure, Job
from service.steps.findings import Findings
from service.steps_records import StepsReport, StepsStatus
from service.storage.interface import Store


def find_steps_report(store: Store, job: Job) -> tuple[StepsReport, bool]:
    """The report, and whether it is final; of a job that runs, or whose worker died, as far as its last attempt came."""
    try:
        return store.get_steps_report(job.id), True
    except NotFoundError:
        events: list[Event] = []
        while more := store.list_events(job.id, after=events[-1].sequence if events else 0):
            events += more
    is_final = job.status in TERMINAL
    return report_from_events(events, status=StepsStatus.FAILED if is_final else None, failure=job.failure), is_final


def report_from_events(events: Iterable[Event], *, status: StepsStatus | None, failure: Failure | None) -> StepsReport:
    """The report as far as the events of a job's last attempt tell it."""
    findings = Findings()
    for event in events:
        if event.name == "claimed":
            findings.restart()
        elif event.name == "progress":
            findings.apply(event.data["name"], event.data["data"])
    return findings.report(status, failure)
