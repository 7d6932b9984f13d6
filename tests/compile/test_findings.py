"""Every finding has a program that raises it and one that does the same work without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from service.compile.analyse import AnalysisContext, analyse, read
from service.compile.environment import warnings_log
from service.compile.findings import holds_whole_sequence
from service.models.config import MeshAxes, MhcConfig, MoeConfig, MtpConfig, ProgramName, RematConfig, StepConfig, TrainConfig, tiny
from service.records import Finding
from tests.compile.conftest import CompileOnTpu, compile_programs
from tests.compile.finding_programs import DIM, GLOBAL_BATCH, HALO, SEQ_LEN, STREAMS

TOPOLOGY = "v5e:2x4"


def config(
    remat: RematConfig | None = None, *, batch: int = GLOBAL_BATCH, dim: int = DIM, expert: int = 2, moe: MoeConfig | None = None
) -> StepConfig:
    """A configuration whose sizes are those of the programs; with one expert rank, fsdp has its devices."""
    model = tiny()
    assert model.engram is not None
    engram = model.engram.model_copy(update={"layers": (1,)})
    assert engram.halo == HALO
    model = model.model_copy(update={"dim": dim, "mhc": MhcConfig(num_streams=STREAMS), "mtp": MtpConfig(), "engram": engram})
    axes = MeshAxes(fsdp=4 // expert, expert=expert, context=2)
    train = TrainConfig(seq_len=SEQ_LEN, per_device_batch=batch / axes.num_devices, remat=remat or RematConfig())
    return StepConfig(model=model, train=train, axes=axes, moe=moe or MoeConfig())


def context(step_config: StepConfig | None = None, **fields: object) -> AnalysisContext:
    axes = {"fsdp": 2, "expert": 2, "context": 2}
    return replace(AnalysisContext(mesh_axes=axes, device_slices=(0,) * 8, family="v5e", step_config=step_config), **fields)


def findings_of(compile_on_tpu: CompileOnTpu, name: str, given: AnalysisContext) -> dict[str, Finding]:
    """Kind to the first finding of it."""
    found: dict[str, Finding] = {}
    for finding in analyse(read(compile_on_tpu(TOPOLOGY, name).dump), context=given).fields["findings"]:
        found.setdefault(finding.kind, finding)
    return found


LOCAL_SEQUENCE = GLOBAL_BATCH // 4 * SEQ_LEN * DIM * 2
"""Bytes of [3, 4096, 1024] in bfloat16: a device's sequences whole."""
CASES = [
    ("halo_gathered", "halo_by_gather", "halo_by_permutes", LOCAL_SEQUENCE * STREAMS, "mesh.context", "engram/short_conv"),
    # The scan keeps each of four layers' whole sequence where half would do, and does so twice.
    ("context_parallelism_unused", "layers_whole", "layers_cut", 2 * 4 * LOCAL_SEQUENCE, "mesh.context", "layers"),
    ("large_replicated_buffer", "state_replicated", "state_cut", 8192 * 2048 * 4, "mesh.fsdp", "w"),
    ("donation_lost", "state_of_another_dtype", "state_cut", 8192 * 2048 * 4 // 8, "train.param_dtype", "w"),
    # Rows of 4 float32 take 128 lanes each.
    ("padding", "rows_of_4", "rows_of_128", 2**24 // 4 // 8 * (128 - 4) * 4, None, "streams"),
    ("moe_buffers_dominate", "dispatch", "layers_cut", None, "moe.ragged_buffer_factor", "moe/dispatch"),
    ("unattributed", "nameless", "layers_cut", None, None, "unattributed"),
]


@pytest.mark.tpu
@pytest.mark.parametrize(("kind", "raising", "quiet", "size", "field", "module"), CASES, ids=[case[0] for case in CASES])
def test_finding_is_raised_by_its_program_and_by_no_other_of_the_pair(
    compile_on_tpu: CompileOnTpu, kind: str, raising: str, quiet: str, size: int | None, field: str | None, module: str | None
) -> None:
    found = findings_of(compile_on_tpu, raising, context(config()))[kind]
    assert (found.spec_field, found.module) == (field, module)
    assert found.bytes
    assert found.buffer
    if size is not None:
        assert found.bytes == size
    assert found.suggestion
    assert kind not in findings_of(compile_on_tpu, quiet, context(config()))


@pytest.mark.tpu
def test_state_that_was_not_to_be_donated_is_no_lost_donation(compile_on_tpu: CompileOnTpu) -> None:
    found = findings_of(compile_on_tpu, "state_of_another_dtype", context(config(), state_donated=False))
    assert "donation_lost" not in found


@pytest.mark.tpu
def test_offload_that_keeps_nothing_on_the_host_is_found(compile_on_tpu: CompileOnTpu) -> None:
    offloading = context(config(RematConfig(offload=("mla_q",))))
    found = findings_of(compile_on_tpu, "layers_cut", offloading)["offload_ignored"]
    assert found.spec_field == "train.remat.offload"
    # Half of each of four layers' sequence is kept on each of two ranks.
    assert found.bytes == 4 * LOCAL_SEQUENCE // 2
    assert found.module == "layers"
    assert found.buffer
    assert "offload_ignored" not in findings_of(compile_on_tpu, "offload_to_host", offloading)
    assert "offload_ignored" not in findings_of(compile_on_tpu, "layers_cut", context(config()))


LOG = (
    "W1130 spmd_partitioner.cc:613] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
    "{devices=[2,1,4]<=[8] last_tile_dim_replicate} to {devices=[1,4,2]<=[8]} efficiently for HLO operation "
    '%reshape.7 = f32[24,4096]{1,0} reshape(%sine.3), metadata={op_name="jit(step)/jvp(layers)/mla/reshape"}. '
    "As the last resort, SPMD will replicate the tensor and then partition it to obtain the target sharding\n"
)


@pytest.mark.tpu
def test_warning_of_the_partitioner_is_a_finding_with_its_operation(compile_on_tpu: CompileOnTpu) -> None:
    found = findings_of(compile_on_tpu, "layers_cut", context(config(), compiler_log=LOG + LOG))["involuntary_rematerialisation"]
    assert (found.buffer, found.module, found.bytes, found.spec_field) == ("reshape.7", "layers/mla", 2 * 24 * 4096 * 4, "mesh")
    assert "f32[24,4096]" in found.message
    assert "jit(step)/jvp(layers)/mla/reshape" in found.message
    assert "involuntary_rematerialisation" not in findings_of(compile_on_tpu, "layers_cut", context(config()))


@pytest.mark.tpu
def test_the_warning_is_read_from_the_log_of_a_real_compile(tmp_path: Path) -> None:
    kinds = {}
    for name in ("resharded", "sharded_alike"):
        # A process each: libtpu keeps one log of warnings for all a process compiles.
        work_dir = tmp_path / name
        work_dir.mkdir()
        dump = compile_programs(TOPOLOGY, (name,), work_dir)[name].dump
        log = warnings_log(work_dir)
        given = context(config(), compiler_log=log.read_text() if log.exists() else "")
        kinds[name] = {finding.kind: finding for finding in analyse(read(dump), context=given).fields["findings"]}
    found = kinds["resharded"]["involuntary_rematerialisation"]
    assert "jit(step)/mla/sharding_constraint" in found.message
    # Six rows in four pieces of two: the gather has eight.
    assert (found.module, found.bytes) == ("mla", 8 * 10 * 512 * 4)
    assert "involuntary_rematerialisation" not in kinds["sharded_alike"]


@pytest.mark.tpu
def test_gather_of_the_sequences_shape_outside_the_convolution_is_no_halo(compile_on_tpu: CompileOnTpu) -> None:
    fields = analyse(read(compile_on_tpu(TOPOLOGY, "halo_beside_table").dump), context=context(config())).fields
    assert ("all-gather", "engram") in {(collective.kind, collective.module) for collective in fields["collectives"]}
    assert "halo_gathered" not in {finding.kind for finding in fields["findings"]}


@pytest.mark.tpu
def test_halo_that_is_nowhere_is_found_without_a_buffer_to_name(compile_on_tpu: CompileOnTpu) -> None:
    found = findings_of(compile_on_tpu, "layers_cut", context(config()))["halo_gathered"]
    assert (found.module, found.buffer, found.bytes) == ("engram/short_conv", None, None)
    assert "is not in the program" in found.message


@pytest.mark.tpu
def test_one_sequence_as_long_as_the_model_is_wide_is_whole_only_where_it_is(compile_on_tpu: CompileOnTpu) -> None:
    square = context(config(batch=4, dim=SEQ_LEN))
    found = findings_of(compile_on_tpu, "square_layers_whole", square)["context_parallelism_unused"]
    assert found.bytes == 2 * 4 * SEQ_LEN * SEQ_LEN * 2
    assert "context_parallelism_unused" not in findings_of(compile_on_tpu, "square_layers_cut", square)


@pytest.mark.parametrize(
    ("batch", "shape", "is_whole"),
    [
        (1, (4, 1, 4096, 4096), True),
        (1, (4, 1, 2048, 4096), False),
        # One stream: the width stands behind a dim of 1 as a sequence does behind its batch.
        (1, (1, 2048, 1, 4096), False),
        # As many streams as sequences.
        (4, (4, 2048, 4, 4096), False),
        (4, (4, 4096, 4, 4096), True),
        (4, (4, 4096, 7), True),
        # A weight of one layer.
        (1, (1, 4096, 7), False),
        # Ids, which are no activations.
        (4, (4, 4096), False),
    ],
)
def test_sequence_is_told_from_the_widths_that_equal_it(batch: int, shape: tuple[int, ...], is_whole: bool) -> None:
    assert holds_whole_sequence(shape, config(batch=4 * batch, dim=SEQ_LEN)) is is_whole


@pytest.mark.tpu
def test_state_that_tensor_ranks_hold_whole_is_found(compile_on_tpu: CompileOnTpu) -> None:
    tensor = context(mesh_axes={"fsdp": 2, "expert": 2, "tensor": 2})
    found = findings_of(compile_on_tpu, "state_whole_over_tensor", tensor)["large_replicated_buffer"]
    assert (found.spec_field, found.bytes) == ("mesh.tensor", 8192 * 2048 * 4 // 4)
    assert "large_replicated_buffer" not in findings_of(compile_on_tpu, "state_cut_over_tensor", tensor)


@pytest.mark.tpu
def test_state_cut_over_axes_of_other_names_is_not_called_replicated(compile_on_tpu: CompileOnTpu) -> None:
    assert "large_replicated_buffer" not in findings_of(compile_on_tpu, "state_cut_by_other_names", context(config()))


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("program", "factor", "expert", "field"),
    [
        ("candidate", -1, 2, "moe.ragged_buffer_factor"),
        ("candidate", 0.5, 2, "moe.ragged_buffer_factor"),
        ("candidate", -1, 1, "train.per_device_batch"),
        ("dropless", 0.5, 2, "moe.dropless.token_chunks"),
        ("dropless", -1, 1, "moe.dropless.token_chunks"),
    ],
)
def test_large_receive_buffers_name_the_field_their_program_reads(
    compile_on_tpu: CompileOnTpu, program: ProgramName, factor: float, expert: int, field: str
) -> None:
    given = context(config(expert=expert, moe=MoeConfig(ragged_buffer_factor=factor)), program=program)
    assert findings_of(compile_on_tpu, "dispatch", given)["moe_buffers_dominate"].spec_field == field


@pytest.mark.tpu
def test_buffer_factor_is_found_without_effect_where_one_rank_has_all_experts(compile_on_tpu: CompileOnTpu) -> None:
    moe = MoeConfig(ragged_buffer_factor=0.5, retry_when_tokens_dropped=True)
    one_rank = context(config(expert=1, moe=moe), mesh_axes={"fsdp": 4, "context": 2})
    found = findings_of(compile_on_tpu, "layers_cut", one_rank)["moe_factor_without_effect"]
    assert (found.spec_field, found.module, found.bytes) == ("moe.ragged_buffer_factor", "moe_layers/moe", None)
    assert "retry" in found.message
    # The program that exchanges, two ranks, the worst case, and the dropless program, which reads no factor.
    assert "moe_factor_without_effect" not in findings_of(compile_on_tpu, "dispatch", replace(one_rank, mesh_axes=context().mesh_axes))
    for quiet in (
        context(config(moe=moe)),
        replace(one_rank, step_config=config(expert=1)),
        replace(one_rank, program="dropless"),
    ):
        assert "moe_factor_without_effect" not in findings_of(compile_on_tpu, "layers_cut", quiet)


@pytest.mark.tpu
def test_train_step_of_a_good_spec_has_no_findings(compile_on_tpu: CompileOnTpu) -> None:
    given = AnalysisContext(mesh_axes={"fsdp": 2, "context": 2}, device_slices=(0,) * 4, family="v5p")
    assert analyse(read(compile_on_tpu("v5p:2x2x1", "train_step").dump), context=given).fields["findings"] == ()


@pytest.mark.tpu
def test_halo_equals_its_closed_form_and_its_gather_is_priced(compile_on_tpu: CompileOnTpu) -> None:
    fields = analyse(read(compile_on_tpu(TOPOLOGY, "halo_by_permutes").dump), context=context(config())).fields
    conv = next(use for use in fields["halo"] if use.name == "engram_conv")
    rows = GLOBAL_BATCH // 4
    assert conv.payload_bytes == conv.expected_payload_bytes == rows * 2 * HALO * STREAMS * DIM * 2
    assert conv.verdict == "equal"
    assert conv.gather_bytes == rows * SEQ_LEN * STREAMS * DIM * 2
    # Two ranks: each sends one of its two halos, in each of four groups of batch shards.
    assert conv.total_wire_bytes == 4 * rows * 2 * HALO * STREAMS * DIM * 2 * (2 - 1)


@pytest.mark.tpu
def test_halo_that_was_replaced_by_a_gather_is_missing(compile_on_tpu: CompileOnTpu) -> None:
    fields = analyse(read(compile_on_tpu(TOPOLOGY, "halo_by_gather").dump), context=context(config())).fields
    conv = next(use for use in fields["halo"] if use.name == "engram_conv")
    assert (conv.static_count, conv.payload_bytes) == (0, 0)
    assert conv.verdict.startswith("missing")
