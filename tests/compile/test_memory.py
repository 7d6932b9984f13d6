"""The replayed buffer assignment is the compiler's own to the byte, and a dump that does not add up is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.compile.analyse import read
from service.compile.dump import parse_dump
from service.compile.hlo import Program
from service.compile.integrity import check_against_program
from service.compile.memory import HBM, HOST, MemoryDump, replay
from service.errors import AnalysisError
from tests.compile.conftest import CompileOnTpu

pytestmark = pytest.mark.tpu

CASES = [
    ("v5p:2x2x1", "train_step"),
    ("v5e:2x2", "train_step_in_vmem"),
    pytest.param("v5p:2x2x1", "train_step_undonated", marks=pytest.mark.slow),
    pytest.param("v6e:2x2", "train_step", marks=pytest.mark.slow),
    pytest.param("tpu7x:2x2x1", "train_step", marks=pytest.mark.slow),
    ("v5e:2x4", "offload_to_host"),
    ("v5e:2x4", "reduce_scatter"),
    ("v5p:2x2x2", "nested_scans_7_by_5"),
    pytest.param("v5p:2x2x1*2", "mean_over_slices"),
]


@pytest.mark.parametrize(("topology", "name"), CASES)
def test_totals_equal_memory_analysis_to_the_byte(compile_on_tpu: CompileOnTpu, topology: str, name: str) -> None:
    compiled = compile_on_tpu(topology, name)
    memory = read(compiled.dump).memory
    measured = {
        "peak_memory_in_bytes": memory.memory_analysis_peak_bytes,
        "total_allocation_bytes": memory.allocated_bytes,
        "argument_size_in_bytes": memory.argument_bytes,
        "output_size_in_bytes": memory.output_bytes,
        "alias_size_in_bytes": memory.alias_bytes,
    }
    assert measured == compiled.statistics
    assert memory.peak_bytes == sum(life.size for life in memory.alive_at_peak) == max(memory.usage)
    check_against_program(memory, Program(parse_dump(compiled.dump).hlo_module))


def test_peak_is_jaxlibs_where_hbm_holds_the_largest_simulation(compile_on_tpu: CompileOnTpu) -> None:
    compiled = compile_on_tpu("v5p:2x2x1", "train_step")
    assert read(compiled.dump).memory.peak_bytes == compiled.statistics["peak_memory_in_bytes"]


def test_peak_holds_no_vmem_bytes_where_jaxlibs_does(compile_on_tpu: CompileOnTpu) -> None:
    compiled = compile_on_tpu("v5e:2x2", "train_step_in_vmem")
    memory = read(compiled.dump).memory
    # jaxlib states a peak above all that is allocated; the real one cannot be.
    assert compiled.statistics["peak_memory_in_bytes"] > compiled.statistics["total_allocation_bytes"] >= memory.peak_bytes


def test_program_that_does_not_fit_is_read_like_any_other(compile_on_tpu: CompileOnTpu) -> None:
    compiled = compile_on_tpu("v5e:2x2", "train_step_too_large")
    assert "Ran out of memory on HBM" in compiled.error
    memory = read(compiled.dump).memory
    stated_gib = float(compiled.error.split("required for HLO temporaries (")[1].split("G)")[0])
    assert memory.allocated_bytes / 2**30 == pytest.approx(stated_gib, abs=0.01)
    assert memory.peak_bytes == sum(life.size for life in memory.alive_at_peak)


def test_host_bytes_are_what_was_offloaded(compile_on_tpu: CompileOnTpu) -> None:
    memory = read(compile_on_tpu("v5e:2x4", "offload_to_host").dump).memory
    # Six layers' kept product: 8192 / 2 rows by 1024 / 2 columns of float32.
    assert memory.host_bytes == 6 * (8192 // 2) * (1024 // 2) * 4
    assert {memory.allocations[life.allocation].color for life in memory.lifetimes} == {HBM}
    assert HOST in {allocation.color for allocation in memory.allocations.values()}


def test_arguments_live_throughout_and_usage_starts_and_ends_with_them(compile_on_tpu: CompileOnTpu) -> None:
    memory = read(compile_on_tpu("v5p:2x2x1", "train_step").dump).memory
    assert memory.usage[0] == memory.usage[-1] >= memory.argument_bytes
    arguments = [life for life in memory.lifetimes if memory.allocations[life.allocation].parameter is not None]
    assert {(life.start, life.end) for life in arguments} == {(0, len(memory.usage) - 1)}
    assert sum(life.size for life in arguments) == memory.argument_bytes


def test_lifetimes_add_up_to_usage_at_every_point(compile_on_tpu: CompileOnTpu) -> None:
    memory = read(compile_on_tpu("v5p:2x2x1", "train_step").dump).memory
    for index, live in enumerate(memory.usage):
        assert sum(life.size for life in memory.alive_at(index)) == live


@pytest.mark.slow
def test_donation_lowers_the_peak_by_the_state(compile_on_tpu: CompileOnTpu) -> None:
    donated = read(compile_on_tpu("v5p:2x2x1", "train_step").dump).memory
    kept = read(compile_on_tpu("v5p:2x2x1", "train_step_undonated").dump).memory
    assert kept.alias_bytes == 0 < donated.alias_bytes
    assert kept.output_bytes == donated.output_bytes
    assert kept.peak_bytes > donated.peak_bytes


@pytest.fixture
def proto(compile_on_tpu: CompileOnTpu) -> Any:
    """A fresh parse of a real dump, to break."""
    return parse_dump(compile_on_tpu("v5p:2x2x1", "train_step").dump)


def checked(proto: Any) -> MemoryDump:
    memory = replay(proto)
    check_against_program(memory, Program(proto.hlo_module))
    return memory


def test_freed_buffer_that_is_shared_again_is_allocated_again(proto: Any) -> None:
    assignment = proto.buffer_assignment
    del assignment.heap_simulator_traces[:], assignment.buffer_allocations[:], assignment.logical_buffers[:]
    for identifier, size in ((1, 640), (2, 512)):
        assignment.logical_buffers.add(id=identifier, size=size).defined_at.instruction_id = identifier
    allocation = assignment.buffer_allocations.add(index=0, size=640)
    for identifier, size in ((1, 640), (2, 512)):
        allocation.assigned.add(logical_buffer_id=identifier, size=size)
    trace = assignment.heap_simulator_traces.add(buffer_allocation_index=0)
    for kind, buffer, canonical in ((0, 1, 0), (1, 1, 0), (2, 2, 1), (1, 2, 0)):
        trace.events.add(kind=kind, buffer_id=buffer, share_with_canonical_id=canonical)
    memory = replay(proto)
    assert memory.usage == (0, 640, 0, 640, 0)
    assert [(life.buffer_id, life.start, life.end, life.shared_ids) for life in memory.lifetimes] == [(1, 1, 1, ()), (1, 3, 3, (2,))]


def _break_size(proto: Any) -> None:
    proto.buffer_assignment.logical_buffers[0].size += 512


def _break_allocation(proto: Any) -> None:
    proto.buffer_assignment.buffer_allocations[1].size += 512


def _lose_last_event(proto: Any) -> None:
    events = max(proto.buffer_assignment.heap_simulator_traces, key=lambda trace: len(trace.events)).events
    del events[-1]


def _free_twice(proto: Any) -> None:
    events = proto.buffer_assignment.heap_simulator_traces[0].events
    events.append(next(event for event in events if event.kind == 1))


def _make_argument_thread_local(proto: Any) -> None:
    next(a for a in proto.buffer_assignment.buffer_allocations if a.is_entry_computation_parameter).is_thread_local = True


def _call_temporary_an_argument(proto: Any) -> None:
    allocation = next(a for a in proto.buffer_assignment.buffer_allocations if a.is_constant)
    allocation.is_entry_computation_parameter, allocation.parameter_number = True, 3


def _deny_argument(proto: Any) -> None:
    next(a for a in proto.buffer_assignment.buffer_allocations if a.is_entry_computation_parameter).is_entry_computation_parameter = False


def _claim_alias(proto: Any) -> None:
    next(
        a for a in proto.buffer_assignment.buffer_allocations if a.is_entry_computation_parameter and not a.is_parameter_aliased_with_output
    ).is_parameter_aliased_with_output = True


def _split_the_simulation(proto: Any) -> None:
    assignment = proto.buffer_assignment
    for allocation in assignment.buffer_allocations:
        if allocation.color == 0 and allocation.index not in {t.buffer_allocation_index for t in assignment.heap_simulator_traces}:
            assignment.heap_simulator_traces.add(buffer_allocation_index=allocation.index)
            return


@pytest.mark.parametrize(
    "damage",
    [
        _break_size,
        _break_allocation,
        _lose_last_event,
        _free_twice,
        _make_argument_thread_local,
        _call_temporary_an_argument,
        _deny_argument,
        _claim_alias,
        _split_the_simulation,
    ],
)
def test_dump_that_contradicts_itself_is_refused(proto: Any, damage: Any) -> None:
    checked(proto)
    damage(proto)
    with pytest.raises(AnalysisError):
        checked(proto)


def test_truncated_dump_is_refused_with_its_reason(compile_on_tpu: CompileOnTpu) -> None:
    dump = compile_on_tpu("v5p:2x2x1", "train_step").dump
    for length in (0, 1, 17, len(dump) // 3, len(dump) // 2, len(dump) - 1):
        with pytest.raises(AnalysisError, match=r"truncated|no HLO module|no buffer assignment"):
            read(dump[:length])


def test_timeline_is_xprofs_at_every_program_point(compile_on_tpu: CompileOnTpu, tmp_path: Path) -> None:
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    dump = compile_on_tpu("v5p:2x2x1", "train_step").dump
    (tmp_path / "step.hlo_proto.pb").write_bytes(dump)
    options = {"module_name": "step", "host": "step", "memory_space": "0"}
    viewer = json.loads(convert.xspace_to_tool_data([str(tmp_path / "step.xplane.pb")], "memory_viewer", options)[0])
    memory = read(dump).memory
    mib = 2**20
    assert [round(float(size) * mib) for size in viewer["heapSizes"]] == list(memory.usage)
    assert round(viewer["peakHeapMib"] * mib) == memory.peak_bytes
    assert round(viewer["totalBufferAllocationMib"] * mib) == memory.allocated_bytes
    assert round(viewer["entryComputationParametersMib"] * mib) == memory.argument_bytes
