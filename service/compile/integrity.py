"""Holds the buffer assignment against the program it belongs to, so that a corrupted dump fails instead of giving a wrong number.

The dump says much twice: a buffer's size follows from its instruction's shape and tiles, arguments are the entry computation's parameters,
aliases are in the module's own table, and reducers' scratch is thread-local exactly where no control flow leads.
"""

from __future__ import annotations

from service.compile.hlo import Program
from service.compile.memory import HBM, LogicalBuffer, MemoryDump
from service.compile.shapes import TUPLE, logical_bytes, padded_bytes, shape_at
from service.compile.trips import execution_counts
from service.errors import AnalysisError


def check_against_program(memory: MemoryDump, program: Program) -> None:
    """Compare every HBM buffer, argument, alias and whole-program allocation with the program.

    Raises:
        AnalysisError: two statements of the dump contradict each other; says which.
    """
    for buffer in memory.buffers.values():
        if buffer.color == HBM:
            _check_buffer(buffer, program)
    _check_arguments(memory, program)
    _check_thread_local(memory, program)


def _check_buffer(buffer: LogicalBuffer, program: Program) -> None:
    instruction = program.instructions.get(buffer.instruction_id)
    shape = shape_at(instruction.shape, buffer.shape_index) if instruction else None
    if instruction is None or shape is None:
        raise AnalysisError(
            f"buffer {buffer.id} is defined by instruction {buffer.instruction_id}, which has no such output; the dump is corrupted"
        )
    if shape.element_type == TUPLE:
        return
    if shape.layout.memory_space != HBM:
        raise AnalysisError(
            f"buffer {buffer.id} of {instruction.name} is counted in HBM and its layout is in memory space {shape.layout.memory_space}"
        )
    padded = padded_bytes(shape)
    # Without tiles (scalars of reducers) the compiler rounds up to a tile of its own choice.
    contradicts = padded is not None and (buffer.size != padded if shape.layout.tiles else buffer.size < (logical_bytes(shape) or 0))
    if contradicts:
        raise AnalysisError(
            f"buffer {buffer.id} of {instruction.name} takes {buffer.size} bytes and its shape {padded}; the dump is corrupted"
        )


def _check_arguments(memory: MemoryDump, program: Program) -> None:
    parameters = program.parameters[program.entry]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for allocation in memory.allocations.values():
        if allocation.parameter is None:
            if allocation.is_aliased:
                raise AnalysisError(f"allocation {allocation.index} is aliased with an output and is no parameter; the dump is corrupted")
            continue
        number, _ = allocation.parameter
        if allocation.parameter in seen or number not in parameters:
            raise AnalysisError(f"allocation {allocation.index} is parameter {number}, which the program has not or has already")
        seen.add(allocation.parameter)
        if parameters[number] not in {memory.buffers[buffer_id].instruction_id for buffer_id, _ in allocation.assigned}:
            raise AnalysisError(f"allocation {allocation.index} is parameter {number} and does not hold it; the dump is corrupted")
        if allocation.is_aliased and allocation.parameter not in program.aliased_parameters:
            raise AnalysisError(f"allocation {allocation.index} is aliased with an output and the program's table does not say so")
    missing = set(parameters) - {number for number, _ in seen}
    if missing:
        raise AnalysisError(f"parameters {sorted(missing)[:8]} have no allocation; the dump is corrupted")


def _check_thread_local(memory: MemoryDump, program: Program) -> None:
    """Scratch of fusions and reducers is thread-local and counted nowhere; what control flow reaches never is."""
    reached = execution_counts(program).keys()
    for allocation in memory.allocations.values():
        for buffer_id, _ in allocation.assigned:
            instruction = program.instructions.get(memory.buffers[buffer_id].instruction_id)
            if instruction is not None and allocation.is_thread_local and instruction.computation in reached:
                raise AnalysisError(
                    f"allocation {allocation.index} is called thread-local and holds {instruction.name}; the dump is corrupted"
                )
