"""The mixture-of-experts feed-forward: router, shared experts, routed experts over the mesh, and the metrics of a layer.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from service.models.axes import constrain
from service.models.config import ExpertsConfig
from service.models.experts import WEIGHT_AXES, ExpertRun, ExpertWeights, apply_experts, check_shapes
from service.models.primitives import SwiGlu, parameter, weight
from service.models.router import RouterBias, Routing, balance_loss, check_routing, count_assignments, route


class MoeMetrics(NamedTuple):
    """What a layer reports beside its output; goes through scans and remat as any output does."""

    overflow: Bool[Array, ""]
    """An assignment was dropped somewhere: the same value on every device of the mesh."""
    dropped_fraction: Float[Array, ""]
    """Share of the assignments, over all devices and without padding, that were dropped."""
    expert_load: Int[Array, " experts"]
    """Assignments of each expert over all devices, those dropped included, padding not."""
    balance_loss: Float[Array, ""]
    """Already times the configuration's weight: add it to the loss."""


class Moe(nnx.Module):
    """Routed and shared experts in place of a feed-forward.

    Padding tokens are routed to no expert: they take no room in the receive buffers, so that overflow is a matter of real tokens alone, and
    their routed output is zero.

    Args:
        experts: sizes and the router's rule.
        dim: model width.
        dtype: of the computation; the router always computes in float32.
        param_dtype: of the weights at rest.
        rngs: seeds of the initial weights.

    Raises:
        ValueError: the router's groups cannot hold the choice.
    """

    def __init__(self, experts: ExpertsConfig, *, dim: int, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> None:
        check_routing(experts)
        self.config = experts
        self.dtype = dtype
        num, width = experts.num_experts, experts.expert_dim
        self.router = parameter(rngs, (dim, num), ("embed", "router_experts"), dtype=param_dtype, fan_in=dim)
        self.bias = RouterBias(jnp.zeros(num, jnp.float32), axes=("router_experts",)) if experts.bias else None
        self.expert_gate = parameter(rngs, (num, width, dim), WEIGHT_AXES, dtype=param_dtype, fan_in=dim)
        self.expert_up = parameter(rngs, (num, width, dim), WEIGHT_AXES, dtype=param_dtype, fan_in=dim)
        self.expert_down = parameter(rngs, (num, width, dim), WEIGHT_AXES, dtype=param_dtype, fan_in=width)
        shared_width = experts.num_shared_experts * width
        # Experts that every token goes to are one feed-forward of their joint width.
        self.shared = SwiGlu(dim, shared_width, dtype=dtype, param_dtype=param_dtype, rngs=rngs) if shared_width else None

    def __call__(
        self,
        x: Float[Array, "batch seq dim"],
        valid: Bool[Array, "batch seq"],
        *,
        buffer_factor: float,
        token_chunks: int,
        use_ragged_all_to_all: bool,
    ) -> tuple[Float[Array, "batch seq dim"], MoeMetrics]:
        """The layer's output and metrics.

        `buffer_factor` -1 is dropless, a positive one candidate (`costs.receive_rows`); `token_chunks` cuts each device's tokens into
        pieces that go through the experts one after another, each with a buffer smaller by that count; `use_ragged_all_to_all` is for
        backends that have it (TPU), with equal values either way.

        Raises:
            ValueError: sizes do not divide over the mesh or into the chunks.
        """
        experts = self.config
        run = ExpertRun(experts.num_experts, float(buffer_factor), token_chunks, use_ragged_all_to_all)
        check_shapes(run, batch=x.shape[0], seq=x.shape[1], width=experts.expert_dim)
        with jax.named_scope("moe"):
            x = x.astype(self.dtype)
            with jax.named_scope("router"):
                routing = self._route(x)
                counts = count_assignments(routing.indices, valid, experts.num_experts)
                loss = balance_loss(routing, counts, valid, experts)
                # One past the last expert marks padding.
                indices = jnp.where(valid[..., None], routing.indices, experts.num_experts)
            stored = ExpertWeights(self.expert_gate[...], self.expert_up[...], self.expert_down[...])
            y, dropped, overflow = apply_experts(run, x, indices, routing.weights, stored)
            if self.shared is not None:
                with jax.named_scope("shared"):
                    y = y + self.shared(x)
            y = checkpoint_name(constrain(y, "batch", "seq", "dim"), "moe_out")
        assignments = jnp.maximum(jnp.sum(valid, dtype=jnp.int32) * experts.num_experts_per_token, 1)
        return y, MoeMetrics(
            overflow=overflow,
            dropped_fraction=dropped.astype(jnp.float32) / assignments.astype(jnp.float32),
            expert_load=jnp.sum(counts, axis=0),
            balance_loss=loss,
        )

    def _route(self, x: Float[Array, "batch seq dim"]) -> Routing:
        # Highest precision: bfloat16 passes would move the choice of tokens whose scores lie close.
        logits = jnp.einsum("bsd,de->bse", x.astype(jnp.float32), weight(self.router, "float32"), precision=jax.lax.Precision.HIGHEST)
        bias = None if self.bias is None else self.bias[...]
        return route(constrain(logits, "batch", "seq", None), bias, self.config)
