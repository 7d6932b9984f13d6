"""Weighs the programs of a spec on this machine, without a server: one child per program, side by side."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from service.compile.interface import ChildLimits, Compiler, CompileRequest, ProgressEvent
from service.records import Report
from service.spec import Spec


def weigh(
    spec: Spec,
    compiler: Compiler,
    *,
    limits: ChildLimits,
    on_event: Callable[[str, ProgressEvent], None],
    on_report: Callable[[Report], None],
    parallel: int,
    artifact_dir: Path | None = None,
) -> Mapping[str, Report]:
    """The report of every program of `spec`, in its order; at most `parallel` children at once.

    `on_event(program, event)` and `on_report` are called from the threads that supervise the children. On KeyboardInterrupt every child is
    killed and waited for before the interrupt goes on, so that nothing is left running.
    """
    cancelled = threading.Event()
    with tempfile.TemporaryDirectory(prefix="weighbridge-") as scratch:

        def run(program: str) -> Report:
            request = CompileRequest.model_validate(
                {
                    "spec": spec.as_json(),
                    "program": program,
                    "depth": spec.depth,
                    "work_dir": str(Path(scratch) / program),
                    # Absolute, for the child runs in a directory of its own that is removed with it.
                    "artifact_dir": None if artifact_dir is None else str(artifact_dir.absolute()),
                }
            )
            report = compiler(request, limits=limits, on_event=lambda event: on_event(program, event), is_cancelled=cancelled.is_set)
            on_report(report)
            return report

        # The threads outlive their children: a child is bound to the thread that started it and ends with it.
        with ThreadPoolExecutor(max_workers=max(1, parallel)) as pool:
            futures: dict[str, Future[Report]] = {program: pool.submit(run, program) for program in spec.programs}
            try:
                return {program: future.result() for program, future in futures.items()}
            except BaseException:
                cancelled.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
