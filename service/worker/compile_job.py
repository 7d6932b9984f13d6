"""Runs a compile job: one child per program, each report kept as soon as it is there."""

from __future__ import annotations

from pathlib import Path

from service.compile.interface import ChildLimits, Compiler, CompileRequest, ProgressEvent
from service.errors import SpecError
from service.identity import identify
from service.records import TERMINAL, FailureKind, JobStatus, Report, ReportStatus
from service.spec import Spec, parse_spec, require_kind
from service.worker.held import STOPPED, HeldJob


class CompileJobRunner:
    """`service.worker.loop.JobRunner` for jobs of kind `compile`."""

    def __init__(self, compiler: Compiler, limits: ChildLimits) -> None:
        self._compiler = compiler
        self._limits = limits

    def __call__(self, held: HeldJob) -> None:
        """Weigh the programs that have no report yet, one after the other, and end the job.

        A program that does not fit is a result; one that could not be weighed makes the job fail, after the others were tried: each
        says something by itself. Raises LeaseLostError when the job is no longer this worker's.
        """
        try:
            spec = parse_spec(held.job.spec)
            require_kind(spec, "compile")
        except SpecError as error:
            held.refuse_spec(error)
            return
        identity = identify(spec, held.job.kind)
        if identity != held.job.identity and held.restate_identity(identity).status in TERMINAL:
            return
        for program in spec.programs:
            if program in held.claim.measured_programs:
                continue
            if held.is_stopping.is_set():
                held.release(STOPPED)
                return
            if held.is_cancelled.is_set():
                held.finish(JobStatus.CANCELLED)
                return
            artifact_dir = held.directory / f"{program}-artifacts"
            artifact_dir.mkdir()
            report = self._weigh(held, spec, program, artifact_dir)
            if report.failure is not None and report.failure.kind is FailureKind.CANCELLED:
                if held.is_cancelled.is_set():
                    held.finish(JobStatus.CANCELLED, report.failure)
                else:
                    held.release(STOPPED)
                return
            held.save_report(report, {path.name: path for path in sorted(artifact_dir.iterdir()) if path.is_file()})
        failures = [report.failure for report in held.list_reports() if report.status is ReportStatus.FAILED]
        held.finish(JobStatus.FAILED if failures else JobStatus.SUCCEEDED, failures[0] if failures else None)

    def _weigh(self, held: HeldJob, spec: Spec, program: str, artifact_dir: Path) -> Report:
        request = CompileRequest(
            spec=spec.as_json(), program=program, depth=spec.depth, work_dir=str(held.directory / program), artifact_dir=str(artifact_dir)
        )

        def forward(event: ProgressEvent) -> None:
            held.append_event("progress", {"program": program, **event.model_dump(mode="json")})

        return self._compiler(request, limits=self._limits, on_event=forward, is_cancelled=held.is_unwanted)
