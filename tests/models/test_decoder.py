"""The whole decoder with every part on: eight devices give the loss and the gradients that one gives."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from service.models.axes import make_mesh
from service.models.config import ContextConfig, MeshAxes, MhcConfig, RematConfig, StepConfig, TrainConfig, tiny
from service.models.data import synthetic_batch
from service.models.order import resolve_order
from service.models.train_step import build_train_program, init_state

B, S = 8, 48
UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Compiles in a third of the time."""


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def first_step(axes: MeshAxes, *, load_balance: bool = True, **train: Any) -> tuple[dict[str, Any], Any]:
    """Metrics of the first step, and the gradients: the first moment is (1 - beta1) times them."""
    model = tiny()
    assert model.engram is not None
    model = model.model_copy(
        update={
            "num_layers": 3,
            "engram": model.engram.model_copy(update={"layers": (1,)}),
            "mhc": MhcConfig(num_streams=2, sinkhorn_iterations=3),
        }
    )
    settings = {"seq_len": S, "per_device_batch": B / axes.num_devices, "dtype": "float32"} | train
    config = StepConfig(model=model, train=TrainConfig(**settings), axes=axes, context=ContextConfig(load_balance=load_balance))
    mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
    program, state = build_train_program(config, "dropless", mesh), init_state(config, mesh, seed=0)
    order = resolve_order(config.context, cp=axes.context, mode="train", has_engram=True)
    batch = synthetic_batch(batch=B, seq_len=S, vocab_size=model.vocab_size, cp=axes.context, order=order)._asdict()
    with jax.set_mesh(mesh):
        batch = {name: jax.device_put(array, program.abstract_batch[name].sharding) for name, array in batch.items()}
        new, metrics = jax.jit(program.step, compiler_options=UNOPTIMISED)(state, batch)
    return jax.device_get(metrics), jax.device_get(new["mu"])


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Any], Any]:
    with jax.default_matmul_precision("highest"):
        return first_step(MeshAxes())


def compare(a: tuple[dict[str, Any], Any], b: tuple[dict[str, Any], Any]) -> None:
    for name in ("loss", "main_loss", "mtp_loss", "balance_loss", "tokens"):
        assert a[0][name] == pytest.approx(b[0][name], rel=1e-6), name
    np.testing.assert_array_equal(a[0]["expert_load"], b[0]["expert_load"])

    def close(path: Any, x: np.ndarray, y: np.ndarray) -> None:
        rows = min(len(x), len(y)) if "table" in str(path) else len(x)  # pads are rows of zeros at the end
        x, y = x[:rows], y[:rows]
        # Engram's gate takes a square root near zero, which magnifies rounding.
        tolerance = 2e-3 if "engram" in str(path) else 2e-4
        assert np.abs(x - y).max() <= tolerance * np.abs(x).max(), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(close, a[1], b[1])


def test_metrics_cover_every_moe_layer_with_mtp_last(alone: tuple[dict[str, Any], Any]) -> None:
    metrics, _ = alone
    assert metrics["expert_load"].shape == (3, 8)
    assert metrics["dropped_fraction"].tolist() == [0, 0, 0]
    assert not metrics["has_moe_overflow"]
    assert metrics["loss"] == pytest.approx(metrics["main_loss"] + 0.1 * metrics["mtp_loss"] + metrics["balance_loss"], rel=1e-6)
    assert abs(metrics["main_loss"] - np.log(512)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("load_balance", [True, False])
def test_context_fsdp_and_expert_ranks_change_nothing(alone: tuple[dict[str, Any], Any], load_balance: bool) -> None:
    compare(alone, first_step(MeshAxes(fsdp=2, expert=2, context=2), load_balance=load_balance))


@pytest.mark.slow
def test_tensor_and_data_ranks_change_nothing(alone: tuple[dict[str, Any], Any]) -> None:
    compare(alone, first_step(MeshAxes(data=2, expert=2, tensor=2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", [RematConfig(policy="none"), RematConfig(policy="minimal"), RematConfig(save=("attention_out", "mla_kv"))]
)
def test_remat_and_vocabulary_chunks_change_nothing(alone: tuple[dict[str, Any], Any], remat: RematConfig) -> None:
    compare(alone, first_step(MeshAxes(), remat=remat, vocab_chunks=4))
