"""Classes and modules of a real train step sum to its peak, and each class is its closed form."""

from __future__ import annotations

from typing import Any

import pytest

from service.compile.analyse import AnalysisContext, analyse, read
from service.compile.dump import parse_dump
from service.compile.memory import HBM
from service.records import BUFFER_CLASSES
from tests.compile.conftest import CompileOnTpu
from tests.compile.tpu_programs import TRAIN_LAYERS, TRAIN_VOCAB

pytestmark = pytest.mark.tpu

DIM, TOKENS, BATCH = 1024, 4096, 8
DEVICES = 4


@pytest.fixture
def fields(compile_on_tpu: CompileOnTpu) -> dict[str, Any]:
    context = AnalysisContext(mesh_axes={"fsdp": 2, "context": 2}, device_slices=(0,) * 4, family="v5p")
    return analyse(read(compile_on_tpu("v5p:2x2x1", "train_step").dump), context=context).fields


def test_classes_and_modules_sum_to_the_peak(fields: dict[str, Any]) -> None:
    assert sum(fields["classes"].values()) == sum(fields["modules"].values()) == fields["peak_bytes"]
    assert set(fields["classes"]) <= set(BUFFER_CLASSES)
    assert fields["fragmentation_bytes"] == fields["allocated_bytes"] - fields["peak_bytes"]


def test_parameters_and_moments_are_their_closed_form(fields: dict[str, Any]) -> None:
    layers = TRAIN_LAYERS * 2 * 4 * DIM * DIM
    parameters = (2 * TRAIN_VOCAB * DIM + layers) * 4 // DEVICES
    for name in ("parameters", "optimizer_first_moment", "optimizer_second_moment"):
        assert fields["classes"][name] == parameters
    assert fields["classes"]["batch"] == 2 * BATCH * TOKENS * 4 // DEVICES


def test_saved_activations_are_the_scans_carries(fields: dict[str, Any]) -> None:
    # Rematerialised layers keep their input alone, in bfloat16, which is all that the first product needs; the last layer's output is kept
    # in float32 for the head's gradient.
    tokens = BATCH * TOKENS * DIM // DEVICES
    assert fields["classes"]["saved_activations"] == TRAIN_LAYERS * tokens * 2 + tokens * 4


def test_gradients_of_the_layers_stand_whole_at_the_peak(fields: dict[str, Any]) -> None:
    assert fields["classes"]["gradients"] == TRAIN_LAYERS * 2 * 4 * DIM * DIM * 4 // DEVICES


def test_gathered_and_cast_weights_are_no_parameters(fields: dict[str, Any]) -> None:
    # Both stacked weights cast to bfloat16 once, before the loop.
    assert fields["classes"]["parameter_copies"] == TRAIN_LAYERS * 2 * 4 * DIM * DIM * 2 // DEVICES
    gathered = [buffer for buffer in fields["buffers"] if buffer.scope.startswith("state[") and buffer.class_ != "parameters"]
    assert {buffer.class_ for buffer in gathered} <= {
        "optimizer_first_moment",
        "optimizer_second_moment",
        "collective_buffers",
        "other_arguments",
    }


def test_modules_are_the_named_scopes(fields: dict[str, Any]) -> None:
    large = {name for name, size in fields["modules"].items() if size > 0.001 * fields["peak_bytes"]}
    assert large == {"layers", "layers/mlp", "embed", "logits", "loss"}
    assert fields["unattributed_bytes"] < 0.03 * fields["peak_bytes"]
    assert fields["module_inferred_bytes"] < 0.1 * fields["peak_bytes"]


def test_buffers_are_listed_largest_first_with_source_and_lifetime(fields: dict[str, Any]) -> None:
    sizes = [buffer.padded_bytes for buffer in fields["buffers"]]
    assert sizes == sorted(sizes, reverse=True)
    assert fields["num_buffers_at_peak"] >= len(sizes)
    peak = fields["timeline"].peak_index
    for buffer in fields["buffers"]:
        assert buffer.start_index <= peak <= buffer.end_index
        assert buffer.logical_bytes is None or buffer.logical_bytes <= buffer.padded_bytes
    sources = {buffer.source for buffer in fields["buffers"] if buffer.source}
    assert sources
    assert all(source.startswith("tests/compile/tpu_programs.py:") or source.count("/") <= 2 for source in sources)


@pytest.mark.slow
def test_outputs_of_an_undonated_step_belong_to_the_modules_they_update(compile_on_tpu: CompileOnTpu) -> None:
    context = AnalysisContext(mesh_axes={"fsdp": 2, "context": 2}, device_slices=(0,) * 4, family="v5p", state_donated=False)
    fields = analyse(read(compile_on_tpu("v5p:2x2x1", "train_step_undonated").dump), context=context).fields
    state = sum(fields["classes"][name] for name in ("parameters", "optimizer_first_moment", "optimizer_second_moment"))
    assert fields["alias_bytes"] == 0
    assert fields["classes"]["outputs"] == pytest.approx(state, rel=1e-4)
    outputs = [buffer for buffer in fields["buffers"] if buffer.class_ == "outputs" and buffer.padded_bytes > 2**20]
    assert {buffer.module for buffer in outputs} == {"layers", "embed", "logits"}


def test_largest_buffers_of_a_program_that_does_not_fit_are_the_same_table(compile_on_tpu: CompileOnTpu) -> None:
    context = AnalysisContext(mesh_axes={"fsdp": 2, "context": 2}, device_slices=(0,) * 4, family="v5e")
    fields = analyse(read(compile_on_tpu("v5e:2x2", "train_step_too_large").dump), context=context).fields
    assert sum(fields["classes"].values()) == fields["peak_bytes"]
    assert fields["buffers"][0].padded_bytes > 2**30
    assert fields["buffers"][0].module


def test_memory_whose_use_over_time_is_not_told_is_blamed_on_no_buffer(compile_on_tpu: CompileOnTpu) -> None:
    """The compiler writes no heap trace where it places every buffer for the whole program, as under a very low memory limit."""
    proto = parse_dump(compile_on_tpu("v5p:2x2x1", "train_step").dump)
    allocations, traces = proto.buffer_assignment.buffer_allocations, proto.buffer_assignment.heap_simulator_traces
    (position,) = [index for index, trace in enumerate(traces) if allocations[trace.buffer_allocation_index].color == HBM]
    pool = allocations[traces[position].buffer_allocation_index]
    del traces[position]
    context = AnalysisContext(mesh_axes={"fsdp": 2, "context": 2}, device_slices=(0,) * 4, family="v5p")
    fields = analyse(read(proto.SerializeToString()), context=context).fields
    assert min(fields["unattributed_bytes"], fields["classes"]["unattributed"], fields["modules"]["unattributed"]) >= pool.size
    assert sum(fields["classes"].values()) == sum(fields["modules"].values()) == fields["peak_bytes"]
    (shown,) = [buffer for buffer in fields["buffers"] if buffer.padded_bytes == pool.size]
    assert shown.name == f"allocation {pool.index} of {len(pool.assigned)} values"
    assert (shown.dtype, shown.shape, shown.logical_bytes, shown.scope, shown.source) == ("mixed", (), None, "", None)
    assert fields["padding_bytes"] < pool.size
