"""The timeline of HBM: thinned for storing without losing a maximum, the loops named on it, and the maxima that stand out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.compile.hlo import Program
from service.compile.memory import MemoryDump
from service.compile.scope_search import ScopeSearch
from service.records import Timeline, TimelinePoint, TimelineSpan

KEPT_ABOVE = 0.01
"""Every local maximum above this share of the peak is kept, and no other point where usage is not at a turn."""

MAX_PEAKS = 8


@dataclass(frozen=True, slots=True)
class Maximum:
    """A local maximum: its first index, its height and how far usage falls on its better side before it rises higher."""

    index: int
    live_bytes: int
    prominence: int


def build_timeline(memory: MemoryDump, program: Program, search: ScopeSearch) -> Timeline:
    """The stored timeline: first and last point, every local maximum above 1 % of the peak, and the lowest point between two of them."""
    usage = memory.usage
    points = [
        TimelinePoint(index=index, live_bytes=usage[index], instruction=memory.event_instructions[index]) for index in kept_indices(usage)
    ]
    return Timeline(
        num_points=len(usage), peak_index=memory.peak_index, points=tuple(points), spans=tuple(_loop_spans(memory, program, search))
    )


def kept_indices(usage: Sequence[int]) -> list[int]:
    """The indices that draw the same curve: ends, maxima above 1 % of the peak, and between two of these the first lowest point."""
    threshold = max(usage) * KEPT_ABOVE
    kept = {0, len(usage) - 1}
    maxima = [index for index in _local_maxima(usage) if usage[index] > threshold]
    kept.update(maxima)
    for before, after in zip([0, *maxima], [*maxima, len(usage) - 1], strict=True):
        if after - before > 1:
            between = usage[before : after + 1]
            kept.add(before + between.index(min(between)))
    return sorted(kept)


def _local_maxima(usage: Sequence[int]) -> list[int]:
    """First index of each stretch of equal usage that is higher than what stands on both sides; an end counts as low."""
    starts = [index for index in range(len(usage)) if index == 0 or usage[index] != usage[index - 1]]
    return [
        start
        for position, start in enumerate(starts)
        if (position == 0 or usage[starts[position - 1]] < usage[start])
        and (position == len(starts) - 1 or usage[starts[position + 1]] < usage[start])
    ]


def outstanding_maxima(usage: Sequence[int]) -> list[Maximum]:
    """Local maxima whose prominence is above 1 % of the peak, highest first, at most `MAX_PEAKS`; the first is the peak."""
    fall_before = _falls(usage)
    fall_after = _falls(usage[::-1])[::-1]
    lowest, highest = min(usage), max(usage)
    found = []
    for index in _local_maxima(usage):
        bases = [base for base in (fall_before[index], fall_after[index]) if base is not None]
        prominence = usage[index] - (max(bases) if bases else lowest)
        if prominence > highest * KEPT_ABOVE or usage[index] == highest:
            found.append(Maximum(index, usage[index], prominence))
    return sorted(found, key=lambda maximum: (-maximum.live_bytes, maximum.index))[:MAX_PEAKS]


def _falls(usage: Sequence[int]) -> list[int | None]:
    """For each index the lowest usage back to the nearest higher one before it; None where none before is higher."""
    falls: list[int | None] = []
    higher: list[tuple[int, int]] = []
    for live in usage:
        lowest = live
        while higher and higher[-1][0] <= live:
            lowest = min(lowest, higher.pop()[1])
        falls.append(lowest if higher else None)
        higher.append((live, lowest))
    return falls


def _loop_spans(memory: MemoryDump, program: Program, search: ScopeSearch) -> Iterator[TimelineSpan]:
    """Where each loop's body stands on the timeline; it stands there once, however often it runs."""
    names = {program.computations[body].name: loop for body, loop in program.loops_by_body.items()}
    spans: dict[int, tuple[int, int]] = {}
    for index, computation in enumerate(memory.event_computations):
        # A loop within a loop belongs to both.
        while (loop_id := names.get(computation)) is not None:
            first, _ = spans.get(loop_id, (index, index))
            spans[loop_id] = (first, index)
            computation = program.computations[program.instructions[loop_id].computation].name
    for loop_id, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        found = search.find([(loop_id, ())])
        scope = found.scope if found else None
        module = (scope.module if scope else "") or program.instructions[loop_id].name
        yield TimelineSpan(name=f"{module}, {scope.phase}" if scope and scope.phase else module, start_index=first, end_index=last)
