"""Multi-token prediction: packed rows on any context order give what each document gives alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from service.models.attention import make_places
from service.models.axes import make_mesh
from service.models.config import ContextConfig, MeshAxes, MhcConfig, MtpConfig, StepConfig, TrainConfig, tiny
from service.models.data import synthetic_batch
from service.models.generator import make_key
from service.models.layer import Program
from service.models.loss import next_token_loss
from service.models.mtp import Ahead, Mtp, MtpModule
from service.models.order import Order, to_array_order, to_time_order

B, S, DEPTH = 2, 24, 3


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def program(*, context: int = 1, load_balance: bool = True, num_dense_layers: int = 1) -> Program:
    changes = {
        "num_layers": 1,
        "first_num_dense_layers": num_dense_layers,
        "engram": None,
        "mtp": MtpConfig(depth=DEPTH),
        "mhc": MhcConfig(num_streams=2, sinkhorn_iterations=3),
    }
    model = tiny().model_copy(update=changes)
    config = StepConfig(
        model=model,
        train=TrainConfig(seq_len=S, per_device_batch=B / context, dtype="float32"),
        axes=MeshAxes(context=context),
        context=ContextConfig(load_balance=load_balance),
    )
    return Program(config, "dropless", "cpu")


def batch(order: Order, cp: int) -> Any:
    return synthetic_batch(batch=B, seq_len=S, vocab_size=512, max_documents=3, cp=cp, order=order, seed=5)


def table() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (512, tiny().dim))


def head() -> jax.Array:
    return jax.random.normal(jax.random.key(2), (tiny().dim, 512)) / 8


def hidden() -> jax.Array:
    return jax.random.normal(jax.random.key(3), (B, S, tiny().dim))


@pytest.mark.parametrize(("cp", "order"), [(1, Order.NATURAL), (2, Order.NATURAL), (2, Order.DUAL_CHUNK_SWAP), (3, Order.DUAL_CHUNK_SWAP)])
def test_each_depth_looks_one_token_further_within_its_document(cp: int, order: Order) -> None:
    natural = batch(Order.NATURAL, 1)
    tokens, targets, segments, _ = (jnp.asarray(x) for x in batch(order, cp))
    with jax.set_mesh(make_mesh(MeshAxes(context=cp), jax.devices()[:cp])):

        def look(tokens: jax.Array, targets: jax.Array, segments: jax.Array) -> list[Ahead]:
            aheads = [Ahead.start(tokens, targets, segments, order)]
            for _ in range(DEPTH):
                aheads.append(aheads[-1].deeper(segments, order))
            return aheads

        aheads = jax.jit(look)(tokens, targets, segments)
    for depth, ahead in enumerate(aheads):
        in_time = jax.tree.map(lambda x: to_time_order(np.asarray(x), cp=cp, order=order), ahead)
        for row in range(B):
            for t in range(S):
                window = natural.segment_ids[row, t : t + depth + 2]
                counts = len(window) == depth + 2 and window[0] != 0 and (window == window[0]).all()
                assert in_time.counts[row, t] == counts
                if counts:
                    assert in_time.tokens[row, t] == natural.tokens[row, t + depth]
                    assert in_time.targets[row, t] == natural.tokens[row, t + depth + 1]


def build(config: Program) -> Mtp:
    return Mtp(config, rngs=nnx.Rngs(params=make_key(4)))


@cache
def documents_alone() -> list[tuple[float, int]]:
    """(summed loss, tokens) of each depth from each document as a row of its own, shifted by slicing."""
    data, mtp = batch(Order.NATURAL, 1), build(program())
    model = program().config.model
    graph, stacked = nnx.split(mtp.depths)
    results = []
    for depth in range(1, DEPTH + 1):
        total, tokens = 0.0, 0
        for row in range(B):
            for document in range(1, data.segment_ids[row].max() + 1):
                at = np.flatnonzero(data.segment_ids[row] == document)
                words, length = data.tokens[row, at], len(at)
                state = hidden()[row : row + 1, at]
                places = make_places(model, jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32))
                for d in range(1, depth + 1):
                    module: MtpModule = nnx.merge(graph, jax.tree.map(lambda leaf, d=d: leaf[d - 1], stacked))
                    shifted = np.concatenate([words[d:], np.zeros(min(d, length), np.int32)])
                    state, _ = module(state, table()[shifted][None], places)
                logits = np.asarray(module.final_norm(state)[0] @ head(), np.float64)
                for t in range(length - depth - 1):
                    total += np.log(np.exp(logits[t]).sum()) - logits[t, words[t + depth + 1]]
                    tokens += 1
        results.append((total, tokens))
    return results


@pytest.mark.parametrize(("context", "load_balance"), [(1, True), (2, True), (2, False)])
def test_packed_rows_give_what_each_document_gives_alone(context: int, load_balance: bool) -> None:
    config = program(context=context, load_balance=load_balance)
    cp, order = context, config.order
    assert order is (Order.DUAL_CHUNK_SWAP if load_balance and cp > 1 else Order.NATURAL)
    tokens, targets, segments, positions = (jnp.asarray(x) for x in batch(order, cp))
    graph, state = nnx.split(build(config))

    def losses(state: nnx.State, start: jax.Array) -> Any:
        ahead = Ahead.start(tokens, targets, segments, order)
        places = make_places(config.config.model, positions, segments, order=order)
        loss = lambda hidden, targets, counts: next_token_loss(hidden, head(), targets, counts, num_chunks=1)  # noqa: E731
        return nnx.merge(graph, state)(start, ahead, places, embed=lambda tokens: table()[tokens], loss=loss)[0]

    with jax.set_mesh(make_mesh(MeshAxes(context=cp), jax.devices()[:cp])):
        packed = jax.jit(losses)(state, to_array_order(hidden(), cp=cp, order=order))
    for depth, (total, count) in enumerate(documents_alone()):
        assert int(packed.tokens[depth]) == count > 0
        assert float(packed.total[depth]) == pytest.approx(total, rel=2e-6)


@pytest.mark.parametrize("context", [1, 2])
def test_a_position_that_looks_into_another_document_goes_to_no_expert(context: int) -> None:
    config = program(context=context, num_dense_layers=0)
    tokens, targets, segments, positions = (jnp.asarray(x) for x in batch(config.order, context))
    graph, state = nnx.split(build(config))

    def run(state: nnx.State, start: jax.Array) -> Any:
        ahead = Ahead.start(tokens, targets, segments, config.order)
        places = make_places(config.config.model, positions, segments, order=config.order)
        loss = lambda hidden, targets, counts: next_token_loss(hidden, head(), targets, counts, num_chunks=1)  # noqa: E731
        return nnx.merge(graph, state)(start, ahead, places, embed=lambda tokens: table()[tokens], loss=loss)

    with jax.set_mesh(make_mesh(MeshAxes(context=context), jax.devices()[:context])):
        losses, metrics = jax.jit(run)(state, hidden())
    experts = config.config.model.experts
    assert experts is not None
    counted = np.asarray(losses.tokens)
    assert (np.diff(counted) < 0).all()
    np.testing.assert_array_equal(np.asarray(metrics.expert_load).sum(axis=-1), counted * experts.num_experts_per_token)
