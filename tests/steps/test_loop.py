"""The retry loop's promises, held against a step of plain numbers whose every start, read and free is written down."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from service.steps.loop import Outcome, PlainLoop, RetryLoop


@dataclass
class FakeState:
    """A number that training adds to; freed states cannot be used."""

    value: int
    freed: bool = False


@dataclass
class FakeTrainer:
    """Candidate and dropless steps over plain numbers; the candidate gives a wrong value and the flag in `overflowing` steps."""

    overflowing: frozenset[int] = frozenset()
    log: list[str] = field(default_factory=list)
    states: list[FakeState] = field(default_factory=list)
    most_alive: int = 0

    def new_state(self, value: int) -> FakeState:
        state = FakeState(value)
        self.states.append(state)
        self.most_alive = max(self.most_alive, self.num_alive)
        return state

    @property
    def num_alive(self) -> int:
        return sum(not state.freed for state in self.states)

    def step(self, program: str, state: FakeState, batch: int) -> tuple[FakeState, dict[str, object]]:
        assert not state.freed, "a freed state was stepped from"
        self.log.append(f"{program} {batch}")
        overflowed = program == "candidate" and batch in self.overflowing
        value = state.value * 3 + batch + (1000 if overflowed else 0)
        return self.new_state(value), {"program": program, "batch": batch, "overflow": overflowed, "value": value}

    def candidate(self, state: FakeState, batch: int) -> tuple[FakeState, dict[str, object]]:
        return self.step("candidate", state, batch)

    def dropless(self, state: FakeState, batch: int) -> tuple[FakeState, dict[str, object]]:
        return self.step("dropless", state, batch)

    def read(self, metrics: dict[str, object]) -> bool:
        self.log.append(f"read {metrics['batch']}")
        return bool(metrics["overflow"])

    def free(self, state: FakeState) -> None:
        assert not state.freed, "a state was freed twice"
        state.freed = True
        self.log.append(f"free {state.value}")

    def loop(self, look_ahead: int) -> RetryLoop:
        return RetryLoop(self.candidate, self.dropless, has_overflowed=self.read, discard=self.free, look_ahead=look_ahead)

    def train(self, look_ahead: int, num_steps: int) -> tuple[RetryLoop, list[Outcome]]:
        loop = self.loop(look_ahead)
        return loop, list(loop.run(self.new_state(7), num_steps, lambda index: index))


def dropless_only(num_steps: int) -> list[int]:
    value, values = 7, []
    for batch in range(num_steps):
        value = value * 3 + batch
        values.append(value)
    return values


@pytest.mark.parametrize("look_ahead", [0, 1])
@pytest.mark.parametrize("overflowing", [(), (0,), (4,), (1, 2), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_the_steps_that_count_are_those_dropless_alone_would_have_made(look_ahead: int, overflowing: tuple[int, ...]) -> None:
    trainer = FakeTrainer(frozenset(overflowing))
    loop, outcomes = trainer.train(look_ahead, 5)
    assert [outcome.metrics["value"] for outcome in outcomes] == dropless_only(5)
    assert loop.state.value == dropless_only(5)[-1]
    assert [outcome.index for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.index for outcome in outcomes if outcome.discarded] == list(overflowing)
    assert [outcome.program for outcome in outcomes] == ["dropless" if step in overflowing else "candidate" for step in range(5)]


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_both_sets_of_metrics_are_kept(look_ahead: int) -> None:
    _, outcomes = FakeTrainer(frozenset({2})).train(look_ahead, 4)
    replayed = outcomes[2]
    assert replayed.metrics["program"] == "dropless"
    assert replayed.discarded["program"] == "candidate"
    assert replayed.discarded["value"] == replayed.metrics["value"] + 1000


def test_looking_ahead_every_flag_is_read_after_the_next_step_was_started() -> None:
    trainer = FakeTrainer()
    trainer.train(1, 4)
    order = [line for line in trainer.log if not line.startswith("free")]
    assert order == ["candidate 0", "candidate 1", "read 0", "candidate 2", "read 1", "candidate 3", "read 2", "read 3"]


def test_without_look_ahead_each_flag_is_read_before_the_next_step() -> None:
    trainer = FakeTrainer()
    trainer.train(0, 3)
    order = [line for line in trainer.log if not line.startswith("free")]
    assert order == ["candidate 0", "read 0", "candidate 1", "read 1", "candidate 2", "read 2"]


def test_the_dropless_program_is_never_started_when_nothing_overflows() -> None:
    trainer = FakeTrainer()
    trainer.train(1, 5)
    assert not any(line.startswith("dropless") for line in trainer.log)


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_the_candidates_state_is_freed_before_the_replay_starts(look_ahead: int) -> None:
    trainer = FakeTrainer(frozenset({1}))
    trainer.train(look_ahead, 3)
    wrong = (7 * 3 + 0) * 3 + 1 + 1000
    assert trainer.log.index(f"free {wrong}") < trainer.log.index("dropless 1")


def test_what_was_started_ahead_has_ended_before_it_is_freed_and_the_replay_starts() -> None:
    """A state that is still being computed is not free, and the dropless program is weighed without it."""
    trainer = FakeTrainer(frozenset({1}))
    trainer.train(1, 4)
    assert trainer.log.index("read 2") < trainer.log.index("dropless 1")


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_no_more_states_are_alive_than_the_loop_says(look_ahead: int) -> None:
    trainer = FakeTrainer(frozenset({1, 3}))
    loop, _ = trainer.train(look_ahead, 6)
    assert trainer.most_alive == loop.num_states_held == 2 + look_ahead
    assert trainer.num_alive == 1
    assert not loop.state.freed


def test_the_step_started_in_vain_is_counted_and_run_again() -> None:
    trainer = FakeTrainer(frozenset({1}))
    _, outcomes = trainer.train(1, 3)
    assert [outcome.num_wasted for outcome in outcomes] == [0, 1, 0]
    assert trainer.log.count("candidate 2") == 2


def test_the_last_step_has_nothing_ahead_of_it_to_waste() -> None:
    _, outcomes = FakeTrainer(frozenset({2})).train(1, 3)
    assert outcomes[-1].num_wasted == 0


def test_closing_the_loop_early_frees_what_was_started() -> None:
    trainer = FakeTrainer()
    loop = trainer.loop(1)
    steps = loop.run(trainer.new_state(7), 5, lambda index: index)
    next(steps)
    steps.close()
    assert trainer.num_alive == 1
    assert not loop.state.freed


def test_a_dropless_program_that_drops_is_a_fault_not_a_result() -> None:
    trainer = FakeTrainer(frozenset({0}))
    loop = RetryLoop(trainer.candidate, trainer.candidate, has_overflowed=trainer.read, discard=trainer.free, look_ahead=0)
    with pytest.raises(AssertionError, match="dropped tokens in step 0"):
        list(loop.run(trainer.new_state(7), 1, lambda index: index))


def test_a_look_ahead_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="look_ahead is 2; use 0 or 1"):
        FakeTrainer().loop(2)


def test_the_plain_loop_waits_for_a_step_only_once_the_next_was_started() -> None:
    trainer = FakeTrainer()
    loop = PlainLoop(trainer.candidate, "candidate", wait=trainer.read)
    outcomes = list(loop.run(trainer.new_state(7), 3, lambda index: index, start=10))
    assert trainer.log == ["candidate 10", "candidate 11", "read 10", "candidate 12", "read 11", "read 12"]
    assert [outcome.index for outcome in outcomes] == [10, 11, 12]
    assert loop.state.value == outcomes[-1].metrics["value"]
