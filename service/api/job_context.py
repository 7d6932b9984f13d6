"""What the page of one job is made of: its state, the programs to choose from, the pair, what happened, files and provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.api.contexts import JOB_STATES, VERDICTS, Moment, Verdict, moment, topology_sentence
from service.api.phase_words import PHASE_WORDS, failure_title, phase_words, words_of
from service.api.program_context import ProgramView, program_view
from service.api.steps_context import StepsView, event_detail, steps_sentence
from service.records import TERMINAL, Event, Failure, Job, JobStatus, Pair, Report
from service.retry import weigh_retry
from service.spec_text import write_plain
from service.steps.interface import STEPS_PROGRAM
from service.storage.interface import Artifact
from service.units import format_bytes, format_parameters
from service.verdict_text import governing

_PAIR_VERDICTS: Mapping[bool | None, Verdict] = {
    True: Verdict("fits", "Both fit"),
    False: Verdict("over", "The pair does not fit"),
    None: Verdict("open", "The pair is undecided"),
}


@dataclass(frozen=True)
class ProgramTab:
    """A program of the job, to choose from."""

    name: str
    href: str
    is_selected: bool
    verdict: Verdict
    allocated_bytes: int | None


@dataclass(frozen=True)
class Step:
    """One thing that happened to a job, for its log."""

    at: Moment
    name: str
    detail: str


@dataclass(frozen=True)
class ArtifactLine:
    """A file kept of the job."""

    name: str
    href: str
    size_bytes: int


@dataclass(frozen=True)
class LiveState:
    """How far a job is that has not ended; the script changes it as events come."""

    states: tuple[tuple[str, Verdict, bool], ...]
    """The states it can be in, by name, and whether it is in that one."""
    phase: str
    words_json: str
    """Words by phase, for the script."""
    nobody: str
    """Why nobody takes it, where nobody will."""


@dataclass(frozen=True)
class JobContext:
    """job.html."""

    title: str
    job: Job
    state: Verdict
    subject: str
    """What was weighed on what: topology, chips, devices, and the parameters once they are known."""
    live: LiveState | None
    """None of a job that has ended."""
    last_event: int
    """Sequence of the newest event shown: the script listens from there on."""
    tabs: tuple[ProgramTab, ...]
    program: ProgramView | None
    real_steps: StepsView | None
    """Of a job of kind steps; such a job has no programs."""
    pair: Pair | None
    pair_verdict: Verdict | None
    failure: Failure | None
    failure_title: str
    steps: tuple[Step, ...]
    artifacts: tuple[ArtifactLine, ...]
    spec_yaml: str
    created: Moment | None
    started: Moment | None
    finished: Moment | None
    compare_href: str
    previous_href: str
    """The comparison with the scenario's answer before this one; empty where there is none."""


def job_context(
    job: Job,
    reports: Sequence[Report],
    *,
    program: str | None,
    events: Sequence[Event],
    artifacts: Sequence[Artifact],
    real_steps: StepsView | None = None,
    step_seconds: tuple[float, float] | None = None,
    previous: Job | None = None,
    nobody: str = "",
) -> JobContext:
    """The page of `job` with the report of `program`, or of the program that decides where none is named or it is not there.

    `step_seconds` are a candidate's and a dropless step's, as the reader measured them; `previous` is the scenario's answer before this
    job; `nobody` says why no worker will take a job that waits.
    """
    chosen = next((report for report in reports if report.program == program), None) or governing(reports)
    mesh = job.spec.get("mesh") or {}
    is_comparable = job.kind == "compile" and job.status == JobStatus.SUCCEEDED
    failure = job.failure if job.failure else chosen.failure if chosen else None
    pair = weigh_retry(job.spec, reports, step_seconds=step_seconds)
    return JobContext(
        title=job.scenario,
        job=job,
        state=JOB_STATES[job.status],
        subject=steps_sentence(job.spec) if job.kind == "steps" else _subject(mesh, chosen),
        live=None if job.status in TERMINAL else _live_state(job, events, real_steps, nobody),
        last_event=events[-1].sequence if events else 0,
        tabs=tuple(
            ProgramTab(
                report.program,
                f"/jobs/{job.id}?program={report.program}",
                report is chosen,
                VERDICTS[report.status],
                report.allocated_bytes,
            )
            for report in reports
        ),
        program=None if chosen is None else program_view(chosen),
        real_steps=real_steps,
        pair=pair,
        pair_verdict=None if pair is None else _PAIR_VERDICTS[pair.fits],
        failure=failure,
        failure_title="" if failure is None else failure_title(failure, _words_at_end(failure, reports, events, real_steps)),
        steps=tuple(step for event in events if (step := _step(event)) is not None),
        artifacts=tuple(ArtifactLine(entry.name, f"/api/v1/jobs/{job.id}/artifacts/{entry.name}", entry.size_bytes) for entry in artifacts),
        spec_yaml=write_plain(json.loads(json.dumps(dict(job.spec)))),
        created=moment(job.created_at),
        started=moment(job.started_at),
        finished=moment(job.finished_at),
        compare_href=f"/compare?head={job.id}" if is_comparable else "",
        previous_href=f"/compare?base={previous.id}&head={job.id}" if is_comparable and previous is not None else "",
    )


def _live_state(job: Job, events: Sequence[Event], real_steps: StepsView | None, nobody: str) -> LiveState:
    phase = ""
    if job.status is JobStatus.RUNNING:
        phase = phase_words(events) if real_steps is None else words_of(real_steps.report.phase, STEPS_PROGRAM)
    return LiveState(
        states=tuple((state.value, JOB_STATES[state], state is job.status) for state in (JobStatus.QUEUED, JobStatus.RUNNING)),
        phase=phase,
        words_json=json.dumps(dict(PHASE_WORDS)),
        nobody=nobody,
    )


def _words_at_end(failure: Failure, reports: Sequence[Report], events: Sequence[Event], real_steps: StepsView | None) -> str:
    """The phase that ended in this failure: the last of the program whose it is, where that is known."""
    if real_steps is not None:
        return words_of(real_steps.report.phase, STEPS_PROGRAM)
    return phase_words(events, next((report.program for report in reports if report.failure == failure), None))


def _subject(mesh: Mapping[str, Any], report: Report | None) -> str:
    topology = topology_sentence(mesh.get("topology"), int(mesh.get("slices", 1)))
    if report is None or report.num_parameters is None:
        return topology
    return f"{topology} · {format_parameters(report.num_parameters)} parameters"


def _step(event: Event) -> Step | None:
    at = moment(event.created_at)
    assert at is not None
    data = event.data
    if event.name == "progress" and data.get("program") == STEPS_PROGRAM:
        detail = event_detail(event)
        return None if detail is None else Step(at, str(data.get("name", "")).replace("_", " "), detail)
    if event.name == "progress":
        return Step(at, str(data.get("name", "")).replace("_", " "), f"{data.get('program', '')} · {data.get('seconds', 0):.1f} s")
    detail = " · ".join(f"{name.replace('_', ' ')} {_plain(name, value)}" for name, value in data.items() if value is not None)
    return Step(at, event.name.replace("_", " "), detail)


def _plain(name: str, value: Any) -> str:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
