"""Which layers run in one scan."""

from __future__ import annotations

import pytest

from service.models.config import deepseek_custom, deepseek_v3_671b, tiny
from service.models.runs import LayerRun, layer_runs


def test_layers_of_one_kind_are_one_run() -> None:
    assert layer_runs(deepseek_v3_671b()) == (LayerRun("dense", 0, 3, False), LayerRun("moe", 3, 61, False))
    assert [run.name for run in layer_runs(deepseek_v3_671b())] == ["dense_layers_0_2", "moe_layers_3_60"]


def test_engram_begins_a_run_and_nothing_ends_after_it() -> None:
    assert layer_runs(deepseek_custom()) == (LayerRun("dense", 0, 1, False), LayerRun("moe", 1, 4, True), LayerRun("moe", 4, 6, True))


def test_deeper_models_have_no_more_runs() -> None:
    assert len(layer_runs(deepseek_custom().model_copy(update={"num_layers": 24}))) == len(layer_runs(deepseek_custom()))


def test_layers_beyond_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engram.layers names \[2\] and the model has layers 0 to 1"):
        layer_runs(tiny().model_copy(update={"num_layers": 2}))
    with pytest.raises(ValueError, match="first_num_dense_layers is 5 of 4 layers"):
        layer_runs(tiny().model_copy(update={"first_num_dense_layers": 5}))
