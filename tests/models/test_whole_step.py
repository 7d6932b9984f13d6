"""Whole models in combinations of parts over context ranks; whole candidate steps, their replay, and the router's bias."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from service.models.axes import make_mesh
from service.models.config import (
    ContextConfig,
    DroplessConfig,
    MeshAxes,
    MhcConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    ProgramName,
    StepConfig,
    TrainConfig,
)
from service.models.data import synthetic_batch
from service.models.decoder import Decoder, Losses
from service.models.generator import make_key
from service.models.hashing import HashMapping
from service.models.layer import Program
from service.models.order import Mode, Order
from service.models.train_step import TrainProgram, build_train_program
from service.steps.loop import RetryLoop
from service.steps.programs import discard, has_overflowed, to_host
from tests.small_model import EVERYTHING, K, V

B, S = 4, 36
UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Compiles in a third of the time."""

DENSE = EVERYTHING.model_copy(update={"num_layers": 1, "experts": None, "engram": None})
MOE = EVERYTHING.model_copy(
    update={"num_layers": 1, "first_num_dense_layers": 0, "engram": None, "mhc": MhcConfig(), "mtp": MtpConfig(depth=1)}
)
DROPLESS = MoeConfig()
BALANCED, NATURAL, STRIPED = ContextConfig(), ContextConfig(load_balance=False), ContextConfig(order="striped")


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def config(model: ModelConfig, axes: MeshAxes, *, context: ContextConfig = BALANCED, moe: MoeConfig = DROPLESS) -> StepConfig:
    train = TrainConfig(seq_len=S, per_device_batch=B / axes.num_devices, dtype="float32")
    return StepConfig(model=model, train=train, axes=axes, context=context, moe=moe)


def filled(tree: Any) -> Any:
    """NumPy values for arrays of these shapes: no kernel or bias is zero and no scale is one, so that every part counts at once."""
    generator = np.random.default_rng(3)

    def fill(path: Any, leaf: Any) -> np.ndarray:
        values = np.asarray(generator.normal(size=leaf.shape)) * max((1, *leaf.shape[-1:])) ** -0.5
        return (1 + values if "norm" in jax.tree_util.keystr(path) else values).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, tree)


# Combinations of parts, by the losses of one forward pass


def forward(model: ModelConfig, axes: MeshAxes, context: ContextConfig, mode: Mode = "train") -> tuple[Losses, Order]:
    """The losses of one packed batch, the same whatever the axes, the order and the mode of the call; and the order it lay in."""
    # Not the identity: tokens share compressed ids, as with a real tokenizer.
    mapping = None if model.engram is None else HashMapping(model.engram, (np.arange(V) * 31 % 53).astype(np.int32))
    program = Program(config(model, axes, context=context), "dropless", "cpu", mapping)
    order = program.order_of(mode)
    batch = synthetic_batch(batch=B, seq_len=S, vocab_size=V, max_documents=3, cp=axes.context, order=order, seed=2)
    with jax.set_mesh(make_mesh(axes, jax.devices()[: axes.num_devices])):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(program, rngs=nnx.Rngs(params=make_key(0)))))
        run = jax.jit(lambda state, batch: nnx.merge(graph, state)(**batch, mode=mode), compiler_options=UNOPTIMISED)
        return jax.device_get(run(filled(state), batch._asdict())), order


@cache
def alone(model: ModelConfig) -> Losses:
    with jax.default_matmul_precision("highest"):
        return forward(model, MeshAxes(), BALANCED)[0]


