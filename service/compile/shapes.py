"""Sizes and texts of HLO shapes: logical bytes, bytes with tile padding, and the layout as the compiler prints it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

PRIMITIVE_TYPES = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    15: ("c64", 64),
    16: ("bf16", 16),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
    35: ("f6e3m2fn", 6),
    36: ("f6e2m3fn", 6),
}
"""xla.PrimitiveType number to name and bits; tests/compile/test_dump.py holds the numbers."""

TUPLE, OPAQUE, TOKEN = 13, 14, 17


def shape_at(shape: Any, index: Sequence[int]) -> Any | None:
    """The part of a (nested tuple) shape at an index; None where the index leads nowhere."""
    for position in index:
        if not 0 <= position < len(shape.tuple_shapes):
            return None
        shape = shape.tuple_shapes[position]
    return shape


def leaves(shape: Any) -> list[Any]:
    """The array shapes in a shape, in order; the shape itself where it is no tuple."""
    if shape.element_type != TUPLE:
        return [shape]
    return [leaf for part in shape.tuple_shapes for leaf in leaves(part)]


def dtype_name(shape: Any) -> str:
    """The element type as HLO text spells it: `bf16`; `tuple`, `opaque` and `token` for what holds no elements."""
    special = {TUPLE: "tuple", OPAQUE: "opaque", TOKEN: "token"}
    return special.get(shape.element_type) or PRIMITIVE_TYPES.get(shape.element_type, (f"type{shape.element_type}", 0))[0]


def element_bits(shape: Any) -> int | None:
    """Bits of one element as stored; None for tuples, tokens and types that are not known."""
    known = PRIMITIVE_TYPES.get(shape.element_type)
    return (shape.layout.element_size_in_bits or known[1]) if known else None


def logical_bytes(shape: Any) -> int | None:
    """Elements times their width, rounded up to a byte; None where the shape has no known elements."""
    bits = element_bits(shape)
    return None if bits is None else -(-math.prod(shape.dimensions) * bits // 8)


def padded_bytes(shape: Any) -> int | None:
    """Bytes an array takes with its layout's tiles: every tiled dim is rounded up to the tile (9 rows of bf16 in T(8,128) take 16).

    The first tile lies over the minor-most dims in layout order; further tiles subdivide it and pad nothing more than they must.
    """
    bits = element_bits(shape)
    if bits is None:
        return None
    dims = [shape.dimensions[dim] for dim in reversed(shape.layout.minor_to_major)]
    for tile in shape.layout.tiles:
        rank = len(tile.dimensions)
        dims = [1] * (rank - len(dims)) + dims
        tiled = [(-(-dim // size), size) for dim, size in zip(dims[len(dims) - rank :], tile.dimensions, strict=True)]
        # A tile splits each dim in two: how many tiles, and how large; the next tile lies over the minor-most of these.
        dims = dims[: len(dims) - rank] + [count for count, _ in tiled] + [size for _, size in tiled]
    elements = math.prod(dims)
    if align := shape.layout.tail_padding_alignment_in_elements:
        elements = -(-elements // align) * align
    return -(-elements * bits // 8)


def layout_text(shape: Any) -> str:
    """The layout as HLO text writes it: `{1,0:T(8,128)(2,1)S(1)}`; empty for tuples."""
    if shape.element_type == TUPLE:
        return ""
    layout = shape.layout
    tiles = "".join(f"({','.join(str(dim) for dim in tile.dimensions)})" for tile in layout.tiles)
    space = f"S({layout.memory_space})" if layout.memory_space else ""
    tail = layout.tail_padding_alignment_in_elements
    suffix = (f"T{tiles}" if tiles else "") + (f"L({tail})" if tail > 1 else "") + space
    return "{" + ",".join(str(dim) for dim in layout.minor_to_major) + (f":{suffix}" if suffix else "") + "}"
