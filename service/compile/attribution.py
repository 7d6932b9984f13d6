"""Says of each buffer what it is (class), what it belongs to (module) and when it was made (phase).

The class of what lives through the whole program comes from its allocation: an entry parameter is what its pytree path says, whatever
name later values carry. The class of a temporary comes from what made it and how long it lives. The module comes from named scopes; where
the compiler dropped them, from the fused computation, the source of an asynchronous copy or loop value, the users, the operands, in
this order, and is then marked as inferred.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from service.compile.collectives import is_collective_result
from service.compile.hlo import Instruction, Program, Value
from service.compile.memory import Lifetime, MemoryDump
from service.compile.scope_search import ScopeSearch
from service.compile.scopes import BACKWARD, FORWARD, INPUT, OPTIMIZER, REMAT, Scope, parse_argument, parse_scope
from service.records import STATE_CLASSES

UNATTRIBUTED = "unattributed"
_MOVES = frozenset(
    {
        "all-gather", "all-gather-done", "all-gather-start", "all-reduce", "all-reduce-done", "all-reduce-start", "bitcast",
        "convert", "copy", "copy-done", "copy-start", "get-tuple-element", "optimization-barrier", "reduce-scatter", "reshape", "slice",
        "transpose", "tuple", "while",
    }
)  # fmt: skip
"""Opcodes that pass a value on without making a new one."""

_PIECEWISE_MOVES = frozenset({"async-done", "async-start", "concatenate", "custom-call", "dynamic-slice"})
"""How the compiler brings an argument on chip piece by piece."""

_ARGUMENT_SEARCH_LIMIT = 64
_COPY_SEARCH_LIMIT = 512
"""Hops: a gather that runs beside other fusions passes through each of them."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """What one buffer is."""

    buffer_class: str
    module: str
    module_inferred: bool
    phase: str | None
    op_name: str
    """The name the module was read from; empty where none was found."""
    instruction: Instruction
    """Where the bytes are defined."""


class Attributor:
    """Attributes the buffers of one program."""

    def __init__(self, program: Program, memory: MemoryDump, search: ScopeSearch) -> None:
        self._program = program
        self._memory = memory
        self._search = search

    def attribute(self, life: Lifetime) -> Attribution:
        """Class, module and phase of the buffer that lives there."""
        values = [self._value(buffer_id) for buffer_id in (life.buffer_id, *life.shared_ids)]
        allocation = self._memory.allocations[life.allocation]
        if allocation.parameter is not None:
            return self._parameter(allocation.parameter[0])
        if self._memory.is_pool(life):
            # Which of its values is alive when is not known: none of them may stand for all of its bytes.
            return Attribution(UNATTRIBUTED, UNATTRIBUTED, False, None, "", self._program.instructions[values[0][0]])
        found = self._search.find(values)
        instruction = self._program.instructions[values[0][0]]
        scope = found.scope if found else Scope((), None)
        phase = self._search.phase_of(values) or self._phase_by_position(life)
        if allocation.is_constant:
            buffer_class = "constants"
        elif allocation.maybe_live_out:
            buffer_class = "outputs"
            # The optimizer makes all of the new state; whose state it is stands in what it was made from.
            if found and scope.phase == OPTIMIZER and (argument := self._updated_argument(instruction)):
                return Attribution(buffer_class, argument.module, True, phase, found.op_name, instruction)
        else:
            buffer_class = self._temporary_class(life, values, scope, phase, bool(found))
        module = scope.module or UNATTRIBUTED
        op_name, is_inferred = (found.op_name, found.is_inferred) if found else ("", False)
        return Attribution(buffer_class, module, is_inferred, phase, op_name, instruction)

    def _value(self, buffer_id: int) -> Value:
        buffer = self._memory.buffers[buffer_id]
        return buffer.instruction_id, buffer.shape_index

    def _parameter(self, number: int) -> Attribution:
        instruction = self._program.instructions[self._program.parameters[self._program.entry][number]]
        scope = parse_argument(instruction.op_name)
        module = scope.module or UNATTRIBUTED
        return Attribution(scope.role or "other_arguments", module, False, INPUT, instruction.op_name, instruction)

    def _updated_argument(self, update: Instruction) -> Scope | None:
        """The module whose state an optimizer's instruction updates: that of the nearest argument it reads; None without one."""
        pending, seen = deque(update.operands), set[int]()
        while pending and len(seen) < _ARGUMENT_SEARCH_LIMIT:
            source = self._program.instructions[self._program.resolve((pending.popleft(), ()))[0]]
            if source.id in seen:
                continue
            seen.add(source.id)
            if source.opcode == "parameter" and source.computation == self._program.entry:
                scope = parse_argument(source.op_name)
                if scope.role in STATE_CLASSES and scope.path:
                    return scope
            elif source.opcode in _MOVES | _PIECEWISE_MOVES and source.opcode != "while":
                pending.extend(source.operands)
        return None

    # Classes of temporaries

    def _temporary_class(self, life: Lifetime, values: list[Value], scope: Scope, phase: str | None, is_known: bool) -> str:
        path = scope.path
        is_dispatch = "moe" in path and ("dispatch" in path or "combine" in path)
        if any(is_collective_result(self._program, value) for value in values):
            return "moe_dispatch" if is_dispatch else "collective_buffers"
        if is_dispatch:
            return "moe_dispatch"
        if phase in (BACKWARD, REMAT, OPTIMIZER) and any(self._reaches_optimizer(value) for value in values):
            return "gradients"
        if any(self._is_parameter_copy(value) for value in values):
            return "parameter_copies"
        if "logits" in path or "loss" in path:
            return "logits"
        backward_start = self._backward_start
        if phase == FORWARD and backward_start is not None and life.start < backward_start <= life.end:
            return "saved_activations"
        if phase == REMAT:
            return "rematerialised"
        return "temporaries" if is_known else UNATTRIBUTED

    @cached_property
    def _event_phases(self) -> list[str | None]:
        """Phase of the instruction of each timeline index, by its own name; None where it has none, and at 0, before the first event."""
        instructions = (self._program.instructions[self._value(buffer_id)[0]] for buffer_id in self._memory.event_buffers)
        return [None, *(parse_scope(instruction.op_name).phase for instruction in instructions)]

    @cached_property
    def _backward_start(self) -> int | None:
        """Timeline index where the forward pass gives way to the backward pass; None in a program without one.

        The scheduler hoists small backward instructions far forward (zeros that gradients are summed into, sorted indices), so the first
        of them would be too early. It is the index that has the most forward and the fewest backward instructions before it.
        """
        phases = self._event_phases
        if BACKWARD not in phases and REMAT not in phases:
            return None
        most, balance, start = 0, 0, 0
        for index, phase in enumerate(phases):
            balance += (phase == FORWARD) - (phase in (BACKWARD, REMAT))
            if balance > most:
                most, start = balance, index + 1
        return start

    def _phase_by_position(self, life: Lifetime) -> str | None:
        """The phase of the nearest earlier timeline index that has one."""
        for index in range(min(life.start, len(self._event_phases) - 1), 0, -1):
            if self._event_phases[index] is not None:
                return self._event_phases[index]
        return None

    def _reaches_optimizer(self, value: Value) -> bool:
        """Whether the value, only moved or summed over devices, is read by the optimizer."""
        for instruction, _ in self._search.walk_users(value, passing=_MOVES):
            if parse_scope(instruction.op_name).phase == OPTIMIZER:
                return True
            if any(parse_scope(inner.op_name).phase == OPTIMIZER for inner in self._search.fused(instruction)):
                return True
        return False

    def _is_parameter_copy(self, value: Value) -> bool:
        """Whether the value is an entry parameter that was only cast, cut, copied or gathered, in fusions or outside of them."""
        instruction, index = self._program.instructions[value[0]], value[1]
        fusions: list[Instruction] = []
        for _ in range(_COPY_SEARCH_LIMIT):
            if instruction.opcode == "parameter":
                if fusions:
                    instruction, index = self._program.instructions[fusions.pop().operands[instruction.proto.parameter_number]], ()
                    continue
                if instruction.computation == self._program.entry:
                    return parse_argument(instruction.op_name).role == "parameters"
                outer = self._program.unchanged_input(instruction, index)
                if outer is None:
                    return False
                instruction, index = self._program.instructions[outer[0]], outer[1]
                continue
            if instruction.opcode == "get-tuple-element":
                index = (instruction.proto.tuple_index, *index)
            elif instruction.opcode == "tuple" and index and index[0] < len(instruction.operands):
                instruction, index = self._program.instructions[instruction.operands[index[0]]], index[1:]
                continue
            elif instruction.opcode == "fusion":
                fusions.append(instruction)
                instruction = self._program.root_of(instruction.called[0])
                continue
            elif instruction.opcode == "custom-call" and fusions and is_collective_result(self._program, (fusions[-1].id, ())):
                # Half of a gather that runs beside other fusions: its first operand is what is gathered.
                index = ()
            elif instruction.opcode not in _MOVES or instruction.opcode in ("while", "all-reduce", "reduce-scatter"):
                return False
            if not instruction.operands:
                return False
            if instruction.opcode in ("copy-start", "all-gather-start"):
                index = ()
            instruction = self._program.instructions[instruction.operands[0]]
        return False
