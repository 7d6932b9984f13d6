"""Whole-step checks, on steps of plain numbers: what is compared, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from service.models.config import ContextConfig, StepConfig
from service.steps import step_checks
from service.steps.checks import CheckContext, run_check
from service.steps.config import StepsConfig
from service.steps.programs import StepsMade
from service.steps.step_checks import relative
from service.steps_records import CheckResult, CheckStatus, StepMetrics, StepRecord


def metrics(loss: float | None, mtp_loss: float | None = None, *, overflow: bool = False) -> StepMetrics:
    return StepMetrics(loss=loss, main_loss=loss, mtp_loss=mtp_loss, balance_loss=0.0, tokens=9, has_moe_overflow=overflow)


@dataclass
class FakeStep:
    """A program that gives these losses, whatever it is fed."""

    losses: list[float | None]
    loads: list[list[list[int]]] = field(default_factory=lambda: [[[5, 3]]] * 10)
    donates: bool = True
    name: str = "dropless"

    def batch_at(self, step: int, seed: int) -> Any:
        return (step, seed)


@dataclass
class FakePrograms:
    """Answers every compile with one program, and remembers what was asked."""

    step: FakeStep
    asked: list[StepConfig] = field(default_factory=list)

    def compile(self, config: StepConfig, name: str) -> FakeStep:
        self.asked.append(config)
        return self.step


@pytest.fixture(autouse=True)
def _run_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_steps(step: FakeStep, initial: Any, num_steps: int, batch_at: Any, *, keep_state: bool = False) -> StepsMade:
        return StepsMade([metrics(loss) for loss in step.losses[:num_steps]], [np.array(load) for load in step.loads[:num_steps]], None)

    monkeypatch.setattr(step_checks, "run_steps", run_steps)


def check(name: Any, config: StepConfig, run: FakeStep, other: FakeStep, records: tuple[StepRecord, ...] = ()) -> tuple[CheckResult, Any]:
    programs: Any = FakePrograms(other)
    compiled: Any = [run]
    steps = StepsConfig(check_steps=3, num_steps=2, warmup_steps=1)
    return run_check(name, CheckContext(config, steps, programs, compiled, {}, records)), programs


LOSSES: list[float | None] = [8.0, 7.5, 7.0]


def test_load_balance_flips_the_order_and_nothing_else(make_config: Any) -> None:
    config = make_config()
    result, programs = check("load_balance", config, FakeStep(LOSSES), FakeStep(LOSSES))
    assert result.status is CheckStatus.PASSED
    assert programs.asked == [config.model_copy(update={"context": ContextConfig(load_balance=False)})]
    assert set(result.numbers) == {"loss_on", "loss_off", "main_loss_on", "main_loss_off"}


def test_context_parallel_gives_its_devices_to_fsdp(make_config: Any) -> None:
    result, programs = check("context_parallel", make_config(), FakeStep(LOSSES), FakeStep(LOSSES))
    # Four sequences over fsdp 2 × 2 × expert 2 = 8 do not divide.
    assert result.status is CheckStatus.NOT_APPLICABLE
    assert "cut in 8, and 4 sequences do not divide" in result.detail
    config = make_config(train=make_config().train.model_copy(update={"per_device_batch": 1.0}))
    result, programs = check("context_parallel", config, FakeStep(LOSSES), FakeStep(LOSSES))
    assert result.status is CheckStatus.PASSED
    assert (programs.asked[0].axes.fsdp, programs.asked[0].axes.context) == (4, 1)
    assert programs.asked[0].global_batch == config.global_batch


@pytest.mark.parametrize(
    ("other", "passed"),
    [
        ([8.0, 7.5, 7.0 * (1 + 0.9e-6)], True),
        ([8.0, 7.5, 7.0 * (1 + 1.2e-6)], False),
        ([8.0, 7.5, None], False),
    ],
)
def test_one_step_beyond_a_millionth_fails(make_config: Any, other: list[float | None], passed: bool) -> None:
    result, _ = check("load_balance", make_config(), FakeStep(LOSSES), FakeStep(other))
    assert (result.status is CheckStatus.PASSED) == passed
    assert result.tolerance == 1e-6


def test_bfloat16_is_held_to_what_its_digits_allow(make_config: Any) -> None:
    config = make_config(train=make_config().train.model_copy(update={"dtype": "bfloat16"}))
    result, _ = check("load_balance", config, FakeStep(LOSSES), FakeStep([8.0, 7.5, 7.05]))
    assert (result.status, result.tolerance) == (CheckStatus.PASSED, 2e-2)


def test_a_token_that_another_expert_got_is_told(make_config: Any) -> None:
    moved = FakeStep([8.0, 7.5, 7.001], loads=[[[5, 3]], [[5, 3]], [[4, 4]]])
    result, _ = check("load_balance", make_config(), FakeStep(LOSSES), moved)
    assert result.status is CheckStatus.FAILED
    assert "in steps [2] the router sent at least 1 assignments to another expert" in result.detail


def test_a_loss_must_fall(make_config: Any) -> None:
    falling = [8 - step / 10 for step in range(20)]
    assert check("loss_falls", make_config(), FakeStep([*falling]), FakeStep([]))[0].status is CheckStatus.PASSED
    assert check("loss_falls", make_config(), FakeStep([*reversed(falling)]), FakeStep([]))[0].status is CheckStatus.FAILED
    assert check("loss_falls", make_config(), FakeStep([*falling[:-1], None]), FakeStep([]))[0].detail == "a loss is not finite"


def record(step: int, loss: float, *, flags_equal: bool = True) -> StepRecord:
    return StepRecord(
        step=step,
        is_warmup=False,
        program="dropless",
        seconds=1,
        tokens_per_second=9,
        metrics=metrics(loss, overflow=step == 1),
        flags_equal=flags_equal,
    )


def test_the_same_seed_must_give_equal_bits(make_config: Any) -> None:
    again = FakeStep(LOSSES)
    # The fake's second run never overflows; the first did in step 1: a metric that differs is enough.
    records = (record(0, 8.0), record(1, 7.5), record(2, 7.0))
    result, _ = check("same_seed", make_config(), again, again, records)
    assert result.status is CheckStatus.FAILED
    assert result.detail == "steps [1] differ"
    assert result.deviation == 0
    equal = (records[0], record(2, 7.5), records[2])
    assert check("same_seed", make_config(), again, again, equal)[0].status is CheckStatus.PASSED


def test_devices_that_hold_different_flags_are_found(make_config: Any) -> None:
    step = FakeStep(LOSSES)
    good, bad = (record(0, 8.0), record(1, 7.5)), (record(0, 8.0), record(1, 7.5, flags_equal=False))
    assert check("overflow_flag", make_config(), step, step, good)[0].detail == "equal on all 8 devices in 2 steps, raised in 1"
    result, _ = check("overflow_flag", make_config(), step, step, bad)
    assert (result.status, result.deviation) == (CheckStatus.FAILED, 1)


def test_nothing_is_close_to_what_is_not_finite() -> None:
    assert relative(None, 1.0) == relative(1.0, None) == math.inf
    assert relative(0.0, 0.0) == 0
    assert relative(-2.0, -1.0) == 0.5
