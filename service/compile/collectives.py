"""Counts what crosses the links: every collective of the program, in every spelling, with its bytes and how often it runs per step.

One collective can be written as one instruction, as a start and a done, as an asynchronous wrapper or a fusion that calls it, or as a
chain of fusions that overlap it with compute; each is counted once. Sizes are those of the operands, never of a start's tuple. Bytes are
per device and logical (tile padding does not cross links). Where the compiler fuses a cast into a collective, the operand's type counts.

Payload and wire bytes, for a group of n devices (ring or all-to-all factors):

    kind                  payload            wire bytes sent per device
    all-gather            gathered result    (n-1)/n of it
    all-reduce            operand            2(n-1)/n of it
    reduce-scatter        operand            (n-1)/n of it
    all-to-all            operand            (n-1)/n of it
    ragged-all-to-all     the smaller of     (n-1)/n of it, when rows spread evenly: the true sizes are data
                          operand, output
    collective-permute    operand            all of it, on devices that have a target
    collective-broadcast  operand            all of it, on the source
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from service.compile.cross_slice import transfer_kind
from service.compile.groups import Mesh, Reach, reach_of
from service.compile.hlo import Instruction, Program, Value
from service.compile.scope_search import ScopeSearch
from service.compile.shapes import dtype_name, leaves, logical_bytes
from service.compile.trips import Count, execution_counts
from service.errors import AnalysisError

WIRE_FACTORS: Mapping[str, str] = {
    "all-gather": "(n-1)/n",
    "all-reduce": "2(n-1)/n",
    "reduce-scatter": "(n-1)/n",
    "all-to-all": "(n-1)/n",
    "ragged-all-to-all": "(n-1)/n, rows spread evenly",
    "collective-permute": "1, on devices with a target",
    "collective-broadcast": "1, on the source",
}
"""The kinds that are understood, and which share of the payload a device sends."""

_FAMILY = re.compile(r"^(all-(?!.*-done$)|collective-|ragged-all-|reduce-scatter|send$|recv$)")
"""What an opcode of the family looks like, known or not."""

_GROUP_FIELDS = ("collective_device_list", "iota_collective_device_list", "mesh_axes_replica_group_list")

_NEVER = frozenset(
    {
        "add",
        "bitcast",
        "broadcast",
        "constant",
        "convert",
        "copy",
        "fusion",
        "get-tuple-element",
        "multiply",
        "parameter",
        "reshape",
        "tuple",
    }
)
"""The most frequent opcodes, which are certainly none: most instructions are told by one look-up."""

_EXPLICIT = frozenset(
    {
        "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute", "psum", "psum2",
        "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter",
    }
)  # fmt: skip
"""Primitives by which a program asks for a collective; any other collective was made by the compiler from shardings."""

_VIEWS = frozenset({"bitcast", "convert", "copy", "dynamic-slice", "reshape", "slice", "transpose"})
"""Opcodes that pass on what a collective brought, or a part of it."""

_WRAPPERS = frozenset({"fusion", "async-start", "custom-call", "custom-call-start"})


@dataclass(frozen=True, slots=True)
class CollectiveInstance:
    """One collective of the program, where it stands."""

    kind: str
    """One of WIRE_FACTORS, or the opcode where that is not known."""
    name: str
    computation: str
    is_known: bool
    reach: Reach
    payload_bytes: int | None
    """Per run and device; None for an opcode that is not known."""
    wire_bytes: Fraction | None
    """What the busiest device sends per run; None for an opcode that is not known."""
    count: Count
    """Runs per step."""
    module: str
    phase: str | None
    op_name: str
    is_compiler_made: bool | None
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def base_opcode(opcode: str) -> str:
    """The opcode without its asynchronous suffix."""
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def is_collective(instruction: Instruction) -> bool:
    """Whether the instruction itself starts or is a collective, of a known kind or not."""
    opcode, proto = instruction.opcode, instruction.proto
    if opcode in _NEVER or opcode.endswith(("-done", "-update")):
        return False
    if opcode in ("send", "recv") and proto.is_host_transfer:
        # To the host, unless the multi-slice runtime stands behind it; the receiving half is not counted again.
        return transfer_kind(instruction) is not None
    if _FAMILY.match(opcode) or proto.source_target_pairs or proto.replica_groups:
        return True
    # An opcode nobody foresaw is of the family when it has groups.
    return any(proto.HasField(field) for field in _GROUP_FIELDS)


def is_collective_result(program: Program, value: Value) -> bool:
    """Whether the value came over the links: a collective yields it, or waits for it, or wraps what does.

    A fusion that carries a piece of a running collective yields its own results beside it: only what the collective makes is one.
    """
    instruction = program.instructions[value[0]]
    if base_opcode(instruction.opcode) in WIRE_FACTORS or is_collective(instruction):
        return True
    if instruction.opcode not in _WRAPPERS:
        return False
    is_wrapper = any(is_collective(inner) for inner in program.nested(instruction))
    if instruction.opcode != "fusion" or not is_wrapper:
        return is_wrapper
    made = program.resolve((program.computations[instruction.called[0]].root, value[1]))
    while program.instructions[made[0]].opcode in _VIEWS:
        made = program.resolve((program.instructions[made[0]].operands[0], ()))
    # The halves of a collective that runs beside other fusions end in a custom call that names no computation.
    return program.instructions[made[0]].opcode == "custom-call" or is_collective_result(program, made)


def find_collectives(program: Program, mesh: Mesh, search: ScopeSearch) -> list[CollectiveInstance]:
    """Every collective of the program once, in program order.

    Raises:
        AnalysisError: groups that contradict the mesh.
    """
    return [
        _instance(program, mesh, search, instruction, inner, count)
        for computation, count in execution_counts(program).items()
        for instruction in program.in_computation(computation)
        for inner in _collectives_of(program, instruction)
    ]


def _collectives_of(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The collectives an instruction starts: itself, or those it wraps unless an earlier fusion of its chain has started them."""
    if is_collective(instruction):
        yield instruction
    elif instruction.opcode in _WRAPPERS:
        wrapped = [inner for inner in program.nested(instruction) if is_collective(inner)]
        if wrapped:
            started = _started_before(program, instruction)
            yield from (inner for inner in wrapped if (inner.opcode, inner.proto.channel_id) not in started)


