"""The router against an independent NumPy version written from the equations, and what its parts promise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.models.config import ExpertsConfig
from service.models.router import Routing, balance_loss, count_assignments, route, update_router_bias


def config(**fields: object) -> ExpertsConfig:
    return ExpertsConfig(**{"num_experts": 12, "num_experts_per_token": 3, "expert_dim": 5, **fields})  # type: ignore[arg-type]


def numpy_route(logits: np.ndarray, bias: np.ndarray | None, experts: ExpertsConfig) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, in float64: the chosen experts as a set in index order, and a weight for every expert (zero if not chosen)."""
    chosen = np.zeros(logits.shape, bool)
    weights = np.zeros(logits.shape)
    for where in np.ndindex(*logits.shape[:-1]):
        z = logits[where].astype(np.float64)
        s = 1 / (1 + np.exp(-z)) if experts.score_func == "sigmoid" else np.exp(z) / np.exp(z).sum()
        b = s + (0 if bias is None else bias.astype(np.float64))
        per_group = experts.num_experts // experts.num_groups
        by_group = [sorted(b[g * per_group : (g + 1) * per_group], reverse=True)[:2] for g in range(experts.num_groups)]
        best_groups = sorted(range(experts.num_groups), key=lambda g: -sum(by_group[g]))[: experts.num_groups_per_token]
        allowed = [e for e in range(experts.num_experts) if e // per_group in best_groups]
        top = sorted(allowed, key=lambda e: -b[e])[: experts.num_experts_per_token]
        chosen[where][top] = True
        total = s[top].sum() if experts.normalize else 1.0
        weights[where][top] = s[top] / total * experts.scaling
    return chosen, weights


def spread(routing: Routing, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """What `numpy_route` returns, from a `Routing`."""
    onehot = np.asarray(routing.indices)[..., None] == np.arange(num_experts)
    return onehot.any(axis=-2), (onehot * np.asarray(routing.weights)[..., None]).sum(axis=-2)


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.sampled_from([(1, 1, 7), (2, 1, 5), (4, 2, 3), (4, 3, 1), (3, 3, 2)]),
    per_token=st.integers(1, 3),
    rule=st.sampled_from([("sigmoid", True), ("sigmoid", False), ("softmax", False)]),
    bias_scale=st.sampled_from([None, 0.05, 3.0]),
    seed=st.integers(0, 10_000),
)
def test_any_router_equals_the_equations(
    sizes: tuple[int, int, int], per_token: int, rule: tuple[str, bool], bias_scale: float | None, seed: int
) -> None:
    num_groups, groups_per_token, per_group = sizes
    batch, seq, (score_func, normalize) = 2, 5, rule
    per_token = min(per_token, groups_per_token * per_group)
    experts = config(
        num_experts=num_groups * per_group,
        num_experts_per_token=per_token,
        num_groups=num_groups,
        num_groups_per_token=groups_per_token,
        score_func=score_func,
        normalize=normalize,
        scaling=1.75,
    )
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, seq, experts.num_experts)).astype(np.float32)
    bias = None if bias_scale is None else (bias_scale * rng.normal(size=experts.num_experts)).astype(np.float32)
    routing = jax.jit(route, static_argnums=2)(logits, bias, experts)
    chosen, weights = spread(routing, experts.num_experts)
    expected_chosen, expected_weights = numpy_route(logits, bias, experts)
    np.testing.assert_array_equal(chosen, expected_chosen)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-5)
    assert (chosen.sum(axis=-1) == per_token).all(), "a token's experts are distinct"


def test_the_bias_takes_part_in_the_choice_and_not_in_the_weights() -> None:
    experts = config(num_experts=4, num_experts_per_token=1, normalize=False, scaling=1.0)
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    routing = route(logits, jnp.array([0.0, 0.0, 0.0, 5.0]), experts)
    assert routing.indices.item() == 3
    assert routing.weights.item() == pytest.approx(1 / (1 + np.exp(1.0)), rel=1e-6)


def test_a_group_is_scored_by_its_two_best_not_by_its_best() -> None:
    experts = config(num_experts=6, num_experts_per_token=2, num_groups=2, num_groups_per_token=1)
    # Group 0 has the best expert; group 1 has the best pair.
    logits = jnp.array([[[3.0, -4.0, -4.0, 1.0, 1.5, -4.0]]])
    assert sorted(np.asarray(route(logits, None, experts).indices).ravel().tolist()) == [3, 4]


