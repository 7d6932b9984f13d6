"""The module tree: totals include the parts, and the parts of every module sum to its total."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.breakdown import OWN, ModuleRow, module_tree

PATHS = st.lists(st.sampled_from(["mla", "moe", "norm", "mtp"]), min_size=1, max_size=4).map("/".join)


def test_a_module_comes_before_its_parts_and_larger_ones_first() -> None:
    rows = module_tree({"moe/shared": 30, "embed": 5, "moe": 7, "moe/router": 11})
    assert [(row.depth, row.name, row.num_bytes, row.num_parts) for row in rows] == [
        (0, "moe", 48, 3),
        (1, "shared", 30, 0),
        (1, "router", 11, 0),
        (1, OWN, 7, 0),
        (0, "embed", 5, 0),
    ]


@given(st.dictionaries(PATHS, st.integers(1, 10**12)))
def test_the_parts_of_every_module_sum_to_its_total(modules: dict[str, int]) -> None:
    rows = module_tree(modules)
    assert sum(row.num_bytes for row in rows if row.depth == 0) == sum(modules.values())
    for position, row in enumerate(rows):
        below = parts_of(rows, position)
        assert len(below) == row.num_parts
        if below:
            assert sum(part.num_bytes for part in below) == row.num_bytes


def parts_of(rows: tuple[ModuleRow, ...], position: int) -> list[ModuleRow]:
    parts = []
    for row in rows[position + 1 :]:
        if row.depth <= rows[position].depth:
            break
        if row.depth == rows[position].depth + 1:
            parts.append(row)
    return parts
