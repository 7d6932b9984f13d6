"""Collectives of real compiles are counted as they were written, by kind, axes, runs per step and bytes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from service.compile.collective_report import Links, group_collectives, per_step, sum_collectives
from service.compile.collectives import CollectiveInstance, find_collectives
from service.compile.dump import parse_dump
from service.compile.groups import Mesh
from service.compile.hlo import Program
from service.compile.scope_search import ScopeSearch
from tests.compile.conftest import Compiled, CompileOnTpu

pytestmark = pytest.mark.tpu

TOPOLOGIES = ["v5e:2x4", pytest.param("v5p:2x2x2", marks=pytest.mark.slow)]


def collectives_of(compiled: Compiled) -> list[CollectiveInstance]:
    program = Program(parse_dump(compiled.dump).hlo_module)
    num_devices = 1
    for size in compiled.axes.values():
        num_devices *= size
    slices = int(compiled.topology.partition("*")[2] or 1)
    device_slices = tuple(position * slices // num_devices for position in range(num_devices))
    return find_collectives(program, Mesh(compiled.axes, device_slices), ScopeSearch(program))


def summary(instances: list[CollectiveInstance]) -> list[tuple[str, tuple[str, ...] | None, int, int | None, int | None]]:
    """(kind, axes, static count, per-step count, payload bytes per run) of like instances."""
    groups: dict[tuple[str, tuple[str, ...] | None, int | None], list[CollectiveInstance]] = {}
    for instance in instances:
        groups.setdefault((instance.kind, instance.reach.axes, instance.payload_bytes), []).append(instance)
    counted = []
    for (kind, axes, payload), members in groups.items():
        runs = [member.count.value for member in members]
        counted.append((kind, axes, len(members), None if None in runs else sum(run or 0 for run in runs), payload))
    return sorted(counted, key=str)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scan_of_6_with_3_halos_has_3_permutes_and_runs_18(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    instances = collectives_of(compile_on_tpu(topology, "scan_of_6_with_3_halos"))
    # 64 / 2 rows of 9 float32.
    assert summary(instances) == [("collective-permute", ("context",), 3, 18, 32 * 9 * 4)]
    assert {instance.is_compiler_made for instance in instances} == {False}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_counts_of_nested_scans_multiply(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    payload = 32 * 4096 * 4
    assert summary(collectives_of(compile_on_tpu(topology, "nested_scans_7_by_5"))) == [
        ("all-reduce", ("expert",), 1, 35, payload),
        ("collective-permute", ("context",), 1, 7, payload),
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_combined_all_reduce_sums_its_tensors(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    # The compiler combines the two float32 tensors in one instruction.
    assert summary(collectives_of(compile_on_tpu(topology, "combined_all_reduce"))) == [
        ("all-reduce", ("fsdp",), 1, 1, 2048 * 256 * 2),
        ("all-reduce", ("fsdp",), 1, 1, (1024 * 1024 + 512 * 512) * 4),
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_gather_over_two_axes_names_both(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    instances = collectives_of(compile_on_tpu(topology, "all_gather_over_two_axes"))
    assert summary(instances) == [("all-gather", ("fsdp", "context"), 1, 1, 4096 * 1024 * 4)]
    assert instances[0].wire_bytes == Fraction(3, 4) * 4096 * 1024 * 4


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fusion_that_reduces_and_keeps_a_slice_is_a_reduce_scatter(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    scatters = [i for i in collectives_of(compile_on_tpu(topology, "reduce_scatter")) if i.kind == "reduce-scatter"]
    assert [(i.reach.axes, i.count.value) for i in scatters] == [(("context",), 1)]
    payload = scatters[0].payload_bytes
    # The compiler pads the rows so that its rings divide them: never below what was asked for, and not by much.
    assert payload is not None
    assert 4096 * 4096 * 2 <= payload < 1.1 * 4096 * 4096 * 2
    assert scatters[0].wire_bytes == Fraction(payload, 2)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_to_all_keeps_one_share(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    (instance,) = collectives_of(compile_on_tpu(topology, "all_to_all"))
    payload = 1024 * 2048 * 4
    assert (instance.kind, instance.reach.axes, instance.payload_bytes, instance.wire_bytes) == (
        "all-to-all",
        ("expert",),
        payload,
        payload // 2,
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ragged_all_to_all_carries_no_more_than_its_smaller_buffer(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    (instance,) = collectives_of(compile_on_tpu(topology, "ragged_all_to_all"))
    # 2048 rows are sent into a buffer of 4096.
    assert (instance.kind, instance.reach.axes, instance.payload_bytes) == ("ragged-all-to-all", ("expert",), 2048 * 512 * 4)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_loop_whose_bound_is_data_has_no_count_and_says_why(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    instances = collectives_of(compile_on_tpu(topology, "loop_with_bound_from_data"))
    assert [i.count.value for i in instances] == [None]
    (record,) = group_collectives(instances, Links("v5e", 1))
    assert (record.static_count, record.per_step_count, record.payload_bytes, record.wire_bytes, record.link_seconds) == (
        1,
        None,
        None,
        None,
        None,
    )
    assert "computed at run time" in (record.unknown_reason or "")
    totals = sum_collectives(instances, Links("v5e", 1))
    assert (totals.per_step_count, totals.ici_wire_bytes, totals.link_seconds) == (None, None, None)


def test_loop_that_counts_down_is_counted(compile_on_tpu: CompileOnTpu) -> None:
    # 17, 14, 11, 8, 5, 2.
    assert [i.count.value for i in collectives_of(compile_on_tpu("v5e:2x4", "loop_that_counts_down_by_3"))] == [6]


def test_collective_in_a_branch_has_no_count(compile_on_tpu: CompileOnTpu) -> None:
    (instance,) = collectives_of(compile_on_tpu("v5e:2x4", "branch_with_all_reduce"))
    assert instance.count.value is None
    assert "chosen at run time" in (instance.count.reason or "")


def test_collective_between_slices_is_on_the_data_center_network(compile_on_tpu: CompileOnTpu) -> None:
    compiled = compile_on_tpu("v5p:2x2x1*2", "mean_over_slices")
    across = [i for i in collectives_of(compiled) if i.reach.link == "dcn"]
    assert {i.reach.axes for i in across} == {("data",)}
    totals = sum_collectives(collectives_of(compiled), Links("v5p", 1))
    assert totals.dcn_wire_bytes
    assert totals.link_seconds == pytest.approx(totals.dcn_wire_bytes / 6.25e9)


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2"])
def test_train_step_exchanges_its_halo_in_three_phases(compile_on_tpu: CompileOnTpu, topology: str) -> None:
    name = "train_step" if topology == "v5p:2x2x1" else "train_step_in_vmem"
    batch, dim = (4, 1024) if topology == "v5p:2x2x1" else (2, 512)
    halos = [i for i in collectives_of(compile_on_tpu(topology, name)) if i.module == "layers/halo"]
    # Nothing of the layer's backward pass needs the exchanged rows again, so the compiler drops the exchange of the forward pass run again.
    assert {(i.phase, i.count.value, i.payload_bytes) for i in halos} == {
        (phase, 6, batch * 9 * dim * 4) for phase in ("forward", "backward")
    }
    assert len(halos) == 4
    assert {i.is_compiler_made for i in halos} == {False}


def test_collective_overlapped_by_a_chain_of_fusions_is_counted_once(compile_on_tpu: CompileOnTpu) -> None:
    instances = collectives_of(compile_on_tpu("v5e:2x2", "train_step_in_vmem"))
    gathers = [i for i in instances if i.kind == "all-gather" and i.module == "layers/mlp"]
    # Both weights of a layer, forward and again in the backward pass.
    assert sum(i.count.value or 0 for i in gathers) == 4 * 6
    assert {i.is_compiler_made for i in gathers} == {True}
    chained = [i for i in gathers if i.name.startswith("async-collective")]
    assert chained, "this compiler no longer overlaps a gather by a chain of fusions: find another program that makes it"


def test_per_step_bytes_are_count_times_bytes(compile_on_tpu: CompileOnTpu) -> None:
    (first, *_) = collectives_of(compile_on_tpu("v5e:2x4", "scan_of_6_with_3_halos"))
    assert per_step(first) == (6, 6 * 32 * 9 * 4, 6 * 32 * 9 * 4)