def _started_before(program: Program, fusion: Instruction) -> set[tuple[str, int]]:
    """(opcode, channel) of overlapped collectives that a fusion feeding this one has started.

    The compiler overlaps a collective with compute by a chain of fusions that all hold a copy of it, marked with an
    `async_collective_fusion_config`, and pass its buffers and semaphores on.
    """
    feeder_ids = {program.resolve((operand, ()))[0] for operand in fusion.operands}
    return {
        (inner.opcode, inner.proto.channel_id)
        for feeder in map(program.instructions.__getitem__, sorted(feeder_ids))
        if feeder.opcode in _WRAPPERS
        for inner in program.nested(feeder)
        if is_collective(inner) and _is_overlapped(inner)
    }


def _is_overlapped(instruction: Instruction) -> bool:
    try:
        config = json.loads(instruction.proto.backend_config or b"{}")
    except ValueError:
        return False
    return isinstance(config, dict) and "async_collective_fusion_config" in config


def _instance(
    program: Program, mesh: Mesh, search: ScopeSearch, outer: Instruction, inner: Instruction, count: Count
) -> CollectiveInstance:
    kind = transfer_kind(inner) or base_opcode(inner.opcode)
    reach = reach_of(inner, mesh)
    if kind == "all-reduce" and outer.opcode == "fusion" and _keeps_its_share(program, outer, reach.group_size):
        kind = "reduce-scatter"
    _check_result(program, inner, base_opcode(inner.opcode), reach)
    operands = _payload_shapes(program, inner, kind)
    payload, wire = _bytes(kind, operands, reach)
    found = search.find([(inner.id, ()), (outer.id, ())])
    op_name = found.op_name if found else ""
    return CollectiveInstance(
        kind=kind,
        name=outer.name,
        computation=program.computations[outer.computation].name,
        is_known=kind in WIRE_FACTORS,
        reach=reach,
        payload_bytes=payload,
        wire_bytes=wire,
        count=count,
        module=(found.scope.module if found else "") or "unattributed",
        phase=search.phase_of([(inner.id, ()), (outer.id, ())]),
        op_name=op_name,
        is_compiler_made=_is_compiler_made(outer, inner),
        dtypes=tuple(dict.fromkeys(dtype_name(shape) for shape in operands)),
        shapes=tuple(tuple(shape.dimensions) for shape in operands),
    )


