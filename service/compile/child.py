"""The compile child: reads one request, weighs one program, sends its report and ends (`python -m service.compile.child`).

Started by `service.compile.runner`, which sets its environment. At depth `memory` the report is sent, and the process ended, as soon as the
compiler has assigned buffers: code generation takes most of a compile and changes no byte of it. At depth `full`, and where a program
comes so close to the capacity that its code decides whether it fits, the compile is awaited.
"""

from __future__ import annotations

import gc
import shutil
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.compile.environment import child_log, dump_dir, warnings_log
from service.compile.failures import MAX_MESSAGE_CHARACTERS, ErrorKind, classify_error
from service.compile.interface import CompileRequest
from service.errors import AnalysisError, ServiceError
from service.lifeline import Lifeline, peak_rss_bytes
from service.records import Failure, FailureKind, Report, ReportStatus, Timings

if TYPE_CHECKING:
    import jax

    from service.compile.analyse import AnalysisContext
    from service.compile.lower import Weighed
    from service.compile.memory import MemoryDump
    from service.compile.watch import Compilation

CODE_BAND_BYTES = 512 << 20
"""Most program code that is reckoned with (2 to 300 MB were seen): closer than this to the capacity, only code generation can tell."""

_MAX_LOG_BYTES = 8 << 20
_KNOWN_WITHOUT_DUMP = frozenset({"depth", "topology", "num_devices", "num_parameters", "capacity_bytes", "compiler_message"})

_TIMINGS = {
    "start": "start_seconds",
    "topology": "topology_seconds",
    "build": "build_seconds",
    "trace": "trace_seconds",
    "lower": "lower_seconds",
    "compile": "buffer_assignment_seconds",
    "analyse": "analysis_seconds",
}

Load = Callable[[CompileRequest], "Weighed"]


class LockedError(Exception):
    """Another process was loading libtpu; the request is to be tried again in a new process."""


def main(load: Load | None = None) -> None:
    """Answer one request from stdin and end the process; `load` makes the program of a request, from its spec where None."""
    # Nearly all that tracing makes lives to the end: looking for garbage among it takes time at every turn and frees next to nothing.
    gc.disable()
    lifeline = Lifeline()
    request = CompileRequest.model_validate(lifeline.receive())
    try:
        report = Weighing(request, lifeline).run(load)
    except LockedError as error:
        lifeline.finish({"event": "locked", "message": str(error)})
    lifeline.finish({"event": "report", "report": report.model_dump(mode="json")})


