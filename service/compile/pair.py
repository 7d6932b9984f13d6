"""Weighs the candidate and the dropless program of one spec together: whether a step that retries fits, and what retrying costs.

Neither program donates its state, so that the dropless one can replay the step; each one's own reserved bytes hold the input state
already. The candidate's new state is dropped before a replay, so the two never stand side by side: the worse one decides. A loop that
starts the next step while the overflow flag of the last still travels keeps one more state alive.
"""

from __future__ import annotations

from service.records import STATE_CLASSES, Pair, Report, ReportStatus

RETRY_COST = "candidate + overflow probability × dropless"


def weigh_pair(
    candidate: Report,
    dropless: Report,
    *,
    looks_ahead: bool = False,
    candidate_seconds: float | None = None,
    dropless_seconds: float | None = None,
) -> Pair:
    """The pair of one spec; `looks_ahead` says whether the loop that will run it starts a step before the last one's flag is read.

    Step times are measured ones, where there are any; without them the break-even point is unknown.
    """
    fits = [_fits(candidate), _fits(dropless)]
    both = None if None in fits else all(fits)
    state_bytes = _state_bytes(candidate)
    worse = _worse(candidate, dropless)
    capacity = worse.capacity_bytes if worse else None
    reserved = worse.allocated_bytes if worse else None
    headroom = None if capacity is None or reserved is None else capacity - reserved
    ahead = None if reserved is None or state_bytes is None else reserved + state_bytes
    fits_ahead = None if ahead is None or capacity is None or both is None else both and ahead <= capacity
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
        break_even_probability=break_even_probability(candidate_seconds, dropless_seconds),
    )


def expected_step_seconds(candidate_seconds: float, dropless_seconds: float, overflow_probability: float) -> float:
    """Mean time of a step that retries: the candidate always runs, the dropless program when it overflows."""
    return candidate_seconds + overflow_probability * dropless_seconds


def break_even_probability(candidate_seconds: float | None, dropless_seconds: float | None) -> float | None:
    """The overflow probability above which running dropless always is cheaper: 1 - candidate / dropless, at least 0; None without times."""
    if candidate_seconds is None or not dropless_seconds:
        return None
    return max(0.0, 1 - candidate_seconds / dropless_seconds)


def _fits(report: Report) -> bool | None:
    return {ReportStatus.OK: True, ReportStatus.DOES_NOT_FIT: False}.get(report.status)


def _state_bytes(report: Report) -> int | None:
    return sum(report.classes.get(name, 0) for name in STATE_CLASSES) if report.classes else None


def _worse(candidate: Report, dropless: Report) -> Report | None:
    """The program that reserves more; None unless both were measured."""
    if candidate.allocated_bytes is None or dropless.allocated_bytes is None:
        return None
    return dropless if dropless.allocated_bytes >= candidate.allocated_bytes else candidate
