"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): at each depth one more block predicts one token further ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from service.models.attention import Places
from service.models.axes import constrain
from service.models.halo import shift_left_in_time
from service.models.layer import Layer, Program, scan_stacked, stack
from service.models.loss import WeightedLoss
from service.models.mhc import expand_streams, reduce_streams
from service.models.moe import MoeMetrics
from service.models.order import Order
from service.models.primitives import RmsNorm, parameter, weight


class Ahead(NamedTuple):
    """The batch as position t sees it at depth d; depth 0 is the main model's."""

    tokens: Int[Array, "batch seq"]
    """Token t+d."""
    targets: Int[Array, "batch seq"]
    """Token t+d+1."""
    next_segments: Int[Array, "batch seq"]
    """Segment of token t+d+1."""
    counts: Bool[Array, "batch seq"]
    """Tokens t to t+d+1 are in one document, and it is not padding."""

    @classmethod
    def start(cls, tokens: Array, targets: Array, segment_ids: Array, order: Order) -> Ahead:
        """Depth 0."""
        next_segments = shift_left_in_time(segment_ids, order=order)
        return cls(tokens, targets, next_segments, (next_segments == segment_ids) & (segment_ids != 0))

    def deeper(self, segment_ids: Array, order: Order) -> Ahead:
        """One token further in time: int32 ids cross the context ranks, never embeddings, three ids in one exchange."""
        ids = jnp.stack([self.tokens, self.targets, self.next_segments], axis=-1)
        tokens, targets, next_segments = jnp.moveaxis(shift_left_in_time(ids, order=order), -1, 0)
        # Against the original segment ids: a comparison with the shifted ones would drift from the targets at depths above 1.
        return Ahead(tokens, targets, next_segments, self.counts & (next_segments == segment_ids))


class MtpModule(nnx.Module):
    """One depth: project the last depth's hidden state and the embedding of the next token, then one block of the model's own kind."""

    def __init__(self, program: Program, *, rngs: nnx.Rngs) -> None:
        model, train = program.config.model, program.config.train
        norm: dict[str, Any] = {"eps": model.norm_eps, "param_dtype": train.param_dtype, "rngs": rngs}
        self.hidden_norm = RmsNorm(model.dim, **norm)
        self.embedding_norm = RmsNorm(model.dim, **norm)
        # Both halves of the published [2 * dim, dim] projection, apart: their concatenated input never stands.
        self.project_hidden = parameter(rngs, (model.dim, model.dim), ("embed", "dim"), dtype=train.param_dtype, fan_in=2 * model.dim)
        self.project_embedding = parameter(rngs, (model.dim, model.dim), ("embed", "dim"), dtype=train.param_dtype, fan_in=2 * model.dim)
        self.block = Layer(program, "moe" if model.num_moe_layers else "dense", rngs=rngs)
        self.final_norm = RmsNorm(model.dim, **norm)
        self.num_streams, self.dtype = model.mhc.num_streams, train.dtype

    def __call__(
        self, hidden: Float[Array, "batch seq dim"], embedding: Float[Array, "batch seq dim"], places: Places
    ) -> tuple[Float[Array, "batch seq dim"], MoeMetrics | None]:
        """The hidden state at this depth, before its final norm, and its block's metrics."""
        x = self.hidden_norm(hidden) @ weight(self.project_hidden, self.dtype)
        x = constrain(x + self.embedding_norm(embedding) @ weight(self.project_embedding, self.dtype), "batch", "seq", "dim")
        streams, metrics = self.block(expand_streams(x, self.num_streams), places)
        return reduce_streams(streams), metrics


class Mtp(nnx.Module):
    """All depths, one compiled body."""

    def __init__(self, program: Program, *, rngs: nnx.Rngs) -> None:
        self.depths = stack(partial(MtpModule, program), program.config.model.mtp.depth, rngs=rngs)
        self.remat = program.remat

    def __call__(
        self,
        hidden: Float[Array, "batch seq dim"],
        ahead: Ahead,
        places: Places,
        *,
        embed: Callable[[Array], Array],
        loss: Callable[[Array, Array, Array], WeightedLoss],
        probes: Any = None,
    ) -> tuple[WeightedLoss, MoeMetrics | None]:
        """Loss and metrics of each depth, stacked. `embed` and `loss` (hidden, targets, counts) are the main model's own."""

        def depth(module: MtpModule, carry: tuple[Array, Ahead]) -> tuple[tuple[Array, Ahead], tuple[Array, Ahead, MoeMetrics | None]]:
            hidden, ahead = carry
            ahead = ahead.deeper(places.segment_ids, places.order)
            # What does not count is padding to the block: no expert's buffer, load or balance sees a token that looks into another
            # document. No position that counts reads one, for all that stand before it in its document count too.
            counted = places._replace(segment_ids=jnp.where(ahead.counts, places.segment_ids, 0))
            hidden, metrics = module(hidden, embed(ahead.tokens), counted)
            return (hidden, ahead), (module.final_norm(hidden), ahead, metrics)

        def depth_loss(out: tuple[Array, Ahead]) -> WeightedLoss:
            hidden, ahead = out
            return loss(hidden, ahead.targets, ahead.counts)

        with jax.named_scope("mtp"):
            _, (hiddens, aheads, metrics) = scan_stacked(self.depths, depth, (hidden, ahead), remat=self.remat, probes=probes)
            # Apart from the blocks, and computed again in the backward pass: no depth's logits stand beside another's, or beside a block.
            return jax.lax.map(jax.checkpoint(depth_loss), (hiddens, aheads)), metrics
