"""Absurd sizes are refused before a child starts, and whatever passes stays within int32 indices and int64 byte counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import Problem, SpecError
from service.models.config import PRESETS, DroplessConfig, MeshAxes, MoeConfig, StepConfig, TrainConfig
from service.models.costs import argument_bytes, count_parameters, moe_receive_rows, parameter_arrays
from service.spec import Spec, parse_spec
from service.spec_sizes import MAX_ELEMENTS, MAX_PARAMETERS, check_dims, intermediates

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1

TINY: dict[str, Any] = {
    "scenario": "sizes",
    "model": {"preset": "tiny"},
    "train": {"seq_len": 64},
    "mesh": {"topology": "v5e-4", "fsdp": 4},
}


def with_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(TINY)
    for path, value in copy.deepcopy(sizes).items():
        *sections, field = path.split(".")
        place = data
        for name in sections:
            place = place.setdefault(name, {})
        place[field] = value
    return data


def problems(**sizes: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        parse_spec(with_sizes({path.replace("__", "."): value for path, value in sizes.items()}))
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("path", "value", "bound"),
    [
        ("model.vocab_size", 10**12, 2**24),
        ("model.vocab_size", 2**31, 2**24),
        ("model.num_layers", 10**9, 4096),
        ("model.dim", 2**21, 2**20),
        ("model.num_heads", 2**17, 2**16),
        ("model.mla.kv_lora_rank", 2**21, 2**20),
        ("model.experts.num_experts", 2**14, 8192),
        ("model.experts.num_shared_experts", 1025, 1024),
        ("train.seq_len", 10**11, INT32_MAX),
        ("mesh.fsdp", 2**22, 2**21),
    ],
)
def test_a_size_beyond_anything_real_is_refused_with_its_bound(path: str, value: int, bound: int) -> None:
    (problem,) = problems(**{path.replace(".", "__"): value})
    assert (problem.path, problem.value, problem.message) == (path, value, f"{value} is out of range")
    assert f"to {bound:,}" in problem.legal


def test_tokens_of_a_step_are_numbered_in_int32() -> None:
    assert parse_spec(with_sizes({"train.seq_len": 2**28, "train.attention": "flash"})).step_config().global_batch == 4
    (problem,) = problems(train__seq_len=2**29)
    assert (problem.path, problem.value) == ("train.seq_len", 2**29)
    assert problem.message == "4 sequences of 536,870,912 are 2,147,483,648 tokens a step, more than int32 can number"
    assert problem.legal == "at most 536,870,911, or a smaller per_device_batch"
    (problem,) = problems(train__seq_len=2**20, train__per_device_batch=2**10)
    assert problem.legal == "at most 524,287, or a smaller per_device_batch"


def test_a_dim_beyond_int32_is_told_by_the_field_it_grows_with() -> None:
    (problem,) = problems(model__num_heads=2**12, model__mla__v_head_dim=2**20, model__num_layers=1, model__engram=None)
    assert (problem.path, problem.value) == ("model.num_heads", 2**12)
    assert problem.message == "gives kv_up a dim of 4,295,016,448, more than int32 can index"
    assert problem.legal == "at most 2,047 with the other sizes as they are"


def test_parameters_are_counted_over_the_whole_model() -> None:
    widths = {"model__dim": 2**20, "model__mlp_dim": 2**20, "model__first_num_dense_layers": 4096, "model__num_layers": 4096}
    (problem,) = problems(**widths, model__experts=None, model__engram=None, model__mtp={"depth": 0})
    assert problem.path == "model"
    assert "dense_layers_0_4095.mlp.gate alone is 4,096 × 1,048,576 × 1,048,576" in problem.message
    assert problem.legal == "sizes that multiply to at most 281,474,976,710,656 parameters"
    assert problem.value > MAX_PARAMETERS


def test_a_table_of_many_wide_rows_counts_to_the_parameters() -> None:
    (problem,) = problems(model__engram={"base_sizes": [2**29, 2**29 - 100], "num_heads": 1, "head_dim": 2**20})
    assert "engram_2.table alone is 1,073," in problem.message


def test_an_intermediate_beyond_int64_is_told_by_its_name() -> None:
    (problem,) = problems(train__seq_len=2**26)
    assert (problem.path, problem.value) == ("train.seq_len", 2**26)
    assert problem.message == "the attention scores would have 288,230,376,151,711,744 elements over all devices and layers"
    assert parse_spec(with_sizes({"train.seq_len": 2**26, "train.attention": "flash"}))


def test_rows_of_the_experts_are_numbered_in_int32() -> None:
    many = {"model__experts": {"num_experts": 256, "num_experts_per_token": 128, "num_groups": 1, "num_groups_per_token": 1}}
    mesh = {"mesh__fsdp": 1, "mesh__expert": 4}
    (problem,) = problems(train__seq_len=2**23, train__attention="flash", **many, **mesh)
    assert (problem.path, problem.value) == ("train.seq_len", 2**23)
    assert problem.message == ("each device would receive up to 2,147,483,648 rows of its experts' tokens, more than int32 can number")
    (problem,) = problems(train__seq_len=2**23, train__attention="flash", moe__ragged_buffer_factor=0.5, **many, **mesh)
    assert (problem.path, problem.value, problem.legal) == ("moe.dropless.token_chunks", 1, "more chunks")
    fits = {path.replace("__", "."): value for path, value in {**many, **mesh}.items()}
    fits |= {"train.seq_len": 2**23, "train.attention": "flash", "moe.ragged_buffer_factor": 0.5, "moe.dropless.token_chunks": 2}
    assert max(moe_receive_rows(parse_spec(with_sizes(fits)).step_config(), name) for name in ("candidate", "dropless")) == 2**30


def test_what_does_not_fit_a_device_is_no_mistake() -> None:
    spec = parse_spec(with_sizes({"model.preset": "v4.1-scale", "mesh": {"topology": "v5e:1x1"}, "train.seq_len": 2**17}))
    assert argument_bytes(spec.step_config()).total > 2**43


POWERS = st.integers(0, 31).map(lambda power: min(2**power, INT32_MAX))
FIELDS = (
    *("vocab_size", "num_layers", "first_num_dense_layers", "dim", "num_heads", "mlp_dim"),
    *("mla.q_lora_rank", "mla.kv_lora_rank", "mla.qk_nope_head_dim", "mla.qk_rope_head_dim", "mla.v_head_dim"),
    *("experts.num_experts", "experts.num_experts_per_token", "experts.expert_dim", "experts.num_shared_experts"),
    *("engram.num_heads", "engram.head_dim", "mhc.num_streams", "mtp.depth"),
)
RUNS = {
    "train.seq_len": POWERS,
    "train.per_device_batch": POWERS,
    "train.attention": st.sampled_from(["flash", "dot_product"]),
    "moe.ragged_buffer_factor": st.sampled_from([-1, 0.5, 2, 1024]),
    "moe.dropless.token_chunks": POWERS,
}
STRATEGIES = {f"model.{field}": POWERS for field in FIELDS} | RUNS
# A few fields at a time, so that many specs pass.
SIZES = st.lists(st.sampled_from(sorted(STRATEGIES)), max_size=4, unique=True).flatmap(
    lambda paths: st.fixed_dictionaries({path: STRATEGIES[path] for path in paths})
)
DIVISIBLE = {
    "model.dim": 2**12,
    "model.num_heads": 2**5,
    "model.mla": {"q_lora_rank": 2**12, "qk_nope_head_dim": 2**7, "v_head_dim": 2**7},
    "model.experts": {"expert_dim": 2**9, "num_groups": 1, "num_groups_per_token": 1},
    "model.engram": {"head_dim": 2**10},
    "train.seq_len": 2**10,
}
MESHES = st.sampled_from(
    [
        {"topology": "v5e-4", "fsdp": 4},
        {"topology": "v5e:1x1"},
        {"topology": "v5e-16", "expert": 8, "context": 2},
        {"topology": "v5p:16x16x16", "slices": 64, "data": 64, "fsdp": 32, "expert": 8, "context": 16},
    ]
)


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, mesh=MESHES)
def test_whatever_passes_overflows_in_no_closed_form(sizes: dict[str, Any], mesh: dict[str, Any]) -> None:
    try:
        spec = parse_spec(with_sizes({**DIVISIBLE, **sizes, "mesh": mesh}))
    except SpecError:
        return
    assert_within_bounds(spec)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"model.vocab_size": 2**24, "model.dim": 2**20},
        {"model.num_layers": 4096, "model.dim": 2**14},
        {"model.num_heads": 2**13, "model.mla.v_head_dim": 2**17},
        {"model.engram.head_dim": 2**20, "model.dim": 2**16},
        {"train.seq_len": 2**25},
        {"train.seq_len": 2**28, "train.attention": "flash"},
        {"model.experts.num_experts": 8192, "model.experts.expert_dim": 2**18, "model.dim": 2**13},
    ],
    ids=str,
)
def test_the_largest_that_pass_overflow_in_no_closed_form(sizes: dict[str, Any]) -> None:
    assert_within_bounds(parse_spec(with_sizes(sizes)))


def assert_within_bounds(spec: Spec) -> None:
    config = spec.step_config()
    for tiled in (True, False):
        assert 0 < argument_bytes(config, tiled=tiled).total <= INT64_MAX
    assert sum(count_parameters(config.model).values()) <= MAX_PARAMETERS
    assert all(size <= INT32_MAX for array in parameter_arrays(config.model, config.axes) for size in array.shape)
    assert config.global_batch * config.train.seq_len <= INT32_MAX
    assert all(elements <= MAX_ELEMENTS for _, elements in intermediates(config))
    assert all(moe_receive_rows(config, program) <= INT32_MAX for program in ("candidate", "dropless"))


@pytest.mark.parametrize("preset", PRESETS)
def test_real_sizes_are_far_within_the_bounds(preset: str) -> None:
    axes = MeshAxes(fsdp=64, expert=8)
    config = StepConfig(
        model=PRESETS[preset](), train=TrainConfig(seq_len=2**17), axes=axes, moe=MoeConfig(dropless=DroplessConfig(token_chunks=8))
    )
    assert sum(count_parameters(config.model).values()) * 64 < MAX_PARAMETERS
    assert max(elements for _, elements in intermediates(config)) < MAX_ELEMENTS
    assert not list(check_dims(config.model, axes))
