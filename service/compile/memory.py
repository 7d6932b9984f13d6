"""Replays the compiler's buffer assignment: which bytes of HBM are alive at each program point, exactly as the compiler counted them.

The peak is what is alive at once: every allocation of HBM that lives through the whole program (arguments, outputs, constants) plus
the largest point of the heap simulation of the rest. The allocated bytes are what is reserved, with the holes between buffers. Both are
equal to the byte to `compiled.memory_analysis()` (tests/compile/test_memory.py), with one exception that is jaxlib's: its peak takes the
largest simulation of any memory space, so where on-chip VMEM holds more than HBM's temporaries it adds VMEM bytes to HBM's. Here
that number is `memory_analysis_peak_bytes`, apart.

Everything that the dump says twice is compared, so that a corrupted dump fails instead of giving a wrong number.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.errors import AnalysisError

HBM = 0
HOST = 5
"""Colors of memory spaces in a TPU buffer assignment; 1 is VMEM, 2 SMEM, 4 and 6 synchronisation flags and small scratch."""

_ALLOC, _FREE, _SHARE_WITH = 0, 1, 2


@dataclass(frozen=True, slots=True)
class LogicalBuffer:
    """One value of the program: an output of an instruction, at an index where it has several."""

    id: int
    size: int
    color: int
    instruction_id: int
    shape_index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """One contiguous stretch of a memory space and the logical buffers placed in it, (buffer id, offset)."""

    index: int
    size: int
    color: int
    is_thread_local: bool
    is_constant: bool
    maybe_live_out: bool
    parameter: tuple[int, tuple[int, ...]] | None
    """Parameter number and index within it, for an entry parameter."""
    is_aliased: bool
    """An entry parameter whose memory an output reuses."""
    is_simulated: bool
    """Its buffers come and go (a heap trace exists); otherwise it is reserved and counted for the whole program."""
    assigned: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The stay of one buffer in HBM, from timeline index `start` to `end`, both inclusive.

    `buffer_id` is the buffer that the allocation or the ALLOC event names; `shared_ids` are the other values that use the same bytes in
    that time. For a whole-program allocation the stay is the whole timeline.
    """

    allocation: int
    buffer_id: int
    size: int
    offset: int
    start: int
    end: int
    shared_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryDump:
    """What the buffer assignment says of one program; bytes per device."""

    peak_bytes: int
    allocated_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    host_bytes: int
    memory_analysis_peak_bytes: int
    """What jaxlib's `memory_analysis().peak_memory_in_bytes` gives: `peak_bytes`, unless another memory space's simulation is larger."""
    peak_index: int
    usage: tuple[int, ...]
    """HBM bytes alive at each timeline index; index 0 is before the first event, index i after event i of the simulation."""
    event_buffers: tuple[int, ...]
    """The buffer that event i of the simulation allocates, frees or shares, at position i - 1."""
    event_instructions: tuple[str, ...]
    """Name of the instruction of each timeline index, which defines the event's buffer; empty at 0."""
    event_computations: tuple[str, ...]
    """Name of the computation that instruction is in; empty at 0."""
    lifetimes: tuple[Lifetime, ...]
    """Every HBM buffer's stay, whole-program allocations first."""
    buffers: Mapping[int, LogicalBuffer]
    allocations: Mapping[int, Allocation]

    @property
    def temp_bytes(self) -> int:
        """allocated - argument - outputs that do not reuse an argument's memory (jaxlib's own figure counts otherwise)."""
        return self.allocated_bytes - self.argument_bytes - (self.output_bytes - self.alias_bytes)

    @property
    def fragmentation_bytes(self) -> int:
        """allocated - peak: reserved and free at the peak."""
        return self.allocated_bytes - self.peak_bytes

    def is_pool(self, life: Lifetime) -> bool:
        """Whether the stay is of a whole allocation that no single buffer fills and whose use over time the compiler did not simulate."""
        return self.buffers[life.buffer_id].size < life.size

    def alive_at(self, index: int) -> list[Lifetime]:
        """The buffers in HBM at a timeline index, largest first; their sizes sum to `usage[index]`."""
        alive = [life for life in self.lifetimes if life.start <= index <= life.end]
        return sorted(alive, key=lambda life: (-life.size, life.start, life.buffer_id))

    @property
    def alive_at_peak(self) -> list[Lifetime]:
        return self.alive_at(self.peak_index)


