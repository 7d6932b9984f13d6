"""Exchanges between context ranks are told apart by their scopes, and equal their closed forms in real train steps of every order."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from service.compile.collectives import CollectiveInstance
from service.compile.groups import Reach
from service.compile.halo import measure_halo
from service.compile.interface import ChildLimits, CompileRequest
from service.compile.runner import ChildCompiler
from service.compile.trips import Count
from service.models.config import ContextConfig, MeshAxes, MtpConfig, StepConfig, TrainConfig, tiny
from service.records import HaloUse, Report, ReportStatus
from service.spec import parse_spec

BATCH, SEQ_LEN, CP = 3, 320, 4


def config(*, context: ContextConfig | None = None, mtp_depth: int = 1, **engram: object) -> StepConfig:
    """Three sequences of 320 tokens over four context ranks, with a halo of 9 in two Engram layers unless striped."""
    context = context or ContextConfig()
    model = tiny()
    assert model.engram is not None
    memory = None if context.order == "striped" else model.engram.model_copy(update=engram)
    return StepConfig(
        model=model.model_copy(update={"engram": memory, "mtp": MtpConfig(depth=mtp_depth)}),
        train=TrainConfig(seq_len=SEQ_LEN, per_device_batch=BATCH / CP),
        axes=MeshAxes(context=CP),
        context=context,
    )


Shapes = tuple[tuple[int, ...], ...]


def instance(kind: str, module: str, payload_bytes: int, *, shapes: Shapes = ((1,),), **fields: Any) -> CollectiveInstance:
    """One run over the four context ranks in the forward phase, of int32."""
    if kind == "collective-permute":
        groups: tuple[tuple[int, ...], ...] = tuple((rank, rank + 1) for rank in range(CP - 1))
    else:
        groups = (tuple(range(CP)),)
    known: dict[str, Any] = {"phase": "forward", "dtypes": ("s32",), "op_name": "", "count": Count(1), "is_compiler_made": False}
    known |= {"reach": Reach(groups, ("context",), None, "ici"), "computation": "main", "name": f"{kind}.1", "is_known": True}
    wire = Fraction(payload_bytes)
    return CollectiveInstance(**{**known, **fields}, kind=kind, module=module, payload_bytes=payload_bytes, wire_bytes=wire, shapes=shapes)


def rows_of(use: str, instances: list[CollectiveInstance], given: StepConfig) -> list[HaloUse]:
    return [row for row in measure_halo(instances, given) if row.name == use]


IDS = BATCH * SEQ_LEN * 4


def test_only_the_hash_counts_as_its_gather_and_not_the_table_that_reads_rows() -> None:
    gathers = [instance("all-gather", "engram/hash", IDS), instance("all-gather", "engram", 8 * IDS)]
    gathers.append(instance("all-gather", "engram", 8 * IDS, phase="remat"))
    (row,) = rows_of("engram_ids", gathers, config())
    assert (row.phase, row.payload_bytes, row.verdict) == ("forward", IDS, "equal")


def test_ids_are_gathered_in_array_order_too() -> None:
    (row,) = rows_of("engram_ids", [instance("all-gather", "engram/hash", IDS)], config(context=ContextConfig(load_balance=False)))
    assert (row.expected_payload_bytes, row.verdict) == (IDS, "equal")


def test_gather_that_may_be_merged_into_a_sum_is_unknown_and_not_missing() -> None:
    merged = instance("all-reduce", "batch", 2 * IDS, shapes=((SEQ_LEN, BATCH), (SEQ_LEN, BATCH)), name="all-reduce.7")
    (row,) = rows_of("engram_ids", [merged], config())
    assert (row.static_count, row.per_step_count, row.payload_bytes, row.total_wire_bytes) == (0, None, None, None)
    assert row.verdict.startswith("unknown: ")
    assert "all-reduce.7, of 2 arrays" in row.verdict
    other = instance("all-reduce", "batch", 2 * IDS, shapes=((SEQ_LEN, BATCH + 1),))
    assert rows_of("engram_ids", [other], config())[0].verdict.startswith("missing")


def test_segments_cross_once_for_all_layers_and_again_for_each_that_is_run_again() -> None:
    halo = BATCH * 2 * 9 * 4
    permutes = [instance("collective-permute", "engram/short_conv", halo)]
    permutes += [instance("collective-permute", "engram/short_conv", halo, phase="remat")] * 2
    rows = rows_of("engram_segments", permutes, config(respect_documents=True))
    assert [(row.phase, row.payload_bytes, row.verdict) for row in rows] == [("forward", halo, "equal"), ("remat", 2 * halo, "equal")]
    assert rows_of("engram_segments", permutes, config()) == []


@pytest.mark.parametrize(
    ("context", "tokens"),
    [
        (ContextConfig(), 2),
        (ContextConfig(load_balance=False), 1),
        (ContextConfig(order="striped"), SEQ_LEN // CP),
    ],
    ids=["dual_chunk_swap", "natural", "striped"],
)
def test_shifts_send_a_token_for_each_chunk_and_all_of_them_where_ranks_are_striped(context: ContextConfig, tokens: int) -> None:
    segments, ahead = BATCH * tokens * 4, 2 * BATCH * tokens * 3 * 4
    permutes = [instance("collective-permute", "loss", segments), instance("collective-permute", "mtp", ahead)]
    rows = {row.name: row for row in measure_halo(permutes, config(context=context, mtp_depth=2))}
    for name, payload, per_token in (("loss_shift", segments, 4), ("mtp_shift", ahead, 2 * 3 * 4)):
        assert (rows[name].payload_bytes, rows[name].expected_payload_bytes, rows[name].verdict) == (payload, payload, "equal")
        assert rows[name].gather_bytes == BATCH * SEQ_LEN * per_token


def weigh(spec: dict[str, Any], directory: Path) -> Report:
    """The report of a small model with every exchange: two Engram layers and MTP."""
    model = {"preset": "tiny", "num_layers": 2, "first_num_dense_layers": 2, "experts": None, **spec.pop("model")}
    whole = {"scenario": "halo", "model": model, "train": {"seq_len": 256, "per_device_batch": 1}, **spec}
    request = CompileRequest(spec=parse_spec(whole).as_json(), program="candidate", depth="memory", work_dir=str(directory / "work"))
    limits = ChildLimits(wall_seconds=600)
    return ChildCompiler(directory / "capacity.json")(request, limits=limits, on_event=lambda event: None, is_cancelled=lambda: False)


V5E, LAYERS = {"topology": "v5e-4"}, {"layers": [0, 1]}
TWO_BY_TWO = {"context": 2, **V5E}
WITH_ENGRAM = {"engram_conv", "engram_ids", "loss_shift", "mtp_shift"}
SPECS = {
    # The table is cut over context alone, whose row ids are then gathered beside the hash's.
    "context alone, documents": ({"mesh": {"context": 4, **V5E}, "model": {"engram": {**LAYERS, "respect_documents": True}}}, True),
    "striped": ({"mesh": {"fsdp": 2, **TWO_BY_TWO}, "model": {"engram": None}, "context": {"order": "striped"}}, True),
    "in array order": ({"mesh": {"fsdp": 2, **TWO_BY_TWO}, "model": {"engram": LAYERS}, "context": {"load_balance": False}}, False),
    "replicas": ({"mesh": {"data": 2, **TWO_BY_TWO}, "model": {"engram": LAYERS}}, False),
}


@pytest.mark.tpu
@pytest.mark.parametrize(
    "name", [name if is_always else pytest.param(name, marks=pytest.mark.slow) for name, (_, is_always) in SPECS.items()]
)
def test_every_exchange_of_a_real_train_step_equals_its_closed_form(tmp_path: Path, name: str) -> None:
    spec, _ = SPECS[name]
    report = weigh(dict(spec), tmp_path)
    assert report.status is ReportStatus.OK, report.failure
    wanted = {"loss_shift", "mtp_shift"} if name == "striped" else WITH_ENGRAM | ({"engram_segments"} if "documents" in name else set())
    assert {row.name for row in report.halo} == wanted
    assert {row.verdict for row in report.halo} == {"equal"}, report.halo
    assert {row.name for row in report.halo if row.phase == "remat"} == wanted - {"engram_ids", "loss_shift"}
    assert not {finding.kind for finding in report.findings} & {"halo_gathered", "context_parallelism_unused"}
