"""Programs from HLO text, parsed by XLA's own parser."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jaxlib import _hlo  # type: ignore[attr-defined]  # private, and used by tests alone

from service.compile.collectives import CollectiveInstance, find_collectives
from service.compile.dump import hlo_proto_class
from service.compile.groups import Mesh
from service.compile.hlo import Program
from service.compile.scope_search import ScopeSearch

RECORDED = Path(__file__).parent.parent / "recorded"


def module_from_text(text: str) -> Any:
    """The module of some HLO text, as the dump's own message."""
    serialised = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    proto = hlo_proto_class()()
    proto.hlo_module.MergeFromString(serialised)
    return proto.hlo_module


def program_from_text(text: str) -> Program:
    return Program(module_from_text(text))


@cache
def recorded(name: str) -> Program:
    """The program of `tests/recorded/NAME.hlo`."""
    return program_from_text((RECORDED / f"{name}.hlo").read_text())


def collectives_in(program: Program, axes: dict[str, int], *, num_slices: int = 1) -> list[CollectiveInstance]:
    num_devices = 1
    for size in axes.values():
        num_devices *= size
    slices = tuple(position * num_slices // num_devices for position in range(num_devices))
    return find_collectives(program, Mesh(axes, slices), ScopeSearch(program))
