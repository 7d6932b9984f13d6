"""Which experts each token goes to and with what weight: DeepSeek's router, its balance loss and the update of its bias.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, equations 12 to 20; with `score_func: softmax`, no bias and no
normalisation it is DeepSeek-V2-Lite's (arXiv 2405.04434, section 2.1.2). Everything here is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from service.models.config import ExpertsConfig

_GROUP_BEST = 2
"""A group's score is the sum of this many of its best biased scores."""


class RouterBias(nnx.Variable):
    """Per-expert bias of the choice: state that no gradient trains; `update_router_bias` moves it."""


class Routing(NamedTuple):
    """Where each token goes."""

    indices: Int[Array, "batch seq chosen"]
    """The chosen experts, best biased score first, distinct for each token."""
    weights: Float[Array, "batch seq chosen"]
    """What each chosen expert's output is multiplied by."""
    scores: Float[Array, "batch seq experts"]
    """The unbiased scores of all experts."""


def route(logits: Float[Array, "batch seq experts"], bias: Float[Array, " experts"] | None, experts: ExpertsConfig) -> Routing:
    """Choose `num_experts_per_token` experts for each token.

    The bias takes part in the choice only, so weights, and with them gradients, never see it. With more than one group, only experts of
    the `num_groups_per_token` best groups can be chosen.

    Raises:
        ValueError: the groups cannot hold the choice (`check_routing`).
    """
    check_routing(experts)
    scores = jax.nn.sigmoid(logits) if experts.score_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    # The choice has no gradient; cutting it here spares the backward pass of the sorts below.
    biased = jax.lax.stop_gradient(scores)
    if bias is not None:
        biased = biased + jax.lax.stop_gradient(bias)
    if experts.num_groups > 1:
        biased = _keep_best_groups(biased, experts.num_groups, experts.num_groups_per_token)
    _, indices = jax.lax.top_k(biased, experts.num_experts_per_token)
    # Selected by comparison, not by take_along_axis: the gradient of a gather is a scatter-add, which is slow on TPU.
    chosen = indices[..., None] == jnp.arange(experts.num_experts)
    weights = jnp.sum(jnp.where(chosen, scores[..., None, :], 0.0), axis=-1)
    if experts.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(indices=indices, weights=weights * experts.scaling, scores=scores)


def _keep_best_groups(
    biased: Float[Array, "batch seq experts"], num_groups: int, num_groups_per_token: int
) -> Float[Array, "batch seq experts"]:
    """The scores with every expert outside the best groups at minus infinity."""
    batch, seq, num_experts = biased.shape
    grouped = biased.reshape(batch, seq, num_groups, num_experts // num_groups)
    best, _ = jax.lax.top_k(grouped, min(_GROUP_BEST, grouped.shape[-1]))
    _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), num_groups_per_token)
    kept = jnp.any(groups[..., None] == jnp.arange(num_groups), axis=-2)
    # Minus infinity, not zero: a biased score may be negative, and zero would then win.
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(biased.shape)


def check_routing(experts: ExpertsConfig) -> None:
    """Refuse a router whose groups cannot hold the experts a token needs.

    Raises:
        ValueError: experts do not divide into the groups, or the groups of one token hold fewer experts than it needs.
    """
    num_experts, num_groups, chosen = experts.num_experts, experts.num_groups, experts.num_experts_per_token
    if num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide into {num_groups} groups; use a number of groups that divides them")
    if experts.num_groups_per_token > num_groups:
        raise ValueError(f"num_groups_per_token is {experts.num_groups_per_token} of {num_groups} groups; use at most {num_groups}")
    reachable = experts.num_groups_per_token * (num_experts // num_groups)
    if chosen > reachable:
        raise ValueError(
            f"num_experts_per_token is {chosen} and {experts.num_groups_per_token} groups of {num_experts // num_groups} hold {reachable} "
            "experts; use more groups per token or fewer experts per token"
        )


def count_assignments(
    indices: Int[Array, "batch seq chosen"], valid: Bool[Array, "batch seq"], num_experts: int
) -> Int[Array, "batch experts"]:
    """Tokens of each row that each expert was chosen for; padding does not count."""
    chosen = (indices[..., None] == jnp.arange(num_experts)) & valid[..., None, None]
    return jnp.sum(chosen, axis=(1, 2), dtype=jnp.int32)


def balance_loss(
    routing: Routing, counts: Int[Array, "batch experts"], valid: Bool[Array, "batch seq"], experts: ExpertsConfig
) -> Float[Array, ""]:
    """The sequence-wise balance loss, times its weight: mean over rows of alpha * sum_i f_i * P_i (equations 17 to 20).

    f_i is the share of a row's assignments that went to expert i, times the number of experts; P_i its mean score after the scores of each
    token are normalised to sum to one. A row is one sequence, its packed documents together; padding counts in neither, and a row of
    padding alone counts as no row. Perfect balance gives alpha.
    """
    num_valid = jnp.sum(valid, axis=1, dtype=jnp.float32)  # [batch]
    row_tokens = jnp.maximum(num_valid, 1.0)[:, None]
    f = counts.astype(jnp.float32) * (experts.num_experts / experts.num_experts_per_token) / row_tokens
    share = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + 1e-20)
    p = jnp.sum(jnp.where(valid[..., None], share, 0.0), axis=1) / row_tokens
    num_rows = jnp.maximum(jnp.sum(num_valid > 0, dtype=jnp.float32), 1.0)
    return experts.balance_loss_weight * jnp.sum(f * p) / num_rows


def update_router_bias(
    bias: Float[Array, "*layers experts"], expert_load: Int[Array, "*layers experts"], rate: float
) -> Float[Array, "*layers experts"]:
    """The bias after a step: up by `rate` for experts below the mean load, down for those above, unchanged at the mean.

    Takes one layer or a stack of layers. Apply it to the step that counts: a discarded candidate step must leave the bias as it was.
    """
    load = expert_load.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
