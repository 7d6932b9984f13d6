"""Holds the buffer assignment against the program it belongs to, so that a corrupted dump fails instead of giving a wrong number.

The dump says much twice: a buffer's size and memory space follow from its instruction's shape and layout, arguments are the entry
computation's parameters, aliases are in the module's own table, outputs are its root's, constants are constants, and scratch of reducers is
thread-local where no control flow leads, and an event of the simulation names the instruction of its buffer. All of it held in every dump
seen. What is said once, all of it in the module, is held against the compiler's second copy (`dump.check_copy`);
tests/compile/test_fuzz.py shows what both are good for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from service.compile.hlo import Program
from service.compile.memory import HBM, Allocation, LogicalBuffer, MemoryDump
from service.compile.shapes import TUPLE, logical_bytes, padded_bytes, shape_at
from service.compile.trips import execution_counts
from service.errors import AnalysisError


def check_against_program(memory: MemoryDump, program: Program) -> None:
    """Compare every buffer and allocation with the program.

    Raises:
        AnalysisError: two statements of the dump contradict each other; says which.
    """
    for buffer in memory.buffers.values():
        _check_buffer(buffer, program)
    reached = set(execution_counts(program))
    for allocation in memory.allocations.values():
        _check_flags(allocation, memory, program, reached)
    _check_arguments(memory, program)
    _check_outputs(memory, program)
    _check_events(memory, program)


def _check_buffer(buffer: LogicalBuffer, program: Program) -> None:
    instruction = program.instructions.get(buffer.instruction_id)
    shape = shape_at(instruction.shape, buffer.shape_index) if instruction else None
    if instruction is None or shape is None:
        raise AnalysisError(f"buffer {buffer.id} is defined by instruction {buffer.instruction_id}, which has no such output")
    if shape.element_type == TUPLE:
        return
    if shape.layout.memory_space != buffer.color:
        raise AnalysisError(
            f"buffer {buffer.id} of {instruction.name} is placed in memory space {buffer.color}, its layout in {shape.layout.memory_space}"
        )
    if buffer.color != HBM:
        # On-chip buffers can be smaller than their shapes: v5p prefetches an s32[1,4096] of a flash kernel into 8,192 bytes.
        return
    padded = padded_bytes(shape)
    # Without tiles (scalars of reducers) the compiler rounds up to a tile of its own choice.
    contradicts = padded is not None and (buffer.size != padded if shape.layout.tiles else buffer.size < (logical_bytes(shape) or 0))
    if contradicts:
        raise AnalysisError(f"buffer {buffer.id} of {instruction.name} takes {buffer.size} bytes and its shape {padded}")


def _check_flags(allocation: Allocation, memory: MemoryDump, program: Program, reached: set[int]) -> None:
    """What an allocation is called against what it holds."""
    holders = [program.instructions[memory.buffers[buffer_id].instruction_id] for buffer_id, _ in allocation.assigned]
    says = f"allocation {allocation.index}"
    if holders and allocation.is_constant != all(holder.opcode == "constant" for holder in holders):
        raise AnalysisError(f"{says} is {'' if allocation.is_constant else 'not '}called constant and holds {holders[0].name}")
    if allocation.is_thread_local:
        if allocation.is_constant or allocation.maybe_live_out or allocation.parameter is not None:
            raise AnalysisError(f"{says} is called thread-local and constant, output or parameter; the dump is corrupted")
        lasting = next((holder.name for holder in holders if holder.computation in reached), None)
        if lasting:
            raise AnalysisError(f"{says} is called thread-local and holds {lasting}, which control flow reaches; the dump is corrupted")
    elif (
        allocation.color == HBM and holders and not allocation.is_constant and not any(holder.computation in reached for holder in holders)
    ):
        raise AnalysisError(f"{says} is not called thread-local and holds {holders[0].name}, which no control flow reaches")
    if allocation.parameter is None:
        if allocation.is_aliased:
            raise AnalysisError(f"{says} is aliased with an output and is no parameter; the dump is corrupted")
    elif not allocation.is_aliased == allocation.maybe_live_out == (allocation.parameter in program.aliased_parameters):
        raise AnalysisError(f"{says} is parameter {allocation.parameter[0]}: its flags and the program's table differ on its alias")


def _check_arguments(memory: MemoryDump, program: Program) -> None:
    """Every entry parameter has its allocations, and no other has."""
    parameters = program.parameters[program.entry]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for allocation in memory.allocations.values():
        if allocation.parameter is None:
            continue
        number, _ = allocation.parameter
        if allocation.parameter in seen or number not in parameters:
            raise AnalysisError(f"allocation {allocation.index} is parameter {number}, which the program has not or has already")
        seen.add(allocation.parameter)
        if parameters[number] not in {memory.buffers[buffer_id].instruction_id for buffer_id, _ in allocation.assigned}:
            raise AnalysisError(f"allocation {allocation.index} is parameter {number} and does not hold it; the dump is corrupted")
    missing = set(parameters) - {number for number, _ in seen}
    if missing:
        raise AnalysisError(f"parameters {sorted(missing)[:8]} have no allocation; the dump is corrupted")


def _check_outputs(memory: MemoryDump, program: Program) -> None:
    """Every buffer of the entry's root is in an output, and no more outputs are there than the root can have."""
    allocation_of = {buffer_id: a for a in memory.allocations.values() for buffer_id, _ in a.assigned}
    buffer_of = {(buffer.instruction_id, buffer.shape_index): buffer.id for buffer in memory.buffers.values()}
    root = program.root_of(program.entry)
    values = {(root.id, ())} | {program.resolve((root.id, index)) for index in _indices(root.shape)}
    # A value that a loop hands out has no buffer of its own name: it may be in any output.
    found = [allocation_of[buffer_of[value]] for value in values if value in buffer_of]
    for allocation in found:
        if not allocation.maybe_live_out:
            raise AnalysisError(
                f"allocation {allocation.index} holds an output of the program and is not called one; the dump is corrupted"
            )
    unexplained = {a.index for a in memory.allocations.values() if a.maybe_live_out} - {a.index for a in found}
    if len(unexplained) > len(values) - len(found):
        raise AnalysisError(
            f"allocations {sorted(unexplained)[:8]} are called outputs and hold none of the program's; the dump is corrupted"
        )


def _check_events(memory: MemoryDump, program: Program) -> None:
    """Every event of the simulation names the instruction that defines its buffer, a FREE too."""
    events = zip(memory.event_buffers, memory.event_computations[1:], memory.event_instructions[1:], strict=True)
    for index, (buffer_id, *named) in enumerate(events, start=1):
        instruction = program.instructions[memory.buffers[buffer_id].instruction_id]
        defined = [program.computations[instruction.computation].name, instruction.name]
        if named != defined:
            raise AnalysisError(f"event {index} names {' '.join(named)}, and its buffer {buffer_id} is of {' '.join(defined)}")


def _indices(shape: Any, prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every index into a shape, its tuples' own included."""
    yield prefix
    if shape.element_type == TUPLE:
        for position, part in enumerate(shape.tuple_shapes):
            yield from _indices(part, (*prefix, position))
