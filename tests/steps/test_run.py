"""Every error of a steps child becomes the outcome that it is, with what was known until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from service.models.config import MoeConfig, StepConfig
from service.records import FailureKind
from service.steps.checks import FORCED_FACTOR
from service.steps.config import StepsConfig
from service.steps.devices import NoDevicesError
from service.steps.interface import StepsRequest
from service.steps.run import NotFiniteError, StepsRun, configure
from service.steps_records import StepsReport, StepsStatus


def run_that(does: Callable[[StepsRun], None], monkeypatch: pytest.MonkeyPatch) -> tuple[StepsReport, list[str]]:
    events: list[str] = []
    run = StepsRun(StepsRequest(spec={}, work_dir="unused"), lambda name, _: events.append(name))
    monkeypatch.setattr(run, "_run", lambda: does(run))
    return run.run(), events


def enter_then(phase: str, raise_: Callable[[], Any]) -> Callable[[StepsRun], None]:
    def does(run: StepsRun) -> None:
        run._enter(phase)
        run._know(num_parameters=55)
        raise_()

    return does


def exhaust() -> None:
    jnp.zeros(1 << 50).block_until_ready()


def fail(error: Exception) -> Callable[[], None]:
    def raise_() -> None:
        raise error

    return raise_


@pytest.mark.parametrize(
    ("phase", "raise_", "status", "kind", "words"),
    [
        ("steps", exhaust, StepsStatus.DOES_NOT_FIT, FailureKind.HOST_MEMORY, "in phase steps: JaxRuntimeError: RESOURCE_EXHAUSTED"),
        ("build", fail(ValueError("dim 'embed' of 10")), StepsStatus.FAILED, FailureKind.LOWERING, "dim 'embed' of 10"),
        ("checks", fail(ValueError("RESOURCE_EXHAUSTED")), StepsStatus.FAILED, FailureKind.CRASHED, "in phase checks: ValueError"),
        ("devices", fail(NoDevicesError("no gpu")), StepsStatus.FAILED, FailureKind.UNSUPPORTED, "no gpu"),
        ("steps", fail(NotFiniteError("step 3 gave nan")), StepsStatus.FAILED, FailureKind.NOT_FINITE, "step 3 gave nan"),
    ],
)
def test_each_error_is_the_outcome_it_is(
    monkeypatch: pytest.MonkeyPatch, phase: str, raise_: Callable[[], Any], status: StepsStatus, kind: FailureKind, words: str
) -> None:
    report, events = run_that(enter_then(phase, raise_), monkeypatch)
    assert (report.status, report.phase, report.num_parameters) == (status, phase, 55)
    assert report.failure is not None
    assert report.failure.kind is kind
    assert words in report.failure.message
    assert events[:2] == [phase, "known"]


def test_phases_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def does(run: StepsRun) -> None:
        for phase in ("devices", "build", "done"):
            run._enter(phase)

    report, _ = run_that(does, monkeypatch)
    assert report.status is StepsStatus.OK
    assert list(report.seconds) == ["start", "devices", "build"]
    assert report.child_peak_rss_bytes


def test_what_is_run_is_the_specs_unless_asked_otherwise(make_config: Callable[..., StepConfig]) -> None:
    full = make_config()
    assert configure(full, StepsConfig()) == (full, {})
    forced, _ = configure(full, StepsConfig(force_overflow="small_factor"))
    assert forced.moe.ragged_buffer_factor == FORCED_FACTOR
    assert configure(full, StepsConfig(force_overflow="skewed_router"))[0] == full
    full = make_config(model=full.model.model_copy(update={"mlp_dim": 200}))
    reduced, changes = configure(full, StepsConfig(model="tiny-of-same-shape"))
    assert reduced.train == full.train
    assert changes["mlp_dim"] == ("200", "96")
    assert reduced.model.dim == full.model.dim, "smaller than the reduction already"


def test_a_model_without_experts_never_retries(make_config: Callable[..., StepConfig]) -> None:
    config = make_config(moe=MoeConfig(retry_when_tokens_dropped=True))
    assert config.retries
    assert not config.model_copy(update={"model": config.model.model_copy(update={"experts": None})}).retries
    assert not make_config(moe=MoeConfig()).retries