def replay(proto: Any) -> MemoryDump:
    """The memory of the program in a parsed `*.after_optimizations.hlo.pb`.

    Raises:
        AnalysisError: the buffer assignment does not add up.
    """
    assignment = proto.buffer_assignment
    buffers = _read_buffers(assignment)
    allocations = _read_allocations(assignment, buffers)
    simulations: list[tuple[Allocation, _Simulation]] = []
    for trace in assignment.heap_simulator_traces:
        allocation = allocations[trace.buffer_allocation_index]
        simulations.append((allocation, _simulate(trace, allocation, buffers)))

    whole = [a for a in allocations.values() if a.color == HBM and not a.is_thread_local and not a.is_simulated and a.assigned]
    base_bytes = sum(a.size for a in whole)
    in_hbm = [(allocation, simulation) for allocation, simulation in simulations if allocation.color == HBM]
    if len(in_hbm) > 1:
        # The order of two simulations against each other is not in the dump, so their joint peak is not known.
        indices = [allocation.index for allocation, _ in in_hbm]
        raise AnalysisError(f"the dump simulates HBM in {len(in_hbm)} separate allocations {indices}; exactly one or none can be added up")
    usage, instructions, computations, lifetimes = [base_bytes], [""], [""], []
    event_buffers: list[int] = []
    if in_hbm:
        allocation, simulation = in_hbm[0]
        usage += [base_bytes + live for live in simulation.usage]
        event_buffers = simulation.buffers
        instructions += simulation.instructions
        computations += simulation.computations
        lifetimes = simulation.lifetimes
    last = len(usage) - 1
    lifetimes = [_whole_program(allocation, buffers, last) for allocation in whole] + lifetimes
    peak_bytes = max(usage)
    peak_index = usage.index(peak_bytes)

    memory = MemoryDump(
        peak_bytes=peak_bytes,
        allocated_bytes=sum(a.size for a in allocations.values() if a.color == HBM and not a.is_thread_local),
        argument_bytes=sum(a.size for a in whole if a.parameter is not None),
        output_bytes=sum(a.size for a in whole if a.maybe_live_out),
        alias_bytes=sum(a.size for a in whole if a.is_aliased),
        host_bytes=sum(a.size for a in allocations.values() if a.color == HOST and not a.is_thread_local),
        memory_analysis_peak_bytes=base_bytes + max((max(s.usage, default=0) for _, s in simulations), default=0),
        peak_index=peak_index,
        usage=tuple(usage),
        event_buffers=tuple(event_buffers),
        event_instructions=tuple(instructions),
        event_computations=tuple(computations),
        lifetimes=tuple(lifetimes),
        buffers=buffers,
        allocations=allocations,
    )
    _check_totals(memory)
    return memory


def _read_buffers(assignment: Any) -> dict[int, LogicalBuffer]:
    buffers: dict[int, LogicalBuffer] = {}
    values: set[tuple[int, tuple[int, ...]]] = set()
    for entry in assignment.logical_buffers:
        where = entry.defined_at
        value = (where.instruction_id, tuple(where.shape_index))
        if entry.id in buffers or entry.size < 0:
            raise AnalysisError(f"the dump names logical buffer {entry.id} twice or with a negative size ({entry.size}); it is corrupted")
        if value in values:
            raise AnalysisError(f"the dump gives output {value[1]} of instruction {value[0]} two logical buffers; it is corrupted")
        values.add(value)
        buffers[entry.id] = LogicalBuffer(entry.id, entry.size, entry.color, *value)
    return buffers


