"""The checks of single parts pass on the real model over eight devices, and fail when what they cover is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from service.models import engram, engram_table, experts
from service.models.axes import make_mesh
from service.models.config import ContextConfig, ExpertsConfig, MeshAxes, StepConfig
from service.models.order import Order
from service.steps import part_checks
from service.steps.checks import CheckContext, NotApplicableError, run_check
from service.steps.config import StepsConfig
from service.steps_records import CheckResult, CheckStatus


@pytest.fixture(autouse=True)
def _highest_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def check(name: Any, config: StepConfig) -> CheckResult:
    devices = jax.devices()[: config.axes.num_devices]
    step: Any = SimpleNamespace(mesh=make_mesh(config.axes, devices))
    nothing: Any = None
    return run_check(name, CheckContext(config, StepsConfig(seed=3), nothing, [step], nothing, ()))


@pytest.mark.parametrize("name", ["halo_conv", "mtp_shift", "dense_reference", "table_gradients"])
def test_the_part_agrees_with_its_reference(make_config: Callable[..., StepConfig], name: str) -> None:
    result = check(name, make_config())
    assert result.status is CheckStatus.PASSED, result.detail
    assert result.deviation is not None
    assert result.tolerance is not None


def test_natural_order_over_context_ranks_agrees_too(make_config: Callable[..., StepConfig]) -> None:
    config = make_config(context=ContextConfig(load_balance=False), axes=MeshAxes(fsdp=2, context=4))
    for name in ("halo_conv", "mtp_shift"):
        assert check(name, config).status is CheckStatus.PASSED


def test_a_softmax_router_without_groups_agrees_too(make_config: Callable[..., StepConfig]) -> None:
    config = make_config()
    softmax = ExpertsConfig(
        num_experts=6, num_experts_per_token=2, expert_dim=16, score_func="softmax", bias=False, normalize=False, scaling=1
    )
    result = check("dense_reference", config.model_copy(update={"model": config.model.model_copy(update={"experts": softmax})}))
    assert result.status is CheckStatus.PASSED, result.detail


def test_a_convolution_that_reads_array_order_is_found(make_config: Callable[..., StepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = engram.chunks_with_history
    monkeypatch.setattr(engram, "chunks_with_history", lambda x, *, halo, order: exchange(x, halo=halo, order=Order.NATURAL))
    result = check("halo_conv", make_config())
    assert result.status is CheckStatus.FAILED
    assert result.deviation is not None
    assert result.deviation > 1e-2


def test_a_shift_in_array_order_is_found(make_config: Callable[..., StepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(x: Any, *, order: Order) -> Any:
        return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)

    monkeypatch.setattr(part_checks, "shift_left_in_time", shift)
    assert check("mtp_shift", make_config()).status is CheckStatus.FAILED


def test_a_buffer_that_drops_is_found(make_config: Callable[..., StepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = experts.receive_rows
    monkeypatch.setattr(experts, "receive_rows", lambda *args, **options: rows(*args, **(options | {"buffer_factor": 0.5})))
    assert check("dense_reference", make_config()).status is CheckStatus.FAILED


def test_a_table_gradient_that_loses_a_token_is_found(make_config: Callable[..., StepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    write = engram_table._write
    monkeypatch.setattr(engram_table, "_write", lambda gradient, ids, **sizes: write(gradient.at[0].set(0), ids, **sizes))
    result = check("table_gradients", make_config())
    assert result.status is CheckStatus.FAILED
    assert "engram table" in result.detail


def test_a_check_that_breaks_has_failed_and_says_how(make_config: Callable[..., StepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such collective")

    monkeypatch.setattr(part_checks, "shift_left_in_time", broken)
    result = check("mtp_shift", make_config())
    assert result.status is CheckStatus.FAILED
    assert result.detail == "could not be run: RuntimeError: no such collective"


def test_a_model_without_the_part_is_no_failure(make_config: Callable[..., StepConfig]) -> None:
    config = make_config()
    plain = config.model.model_copy(update={"engram": None})
    result = check("halo_conv", config.model_copy(update={"model": plain}))
    assert (result.status, result.detail) == (CheckStatus.NOT_APPLICABLE, "the model has no Engram layer")
    assert issubclass(NotApplicableError, Exception)


def test_the_references_router_keeps_the_best_groups() -> None:
    rule: Any = SimpleNamespace(num_groups=2, num_groups_per_token=1, num_experts_per_token=2)
    # Group sums of the two best: 0.9 + 0.1 against 0.6 + 0.5, so the single best expert is left out.
    chosen = part_checks._choose(rule, np.array([[0.9, 0.1, 0.0, 0.6, 0.5, 0.2]]))
    assert chosen.tolist() == [[False, False, False, True, True, False]]