def test_negative_biased_scores_do_not_lose_to_experts_of_other_groups() -> None:
    experts = config(num_experts=4, num_experts_per_token=2, num_groups=2, num_groups_per_token=1)
    bias = jnp.array([-5.0, -5.0, -6.0, -6.0])
    assert sorted(np.asarray(route(jnp.zeros((1, 1, 4)), bias, experts).indices).ravel().tolist()) == [0, 1]


def test_neither_bias_nor_choice_has_a_gradient_and_the_weights_do() -> None:
    experts = config(num_groups=3, num_groups_per_token=2)
    logits = jax.random.normal(jax.random.key(3), (2, 5, 12))
    bias = 0.1 * jax.random.normal(jax.random.key(4), (12,))
    weigh = jax.random.normal(jax.random.key(5), (2, 5, 3))

    @jax.jit
    def total(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(route(logits, bias, experts).weights * weigh)

    dlogits, dbias = jax.grad(total, argnums=(0, 1))(logits, bias)
    assert not np.asarray(dbias).any()
    step = 1e-3
    direction = jax.random.normal(jax.random.key(6), logits.shape)
    slope = (total(logits + step * direction, bias) - total(logits - step * direction, bias)) / (2 * step)
    assert float(jnp.sum(dlogits * direction)) == pytest.approx(float(slope), rel=2e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_groups": 5}, "12 experts do not divide into 5 groups"),
        ({"num_groups": 4, "num_groups_per_token": 6}, "num_groups_per_token is 6 of 4 groups; use at most 4"),
        ({"num_groups": 6, "num_groups_per_token": 1}, "num_experts_per_token is 3 and 1 groups of 2 hold 2 experts"),
        ({"num_experts_per_token": 13}, "num_experts_per_token is 13 and 1 groups of 12 hold 12 experts"),
    ],
)
def test_groups_that_cannot_hold_the_choice_are_refused(fields: dict[str, int], message: str) -> None:
    experts = config(**fields)
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((1, 1, experts.num_experts)), None, experts)


def test_balance_loss_equals_the_equations_and_padding_counts_nowhere() -> None:
    experts = config(balance_loss_weight=0.3)
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(3, 7, 12)).astype(np.float32)
    valid = np.ones((3, 7), bool)
    valid[0, 4:] = False
    valid[2] = False  # a row of padding alone
    routing = route(jnp.asarray(logits), None, experts)
    counts = count_assignments(routing.indices, jnp.asarray(valid), 12)

    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = []
    for row in (0, 1):
        tokens = np.flatnonzero(valid[row])
        f = np.zeros(12)
        p = np.zeros(12)
        for t in tokens:
            f[np.argsort(-scores[row, t])[:3]] += 12 / (3 * len(tokens))
            p += scores[row, t] / scores[row, t].sum() / len(tokens)
        expected.append(0.3 * (f * p).sum())
    assert float(balance_loss(routing, counts, jnp.asarray(valid), experts)) == pytest.approx(np.mean(expected), rel=1e-5)
    assert np.asarray(counts).sum(axis=1).tolist() == [4 * 3, 7 * 3, 0]


def test_perfect_balance_costs_exactly_the_weight_and_collapse_costs_more() -> None:
    experts = config(num_experts=4, num_experts_per_token=1, balance_loss_weight=0.25)
    valid = jnp.ones((1, 4), bool)

    def loss(favourite: np.ndarray) -> float:
        logits = jnp.where(jnp.asarray(favourite)[None, :, None] == jnp.arange(4), 4.0, -4.0)
        routing = route(logits, None, experts)
        return float(balance_loss(routing, count_assignments(routing.indices, valid, 4), valid, experts))

    assert loss(np.arange(4)) == pytest.approx(0.25, rel=1e-6)
    assert loss(np.zeros(4, int)) > 0.9


def test_the_bias_moves_against_the_load_of_each_layer_by_the_rate() -> None:
    bias = jnp.array([[0.5, 0.0, -0.25], [0.0, 0.0, 0.0]])
    load = jnp.array([[9, 0, 3], [2, 2, 2]])
    moved = update_router_bias(bias, load, 0.125)
    np.testing.assert_array_equal(moved, [[0.375, 0.125, -0.125], [0.0, 0.0, 0.0]])
