"""Real steps of a small deepseek-custom with everything on, in real children on eight CPU devices: the public end-to-end case.

Long: each child compiles several train steps. Losses are compared in float32 at highest precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.compile.interface import ChildLimits
from service.records import FailureKind
from service.spec import parse_spec
from service.steps.interface import StepsRequest
from service.steps.runner import CHILD, ChildSteps
from service.steps_records import CheckStatus, StepsReport, StepsStatus

EXAMPLE = Path(__file__).parents[2] / "examples" / "steps-deepseek-custom-cpu-8.yaml"
BROKEN = Path(__file__).with_name("broken_child.py")

pytestmark = pytest.mark.slow

Run = Callable[..., StepsReport]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(changes: dict[str, Any], command: tuple[str, ...] = CHILD) -> StepsReport:
        spec = yaml.safe_load(EXAMPLE.read_text())
        for section, fields in changes.items():
            is_partial = section in spec and isinstance(fields, dict) and "preset" not in fields
            spec[section] = {**spec[section], **fields} if is_partial else fields
        request = StepsRequest(spec=parse_spec(spec).as_json(), work_dir=str(tmp_path / "child"))
        return ChildSteps(command)(request, limits=ChildLimits(), on_event=lambda _: None, is_cancelled=lambda: False)

    return run


@pytest.mark.parametrize(("fsdp", "context"), [(2, 2), (1, 4)])
def test_every_check_of_the_public_case_passes(run: Run, fsdp: int, context: int) -> None:
    report = run({"mesh": {"fsdp": fsdp, "context": context}})
    assert report.failure is None
    assert {check.name: check.detail for check in report.checks if check.status is not CheckStatus.PASSED} == {}
    assert report.status is StepsStatus.OK
    assert len(report.checks) == 10
    checks = {check.name: check for check in report.checks}
    for name in ("load_balance", "context_parallel"):
        deviation = checks[name].deviation
        assert deviation is not None
        assert deviation <= 1e-6
        assert all(len(series) == 10 for series in checks[name].numbers.values())
    assert report.memory is not None
    assert report.memory.ratio is not None
    assert len(report.steps) == 12
    assert report.num_replays == 0


CHECK_ALONE = {"moe": {"ragged_buffer_factor": -1, "retry_when_tokens_dropped": False}}


def load_balance_losses(run: Run, fix: str, *, seed: int = 0) -> tuple[CheckStatus, list[float]]:
    """The load-balance check's outcome with a fix taken out, and the deviation of each step's loss."""
    steps = {"num_steps": 1, "warmup_steps": 0, "check_steps": 10, "checks": ["load_balance"], "seed": seed}
    report = run({**CHECK_ALONE, "steps": steps}, command=(sys.executable, str(BROKEN), fix))
    assert report.failure is None
    (check,) = report.checks
    on, off = check.numbers["loss_on"], check.numbers["loss_off"]
    assert None not in (*on, *off)
    return check.status, [abs(a - b) / b for a, b in zip(on, off, strict=True) if a is not None and b is not None]


def test_without_the_hash_fix_the_loss_is_off_at_once(run: Run) -> None:
    status, deviations = load_balance_losses(run, "hash")
    assert status is CheckStatus.FAILED
    assert deviations[0] > 1e-5


def test_without_the_halo_fix_the_loss_is_right_at_first_and_off_later(run: Run) -> None:
    status, deviations = load_balance_losses(run, "halo")
    assert status is CheckStatus.FAILED
    assert deviations[0] <= 1e-6
    assert max(deviations[1:]) > 1e-6


def test_without_the_halo_fix_a_kernel_that_is_not_zero_is_off_at_once(run: Run) -> None:
    status, deviations = load_balance_losses(run, "halo_kernel")
    assert status is CheckStatus.FAILED
    assert deviations[0] > 1e-5


def test_with_every_fix_a_kernel_that_is_not_zero_is_right(run: Run) -> None:
    # With other seeds two experts' scores for a token come to tie to the last bit and it changes its expert, which the check tells.
    status, deviations = load_balance_losses(run, "kernel", seed=2)
    assert status is CheckStatus.PASSED
    assert max(deviations) <= 1e-6


def losses(report: StepsReport) -> list[float | None]:
    assert report.failure is None
    return [step.metrics.loss for step in report.steps]


@pytest.mark.parametrize(("how", "factor"), [("small_factor", 1.0), ("skewed_router", 1.0)])
def test_a_forced_overflow_is_replayed_to_the_losses_of_dropless_alone(run: Run, how: str, factor: float) -> None:
    steps = {"force_overflow": how, "checks": [], "num_steps": 10, "warmup_steps": 0}
    replayed = run({"steps": steps, "moe": {"ragged_buffer_factor": factor}})
    no_retry = {"ragged_buffer_factor": factor, "retry_when_tokens_dropped": False}
    alone = run({"steps": steps, "moe": no_retry, "programs": ["dropless"]})
    dropping = run({"steps": steps, "moe": no_retry, "programs": ["candidate"]})
    assert replayed.num_replays == 10
    assert replayed.overflow_rate == dropping.overflow_rate == 1
    assert all(step.flags_equal and step.discarded and max(step.discarded.dropped_fraction) > 0 for step in replayed.steps)
    assert losses(replayed) == losses(alone)
    assert [step.discarded.loss for step in replayed.steps if step.discarded] != losses(alone)
    assert all(a != b for a, b in zip(losses(dropping), losses(alone), strict=True))


def test_a_loss_that_is_not_finite_is_an_outcome_with_the_steps_before_it(run: Run) -> None:
    report = run({**CHECK_ALONE, "train": {"learning_rate": 1e30}, "steps": {"num_steps": 6, "checks": []}})
    assert report.status is StepsStatus.FAILED
    assert report.failure is not None
    assert report.failure.kind is FailureKind.NOT_FINITE
    assert report.steps[-1].metrics.loss is None
    assert report.steps[0].metrics.loss is not None
    assert "lower train.learning_rate" in report.failure.message


def test_a_model_too_large_for_the_host_is_refused_before_anything_is_allocated(run: Run) -> None:
    report = run({"model": {"vocab_size": 2**24, "dim": 16384}})
    assert report.status is StepsStatus.DOES_NOT_FIT
    assert report.failure is not None
    assert report.failure.kind is FailureKind.HOST_MEMORY
    assert "tiny-of-same-shape" in report.failure.message
    assert report.estimate is not None
    assert report.phase == "estimate"
    assert report.child_peak_rss_bytes is not None
    assert report.child_peak_rss_bytes < 2 << 30


def test_the_reduction_of_the_largest_model_runs(run: Run) -> None:
    model = {"preset": "deepseek-v3-671b", "mtp": {"depth": 1}}
    report = run({"model": model, "steps": {"model": "tiny-of-same-shape", "checks": ["overflow_flag"], "num_steps": 2}})
    assert report.failure is None
    assert report.status is StepsStatus.OK
    assert report.reduction["num_layers"] == ("61", "3")
