"""The decoder: embedding, runs of layers with Engram reads between them, and the losses of the main head and of MTP."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from service.models.attention import make_places
from service.models.axes import constrain
from service.models.embed import Embed
from service.models.layer import Layer, Program, rematerialise, scan_stacked, stack
from service.models.loss import next_token_loss
from service.models.mhc import expand_streams, reduce_streams
from service.models.moe import MoeMetrics
from service.models.mtp import Ahead, Mtp
from service.models.primitives import RmsNorm, parameter, weight
from service.models.runs import layer_runs


class Losses(NamedTuple):
    """What a forward pass gives: losses per token that counts, and the metrics of every MoE layer by run."""

    main: Float[Array, ""]
    mtp: Float[Array, ""]
    """Mean over depths, before its weight; 0 where there is no MTP."""
    balance: Float[Array, ""]
    """Sum over the MoE layers of the router's balance loss, its weight included."""
    tokens: Float[Array, ""]
    """Tokens of the main loss."""
    moe: dict[str, MoeMetrics]
    """Name of the run (`moe_layers_3_60`, `mtp`) to its layers' metrics, stacked."""


class Decoder(nnx.Module):
    """One DeepSeek-style decoder with its heads."""

    def __init__(self, program: Program, *, rngs: nnx.Rngs) -> None:
        model, train = program.config.model, program.config.train
        dtypes = {"dtype": train.dtype, "param_dtype": train.param_dtype}
        self.embed = Embed(model.vocab_size, model.dim, **dtypes, rngs=rngs)
        for run in layer_runs(model):
            setattr(self, run.name, stack(partial(Layer, program, run.kind), run.length, rngs=rngs))
        self.final_norm = RmsNorm(model.dim, eps=model.norm_eps, param_dtype=train.param_dtype, rngs=rngs)
        self.head = parameter(rngs, (model.dim, model.vocab_size), ("embed", "vocab"), dtype=train.param_dtype, fan_in=model.dim)
        if model.mtp.depth:
            self.mtp = Mtp(program, rngs=rngs)
        self.program = program

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
    ) -> Losses:
        """Losses of one batch, in the array order of training input."""
        program = self.program
        model, train = program.config.model, program.config.train
        places = make_places(model, positions, segment_ids)
        streams = expand_streams(self.embed(tokens), model.mhc.num_streams)
        moe: dict[str, MoeMetrics] = {}
        for run in layer_runs(model):
            with jax.named_scope(f"{run.kind}_layers"):
                streams, metrics = scan_stacked(
                    getattr(self, run.name), lambda layer, streams: layer(streams, places), streams, remat=program.remat
                )
            if metrics is not None:
                moe[run.name] = metrics
        hidden = reduce_streams(streams)

        with jax.named_scope("logits"):
            head = weight(self.head, train.dtype)

        def loss(hidden: Array, targets: Array, counts: Array) -> Any:
            return next_token_loss(hidden, head, targets, counts, num_chunks=train.vocab_chunks)

        with jax.named_scope("loss"):
            ahead = Ahead.start(tokens, targets, segment_ids, program.order)
        main = loss(self.final_norm(hidden), ahead.targets, ahead.counts)
        mtp = jnp.float32(0)
        if model.mtp.depth:
            losses, metrics = self.mtp(hidden, ahead, places, embed=self.embed, loss=loss)
            mtp = jnp.mean(losses.mean())
            if metrics is not None:
                moe["mtp"] = metrics
        balance = sum((jnp.sum(metrics.balance_loss) for metrics in moe.values()), jnp.float32(0))
        return Losses(main.mean(), mtp, balance, main.tokens, moe)