def _read_allocations(assignment: Any, buffers: Mapping[int, LogicalBuffer]) -> dict[int, Allocation]:
    simulated = [trace.buffer_allocation_index for trace in assignment.heap_simulator_traces]
    if len(set(simulated)) != len(simulated):
        raise AnalysisError(f"the dump has several heap traces for one allocation ({simulated}); it is corrupted")
    allocations: dict[int, Allocation] = {}
    placed: set[int] = set()
    for entry in assignment.buffer_allocations:
        if entry.index != len(allocations):
            raise AnalysisError(f"allocation {entry.index} stands at position {len(allocations)}; the dump is corrupted")
        assigned = []
        end = 0
        for part in entry.assigned:
            buffer = buffers.get(part.logical_buffer_id)
            if buffer is None or buffer.size != part.size or buffer.color != entry.color or buffer.id in placed or part.offset < 0:
                raise AnalysisError(f"allocation {entry.index} places logical buffer {part.logical_buffer_id} in a way that contradicts it")
            placed.add(buffer.id)
            end = max(end, part.offset + part.size)
            assigned.append((buffer.id, part.offset))
        if end != entry.size:
            raise AnalysisError(f"allocation {entry.index} reserves {entry.size} bytes and its buffers end at {end}; the dump is corrupted")
        is_parameter = entry.is_entry_computation_parameter
        allocations[entry.index] = Allocation(
            index=entry.index,
            size=entry.size,
            color=entry.color,
            is_thread_local=entry.is_thread_local,
            is_constant=entry.is_constant,
            maybe_live_out=entry.maybe_live_out,
            parameter=(entry.parameter_number, tuple(entry.parameter_shape_index)) if is_parameter else None,
            is_aliased=entry.is_parameter_aliased_with_output,
            is_simulated=entry.index in simulated,
            assigned=tuple(assigned),
        )
    if len(placed) != len(buffers):
        missing = next(iter(buffers.keys() - placed))
        raise AnalysisError(f"{len(buffers) - len(placed)} logical buffers (first: {missing}) have no allocation; the dump is corrupted")
    unknown = [index for index in simulated if index not in allocations]
    if unknown:
        raise AnalysisError(f"heap traces name allocations {unknown}, which do not exist; the dump is corrupted")
    return allocations


@dataclass(slots=True)
class _Simulation:
    """A heap trace replayed: bytes alive after each event, and every buffer's stay (timeline indices count from 1)."""

    usage: list[int]
    buffers: list[int]
    instructions: list[str]
    computations: list[str]
    lifetimes: list[Lifetime]


@dataclass(slots=True)
class _Stay:
    """A buffer while it is alive: when it began, and who uses it."""

    start: int
    users: int
    shared: list[int]


