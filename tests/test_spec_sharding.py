"""What a spec is told of sizes that the mesh cuts, against `check_divides`, by which a child refuses the same sizes array by array."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import Problem, SpecError
from service.models.axes import check_divides
from service.models.config import PRESETS, MeshAxes, ModelConfig, MtpConfig
from service.models.costs import parameter_arrays
from service.spec import parse_spec
from service.spec_sharding import FIELDS, check_sharding, cut_dims

SIZES = st.sampled_from([1, 1, 2, 3, 4, 8])
MESHES = st.builds(MeshAxes, data=SIZES, fsdp=SIZES, expert=SIZES, context=SIZES, tensor=SIZES)
FIELD_VALUES = st.dictionaries(
    st.sampled_from(sorted({*FIELDS.values(), "mla.q_lora_rank", "engram.head_dim"})), st.integers(3, 96), max_size=3
)


def replaced(model: ModelConfig, field: str, value: int) -> ModelConfig:
    section, _, name = field.rpartition(".")
    if not section:
        return model.model_copy(update={name: value})
    return model.model_copy(update={section: getattr(model, section).model_copy(update={name: value})})


def problems_of(model: ModelConfig, mesh: MeshAxes) -> list[Problem]:
    data = {
        "scenario": "drawn",
        "model": {"preset": "tiny"} | model.model_dump(mode="json"),
        "train": {"seq_len": 64 * mesh.context},
        "mesh": mesh.as_dict(),
        "steps": {},
    }
    try:
        parse_spec(data)
    except SpecError as error:
        return error.problems
    return []


def is_refused_by_the_child(model: ModelConfig, mesh: MeshAxes) -> bool:
    try:
        for array in parameter_arrays(model, mesh):
            check_divides("/".join(array.path), array.shape, array.axes, mesh.as_dict())
    except ValueError:
        return True
    return model.num_heads % mesh.tensor != 0


@settings(max_examples=300, deadline=None)
@given(preset=st.sampled_from(sorted(PRESETS)), mesh=MESHES, values=FIELD_VALUES)
def test_a_spec_passes_exactly_where_every_parameter_divides(preset: str, mesh: MeshAxes, values: dict[str, int]) -> None:
    model = PRESETS[preset]()
    for field, value in values.items():
        section = field.rpartition(".")[0]
        if not section or getattr(model, section) is not None:
            model = replaced(model, field, value)
    problems = problems_of(model, mesh)
    assert bool(problems) == is_refused_by_the_child(model, mesh), problems
    assert len({problem.path for problem in problems}) == len(problems)


@settings(max_examples=30, deadline=None)
@given(mesh=MESHES, values=FIELD_VALUES)
def test_the_multiple_that_is_told_is_legal_for_the_field_and_the_least(mesh: MeshAxes, values: dict[str, int]) -> None:
    model = PRESETS["tiny"]()
    for field, value in values.items():
        model = replaced(model, field, value)
    for problem in check_sharding(model, mesh):
        field = problem.path.removeprefix("model.")
        multiple = int(problem.legal.removeprefix("a multiple of ").partition(",")[0])
        divisors = [value for value in range(1, multiple + 1) if multiple % value == 0]
        assert [value for value in divisors if problem.path not in paths(replaced(model, field, value), mesh)] == [multiple]


def paths(model: ModelConfig, mesh: MeshAxes) -> set[str]:
    return {problem.path for problem in check_sharding(model, mesh)}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_cut_dim_grows_with_the_field_it_is_named_by_and_with_no_other(preset: str) -> None:
    model = PRESETS[preset]().model_copy(update={"mtp": MtpConfig(depth=1)})
    mesh = MeshAxes()
    dims = list(cut_dims(model, mesh))
    for field, value in {(dim.field, dim.value) for dim in dims}:
        grown = list(cut_dims(replaced(model, field, 3 * value), mesh))
        assert [dim.size for dim in grown] == [dim.size * (3 if dim.field == field else 1) for dim in dims]


@pytest.mark.parametrize(
    ("mesh", "path", "value", "message", "legal"),
    [
        (
            {"fsdp": 2, "expert": 8},
            "model.mla.q_lora_rank",
            24,
            "does not divide over fsdp 2 × expert 8 × context 1 = 16 shards",
            "a multiple of 16, or other mesh axes",
        ),
        (
            {"fsdp": 3, "expert": 1},
            "model.num_heads",
            4,
            "gives kv_up a dim of 128, which does not divide over tensor 1 × fsdp 3 × expert 1 × context 1 = 3 shards",
            "a multiple of 3, or other mesh axes",
        ),
        (
            {"fsdp": 3, "expert": 1},
            "model.engram.head_dim",
            32,
            "gives key_kernel a dim of 128, which does not divide over fsdp 3 × expert 1 × context 1 = 3 shards",
            "a multiple of 3, or other mesh axes",
        ),
    ],
)
def test_a_size_that_no_field_states_alone_is_told_by_its_field(
    mesh: dict[str, int], path: str, value: int, message: str, legal: str
) -> None:
    problems = {problem.path: problem for problem in problems_of(PRESETS["tiny"](), MeshAxes(**mesh))}
    assert problems[path] == Problem(path, value, message, legal)


def test_tiny_on_sixteen_chips_is_refused_before_a_child_starts() -> None:
    data: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "train": {"seq_len": 64},
        "mesh": {"topology": "v5e-16", "fsdp": 2, "expert": 8},
    }
    with pytest.raises(SpecError, match=r"model\.mla\.q_lora_rank: does not divide over fsdp 2 × expert 8 × context 1 = 16 shards"):
        parse_spec(data)


def test_sizes_are_told_beside_layers_that_cannot_be() -> None:
    mesh = MeshAxes(fsdp=16)
    tiny = PRESETS["tiny"]()
    assert math.gcd(tiny.dim, 16) == 16
    for wrong in (
        {"mlp_dim": None},
        {"experts": None},
        {"first_num_dense_layers": 9},
        {"engram": tiny.engram.model_copy(update={"layers": (9,), "base_sizes": (2**30, 2**30)}) if tiny.engram else None},
    ):
        problems = {problem.path for problem in problems_of(tiny.model_copy(update={"dim": 72, **wrong}), mesh)}
        assert {"model.dim", "model.mla.q_lora_rank"} < problems