def _payload_shapes(program: Program, instruction: Instruction, kind: str) -> list[Any]:
    """The array shapes a device puts in: of the data operands, not of offsets, sizes or destination buffers."""
    operands = [program.instructions[operand].shape for operand in instruction.operands]
    if instruction.opcode == "send":
        # Its other operand is a token.
        operands = operands[:1]
    elif kind == "ragged-all-to-all" and len(operands) > 1:
        # Over all devices, no more rows are sent than the operands hold, nor received than the output buffers hold.
        operands = [min(operands[:2], key=lambda shape: logical_bytes(shape) or 0)]
    elif kind == "collective-permute" and len(operands) == 4:
        # A permute in place names its output and both offsets too.
        operands = operands[:1]
    return [leaf for operand in operands for leaf in leaves(operand)]


def _check_result(program: Program, instruction: Instruction, opcode: str, reach: Reach) -> None:
    """Hold how many elements a synchronous collective yields against how many it is given; the compiler may fuse a cast into it."""
    if instruction.opcode != opcode or opcode not in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        return
    given = _num_elements(leaf for operand in instruction.operands for leaf in leaves(program.instructions[operand].shape))
    yielded = _num_elements(leaves(instruction.shape))
    factor = {"all-gather": Fraction(reach.group_size), "reduce-scatter": Fraction(1, reach.group_size)}.get(opcode, Fraction(1))
    if yielded != factor * given:
        raise AnalysisError(
            f"{instruction.name} is given {given} elements and yields {yielded} over groups of {reach.group_size}; the dump is corrupted"
        )


def _num_elements(shapes: Iterable[Any]) -> int:
    return sum(math.prod(shape.dimensions) for shape in shapes)


def _bytes(kind: str, operands: list[Any], reach: Reach) -> tuple[int | None, Fraction | None]:
    """(payload, wire bytes of the busiest device) of one run."""
    sizes = [logical_bytes(shape) for shape in operands]
    if kind not in WIRE_FACTORS or any(size is None for size in sizes):
        return None, None
    given = sum(size for size in sizes if size is not None)
    if kind == "collective-permute":
        return given, Fraction(given if any(source != target for source, target in reach.groups) else 0)
    members = reach.group_size
    if kind == "collective-broadcast":
        return given, Fraction(given if members > 1 else 0)
    payload = given * members if kind == "all-gather" else given
    share = Fraction(members - 1, members) * (2 if kind == "all-reduce" else 1)
    return payload, payload * share


def _keeps_its_share(program: Program, fusion: Instruction, group_size: int) -> bool:
    """Whether a fusion reduces over a group and keeps one member's share of it: the compiler's spelling of a reduce-scatter.

    A slice of another size is only read from a whole all-reduce.
    """
    instruction = program.root_of(fusion.called[0])
    while instruction.opcode in ("bitcast", "copy", "reshape", "convert") and instruction.operands:
        instruction = program.instructions[instruction.operands[0]]
    if instruction.opcode != "dynamic-slice":
        return False
    source, _ = program.resolve((instruction.operands[0], ()))
    kept, reduced = (_num_elements(leaves(program.instructions[id].shape)) for id in (instruction.id, instruction.operands[0]))
    return program.instructions[source].opcode == "all-reduce" and kept * group_size == reduced


def _is_compiler_made(outer: Instruction, inner: Instruction) -> bool | None:
    """Whether no line of the program asks for it: sharding propagation or a later pass made it. None without a name to tell by."""
    for instruction in (inner, outer):
        if any(entry.key == "is_spmd_generated" and entry.value == "true" for entry in instruction.proto.frontend_attributes.map):
            return True
    op_names = [instruction.op_name for instruction in (inner, outer) if instruction.op_name]
    if not op_names:
        return None
    return not any(part.rsplit("/", 1)[-1] in _EXPLICIT for op_name in op_names for part in op_name.split(";"))