def _simulate(trace: Any, allocation: Allocation, buffers: Mapping[int, LogicalBuffer]) -> _Simulation:
    """Replay ALLOC, FREE and SHARE_WITH with reference counts; sharing with a freed buffer allocates it again, as the compiler does."""
    offsets = dict(allocation.assigned)
    canonical: dict[int, int] = {}
    alive: dict[int, _Stay] = {}
    places = _Places(allocation)
    result = _Simulation([], [], [], [], [])
    live_bytes = 0
    for index, event in enumerate(trace.events, start=1):
        buffer_id, kind = event.buffer_id, event.kind
        if buffer_id not in offsets:
            raise AnalysisError(f"event {index} of allocation {allocation.index} names buffer {buffer_id}, which is not placed in it")
        if kind == _FREE:
            owner = canonical.get(buffer_id)
            stay = alive.get(owner) if owner is not None else None
            if owner is None or stay is None:
                raise AnalysisError(f"event {index} of allocation {allocation.index} frees buffer {buffer_id}, which is not alive")
            del canonical[buffer_id]
            stay.users -= 1
            if stay.users == 0:
                del alive[owner]
                size = buffers[owner].size
                live_bytes -= size
                places.remove(offsets[owner])
                shared = tuple(dict.fromkeys(stay.shared))
                result.lifetimes.append(Lifetime(allocation.index, owner, size, offsets[owner], stay.start, index - 1, shared))
        elif kind in (_ALLOC, _SHARE_WITH):
            if buffer_id in canonical:
                raise AnalysisError(f"event {index} of allocation {allocation.index} allocates buffer {buffer_id}, which is alive")
            owner = buffer_id
            if kind == _SHARE_WITH:
                owner = canonical.get(event.share_with_canonical_id, event.share_with_canonical_id)
                if owner not in offsets or buffers[buffer_id].size > buffers[owner].size:
                    raise AnalysisError(f"event {index} of allocation {allocation.index}: buffer {buffer_id} cannot lie in buffer {owner}")
            canonical[buffer_id] = owner
            if owner not in alive:
                alive[owner] = _Stay(start=index, users=0, shared=[])
                size = buffers[owner].size
                live_bytes += size
                places.add(offsets[owner], size)
            alive[owner].users += 1
            if buffer_id != owner:
                alive[owner].shared.append(buffer_id)
        else:
            raise AnalysisError(f"event {index} of allocation {allocation.index} is of unknown kind {kind}; known are 0 to 2")
        result.usage.append(live_bytes)
        result.buffers.append(buffer_id)
        result.instructions.append(event.instruction_name)
        result.computations.append(event.computation_name)
    if alive:
        raise AnalysisError(f"the heap trace of allocation {allocation.index} ends with {len(alive)} buffers alive; it was cut short")
    return result


class _Places:
    """The stretches of one allocation that are in use; in HBM two buffers alive at once never overlap (in VMEM some do, by design)."""

    def __init__(self, allocation: Allocation) -> None:
        self._index = allocation.index
        self._is_hbm = allocation.color == HBM
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, offset: int, size: int) -> None:
        if size == 0 or not self._is_hbm:
            return
        at = bisect.bisect_right(self._starts, offset)
        before_ends = self._ends[at - 1] if at else 0
        after_starts = self._starts[at] if at < len(self._starts) else offset + size
        if before_ends > offset or after_starts < offset + size:
            raise AnalysisError(
                f"allocation {self._index} holds two live buffers in the same bytes at offset {offset}; the dump is corrupted"
            )
        self._starts.insert(at, offset)
        self._ends.insert(at, offset + size)

    def remove(self, offset: int) -> None:
        at = bisect.bisect_left(self._starts, offset)
        if at < len(self._starts) and self._starts[at] == offset:
            del self._starts[at], self._ends[at]


def _whole_program(allocation: Allocation, buffers: Mapping[int, LogicalBuffer], last: int) -> Lifetime:
    """The stay of an allocation reserved throughout: named by the largest buffer that ends with it, one that fills it if any does."""
    last_placed = (buffer_id for buffer_id, offset in allocation.assigned if offset + buffers[buffer_id].size == allocation.size)
    owner = max(last_placed, key=lambda buffer_id: buffers[buffer_id].size)
    shared = tuple(buffer_id for buffer_id, _ in allocation.assigned if buffer_id != owner)
    return Lifetime(allocation.index, owner, allocation.size, 0, 0, last, shared)


def _check_totals(memory: MemoryDump) -> None:
    """Hold the totals against each other and the buffers at the peak against the peak."""
    at_peak = sum(life.size for life in memory.alive_at_peak)
    if at_peak != memory.peak_bytes:
        raise AnalysisError(f"the buffers alive at the peak sum to {at_peak} bytes and the peak is {memory.peak_bytes}")
    sizes: Sequence[tuple[str, int, int]] = (
        ("peak", memory.peak_bytes, memory.allocated_bytes),
        ("alias", memory.alias_bytes, min(memory.argument_bytes, memory.output_bytes)),
        ("argument", memory.argument_bytes, memory.peak_bytes),
    )
    for name, size, limit in sizes:
        if size > limit:
            raise AnalysisError(f"the dump does not add up: {name} is {size} bytes, above the {limit} that contain it")
