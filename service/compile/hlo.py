"""The optimised program as a graph: instructions, who uses them, which computation each lies in and who calls that.

Built from the dump's `HloModuleProto`. Every instruction is named by its id, unique in the module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from service.compile.shapes import TUPLE
from service.errors import AnalysisError

Value = tuple[int, tuple[int, ...]]
"""One output of an instruction: its id and the index into its shape; the index is () where it has one output."""


class Instruction(NamedTuple):
    """One instruction; `proto` holds what is rarely asked for."""

    id: int
    name: str
    opcode: str
    computation: int
    op_name: str
    """The JAX name scope path, or a pytree path; empty where the compiler made or merged the instruction."""
    operands: tuple[int, ...]
    called: tuple[int, ...]
    proto: Any

    @property
    def shape(self) -> Any:
        return self.proto.shape


@dataclass(frozen=True, slots=True)
class Computation:
    """One computation: the entry, the body of a loop, a fusion, a reducer."""

    id: int
    name: str
    root: int
    instructions: tuple[int, ...]


class Program:
    """The optimised module of one program.

    Raises:
        AnalysisError: an instruction names operands or computations that do not exist.
    """

    def __init__(self, module: Any) -> None:
        self.name: str = module.name
        self.entry: int = module.entry_computation_id
        self.instructions: dict[int, Instruction] = {}
        self.computations: dict[int, Computation] = {}
        self._stack_frames = module.stack_frame_index
        self._aliases = module.input_output_alias
        self._shardings = module.spmd_parameters_shardings
        for computation in module.computations:
            ids = []
            for proto in computation.instructions:
                instruction = Instruction(
                    proto.id,
                    proto.name,
                    proto.opcode,
                    computation.id,
                    proto.metadata.op_name,
                    tuple(proto.operand_ids),
                    tuple(proto.called_computation_ids),
                    proto,
                )
                self.instructions[proto.id] = instruction
                ids.append(proto.id)
            self.computations[computation.id] = Computation(computation.id, computation.name, computation.root_id, tuple(ids))
        self._check()

    def _check(self) -> None:
        count = sum(len(computation.instructions) for computation in self.computations.values())
        if count != len(self.instructions) or self.entry not in self.computations:
            raise AnalysisError(f"module {self.name!r} repeats an instruction id or has no entry computation; the dump is corrupted")
        for computation in self.computations.values():
            if computation.root not in self.instructions or self.instructions[computation.root].computation != computation.id:
                raise AnalysisError(f"computation {computation.name!r} has no root of its own; the dump is corrupted")
        # Modules are stored with operands before users and callees before callers: with this held, no walk over them can go in a circle.
        placed: set[int] = set()
        defined: set[int] = set()
        for computation in self.computations.values():
            placed.clear()
            for instruction in self.in_computation(computation.id):
                if not placed.issuperset(instruction.operands):
                    raise AnalysisError(
                        f"instruction {instruction.name!r} reads operands that do not stand before it; the dump is corrupted"
                    )
                if not defined.issuperset(instruction.called):
                    raise AnalysisError(f"instruction {instruction.name!r} calls what does not stand before it; the dump is corrupted")
                placed.add(instruction.id)
            defined.add(computation.id)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Instruction id to the ids that read it, in program order."""
        users: dict[int, list[int]] = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction.id)
        return users

    @cached_property
    def callers(self) -> dict[int, list[int]]:
        """Computation id to the ids of the instructions that call it, once per mention."""
        callers: dict[int, list[int]] = defaultdict(list)
        for instruction in self.instructions.values():
            for called in instruction.called:
                callers[called].append(instruction.id)
        return callers

    @cached_property
    def parameters(self) -> dict[int, dict[int, int]]:
        """Computation id to parameter number to instruction id."""
        parameters: dict[int, dict[int, int]] = defaultdict(dict)
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter":
                parameters[instruction.computation][instruction.proto.parameter_number] = instruction.id
        return parameters

    @cached_property
    def loops_by_body(self) -> dict[int, int]:
        """Body or condition computation id to the id of its `while`."""
        return {called: i.id for i in self.instructions.values() if i.opcode == "while" for called in i.called}

    @cached_property
    def aliased_parameters(self) -> set[tuple[int, tuple[int, ...]]]:
        """Entry parameters (number, index) whose memory an output may reuse."""
        return {(entry.parameter_number, tuple(entry.parameter_shape_index)) for entry in self._aliases.entries}

    def sharded_axes(self, number: int) -> tuple[str, ...] | None:
        """The mesh axes an entry parameter is cut over; None where the module does not say it by name."""
        if number >= len(self._shardings):
            return None
        sharding = self._shardings[number]
        if sharding.tile_assignment_dimensions or not sharding.HasField("named_sharding"):
            return None
        named = sharding.named_sharding
        return tuple(named.mesh.axes[axis.mesh_axis_index].name for dim in named.dim_shardings for axis in dim.axes)

    def root_of(self, computation: int) -> Instruction:
        return self.instructions[self.computations[computation].root]

    def in_computation(self, computation: int) -> Iterator[Instruction]:
        return (self.instructions[i] for i in self.computations[computation].instructions)

    def nested(self, instruction: Instruction) -> Iterator[Instruction]:
        """Every instruction of the computations that this one calls, and of those they call; `while` bodies included."""
        pending, seen = list(instruction.called), set[int]()
        while pending:
            computation = pending.pop()
            if computation in seen:
                continue
            seen.add(computation)
            for inner in self.in_computation(computation):
                yield inner
                pending.extend(inner.called)

    def frames_of(self, instruction: Instruction) -> list[str]:
        """`file:line` of the frames that made an instruction, innermost first."""
        frames: list[str] = []
        frame_id = instruction.proto.metadata.stack_frame_id
        index = self._stack_frames
        while 0 < frame_id <= len(index.stack_frames) and len(frames) < 64:
            frame = index.stack_frames[frame_id - 1]
            if not 0 < frame.file_location_id <= len(index.file_locations):
                break
            location = index.file_locations[frame.file_location_id - 1]
            if 0 < location.file_name_id <= len(index.file_names):
                frames.append(f"{index.file_names[location.file_name_id - 1]}:{location.line}")
            frame_id = frame.parent_frame_id
        return frames

    def resolve(self, value: Value) -> Value:
        """The value behind get-tuple-element, tuple and bitcast within one computation: who really defines these bytes."""
        instruction, index = self.instructions[value[0]], value[1]
        for _ in range(1000):
            if instruction.opcode == "get-tuple-element":
                index = (instruction.proto.tuple_index, *index)
            elif instruction.opcode == "tuple" and index and index[0] < len(instruction.operands):
                instruction, index = self.instructions[instruction.operands[index[0]]], index[1:]
                continue
            elif instruction.opcode != "bitcast":
                break
            instruction = self.instructions[instruction.operands[0]]
        return instruction.id, index

    def unchanged_input(self, parameter: Instruction, index: tuple[int, ...]) -> Value | None:
        """The value outside that a loop hands to its body or condition unchanged at this index of its state.

        None where the body changes it, or the parameter is not a loop's.
        """
        loop_id = self.loops_by_body.get(parameter.computation)
        if loop_id is None or not index:
            return None
        loop = self.instructions[loop_id]
        body, _ = self.loop_parts(loop)
        own = self.parameters[body].get(0)
        if own is None or self.resolve((self.computations[body].root, index)) != (own, index):
            return None
        return self.resolve((loop.operands[0], index))

    def loop_parts(self, loop: Instruction) -> tuple[int, int]:
        """(body, condition) computations of a `while`: the condition is the one whose root is a single truth value."""
        body, condition = loop.called
        if self.root_of(body).shape.element_type != TUPLE:
            body, condition = condition, body
        return body, condition


def constant_integer(instruction: Instruction) -> int | None:
    """The value of a scalar integer constant; None for anything else."""
    if instruction.opcode != "constant" or instruction.shape.dimensions:
        return None
    literal = instruction.proto.literal
    values: Sequence[int] = literal.s32s or literal.s64s or literal.u32s or literal.u64s
    return int(values[0]) if len(values) == 1 else None
