"""Reads the partitioner's warnings that it gathers a tensor whole, because it knows no better way from one sharding to another.

It prints one device's piece of the tensor and the sharding it has before: over a named mesh
(`{mesh['fsdp'=2,'context'=2], [{'fsdp'}, {'context'}]}`), or as a number of pieces for each dim
(`{devices=[2,1,4]<=[8] last_tile_dim_replicate}`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from service.compile.scopes import parse_scope
from service.compile.shapes import PRIMITIVE_TYPES

_WARNING = re.compile(r"[Ii]nvoluntary full rematerialization\.(?P<text>[^\n]*)")
_OPERATION = re.compile(r"HLO operation:?\s*%?(?P<name>[\w.\-]+)\s*=\s*(?P<dtype>\w+)\[(?P<dims>[\d,]*)\]")
_OP_NAME = re.compile(r'op_name="(?P<op_name>[^"]*)"')
_OVER_MESH = re.compile(r"from sharding \{mesh\[(?P<mesh>[^\]]*)\], \[(?P<dims>[^\]]*)\]")
_TILED = re.compile(r"from sharding \{devices=\[(?P<tiles>[\d,]+)\][^}]*?(?P<replicates>last_tile_dim_replicate)?\}")
_MESH_AXIS = re.compile(r"'(?P<name>[^']+)'=(?P<size>\d+)")
_AXIS_USED = re.compile(r"'(?P<name>[^']+)'(?P<part>:\(\d+\)(?P<size>\d+))?")
_BITS = dict(PRIMITIVE_TYPES.values())


@dataclass(frozen=True, slots=True)
class Resharding:
    """One tensor that is gathered whole; None where the warning does not say it."""

    operation: str | None
    """The instruction, as the partitioner names it: later passes may rename it."""
    piece: str | None
    """What a device holds before, `bf16[1,512,4,1024]`."""
    gathered_bytes: int | None
    """All pieces together, on each device; where a dim does not divide, the pieces are padded and so is this."""
    op_name: str | None
    module: str | None


def find_reshardings(log: str) -> list[Resharding]:
    """Each of the warnings in a compiler's log once, in order."""
    seen: dict[str, Resharding] = {}
    for match in _WARNING.finditer(log):
        resharding = _read(match["text"])
        seen.setdefault(resharding.operation or match["text"], resharding)
    return list(seen.values())


def _read(text: str) -> Resharding:
    operation, scope = _OPERATION.search(text), _OP_NAME.search(text)
    op_name = scope["op_name"] if scope else None
    module = parse_scope(op_name).module if op_name else ""
    if operation is None:
        return Resharding(None, None, None, op_name, module or None)
    dims = [int(dim) for dim in operation["dims"].split(",") if dim]
    bits, pieces = _BITS.get(operation["dtype"]), _num_pieces(text)
    gathered = None if bits is None or pieces is None else -(-math.prod(dims) * bits // 8) * pieces
    return Resharding(operation["name"], f"{operation['dtype']}[{operation['dims']}]", gathered, op_name, module or None)


def _num_pieces(text: str) -> int | None:
    """In how many pieces the tensor lies before; None in a spelling that is not known."""
    if tiled := _TILED.search(text):
        tiles = [int(size) for size in tiled["tiles"].split(",")]
        return math.prod(tiles[:-1] if tiled["replicates"] else tiles)
    over = _OVER_MESH.search(text)
    if over is None:
        return None
    sizes = {axis["name"]: int(axis["size"]) for axis in _MESH_AXIS.finditer(over["mesh"])}
    # An axis may be used in part: `'fsdp':(1)2` is 2 of its ranks.
    used = [int(axis["size"]) if axis["part"] else sizes.get(axis["name"]) for axis in _AXIS_USED.finditer(over["dims"])]
    known = [size for size in used if size is not None]
    return math.prod(known) if len(known) == len(used) else None
