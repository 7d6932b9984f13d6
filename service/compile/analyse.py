"""Turns one dump into the report's fields and artifacts: the one place where the parts of the analysis are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from service.compile.attribution import UNATTRIBUTED, Attributor
from service.compile.buffers import MAX_BUFFERS, BufferBook, sum_by
from service.compile.collective_report import Links, collectives_json, group_collectives, sum_collectives
from service.compile.collectives import find_collectives
from service.compile.dump import parse_dump
from service.compile.findings import Evidence, find_findings
from service.compile.groups import Mesh
from service.compile.halo import measure_halo
from service.compile.hlo import Program
from service.compile.integrity import check_against_program
from service.compile.memory import MemoryDump, replay
from service.compile.scope_search import ScopeSearch
from service.compile.timeline import build_timeline, outstanding_maxima
from service.errors import AnalysisError
from service.models.config import ProgramName, StepConfig
from service.records import Peak

_LARGEST_PER_PEAK = 5


@dataclass(frozen=True, slots=True)
class AnalysisContext:
    """What the dump does not say of its program."""

    mesh_axes: Mapping[str, int]
    """Axis name to size, in mesh order; the product is the number of devices."""
    device_slices: tuple[int, ...]
    """The slice of each device of the flattened mesh."""
    family: str
    """The topology's family, which decides the links' bandwidths."""
    devices_per_chip: int = 1
    step_config: StepConfig | None = None
    """None for a captured program: no closed forms, and no spec fields in findings."""
    program: ProgramName = "candidate"
    state_donated: bool = True
    """Whether the step was asked to reuse its state's memory."""
    compiler_log: str = ""


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found: fields of a `Report`, and files to keep beside the dump."""

    fields: dict[str, Any]
    artifacts: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reading:
    """A dump read as far as its memory, which is known long before the rest."""

    module: Any
    """The `HloModuleProto`."""
    memory: MemoryDump


def read(dump: bytes) -> Reading:
    """The memory in a `*.after_optimizations.hlo.pb`, and what `analyse` goes on with.

    Raises:
        AnalysisError: the dump is truncated or corrupted, or does not add up.
    """
    with _refusing():
        proto = parse_dump(dump)
        return Reading(proto.hlo_module, replay(proto))


def analyse(reading: Reading, *, context: AnalysisContext) -> Analysis:
    """The whole analysis of what was read; about 0.3 s for the 671B program of 256 devices. Imports neither JAX nor libtpu.

    Raises:
        AnalysisError: the dump does not add up, or contradicts the context; nothing of it is to be trusted then.
    """
    with _refusing():
        return _analyse(reading, context)


@contextmanager
def _refusing() -> Iterator[None]:
    """The parts trust the dump where nothing in it can be compared; what breaks them is a dump no compiler wrote, or a fault of theirs."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise AnalysisError(f"the dump cannot be read ({type(error).__name__}: {error}); compile again") from error


def _analyse(reading: Reading, context: AnalysisContext) -> Analysis:
    memory, program = reading.memory, Program(reading.module)
    check_against_program(memory, program)
    search = ScopeSearch(program)
    book = BufferBook(program, memory, Attributor(program, memory, search))
    instances = find_collectives(program, Mesh(context.mesh_axes, context.device_slices), search)
    links = Links(context.family, context.devices_per_chip)
    at_peak = book.alive_at(memory.peak_index)
    classes, modules = sum_by(at_peak)
    assert sum(classes.values()) == sum(modules.values()) == memory.peak_bytes
    halo = measure_halo(instances, context.step_config)
    fields: dict[str, Any] = {
        **_totals(memory),
        "padding_bytes": sum(book.padding_bytes(buffer.life) for buffer in at_peak),
        "classes": classes,
        "modules": modules,
        "module_inferred_bytes": sum(buffer.life.size for buffer in at_peak if buffer.what.module_inferred),
        "unattributed_bytes": modules.get(UNATTRIBUTED, 0),
        "timeline": build_timeline(memory, program, search),
        "peaks": _peaks(memory, book),
        "buffers": tuple(book.record(buffer) for buffer in at_peak[:MAX_BUFFERS]),
        "num_buffers_at_peak": len(at_peak),
        "collectives": group_collectives(instances, links),
        "collective_totals": sum_collectives(instances, links),
        "halo": halo,
    }
    fields["findings"] = find_findings(
        Evidence(
            program=program,
            memory=memory,
            book=book,
            at_peak=at_peak,
            classes=classes,
            unattributed_bytes=modules.get(UNATTRIBUTED, 0),
            collectives=instances,
            halo=halo,
            mesh_axes=context.mesh_axes,
            config=context.step_config,
            step_program=context.program,
            state_donated=context.state_donated,
            compiler_log=context.compiler_log,
        )
    )
    return Analysis(fields, {"lifetimes.json": book.lifetimes_json(), "collectives.json": collectives_json(instances)})


def _totals(memory: MemoryDump) -> dict[str, int]:
    names = (
        "peak_bytes",
        "allocated_bytes",
        "argument_bytes",
        "output_bytes",
        "alias_bytes",
        "temp_bytes",
        "fragmentation_bytes",
        "host_bytes",
    )
    return {name: getattr(memory, name) for name in names}


def _peaks(memory: MemoryDump, book: BufferBook) -> tuple[Peak, ...]:
    peaks = []
    for maximum in outstanding_maxima(memory.usage):
        temporaries = [buffer for buffer in book.alive_at(maximum.index) if buffer.life.start > 0]
        # Whatever was allocated last made the maximum.
        maker = max(temporaries, key=lambda buffer: buffer.life.start, default=None)
        peaks.append(
            Peak(
                index=maximum.index,
                live_bytes=maximum.live_bytes,
                instruction=memory.event_instructions[maximum.index],
                module=maker.what.module if maker else UNATTRIBUTED,
                phase=maker.what.phase if maker else None,
                drop_bytes=maximum.prominence,
                largest=tuple(book.record(buffer) for buffer in temporaries[:_LARGEST_PER_PEAK]),
            )
        )
    return tuple(peaks)
