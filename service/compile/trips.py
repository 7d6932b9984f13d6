"""How often each computation runs in one step: trip counts of loops, derived from the loops themselves.

The optimised module does not state trip counts. A scan is a counted loop: its condition compares an induction variable with a bound that
the loop does not change, its body adds a constant to it, and its start is a constant outside. Where any of these cannot be seen the
count is unknown, with the reason; it is never taken for 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.compile.hlo import Instruction, Program, Value, constant_integer

_SAME = frozenset({"bitcast", "convert", "copy", "copy-done", "copy-start", "reshape"})
"""Opcodes that hand a scalar on unchanged."""

_HOLDS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class Count:
    """How often something runs per step; None with the reason where that cannot be derived."""

    value: int | None
    reason: str | None = None

    def times(self, other: Count) -> Count:
        # Nothing inside a loop that never runs is run, whatever is unknown about it.
        if self.value == 0 or other.value == 0:
            return Count(0)
        if self.value is None:
            return self
        return other if other.value is None else Count(self.value * other.value)

    def plus(self, other: Count) -> Count:
        if self.value is None:
            return self
        return other if other.value is None else Count(self.value + other.value)


def execution_counts(program: Program) -> dict[int, Count]:
    """Computation id to how often it runs per step, for every computation that control reaches from the entry.

    Fusions, reducers and the like are part of the instruction that calls them and are not listed.
    """
    counts: dict[int, Count] = {program.entry: Count(1)}
    for computation in _callers_first(program):
        own = counts[computation]
        for instruction in program.in_computation(computation):
            for called, factor in _controlled(program, instruction):
                ran = own.times(factor)
                counts[called] = counts[called].plus(ran) if called in counts else ran
    return counts


def _controlled(program: Program, instruction: Instruction) -> list[tuple[int, Count]]:
    """The computations an instruction gives control to, and how often it does each time it runs."""
    if instruction.opcode == "while":
        trips = trip_count(program, instruction)
        body, condition = program.loop_parts(instruction)
        return [(body, trips), (condition, trips.plus(Count(1)))]
    if instruction.opcode == "conditional":
        unknown = Count(None, f"inside a branch of {instruction.name}, which is chosen at run time")
        return [(branch, unknown) for branch in instruction.called]
    if instruction.opcode in ("call", "call-start"):
        return [(called, Count(1)) for called in instruction.called]
    return []


def _callers_first(program: Program) -> list[int]:
    """Computations that control reaches, each after all that give control to it."""
    order: list[int] = []
    state: dict[int, bool] = {}
    pending: list[tuple[int, bool]] = [(program.entry, False)]
    while pending:
        computation, is_done = pending.pop()
        if is_done:
            order.append(computation)
            continue
        if computation in state:
            continue
        state[computation] = True
        pending.append((computation, True))
        for instruction in program.in_computation(computation):
            if instruction.opcode in ("while", "conditional", "call", "call-start"):
                pending.extend((called, False) for called in instruction.called)
    return order[::-1]


def trip_count(program: Program, loop: Instruction) -> Count:
    """How often a loop's body runs each time the loop is reached."""
    body, condition = program.loop_parts(loop)
    test = _comparison(program, condition)
    if test is None:
        return Count(None, f"the condition of {loop.name} is not a comparison of a counter with a bound")
    direction, left, right = test
    for counter, bound, way in ((left, right, direction), (right, left, _MIRRORED[direction])):
        index = _carried_index(program, counter, condition)
        if index is None:
            continue
        step = _step(program, body, index)
        if step is None:
            continue
        start = _constant(program, (loop.operands[0], index))
        limit = _constant(program, bound)
        if start is None or limit is None:
            which = "start" if start is None else "bound"
            return Count(None, f"the {which} of {loop.name} is computed at run time")
        return _count(loop.name, start, limit, step, way)
    return Count(None, f"no counter of {loop.name} advances by a constant")


def _count(name: str, start: int, limit: int, step: int, direction: str) -> Count:
    holds = _HOLDS[direction]
    if not holds(start, limit):
        return Count(0)
    distance = limit - start
    if direction == "NE":
        trips, rest = divmod(distance, step)
        ends = rest == 0 and trips > 0
    else:
        # Inclusive bounds run once more when the counter lands on them.
        inclusive = direction in ("LE", "GE")
        ends = (step > 0) == (direction in ("LT", "LE"))
        trips = abs(distance) // abs(step) + 1 if inclusive else -(-abs(distance) // abs(step))
    return Count(trips) if ends else Count(None, f"the counter of {name} moves away from its bound")


def _comparison(program: Program, condition: int) -> tuple[str, Value, Value] | None:
    """(direction, left, right) of the condition's root, looking into the fusion where it is one."""
    root = program.root_of(condition)
    compare, arguments = root, None
    if root.opcode == "fusion":
        compare = program.root_of(root.called[0])
        arguments = root.operands
    if compare.opcode != "compare" or compare.proto.comparison_direction not in _HOLDS:
        return None
    sides = []
    for operand in compare.operands:
        inner = program.instructions[operand]
        if arguments is not None and inner.opcode == "parameter":
            sides.append((arguments[inner.proto.parameter_number], ()))
        else:
            sides.append((operand, ()))
    return compare.proto.comparison_direction, sides[0], sides[1]


def _behind(program: Program, value: Value) -> Value:
    """The value behind copies, casts and tuple plumbing."""
    value = program.resolve(value)
    while program.instructions[value[0]].opcode in _SAME and program.instructions[value[0]].operands:
        value = program.resolve((program.instructions[value[0]].operands[0], ()))
    return value


def _carried_index(program: Program, value: Value, computation: int) -> tuple[int, ...] | None:
    """Where in the loop's state a value of the condition or body comes from; None where it is not carried."""
    instruction_id, index = _behind(program, value)
    return index if program.parameters[computation].get(0) == instruction_id and index else None


def _step(program: Program, body: int, index: tuple[int, ...]) -> int | None:
    """By how much the body advances the state at `index`; None where it is not by a constant."""
    instruction_id, _ = _behind(program, (program.computations[body].root, index))
    instruction = program.instructions[instruction_id]
    operands: list[Value] = [(operand, ()) for operand in instruction.operands]
    if instruction.opcode == "fusion":
        inner = program.root_of(instruction.called[0])
        passed = instruction.operands
        operands = []
        for operand in inner.operands:
            argument = program.instructions[operand]
            is_passed = argument.opcode == "parameter"
            operands.append((passed[argument.proto.parameter_number] if is_passed else operand, ()))
        instruction = inner
    if instruction.opcode not in ("add", "subtract") or len(operands) != 2:
        return None
    for counter, amount in (operands, operands[::-1]):
        step = _constant(program, amount)
        if step and _carried_index(program, counter, body) == index:
            if instruction.opcode == "add":
                return step
            return -step if counter == operands[0] else None
    return None


def _constant(program: Program, value: Value) -> int | None:
    """A scalar's value: a constant behind copies, also one that enclosing loops hand in unchanged."""
    for _ in range(64):
        instruction_id, index = _behind(program, value)
        instruction = program.instructions[instruction_id]
        if instruction.opcode != "parameter":
            return constant_integer(instruction)
        outer = program.unchanged_input(instruction, index)
        if outer is None:
            return None
        value = outer
    return None
