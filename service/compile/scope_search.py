"""Finds the named scope of a value: its own, or, where the compiler dropped it, that of its nearest relative.

The order is fixed, and everything but the value's own name is marked as inferred: the fused computation, the source of an asynchronous copy
or loop value, the users, the operands.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.compile.hlo import Instruction, Program, Value
from service.compile.scopes import BACKWARD, FORWARD, INPUT, OPTIMIZER, REMAT, Scope, parse_scope

_SEARCH_LIMIT = 96
"""Values looked at before a search is given up; a neighbourhood that means something is smaller."""

_WRAPPERS = frozenset({"fusion", "async-start", "call", "call-start", "custom-call-start"})
"""Opcodes whose called computation is the instruction itself; loop bodies and reducers are programs of their own."""

_ORDER = (FORWARD, REMAT, BACKWARD, OPTIMIZER)
"""Phases in the order in which values flow through them."""

_PLUMBING = frozenset({"get-tuple-element", "tuple", "parameter", "while", "bitcast"})


@dataclass(frozen=True, slots=True)
class FoundScope:
    """A scope and how it was found."""

    scope: Scope
    op_name: str
    is_inferred: bool


class ScopeSearch:
    """Searches one program; keeps what it has found."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._inferred: dict[Value, FoundScope | None] = {}

    def find(self, values: Sequence[Value]) -> FoundScope | None:
        """The scope of the first of these values (which share bytes) that names its own, else the first that can be inferred."""
        for instruction_id, _ in values:
            if found := _own(self._program.instructions[instruction_id]):
                return FoundScope(*found, is_inferred=False)
        for value in values:
            if value not in self._inferred:
                self._inferred[value] = self._infer(value)
            if inferred := self._inferred[value]:
                return inferred
        return None

    def phase_of(self, values: Sequence[Value]) -> str | None:
        """The phase these values (which share bytes) are made in.

        Where none names its own, it is the latest phase among what they are made from: whatever depends on a gradient is backward, and
        what does not is not, whoever reads it. What is made from arguments alone is of the phase that reads it first.
        """
        found = self.find(values)
        if found and not found.is_inferred and found.scope.phase not in (None, INPUT):
            return found.scope.phase
        made_from = {phase for value in values for phase in self._producer_phases(value)}
        if made_from:
            return max(made_from, key=_ORDER.index)
        if found and found.scope.phase not in (None, INPUT):
            return found.scope.phase
        for value in values:
            for user, _ in self.walk_users(value):
                phase = parse_scope(user.op_name).phase
                if phase not in (None, INPUT):
                    return phase
        return None

    def _producer_phases(self, value: Value) -> Iterator[str]:
        """The phase of the nearest instruction with one, up each way that leads to this value within its computation."""
        seen: set[int] = set()
        pending = deque(self._program.instructions[value[0]].operands)
        while pending and len(seen) < _SEARCH_LIMIT:
            instruction = self._program.instructions[pending.popleft()]
            if instruction.id in seen:
                continue
            seen.add(instruction.id)
            phase = parse_scope(instruction.op_name).phase
            if phase in _ORDER:
                yield phase
            elif instruction.opcode != "while":
                pending.extend(instruction.operands)

    def fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions inside a fusion or an asynchronous wrapper."""
        if instruction.opcode in _WRAPPERS:
            yield from self._program.nested(instruction)

    def _infer(self, value: Value) -> FoundScope | None:
        instruction = self._program.instructions[value[0]]
        if found := self._from_fused(instruction, value[1]):
            return FoundScope(*found, is_inferred=True)
        for walk in (self._walk_sources, self.walk_users, self._walk_operands):
            for neighbour, index in walk(value):
                if found := _own(neighbour) or self._from_fused(neighbour, index):
                    return FoundScope(*found, is_inferred=True)
        return None

    def _from_fused(self, instruction: Instruction, index: tuple[int, ...]) -> tuple[Scope, str] | None:
        """The scope of what is fused: of the instruction that makes this output, else the one most fused instructions have."""
        if instruction.opcode != "fusion":
            inner = list(self.fused(instruction))
        else:
            root = self._program.root_of(instruction.called[0])
            maker = self._program.instructions[self._program.resolve((root.id, index if root.opcode == "tuple" else ()))[0]]
            if found := _own(maker):
                return found
            inner = list(self.fused(instruction))
        names = Counter(i.op_name for i in inner if parse_scope(i.op_name).path and parse_scope(i.op_name).role is None)
        if not names:
            return None
        op_name = names.most_common(1)[0][0]
        return parse_scope(op_name), op_name

    def _walk_sources(self, value: Value) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
        """What an asynchronous or loop value comes from: the started operation, the loop body's result, the loop's or caller's input."""
        seen: set[Value] = set()
        pending = deque([value])
        while pending and len(seen) < _SEARCH_LIMIT:
            current = self._program.resolve(pending.popleft())
            if current in seen:
                continue
            seen.add(current)
            instruction, index = self._program.instructions[current[0]], current[1]
            if current != value:
                yield instruction, index
            if instruction.opcode == "while":
                body, _ = self._program.loop_parts(instruction)
                pending.append((self._program.root_of(body).id, index))
                pending.append((instruction.operands[0], index))
            elif instruction.opcode.endswith(("-done", "-update")) or instruction.opcode in ("copy", "copy-start", "async-start"):
                pending.extend((operand, ()) for operand in instruction.operands[:1])
            elif instruction.opcode == "parameter":
                pending.extend(self._outside(instruction, index))

    def _outside(self, parameter: Instruction, index: tuple[int, ...]) -> list[Value]:
        """The operands that callers pass for a computation's parameter."""
        number = parameter.proto.parameter_number
        callers = (self._program.instructions[caller] for caller in self._program.callers.get(parameter.computation, ()))
        return [(caller.operands[number], index) for caller in callers if number < len(caller.operands)]

    def walk_users(self, value: Value, passing: frozenset[str] | None = None) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
        """Who reads the value, nearest first: through tuples, into loops and out of them.

        With `passing`, the walk goes on only behind instructions of these opcodes.
        """
        seen: set[Value] = {value}
        pending = deque([value])
        while pending and len(seen) < _SEARCH_LIMIT:
            instruction_id, index = pending.popleft()
            for user, user_index in self._users_of(instruction_id, index):
                if (user.id, user_index) in seen:
                    continue
                seen.add((user.id, user_index))
                if user.opcode not in _PLUMBING:
                    yield user, user_index
                if passing is None or user.opcode in passing or user.opcode == "parameter":
                    pending.append((user.id, user_index))

    def _users_of(self, instruction_id: int, index: tuple[int, ...]) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
        program = self._program
        for user_id in program.users.get(instruction_id, ()):
            user = program.instructions[user_id]
            if user.opcode == "get-tuple-element":
                if index and index[0] == user.proto.tuple_index:
                    yield user, index[1:]
                elif not index:
                    yield user, ()
            elif user.opcode == "tuple":
                for position, operand in enumerate(user.operands):
                    if operand == instruction_id:
                        yield user, (position, *index)
            elif user.opcode == "while":
                body, _ = program.loop_parts(user)
                parameter = program.parameters[body].get(0)
                if parameter is not None:
                    yield program.instructions[parameter], index
                yield user, index
            elif user.opcode == "bitcast":
                yield user, index
            else:
                yield user, ()
        instruction = program.instructions[instruction_id]
        if program.computations[instruction.computation].root == instruction_id:
            for caller_id in program.callers.get(instruction.computation, ()):
                caller = program.instructions[caller_id]
                if caller.opcode != "while" or program.loop_parts(caller)[0] == instruction.computation:
                    yield caller, index

    def _walk_operands(self, value: Value) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
        """What the value is made from, nearest first, out of loops to their inputs."""
        seen: set[Value] = set()
        pending = deque([value])
        while pending and len(seen) < _SEARCH_LIMIT:
            current = self._program.resolve(pending.popleft())
            if current in seen:
                continue
            seen.add(current)
            instruction, index = self._program.instructions[current[0]], current[1]
            if current != value and instruction.opcode not in ("tuple", "constant"):
                yield instruction, index
            if instruction.opcode == "parameter":
                pending.extend(self._outside(instruction, index))
            elif instruction.opcode == "while":
                body, _ = self._program.loop_parts(instruction)
                pending.append((self._program.root_of(body).id, index))
            else:
                pending.extend((operand, ()) for operand in instruction.operands)


def _own(instruction: Instruction) -> tuple[Scope, str] | None:
    scope = parse_scope(instruction.op_name)
    return (scope, instruction.op_name) if scope.path else None
