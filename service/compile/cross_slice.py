"""Collectives between slices, which the compiler spells as a send to and a receive from the multi-slice runtime.

A multi-slice program is compiled for one slice: groups within it name that slice's devices only. What crosses slices is a `send` with
`_xla_megascale_transfer_type` (`ALL_REDUCE`, `ALL_GATHER`, …) and `_xla_megascale_target`, which is counterparts `{1,2,3}x{0:3}`
(devices 0 to 3 of slices 1, 2 and 3, each with its counterparts), groups `{{100000,200000},…}` or links `{{100000->200000},…}`; ids count
slices from 1 in units of 100,000. The `recv` beside it is the same collective's other half.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from service.compile.hlo import Instruction
from service.errors import AnalysisError

_KINDS: Mapping[str, str] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_IDS_PER_SLICE = 100_000
_COUNTERPARTS = re.compile(r'^"?\{([\d,]+)\}x\{(\d+):(\d+)\}"?$')
_LINK = re.compile(r"\{(\d+)->(\d+)\}")
_GROUP = re.compile(r"\{(\d+(?:,\d+)*)\}")


def attribute(instruction: Instruction, name: str) -> str | None:
    """A frontend attribute's text; None where the instruction has none of this name."""
    return next((entry.value for entry in instruction.proto.frontend_attributes.map if entry.key == name), None)


def transfer_kind(instruction: Instruction) -> str | None:
    """The kind of collective a send to the multi-slice runtime is; None for any other instruction.

    A transfer type that is not known here is given in lower case as it stands.
    """
    if instruction.opcode != "send":
        return None
    transfer = attribute(instruction, "_xla_megascale_transfer_type")
    return None if transfer is None else _KINDS.get(transfer, transfer.lower())


def transfer_groups(instruction: Instruction, slices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The mesh positions that exchange; (source, target) each for a permute.

    Args:
        instruction: a send for which `transfer_kind` gives a kind.
        slices: for each slice, the mesh positions of its devices in order.

    Raises:
        AnalysisError: the target cannot be read or names devices that are not there.
    """
    target = attribute(instruction, "_xla_megascale_target") or ""
    try:
        if match := _COUNTERPARTS.match(target):
            members = [int(number) - 1 for number in match[1].split(",")]
            return tuple(tuple(slices[member][device] for member in members) for device in range(int(match[2]), int(match[3]) + 1))
        if links := _LINK.findall(target):
            return tuple((_position(source, slices), _position(destination, slices)) for source, destination in links)
        if groups := _GROUP.findall(target):
            return tuple(tuple(_position(device, slices) for device in group.split(",")) for group in groups)
    except IndexError:
        raise AnalysisError(
            f"{instruction.name} exchanges with {target}; the mesh has {len(slices)} slices of {len(slices[0])} devices"
        ) from None
    raise AnalysisError(f"{instruction.name} crosses slices to {target!r}, which is no known spelling of devices")


def _position(device: str, slices: Sequence[Sequence[int]]) -> int:
    slice_number, index = divmod(int(device), _IDS_PER_SLICE)
    if slice_number < 1:
        raise IndexError
    return slices[slice_number - 1][index]