@pytest.mark.parametrize(
    ("model", "context", "mode", "order"),
    [
        (EVERYTHING, BALANCED, "train", Order.DUAL_CHUNK_SWAP),
        (EVERYTHING, NATURAL, "train", Order.NATURAL),
        # The mode of the call decides, not how the model was built.
        (DENSE, BALANCED, "prefill", Order.NATURAL),
        (DENSE, STRIPED, "train", Order.STRIPED),
    ],
    ids=["everything_balanced", "everything_natural", "dense_prefill", "dense_striped"],
)
def test_two_depths_of_mtp_beside_every_part_do_not_depend_on_the_order(
    model: ModelConfig, context: ContextConfig, mode: Mode, order: Order
) -> None:
    expected = alone(model)
    found, used = forward(model, MeshAxes(context=2), context, mode)
    assert used is order
    assert abs(float(expected.mtp) - float(expected.main)) > 1e-3, "the two losses are meant to differ"
    for name in ("main", "mtp", "balance", "tokens"):
        assert float(getattr(found, name)) == pytest.approx(float(getattr(expected, name)), rel=1e-6), name
    assert found.moe.keys() == expected.moe.keys() == (set() if model.experts is None else {"moe_layers_1_1", "mtp"})
    for run, metrics in found.moe.items():
        np.testing.assert_array_equal(metrics.expert_load, expected.moe[run].expert_load)


# Several steps, so that gradients, moments and the router's bias count


def train(axes: MeshAxes, context: ContextConfig, num_steps: int) -> list[tuple[float, float]]:
    """(loss, MTP loss) of each step from the same state and batches, whatever the axes and the order."""
    step = config(EVERYTHING, axes, context=context)
    mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
    program = build_train_program(step, "dropless", mesh)
    with jax.set_mesh(mesh):
        run = program.jitted().lower(program.abstract_state, program.abstract_batch).compile(UNOPTIMISED)
    state = filled(program.abstract_state) | {"step": np.int32(0)}
    state |= {name: jax.tree.map(np.zeros_like, state[name]) for name in ("mu", "nu", "router_bias")}
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, program.abstract_state)
    losses = []
    for index in range(num_steps):
        batch = synthetic_batch(
            batch=B,
            seq_len=S,
            vocab_size=V,
            max_documents=3,
            cp=axes.context,
            order=Program(step, "dropless", "cpu").order,
            seed=7,
            step=index,
        )._asdict()
        state, metrics = run(state, {name: jax.device_put(x, program.abstract_batch[name].sharding) for name, x in batch.items()})
        losses.append((float(metrics["loss"]), float(metrics["mtp_loss"])))
    return losses


def test_training_does_not_depend_on_the_context_ranks_or_their_order() -> None:
    """Load balance on two context ranks against none at all, with every part on and no kernel zero; natural order is as in real steps."""
    # Two shards either way: the pads of the Engram table, and so the state that is filled in, are the same.
    alone, balanced = train(MeshAxes(fsdp=2), BALANCED, 4), train(MeshAxes(context=2), BALANCED, 4)
    assert len({loss for loss, _ in alone}) == 4
    for step, (expected, found) in enumerate(zip(alone, balanced, strict=True)):
        assert found == pytest.approx(expected, rel=1e-6), f"step {step}"


# Candidate and dropless as whole steps


AXES = MeshAxes(expert=2)
RETRY = MoeConfig(ragged_buffer_factor=1.5, retry_when_tokens_dropped=True, dropless=DroplessConfig(token_chunks=2))
"""Mean load fills two thirds of a receive buffer; all tokens on one rank would need twice its rows less a third."""
ONE_RANK = np.array([9, 9, 0, 0, 0, 0], np.float32)
"""A bias under which every token chooses experts 0 and 1, which are rank 0's."""


class Step:
    """One program of the retrying pair, compiled."""

    def __init__(self, name: ProgramName) -> None:
        self.config = config(MOE, AXES, moe=RETRY)
        mesh = make_mesh(AXES, jax.devices()[: AXES.num_devices])
        self.program: TrainProgram = build_train_program(self.config, name, mesh)
        with jax.set_mesh(mesh):
            lowered = self.program.jitted().lower(self.program.abstract_state, self.program.abstract_batch)
            self.executable = lowered.compile(UNOPTIMISED)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        return self.executable(state, batch)

    def state(self, crowded: str | None) -> Any:
        """A state whose router sends all tokens of one stack (`moe_layers_0_0` or `mtp`) to one rank, or spreads them."""
        abstract = self.program.abstract_state
        state = filled(abstract) | {"step": np.int32(0)}
        state |= {name: jax.tree.map(np.zeros_like, state[name]) for name in ("mu", "nu", "router_bias")}
        if crowded is not None:
            state["router_bias"][crowded] = jax.tree.map(lambda bias: bias + ONE_RANK, state["router_bias"][crowded])
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, abstract)

    def batch_at(self, step: int) -> Any:
        batch = synthetic_batch(batch=B, seq_len=S, vocab_size=V, max_documents=3, seed=7, step=step)
        return {name: jax.device_put(x, self.program.abstract_batch[name].sharding) for name, x in batch._asdict().items()}


