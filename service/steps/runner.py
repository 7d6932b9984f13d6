"""Runs one steps child to its end, under limits, and makes a report of every way it can end; no JAX here."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.compile.failures import find_check_failure, read_log_tail
from service.compile.interface import ChildLimits, ProgressEvent
from service.compile.toolchain import read_toolchain
from service.records import Failure, FailureKind
from service.settings import PREFIX
from service.spec import parse_spec
from service.steps.devices import steps_environment
from service.steps.findings import Findings
from service.steps.interface import StepsRequest
from service.steps_records import StepsReport, StepsStatus
from service.supervision import Ended, Ending, supervise
from service.units import format_bytes

CHILD = (sys.executable, "-m", "service.steps.child")


class ChildSteps:
    """A `StepsRunner` that runs a child process. `command` is for tests, which bring a child of their own.

    `wall_setting` is what whoever is at the wall limit is told to raise.
    """

    def __init__(self, command: Sequence[str] = CHILD, *, wall_setting: str = f"{PREFIX}CHILD_WALL_SECONDS") -> None:
        self._command = tuple(command)
        self._wall_setting = wall_setting

    def __call__(
        self,
        request: StepsRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> StepsReport:
        """The report; call it from a thread that lives until it returns, since the child dies with that thread."""
        spec = parse_spec(request.spec)
        assert spec.steps is not None
        work_dir = Path(request.work_dir)
        work_dir.mkdir(parents=True)
        toolchain = request.toolchain or read_toolchain({"devices": spec.steps.devices})
        request = request.model_copy(update={"memory_limit_bytes": limits.rss_bytes, "toolchain": toolchain})
        findings = Findings()
        reports: list[StepsReport] = []

        def hear(message: Mapping[str, Any]) -> bool:
            if message.get("event") == "report":
                reports.append(StepsReport.model_validate(message["report"]))
                return True
            if message.get("event") == "progress":
                event = ProgressEvent.model_validate({key: message[key] for key in ("name", "seconds", "data")})
                findings.apply(event.name, event.data)
                on_event(event)
            return False

        try:
            ending = supervise(
                self._command,
                request=request.model_dump(mode="json"),
                environment=steps_environment(spec.steps, spec.mesh.num_devices, work_dir),
                work_dir=work_dir,
                log_path=work_dir / "child.log",
                wall_seconds=limits.wall_seconds,
                rss_bytes=limits.rss_bytes,
                on_message=hear,
                is_wanted=lambda: not is_cancelled(),
            )
        except (ValidationError, ValueError, KeyError) as error:
            # A child of another version, or one that broke in the middle of a message.
            failure = Failure(kind=FailureKind.CRASHED, message=f"the child's message could not be read: {error}"[:2000])
            return findings.report(StepsStatus.FAILED, failure)
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
        if reports:
            report = reports[-1]
            if report.failure is not None and not report.failure.log_tail:
                failure = report.failure.model_copy(update={"log_tail": read_log_tail(ending.log)})
                report = report.model_copy(update={"failure": failure})
            return report
        # A child that ended before it was looked at has no figure, which is not one of 0.
        findings.apply("known", {"child_peak_rss_bytes": ending.peak_rss_bytes or None})
        return _partial(findings, ending, limits, self._wall_setting)


def _partial(findings: Findings, ending: Ending, limits: ChildLimits, wall_setting: str) -> StepsReport:
    """What was known when the child ended without a report of its own, and how it ended."""
    where = f"in phase {findings.phase} after {ending.seconds:.0f} s and {len(findings.steps)} steps"
    log_tail = read_log_tail(ending.log)
    status = StepsStatus.FAILED
    match ending.ended:
        case Ended.CANCELLED:
            kind, message = FailureKind.CANCELLED, f"cancelled {where}"
        case Ended.WALL_LIMIT:
            kind = FailureKind.KILLED_WALL
            message = f"killed {where}: the wall limit is {limits.wall_seconds:.0f} s; raise {wall_setting} to allow more"
        case Ended.RSS_LIMIT:
            status, kind = StepsStatus.DOES_NOT_FIT, FailureKind.KILLED_RSS
            held, limit = format_bytes(ending.peak_rss_bytes), format_bytes(limits.rss_bytes)
            message = f"killed {where}: it held {held} of host memory and the limit is {limit}"
        case Ended.NOT_STARTED:
            kind, message = FailureKind.CRASHED, f"the child could not be started: {ending.detail}"
        case Ended.SIGNALLED if ending.killed_for_host_memory:
            status, kind, message = StepsStatus.DOES_NOT_FIT, FailureKind.HOST_MEMORY, f"killed by the kernel for want of memory {where}"
        case Ended.SIGNALLED:
            assert ending.signal_number is not None
            cause = find_check_failure(log_tail)
            message = f"ended by {signal.Signals(ending.signal_number).name} {where}" + (f": {cause}" if cause else "")
            kind = FailureKind.CRASHED
        case _:
            kind, message = FailureKind.CRASHED, f"exited with code {ending.exit_code} and without a report {where}"
    return findings.report(status, Failure(kind=kind, message=message, log_tail=log_tail))
