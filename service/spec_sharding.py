"""Every size that the mesh cuts must divide, for nothing is replicated in silence: each dim of each parameter against the axis rules.

The parameters are the closed forms of `costs`, which name every array of the model (tests/models/test_costs.py). A child refuses the
same sizes by array (`axes.check_divides`); here they are named by the field of the spec that decides them. No JAX here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import NamedTuple

from service.errors import Problem
from service.models.config import MeshAxes, ModelConfig
from service.models.costs import ParameterArray, num_shards, parameter_arrays
from service.models.rules import RULES

FIELDS: Mapping[str, str] = {
    "embed": "dim",
    "heads": "num_heads",
    "heads_embed": "num_heads",
    "mlp": "mlp_dim",
    "vocab": "vocab_size",
    "expert_mlp": "experts.expert_dim",
}
"""Logical axis to the field of the model that a dim of this axis grows with, where `field_of` knows no better."""
NEVER_REFUSED = frozenset({"experts", "engram_rows", "engram_columns"})
"""Cut axes that are not looked at here: `mesh.expert` answers for the experts, rows are padded to the shards, and columns are cut
only where they divide."""


class CutDim(NamedTuple):
    """One dim of a parameter that is cut over the mesh: the field that decides its size, and that field's value."""

    field: str
    value: int
    array: str
    size: int
    axis: str

    def is_refused_on(self, mesh: MeshAxes) -> bool:
        return self.size % num_shards(self.axis, mesh) != 0

    def legal_multiple(self, mesh: MeshAxes) -> int:
        """What the field must be a multiple of."""
        shards = num_shards(self.axis, mesh)
        return shards // math.gcd(shards, self.size // self.value)


def check_sharding(model: ModelConfig, mesh: MeshAxes) -> Iterator[Problem]:
    """One problem for each field that gives any parameter a dim that does not divide."""
    by_field: dict[str, list[CutDim]] = {}
    for dim in cut_dims(model, mesh):
        by_field.setdefault(dim.field, []).append(dim)
    for field, dims in by_field.items():
        wrong = next((dim for dim in dims if dim.is_refused_on(mesh)), None)
        if wrong is None:
            continue
        axes = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in RULES[wrong.axis])
        given = "" if wrong.size == wrong.value else f"gives {wrong.array} a dim of {wrong.size:,}, which "
        multiple = math.lcm(*(dim.legal_multiple(mesh) for dim in dims))
        yield Problem(
            f"model.{field}",
            wrong.value,
            f"{given}does not divide over {axes} = {num_shards(wrong.axis, mesh)} shards",
            f"a multiple of {multiple}, or other mesh axes",
        )


def cut_dims(model: ModelConfig, mesh: MeshAxes) -> Iterator[CutDim]:
    """Every dim of a parameter of `model` that is cut, experts and Engram tables apart; and the heads, which are never split."""
    yield CutDim("num_heads", model.num_heads, "attention", model.num_heads, "heads")
    for array in parameter_arrays(_buildable(model, mesh)):
        for size, axis in zip(array.shape, array.axes, strict=True):
            if axis is None or not RULES[axis] or axis in NEVER_REFUSED:
                continue
            field = field_of(array, axis, model)
            value = reduce(getattr, field.split("."), model)
            if isinstance(value, int):  # a field without a value is refused as such
                yield CutDim(field, value, array.path[-1], size, axis)


def field_of(array: ParameterArray, axis: str, model: ModelConfig) -> str:
    """The field of `model` that the dim of `array` with this logical axis is a multiple of."""
    name = array.path[-1]
    if axis == "embed" and name == "q_up" and model.mla.q_lora_rank is not None:
        return "mla.q_lora_rank"
    if axis == "embed" and array.part == "engram":
        return "engram.head_dim"
    if axis == "mlp" and "shared" in array.path:
        return "experts.expert_dim"
    return FIELDS[axis]


def _buildable(model: ModelConfig, mesh: MeshAxes) -> ModelConfig:
    """`model` with stand-ins for what other checks refuse (layers that cannot be, Engram rows beyond int32): one answer tells all.

    Every dim that is looked at keeps its size.
    """
    engram = model.engram
    if engram is not None:
        small = {"layers": (0,), "max_ngram": 2, "num_heads": 1, "base_sizes": (2,), "head_dim": engram.embedding_dim}
        engram = engram.model_copy(update=small)
    num_dense = model.num_layers if model.experts is None else min(model.first_num_dense_layers, model.num_layers)
    return model.model_copy(update={"engram": engram, "first_num_dense_layers": num_dense, "mlp_dim": model.mlp_dim or mesh.num_devices})
