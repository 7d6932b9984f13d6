"""The documented reduction keeps every mechanism of a model and fits any small mesh."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import SpecError
from service.models.axes import make_mesh
from service.models.config import PRESETS, MeshAxes, ModelConfig, StepConfig, TrainConfig
from service.models.runs import layer_runs
from service.models.train_step import build_train_program
from service.spec import Spec, parse_spec
from service.spec_sharding import check_sharding
from service.steps.estimate import bytes_per_device
from service.steps.reduction import describe_reduction, reduce_model

MESHES = [
    MeshAxes(),
    MeshAxes(fsdp=2, context=4),
    MeshAxes(fsdp=2, expert=2, context=2),
    MeshAxes(data=2, tensor=2, expert=2),
    MeshAxes(expert=8),
]


def spec_of(model: ModelConfig, axes: MeshAxes) -> Spec:
    return parse_spec(
        {
            "scenario": "reduced",
            "model": {"preset": "tiny", **model.model_dump(mode="json")},
            "train": {"seq_len": 128 * axes.context, "per_device_batch": 1},
            "mesh": axes.model_dump(),
            "steps": {},
        }
    )


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_reduced_model_passes_every_check_of_a_spec(preset: str, axes: MeshAxes) -> None:
    model = reduce_model(PRESETS[preset](), axes)
    assert spec_of(model, axes).model.config() == model


SIZES = st.sampled_from([1, 1, 2, 3, 4, 6, 7, 8, 16, 32, 64])
LARGE_MESHES = st.builds(MeshAxes, data=st.sampled_from([1, 2]), fsdp=SIZES, expert=SIZES, context=SIZES, tensor=SIZES)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "dim": st.sampled_from([48, 2048, 3 * 2048]),
        "num_heads": st.sampled_from([1, 6, 64, 192, 1024]),
        "mla.qk_nope_head_dim": st.sampled_from([3, 64, 96]),
        "mla.v_head_dim": st.sampled_from([5, 64, 96]),
        "mla.q_lora_rank": st.sampled_from([None, 24, 1024, 6 * 1024]),
        "mlp_dim": st.sampled_from([40, 3 * 4096]),
        "experts.num_experts": st.sampled_from([10, 12, 28, 64]),
        "experts.num_groups": st.sampled_from([1, 3, 5, 6, 7]),
        "experts.expert_dim": st.sampled_from([24, 3 * 4096]),
        "engram.num_heads": st.sampled_from([1, 3, 12]),
        "engram.head_dim": st.sampled_from([10, 96, 512]),
        "vocab_size": st.sampled_from([384, 130_000]),
    },
)


@settings(max_examples=400, deadline=None)
@given(preset=st.sampled_from(sorted(PRESETS)), axes=LARGE_MESHES, changes=CHANGES)
def test_a_model_that_can_be_sharded_can_still_be_when_it_is_reduced(preset: str, axes: MeshAxes, changes: dict[str, Any]) -> None:
    model = PRESETS[preset]()
    for path, value in changes.items():
        section, _, field = path.rpartition(".")
        inner = getattr(model, section) if section else model
        if inner is not None and getattr(inner, field) is not None:
            changed = inner.model_copy(update={field: value})
            model = model.model_copy(update={section: changed}) if section else changed
    try:
        spec_of(model, axes)
    except SpecError:
        return
    reduced = reduce_model(model, axes)
    assert spec_of(reduced, axes).model.config() == reduced
    assert all(int(after) <= int(before) for before, after in describe_reduction(model, reduced).values() if after.isdecimal())


@pytest.mark.parametrize(
    ("preset", "axes", "heads", "widths"),
    [
        ("deepseek-v3-671b", MeshAxes(), 4, (12, 20)),
        ("deepseek-v3-671b", MeshAxes(fsdp=64, expert=4), 8, (12, 20)),
        ("deepseek-v2-16b", MeshAxes(fsdp=16, expert=64), 4, (128, 128)),
        ("deepseek-custom", MeshAxes(fsdp=8, tensor=16), 16, (12, 20)),
    ],
)
def test_heads_grow_with_the_mesh_and_stay_as_wide_as_the_models_where_too_few_are_left(
    preset: str, axes: MeshAxes, heads: int, widths: tuple[int, int]
) -> None:
    full = PRESETS[preset]()
    assert not list(check_sharding(full, axes))
    model = reduce_model(full, axes)
    assert not list(check_sharding(model, axes))
    assert (model.num_heads, (model.mla.qk_nope_head_dim, model.mla.v_head_dim)) == (heads, widths)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_reduced_model_can_be_sharded(preset: str) -> None:
    axes = MeshAxes(fsdp=2, expert=2, context=2)
    config = StepConfig(model=reduce_model(PRESETS[preset](), axes), train=TrainConfig(seq_len=128), axes=axes)
    program = build_train_program(config, "candidate", make_mesh(axes, jax.devices()[:8]))
    assert bytes_per_device(program.abstract_state) < 8 << 20


@pytest.mark.parametrize("preset", PRESETS)
def test_every_mechanism_is_kept(preset: str) -> None:
    full = PRESETS[preset]()
    model = reduce_model(full, MeshAxes(fsdp=2, expert=2, context=2))
    assert (model.mhc, model.mtp, model.yarn, model.norm_eps) == (full.mhc, full.mtp, full.yarn, full.norm_eps)
    assert (model.first_num_dense_layers > 0, model.num_moe_layers > 0) == (full.first_num_dense_layers > 0, full.num_moe_layers > 0)
    assert (model.mla.q_lora_rank is None) == (full.mla.q_lora_rank is None)
    assert model.experts is not None
    assert full.experts is not None
    kept = ("score_func", "bias", "normalize", "scaling", "num_shared_experts", "balance_loss_weight")
    assert all(getattr(model.experts, name) == getattr(full.experts, name) for name in kept)
    assert (model.experts.num_groups > 1) == (full.experts.num_groups > 1)
    assert model.experts.num_experts_per_token > 1
    assert (model.engram is None) == (full.engram is None)
    if model.engram is not None and full.engram is not None:
        assert (model.engram.halo, model.engram.max_ngram) == (full.engram.halo, full.engram.max_ngram)
        assert any(run.has_engram for run in layer_runs(model))


def test_the_reduction_says_what_it_changed() -> None:
    full = PRESETS["deepseek-v3-671b"]()
    reduced = reduce_model(full, MeshAxes(expert=4))
    changes = describe_reduction(full, reduced)
    assert changes["num_layers"] == ("61", "3")
    assert changes["experts.num_experts"] == ("256", "8")
    assert "mtp.depth" not in changes
    assert describe_reduction(full, full) == {}


def test_a_model_that_is_tiny_already_stays() -> None:
    tiny = PRESETS["tiny"]()
    assert set(describe_reduction(tiny, reduce_model(tiny, MeshAxes()))) <= {"num_layers"}