class Weighing:
    """One request on its way to a report."""

    def __init__(self, request: CompileRequest, lifeline: Lifeline) -> None:
        self._request, self._lifeline = request, lifeline
        self._work_dir = Path(request.work_dir)
        self._phase, self._entered = "start", 0.0  # a process starts before its code runs
        self._timings: dict[str, float] = {}
        # Fields of the report as they become known, so that a failure at any point tells what was known until then.
        self._known: dict[str, Any] = {}
        self._warnings: list[str] = []

    def run(self, load: Load | None) -> Report:
        """The report, whatever happens. Raises LockedError."""
        try:
            compilation, capacity, context = self._start(load)
            self._judge(compilation, capacity, context)
        except Exception as error:  # the border of the child: every error becomes a recorded failure
            traceback.print_exc()
            if isinstance(error, AnalysisError):
                # What was read from the dump is not to be trusted any more, all of it.
                self._known = {name: value for name, value in self._known.items() if name in _KNOWN_WITHOUT_DUMP}
            self._known |= {"status": ReportStatus.FAILED, "failure": self._failure(error)}
        ended = self._lifeline.seconds
        self._leave(ended)
        return Report(
            program=self._request.program,
            **({"depth": self._request.depth} | self._known),
            timings=Timings(**self._timings, total_seconds=ended),
            child_peak_rss_bytes=peak_rss_bytes(),
            toolchain=self._request.toolchain,
            warnings=tuple(self._warnings),
        )

    def _start(self, load: Load | None) -> tuple[Compilation, Future[int], AnalysisContext]:
        """Everything up to the compile, which runs when this returns."""
        # JAX is imported here and not above: the lifeline stands first, and the import is part of what is timed.
        import jax

        from service.compile.lower import load_spec_program, module_name
        from service.compile.topology import arrange_devices, device_slices, mock_devices
        from service.compile.watch import Compilation
        from service.models.axes import make_mesh

        self._enter("topology")
        program = (load or load_spec_program)(self._request)
        topology = program.topology
        self._known |= {"topology": topology.describe(), "num_devices": topology.num_devices}
        devices = arrange_devices(mock_devices(topology), topology, program.axes)
        mesh = make_mesh(program.axes, devices)
        with jax.set_mesh(mesh):
            self._enter("build")
            built = program.build(mesh)
            self._known["num_parameters"] = built.num_parameters
            self._enter("trace")
            traced = built.jitted.trace(*built.arguments)
            self._enter("lower")
            lowered = traced.lower()
        self._enter("compile")
        compilation = Compilation(lowered, module=module_name(lowered), options=program.compiler_options, dump_dir=dump_dir(self._work_dir))
        # Until buffers are assigned the compiler keeps one core busy; what else is needed is done on another.
        capacity = self._start_capacity(devices[0], program.compiler_options)
        from service.compile.analyse import AnalysisContext

        context = AnalysisContext(
            mesh_axes=program.axes.as_dict(),
            device_slices=device_slices(devices),
            family=topology.family,
            devices_per_chip=topology.devices_per_chip,
            step_config=program.step_config,
            program=self._request.program,
            state_donated=built.state_donated,
            compiler_log="",
        )
        return compilation, capacity, context

    def _judge(self, compilation: Compilation, capacity: Future[int], context: AnalysisContext) -> None:
        """Fill in what the compiler says of the program, waiting for no more of it than the answer needs."""
        from service.compile.analyse import analyse, read
        from service.compile.dump import check_copy, module_size
        from service.compile.watch import yield_cores

        path = compilation.wait_for_dump()
        assigned_seconds = self._lifeline.seconds
        self._leave(assigned_seconds)
        if not compilation.is_assigned:
            # The compile has ended by being refused. Its word stands first, so that it is told even if the dump cannot be read.
            self._conclude(compilation)
        if path is None:
            self._warnings.append("the compiler ended before it assigned buffers: of the memory, only its message is known")
            return
        dump = path.read_bytes()
        reading = read(dump)
        memory = reading.memory
        known_capacity = self._await_capacity(capacity)
        self._known["capacity_bytes"] = known_capacity
        figures = {"peak_bytes": memory.peak_bytes, "allocated_bytes": memory.allocated_bytes, "capacity_bytes": known_capacity}
        self._enter("analyse", figures, since=assigned_seconds)
        is_code_decisive = known_capacity is None or memory.allocated_bytes > known_capacity - CODE_BAND_BYTES
        is_awaited = compilation.is_assigned and (self._request.depth == "full" or is_code_decisive)
        if not is_awaited:
            yield_cores()
        analysis = analyse(reading, context=replace(context, compiler_log=self._read_log()))
        # Last, so that it costs no waiting: by now the compiler has written it.
        copy = compilation.wait_for_copy(path, module_size(dump))
        if copy is not None:
            check_copy(dump, copy)
        self._known |= analysis.fields
        if known_capacity is not None:
            self._known["headroom_bytes"] = known_capacity - memory.allocated_bytes
        self._keep_artifacts(path, analysis.artifacts)
        if is_awaited:
            self._enter("code_generation", figures)
            self._known["depth"] = "full"
            self._conclude(compilation, memory)
            # It ran beside the analysis: the phase alone shows less.
            self._timings["code_generation_seconds"] = self._lifeline.seconds - assigned_seconds
        else:
            self._known.setdefault("status", ReportStatus.OK)

    def _conclude(self, compilation: Compilation, memory: MemoryDump | None = None) -> None:
        """Wait for the compile's end and fill in its verdict; `memory` is what it must agree with, None where it was refused before."""
        try:
            compiled = compilation.wait()
        except Exception as error:
            verdict = classify_error(str(error))
            if verdict.kind is ErrorKind.HBM:
                self._known |= {"status": ReportStatus.DOES_NOT_FIT, "compiler_message": verdict.message}
            elif memory is not None and self._request.depth == "memory":
                # Code was generated only because it decides whether the program fits, which it then does not say.
                self._known |= {"status": ReportStatus.UNKNOWN, "compiler_message": verdict.message}
                self._warnings.append("so close to the capacity that the program's code decides whether it fits, and generating it failed")
            else:
                raise
            return
        assert memory is not None, "a compile that succeeds has assigned buffers"
        self._known |= {"status": ReportStatus.OK, "code_bytes": compare_with_compiler(memory, compiled.memory_analysis())}

    def _read_log(self) -> str:
        """What the compiler has said so far, in this process: what it prints goes to the parent's file, its warnings to libtpu's own."""
        texts = []
        for path in (child_log(self._work_dir), warnings_log(self._work_dir)):
            with suppress(FileNotFoundError), path.open("rb") as file:
                texts.append(file.read(_MAX_LOG_BYTES).decode(errors="replace"))
        return "\n".join(texts)

    def _keep_artifacts(self, dump: Path, artifacts: Mapping[str, bytes]) -> None:
        """Leave the files for keeping where the request wants them; the names begin with the program's.

        A file that cannot be written is a warning: the answer is worth more than what lies beside it.
        """
        if self._request.artifact_dir is None:
            return
        directory = Path(self._request.artifact_dir)
        # XProf opens files of this ending.
        kept = directory / f"{self._request.program}.hlo_proto.pb"
        others = {directory / f"{self._request.program}.{name}": content for name, content in artifacts.items()}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.move(dump, kept)
            for path, content in others.items():
                path.write_bytes(content)
        except OSError as error:
            # Half a file, as a full disk leaves it, would be taken for a whole one.
            for path in (kept, *others):
                with suppress(OSError):
                    path.unlink()
            self._warnings.append(f"the compiler's files were not kept in {directory}: {error.strerror or error}")

    def _start_capacity(self, device: jax.Device, options: Mapping[str, str | int | bool]) -> Future[int]:
        if self._request.capacity_bytes is not None:
            known: Future[int] = Future()
            known.set_result(self._request.capacity_bytes)
            return known
        from service.compile.capacity import measure_capacity

        return ThreadPoolExecutor(1, thread_name_prefix="capacity").submit(measure_capacity, device, options)

    def _await_capacity(self, capacity: Future[int]) -> int | None:
        from service.compile.capacity import CapacityError

        try:
            return capacity.result()
        except CapacityError as error:
            self._warnings.append(f"the capacity is not known: {error}")
            return None

    def _failure(self, error: Exception) -> Failure:
        """What to record of an error, by its class and the phase it ended. Raises LockedError."""
        import jax

        message = str(error)[:MAX_MESSAGE_CHARACTERS] or type(error).__name__
        if isinstance(error, AnalysisError):
            return Failure(kind=FailureKind.ANALYSIS, message=message)
        if isinstance(error, MemoryError):
            return Failure(kind=FailureKind.HOST_MEMORY, message=f"the host had no memory left during {self._phase}")
        if self._phase in ("build", "trace", "lower") or isinstance(error, ServiceError):
            return Failure(
                kind=FailureKind.LOWERING, message=message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"
            )
        verdict = classify_error(str(error))
        if verdict.kind is ErrorKind.LOCK_FILE:
            raise LockedError(verdict.message) from error
        if isinstance(error, jax.errors.JaxRuntimeError):
            return verdict.as_failure()
        kind = {"topology": FailureKind.UNSUPPORTED, "analyse": FailureKind.ANALYSIS}.get(self._phase, FailureKind.COMPILER)
        return Failure(kind=kind, message=f"{type(error).__name__}: {message}")

    def _enter(self, phase: str, data: Mapping[str, Any] | None = None, *, since: float | None = None) -> None:
        """Begin a phase, which ends the one before, and say so."""
        now = self._lifeline.seconds
        self._leave(now)
        self._phase, self._entered = phase, now if since is None else since
        self._lifeline.send({"event": "progress", "name": phase, "seconds": now, "data": data or {}})

    def _leave(self, now: float) -> None:
        """End a phase. One look at the clock ends it and begins the next: no time is lost between them where the machine is busy."""
        name = _TIMINGS.get(self._phase)
        if name is not None:
            self._timings.setdefault(name, now - self._entered)


def compare_with_compiler(memory: MemoryDump, statistics: Any) -> int | None:
    """Hold what was read from the dump against the compiler's own statistics; the program's code bytes, None where it does not say.

    Raises:
        AnalysisError: a figure differs, or there are no statistics: then the dump was misread, and nothing of it can be trusted.
    """
    if statistics is None:
        raise AnalysisError("the compiler gives no memory statistics to hold the dump against")
    pairs = {
        "peak": (memory.memory_analysis_peak_bytes, statistics.peak_memory_in_bytes),
        "allocated": (memory.allocated_bytes, statistics.total_allocation_bytes),
        "argument": (memory.argument_bytes, statistics.argument_size_in_bytes),
        "alias": (memory.alias_bytes, statistics.alias_size_in_bytes),
    }
    different = [f"{name} {ours} and {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if different:
        raise AnalysisError(f"the dump and the compiler differ in bytes: {', '.join(different)}")
    code = statistics.generated_code_size_in_bytes
    return int(code) if code > 0 else None


if __name__ == "__main__":
    main()
