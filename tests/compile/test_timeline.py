"""Thinning keeps every maximum, prominence is what it says, and loops are found on real timelines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.compile.dump import parse_dump
from service.compile.hlo import Program
from service.compile.memory import replay
from service.compile.scope_search import ScopeSearch
from service.compile.timeline import build_timeline, kept_indices, outstanding_maxima
from tests.compile.conftest import CompileOnTpu

usages = st.lists(st.integers(min_value=0, max_value=1000), min_size=1, max_size=60)


def local_maxima(usage: list[int]) -> list[int]:
    """Independent definition: first index of a run of equal values with nothing as high beside the run."""
    found = []
    for index, value in enumerate(usage):
        end = index
        while end + 1 < len(usage) and usage[end + 1] == value:
            end += 1
        starts_run = index == 0 or usage[index - 1] != value
        if starts_run and (index == 0 or usage[index - 1] < value) and (end == len(usage) - 1 or usage[end + 1] < value):
            found.append(index)
    return found


@given(usages)
def test_every_local_maximum_above_one_percent_survives(usage: list[int]) -> None:
    kept = set(kept_indices(usage))
    assert {index for index in local_maxima(usage) if usage[index] > 0.01 * max(usage)} <= kept
    assert {0, len(usage) - 1} <= kept


@given(usages)
def test_lowest_point_between_two_kept_maxima_survives(usage: list[int]) -> None:
    kept = kept_indices(usage)
    maxima = [index for index in local_maxima(usage) if usage[index] > 0.01 * max(usage)]
    for before, after in itertools.pairwise(maxima):
        lowest = min(usage[before : after + 1])
        assert lowest in {usage[index] for index in kept if before <= index <= after}


@given(usages)
def test_thinned_curve_has_the_peak_and_no_new_values(usage: list[int]) -> None:
    kept = kept_indices(usage)
    assert max(usage[index] for index in kept) == max(usage)
    assert kept == sorted(set(kept))


@given(usages)
def test_prominence_is_the_fall_before_a_higher_point(usage: list[int]) -> None:
    for maximum in outstanding_maxima(usage):
        sides = []
        for side in (range(maximum.index, -1, -1), range(maximum.index, len(usage))):
            lowest, is_bounded = usage[maximum.index], False
            for index in side:
                if usage[index] > usage[maximum.index]:
                    is_bounded = True
                    break
                lowest = min(lowest, usage[index])
            if is_bounded:
                sides.append(lowest)
        assert maximum.prominence == usage[maximum.index] - (max(sides) if sides else min(usage))


def test_maxima_that_stand_out_are_listed_highest_first() -> None:
    #        peak       shoulder           second peak
    usage = [10, 50, 100, 90, 100, 20, 21, 20, 70, 10]
    found = [(maximum.index, maximum.live_bytes, maximum.prominence) for maximum in outstanding_maxima(usage)]
    assert found == [(2, 100, 90), (4, 100, 90), (8, 70, 50)]


def test_flat_timeline_has_its_one_maximum() -> None:
    assert [(m.index, m.live_bytes, m.prominence) for m in outstanding_maxima([7, 7, 7])] == [(0, 7, 0)]
    assert kept_indices([7]) == [0]


@pytest.mark.tpu
def test_bodies_of_the_forward_and_backward_scan_are_named_on_the_timeline(compile_on_tpu: CompileOnTpu) -> None:
    proto = parse_dump(compile_on_tpu("v5p:2x2x1", "train_step").dump)
    memory, program = replay(proto), Program(proto.hlo_module)
    timeline = build_timeline(memory, program, ScopeSearch(program))
    assert [span.name for span in timeline.spans] == ["layers, forward", "layers, backward"]
    forward, backward = timeline.spans
    assert 0 < forward.start_index < forward.end_index < backward.start_index < backward.end_index < timeline.num_points
    assert timeline.num_points == len(memory.usage)
    # The peak of a rematerialised train step is in its backward pass.
    assert backward.start_index <= timeline.peak_index <= backward.end_index
    peak = next(point for point in timeline.points if point.index == timeline.peak_index)
    assert peak.live_bytes == memory.peak_bytes
