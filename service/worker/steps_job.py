"""Runs a steps job: one child that takes real steps, and the report of what they showed."""

from __future__ import annotations

from service.compile.interface import ChildLimits, ProgressEvent
from service.errors import SpecError
from service.records import Failure, FailureKind, JobStatus
from service.spec import parse_spec, require_kind
from service.steps.interface import STEPS_PROGRAM, StepsRequest, StepsRunner
from service.steps_records import StepsReport, StepsStatus
from service.worker.held import STOPPED, HeldJob


class StepsJobRunner:
    """`service.worker.loop.JobRunner` for jobs of kind `steps`."""

    def __init__(self, run_steps: StepsRunner, limits: ChildLimits) -> None:
        self._run_steps = run_steps
        self._limits = limits

    def __call__(self, held: HeldJob) -> None:
        """Run the steps, unless an earlier attempt has kept its report, and end the job.

        A failed check and devices that are too small are results; steps that broke off make the job fail. What was known until
        then is kept, also of a job that is cancelled. Raises LeaseLostError when the job is no longer this worker's.
        """
        if not held.claim.measured_programs:
            try:
                spec = parse_spec(held.job.spec)
                require_kind(spec, "steps")
            except SpecError as error:
                held.refuse_spec(error)
                return
            request = StepsRequest(spec=spec.as_json(), work_dir=str(held.directory / STEPS_PROGRAM))
            report = self._run_steps(
                request, limits=self._limits, on_event=lambda event: _forward(held, event), is_cancelled=held.is_unwanted
            )
            if held.is_stopping.is_set() and _was_cancelled(report):
                held.release(STOPPED)
                return
            held.save_steps_report(report)
        else:
            report = held.get_steps_report()
        if _was_cancelled(report):
            held.finish(JobStatus.CANCELLED, report.failure)
        elif report.status is StepsStatus.FAILED:
            held.finish(JobStatus.FAILED, report.failure or Failure(kind=FailureKind.CRASHED, message="the steps failed without a reason"))
        else:
            held.finish(JobStatus.SUCCEEDED)


def _forward(held: HeldJob, event: ProgressEvent) -> None:
    held.append_event("progress", {"program": STEPS_PROGRAM, **event.model_dump(mode="json")})


def _was_cancelled(report: StepsReport) -> bool:
    return report.failure is not None and report.failure.kind is FailureKind.CANCELLED
