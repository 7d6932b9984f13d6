"""The documented reduction keeps every mechanism of a model and fits any small mesh."""

from __future__ import annotations

import jax
import pytest

from service.models.axes import make_mesh
from service.models.config import PRESETS, MeshAxes, StepConfig, TrainConfig
from service.models.runs import layer_runs
from service.models.train_step import build_train_program
from service.spec import parse_spec
from service.steps.estimate import bytes_per_device
from service.steps.reduction import describe_reduction, reduce_model

MESHES = [
    MeshAxes(),
    MeshAxes(fsdp=2, context=4),
    MeshAxes(fsdp=2, expert=2, context=2),
    MeshAxes(data=2, tensor=2, expert=2),
    MeshAxes(expert=8),
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_reduced_model_passes_every_check_of_a_spec(preset: str, axes: MeshAxes) -> None:
    model = reduce_model(PRESETS[preset](), axes)
    spec = {
        "model": {"preset": preset, **model.model_dump(mode="json")},
        "train": {"seq_len": 128, "per_device_batch": 1},
        "mesh": axes.model_dump(),
        "steps": {"devices": f"cpu:{axes.num_devices}"},
    }
    assert parse_spec(spec).model.config() == model


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
