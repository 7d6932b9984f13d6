"""The training loops: the plain one, and the one that replays a step without dropping where its candidate overflowed.

Programs are two compiled functions of (state, batch) and the host chooses between them; there is no branch inside a program. Nothing here
imports JAX: a state is anything that `discard` can free, so the loop's promises are held against a fake step (tests/steps/test_loop.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from service.models.config import ProgramName

State = Any
Batch = Any
Metrics = Any
Step = Callable[[State, Batch], tuple[State, Metrics]]


@dataclass(frozen=True)
class Outcome:
    """One step that counts."""

    index: int
    program: ProgramName
    metrics: Metrics
    """Of the program whose result counts."""
    discarded: Metrics | None
    """The candidate's, where it was replayed."""
    num_wasted: int
    """Look-ahead steps thrown away with the candidate."""
    seconds: float
    """Since the step before ended, or the loop began."""


@dataclass
class _Started:
    """A candidate step whose flag has not been read."""

    index: int
    batch: Batch
    before: State
    after: State
    metrics: Metrics


class RetryLoop:
    """Runs candidate steps and replays with the dropless program those that overflowed.

    Neither program may donate its state. With `look_ahead` 1 the next candidate is started before the flag of the one before is read, so
    that the devices have work while the flag travels and nothing waits as long as nothing overflows; the price is one more state alive
    (that before the unread step, that after it, and that being computed: 3) and, at an overflow, the step that was started in vain. With
    `look_ahead` 0 two states are alive and the devices idle while the host reads and starts the next step.

    Args:
        candidate: the step that may drop tokens.
        dropless: the step that never does.
        has_overflowed: reads the flag of a step's metrics; this is where the host waits.
        discard: frees a state's buffers.
        look_ahead: 0 or 1.
    """

    def __init__(
        self,
        candidate: Step,
        dropless: Step,
        *,
        has_overflowed: Callable[[Metrics], bool],
        discard: Callable[[State], None],
        look_ahead: int,
    ) -> None:
        if look_ahead not in (0, 1):
            raise ValueError(f"look_ahead is {look_ahead}; use 0 or 1 (each step ahead holds one more state)")
        self._candidate = candidate
        self._dropless = dropless
        self._has_overflowed = has_overflowed
        self._discard = discard
        self._look_ahead = look_ahead
        self.state: State = None
        """The newest state that counts, once `run` has ended."""

    @property
    def num_states_held(self) -> int:
        """States alive at once, that being computed included."""
        return 2 + self._look_ahead

    def run(self, state: State, num_steps: int, batch_at: Callable[[int], Batch], *, start: int = 0) -> Generator[Outcome]:
        """Train for `num_steps` steps from `state`, which is freed; each step is yielded when it has ended, in order.

        `batch_at(step)` must give the same batch whenever it is asked. Closing the iterator early frees what is alive.
        """
        started: deque[_Started] = deque()
        last = time.perf_counter()
        next_index, end = start, start + num_steps
        self.state = state
        try:
            while next_index < end or started:
                while next_index < end and len(started) <= self._look_ahead:
                    started.append(self._start(next_index, started[-1].after if started else self.state, batch_at))
                    next_index += 1
                oldest = started.popleft()
                program: ProgramName = "candidate"
                metrics, discarded, num_wasted = oldest.metrics, None, 0
                if self._has_overflowed(oldest.metrics):
                    program, discarded, num_wasted = "dropless", oldest.metrics, len(started)
                    # What was started ahead builds on the discarded state. Ended and freed before the replay, which needs the room: the
                    # devices would finish it before the replay anyway, and a state still being computed is not free.
                    for step in started:
                        self._has_overflowed(step.metrics)
                    for step in (*started, oldest):
                        self._discard(step.after)
                    started.clear()
                    next_index = oldest.index + 1
                    oldest.after, metrics = self._dropless(oldest.before, oldest.batch)
                    if self._has_overflowed(metrics):
                        raise AssertionError(f"the dropless program dropped tokens in step {oldest.index}")
                self._discard(oldest.before)
                self.state = oldest.after
                now = time.perf_counter()
                yield Outcome(oldest.index, program, metrics, discarded, num_wasted, now - last)
                last = now
        finally:
            for step in started:
                self._discard(step.after)

    def _start(self, index: int, before: State, batch_at: Callable[[int], Batch]) -> _Started:
        batch = batch_at(index)
        after, metrics = self._candidate(before, batch)
        return _Started(index, batch, before, after, metrics)


class PlainLoop:
    """Runs one program, whose state is donated: what a job without retry does, and what the retry's cost is measured against.

    `wait` blocks until a step's metrics are there; called one step late, so that the devices always have the next one.
    """

    num_states_held = 1

    def __init__(self, step: Step, program: ProgramName, *, wait: Callable[[Metrics], object]) -> None:
        self._step = step
        self._program = program
        self._wait = wait
        self.state: State = None
        """The newest state, once `run` has ended."""

    def run(self, state: State, num_steps: int, batch_at: Callable[[int], Batch], *, start: int = 0) -> Generator[Outcome]:
        """Train for `num_steps` steps from `state`, which is donated; each step is yielded when it has ended, in order."""
        self.state = state
        last = time.perf_counter()
        waiting: deque[tuple[int, Metrics]] = deque()
        for index in range(start, start + num_steps + 1):
            if index < start + num_steps:
                self.state, metrics = self._step(self.state, batch_at(index))
                waiting.append((index, metrics))
                if len(waiting) < 2:
                    continue
            done, metrics = waiting.popleft()
            self._wait(metrics)
            now = time.perf_counter()
            yield Outcome(done, self._program, metrics, None, 0, now - last)
            last = now