@pytest.fixture(scope="module")
def pair() -> tuple[Step, Step]:
    with jax.default_matmul_precision("highest"):
        return Step("candidate"), Step("dropless")


def assert_equal(a: Any, b: Any) -> None:
    jax.tree_util.tree_map_with_path(
        lambda path, x, y: np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path)), to_host(a), to_host(b)
    )


def test_a_candidate_that_drops_nothing_is_the_dropless_step(pair: tuple[Step, Step]) -> None:
    (new, metrics), (expected, expected_metrics) = (step(step.state(None), step.batch_at(0)) for step in pair)
    assert not has_overflowed(metrics)
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-6)
    np.testing.assert_array_equal(metrics["expert_load"], expected_metrics["expert_load"])
    assert_equal(new["router_bias"], expected["router_bias"])

    def close(path: Any, x: Any, y: Any) -> None:
        # The chunks of the dropless program add up an expert's gradient in another order.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max(), err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, to_host(new["mu"]), to_host(expected["mu"]))


@pytest.mark.parametrize("crowded", ["moe_layers_0_0", "mtp"])
def test_an_overflow_in_any_layer_is_replayed_to_the_dropless_step_bit_for_bit(pair: tuple[Step, Step], crowded: str) -> None:
    candidate, dropless = pair
    loop = RetryLoop(candidate, dropless, has_overflowed=has_overflowed, discard=discard, look_ahead=1)
    outcomes = list(loop.run(candidate.state(crowded), 2, candidate.batch_at))
    state = dropless.state(crowded)
    dropped_state, dropped = candidate(state, candidate.batch_at(0))
    for step, outcome in enumerate(outcomes):
        state, metrics = dropless(state, dropless.batch_at(step))
        assert outcome.program == "dropless"
        assert_equal(outcome.metrics, metrics)
    assert_equal(loop.state, state)
    # What the candidate alone would have made is something else, and layers that were not crowded dropped nothing.
    assert_equal(outcomes[0].discarded, dropped)
    assert [fraction > 0 for fraction in dropped["dropped_fraction"]] == [crowded == name for name in ("moe_layers_0_0", "mtp")]
    assert float(dropped["loss"]) != float(outcomes[0].metrics["loss"])
    assert any((x != y).any() for x, y in zip(*(jax.tree.leaves(to_host(s["mu"])) for s in (dropped_state, state)), strict=True))


def test_a_step_moves_each_layers_bias_once_by_the_load_of_real_tokens(pair: tuple[Step, Step]) -> None:
    candidate, dropless = pair
    before = candidate.state("mtp")
    old = to_host(before["router_bias"])
    loop = RetryLoop(candidate, dropless, has_overflowed=has_overflowed, discard=discard, look_ahead=0)
    (outcome,) = loop.run(before, 1, candidate.batch_at)
    assert outcome.discarded is not None
    load = np.asarray(outcome.metrics["expert_load"])
    segments = np.asarray(candidate.batch_at(0)["segment_ids"])
    num_real = int((segments != 0).sum())
    # At depth 1, those whose next two tokens are in their document too.
    num_counted = int(((segments[:, :-2] != 0) & (segments[:, :-2] == segments[:, 1:-1]) & (segments[:, :-2] == segments[:, 2:])).sum())
    assert 0 < num_counted < num_real < B * S
    assert load.sum(axis=1).tolist() == [num_real * K, num_counted * K]
    moved = [leaf for name in ("moe_layers_0_0", "mtp") for leaf in jax.tree.leaves(to_host(loop.state["router_bias"][name]))]
    start = [leaf for name in ("moe_layers_0_0", "mtp") for leaf in jax.tree.leaves(old[name])]
    for new, was, counts in zip(moved, start, load, strict=True):
        np.testing.assert_array_equal(new[0], was[0] + np.float32(0.125) * np.sign(counts.mean() - counts))
