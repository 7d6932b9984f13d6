"""Turns the flat map of modules into the tree its paths spell, with totals that include what stands below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

OWN = "(itself)"
"""Name of the row that holds what a module has beside its parts, so that the parts of every module sum to its total."""


@dataclass(frozen=True)
class ModuleRow:
    """One row of the tree, in reading order: a module before its parts, larger ones first."""

    path: str
    name: str
    depth: int
    num_bytes: int
    """Bytes of the module and of everything below it."""
    num_parts: int
    """Rows directly below; 0 for a leaf."""


def module_tree(modules: Mapping[str, int]) -> tuple[ModuleRow, ...]:
    """`modules` (path with `/` to bytes, as in a report) as a tree; the rows of depth 0 sum to the sum of `modules`."""
    children: dict[str, set[str]] = {}
    totals: dict[str, int] = {}
    for path, num_bytes in modules.items():
        parts = path.split("/")
        for depth in range(len(parts)):
            prefix = "/".join(parts[: depth + 1])
            totals[prefix] = totals.get(prefix, 0) + num_bytes
            children.setdefault("/".join(parts[:depth]), set()).add(prefix)
    return tuple(_rows("", 0, modules, children, totals))


def _rows(
    parent: str, depth: int, modules: Mapping[str, int], children: Mapping[str, set[str]], totals: Mapping[str, int]
) -> Iterator[ModuleRow]:
    rows = [(totals[path], path, path.rpartition("/")[2]) for path in children.get(parent, ())]
    if parent and modules.get(parent):
        rows.append((modules[parent], parent, OWN))
    for num_bytes, path, name in sorted(rows, key=lambda row: (-row[0], row[2])):
        below = set() if path == parent else children.get(path, set())
        num_parts = len(below) + (1 if below and modules.get(path) else 0)
        yield ModuleRow(path=path, name=name, depth=depth, num_bytes=num_bytes, num_parts=num_parts)
        if below:
            yield from _rows(path, depth + 1, modules, children, totals)
