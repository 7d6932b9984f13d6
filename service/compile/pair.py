"""Weighs the candidate and the dropless program of one spec together: whether a step that retries fits, and what retrying costs.

Neither program donates its state, so that the dropless one can replay the step; each one's own reserved bytes hold the input state
already. The candidate's new state is dropped before a replay, so the two never stand side by side: the worse one decides. A loop that
starts the next step while the overflow flag of the last still travels keeps one more state alive beside the candidate; what it started
ahead is freed before the dropless program runs (service/steps/loop.py).
"""

from __future__ import annotations

from typing import Any

from service.records import STATE_CLASSES, Pair, Report, ReportStatus, StepCost

RETRY_COST = "candidate + overflow probability × dropless"
BREAK_EVEN = "1 − candidate ÷ dropless"
_PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def weigh_pair(
    candidate: Report,
    dropless: Report,
    *,
    looks_ahead: bool = False,
    step_seconds: tuple[float, float] | None = None,
) -> Pair:
    """The pair of one spec; `looks_ahead` says whether the loop that will run it starts a step before the last one's flag is read.

    `step_seconds` are measured times of a candidate and of a dropless step, where there are any: a compile alone does not tell them, and
    without them the cost of retrying stays a formula.
    """
    fits = [_fits(candidate), _fits(dropless)]
    both = _all(*fits)
    state_bytes = _state_bytes(candidate)
    worse = _worse(candidate, dropless)
    capacity = worse.capacity_bytes if worse else None
    reserved = worse.allocated_bytes if worse else None
    headroom = None if capacity is None or reserved is None else capacity - reserved
    ahead = None
    if candidate.allocated_bytes is not None and dropless.allocated_bytes is not None and state_bytes is not None:
        ahead = reserved_bytes(candidate.allocated_bytes, dropless.allocated_bytes, beside_bytes=state_bytes)
    fits_ahead = _all(both, None if ahead is None or capacity is None else ahead <= capacity)
    return Pair(
        fits=fits_ahead if looks_ahead else both,
        candidate_fits=fits[0],
        dropless_fits=fits[1],
        state_bytes=state_bytes,
        worse_program=worse.program if worse else None,
        headroom_bytes=headroom,
        lookahead_allocated_bytes=ahead,
        fits_with_lookahead=fits_ahead,
        retry_cost=RETRY_COST,
        break_even=BREAK_EVEN,
        **({} if step_seconds is None else _timed(*step_seconds)),
    )


def _timed(candidate_seconds: float, dropless_seconds: float) -> dict[str, Any]:
    seconds = {p: expected_step_seconds(candidate_seconds, dropless_seconds, p) for p in _PROBABILITIES}
    return {
        "candidate_seconds": candidate_seconds,
        "dropless_seconds": dropless_seconds,
        "break_even_probability": break_even_probability(candidate_seconds, dropless_seconds),
        "step_costs": tuple(StepCost(overflow_probability=p, seconds=mean) for p, mean in seconds.items()),
    }


def expected_step_seconds(candidate_seconds: float, dropless_seconds: float, overflow_probability: float) -> float:
    """Mean time of a step that retries: the candidate always runs, the dropless program when it overflows."""
    return candidate_seconds + overflow_probability * dropless_seconds


def break_even_probability(candidate_seconds: float, dropless_seconds: float) -> float:
    """The overflow probability above which running dropless always is cheaper; 0 where the candidate is no faster."""
    return max(0.0, 1 - candidate_seconds / dropless_seconds)


def reserved_bytes(candidate_bytes: int, dropless_bytes: int, *, beside_bytes: int) -> int:
    """What a run of both reserves per device: each program's own bytes, the candidate's with `beside_bytes` of other states beside it."""
    return max(candidate_bytes + beside_bytes, dropless_bytes)


def _all(*answers: bool | None) -> bool | None:
    """False as soon as one is, whatever is not known of the others."""
    return False if False in answers else None if None in answers else True


def _fits(report: Report) -> bool | None:
    return {ReportStatus.OK: True, ReportStatus.DOES_NOT_FIT: False}.get(report.status)


def _state_bytes(report: Report) -> int | None:
    return sum(report.classes.get(name, 0) for name in STATE_CLASSES) if report.classes else None


def _worse(candidate: Report, dropless: Report) -> Report | None:
    """The program that reserves more; None unless both were measured."""
    if candidate.allocated_bytes is None or dropless.allocated_bytes is None:
        return None
    return dropless if dropless.allocated_bytes >= candidate.allocated_bytes else candidate
