"""The pair fits when its worse program does, and retrying pays until the break-even point."""

from __future__ import annotations

import pytest

from service.compile.pair import break_even_probability, expected_step_seconds, weigh_pair
from service.records import Report, ReportStatus

GIB = 1 << 30


def report(program: str, allocated: int | None, *, status: ReportStatus = ReportStatus.OK, state: int = 6 * GIB) -> Report:
    classes = (
        {} if allocated is None else {"parameters": state // 3, "optimizer_first_moment": state // 3, "optimizer_second_moment": state // 3}
    )
    return Report(program=program, status=status, depth="memory", allocated_bytes=allocated, capacity_bytes=16 * GIB, classes=classes)


def test_worse_program_decides() -> None:
    pair = weigh_pair(report("candidate", 9 * GIB), report("dropless", 13 * GIB))
    assert (pair.fits, pair.worse_program, pair.headroom_bytes) == (True, "dropless", 3 * GIB)


def test_looking_ahead_keeps_one_more_state() -> None:
    pair = weigh_pair(report("candidate", 9 * GIB), report("dropless", 13 * GIB), looks_ahead=True)
    # Beside the candidate alone: what was started ahead is freed before the dropless program runs.
    assert (pair.state_bytes, pair.lookahead_allocated_bytes) == (6 * GIB, 15 * GIB)
    assert (pair.fits, pair.fits_with_lookahead) == (True, True)
    large = weigh_pair(report("candidate", 12 * GIB), report("dropless", 13 * GIB), looks_ahead=True)
    assert (large.lookahead_allocated_bytes, large.fits, large.fits_with_lookahead) == (18 * GIB, False, False)
    without = weigh_pair(report("candidate", 12 * GIB), report("dropless", 13 * GIB))
    assert (without.fits, without.fits_with_lookahead) == (True, False)
    small = weigh_pair(report("candidate", 9 * GIB, state=3 * GIB), report("dropless", 13 * GIB, state=3 * GIB), looks_ahead=True)
    assert (small.lookahead_allocated_bytes, small.fits) == (13 * GIB, True)


def test_candidate_can_be_the_worse_one() -> None:
    pair = weigh_pair(report("candidate", 14 * GIB), report("dropless", 13 * GIB))
    assert (pair.worse_program, pair.headroom_bytes) == ("candidate", 2 * GIB)


def test_program_that_does_not_fit_makes_the_pair_not_fit() -> None:
    pair = weigh_pair(report("candidate", 9 * GIB), report("dropless", 17 * GIB, status=ReportStatus.DOES_NOT_FIT))
    assert (pair.fits, pair.candidate_fits, pair.dropless_fits, pair.headroom_bytes) == (False, True, False, -GIB)


@pytest.mark.parametrize("status", [ReportStatus.UNKNOWN, ReportStatus.FAILED])
def test_unknown_program_makes_the_pair_unknown(status: ReportStatus) -> None:
    allocated = None if status is ReportStatus.FAILED else 15 * GIB
    pair = weigh_pair(report("candidate", 9 * GIB), report("dropless", allocated, status=status))
    assert (pair.fits, pair.dropless_fits) == (None, None)
    assert (pair.headroom_bytes is None) == (allocated is None)


@pytest.mark.parametrize("status", [ReportStatus.UNKNOWN, ReportStatus.FAILED])
def test_a_program_that_does_not_fit_decides_whatever_is_unknown_of_the_other(status: ReportStatus) -> None:
    pair = weigh_pair(report("candidate", None, status=status), report("dropless", 17 * GIB, status=ReportStatus.DOES_NOT_FIT))
    assert (pair.fits, pair.candidate_fits, pair.dropless_fits, pair.fits_with_lookahead) == (False, None, False, False)


def test_break_even_is_where_retrying_costs_what_dropless_costs() -> None:
    # A public run of DeepSeek-V3 671B on 256 chips: 8.63 s a step at factor 0.125, 12.95 s dropless, 20.92 s with retry.
    threshold = break_even_probability(8.63, 12.95)
    assert threshold == pytest.approx(0.3336, abs=1e-4)
    assert expected_step_seconds(8.63, 12.95, threshold) == pytest.approx(12.95)
    # Its mean step with retry means that 95 % of its steps overflowed, where dropless always would have been cheaper.
    assert expected_step_seconds(8.63, 12.95, 0.949) == pytest.approx(20.92, abs=0.01)
    assert break_even_probability(14.0, 12.95) == 0


def test_measured_times_give_the_cost_of_retrying_and_its_break_even_point() -> None:
    pair = weigh_pair(report("candidate", 9 * GIB), report("dropless", 13 * GIB), step_seconds=(3.0, 4.0))
    assert pair.break_even_probability == pytest.approx(0.25)
    costs = {cost.overflow_probability: cost.seconds for cost in pair.step_costs}
    assert (costs[0.0], costs[0.1], costs[0.25], costs[1.0]) == (3.0, pytest.approx(3.4), pytest.approx(4.0), 7.0)
    untimed = weigh_pair(report("candidate", 9 * GIB), report("dropless", 13 * GIB))
    assert (untimed.break_even_probability, untimed.step_costs) == (None, ())
    assert (untimed.retry_cost, untimed.break_even) == ("candidate + overflow probability × dropless", "1 − candidate ÷ dropless")
