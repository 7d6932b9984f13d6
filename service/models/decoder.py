"""The decoder: embedding, runs of layers with Engram reads between them, and the losses of the main head and of MTP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from service.models.attention import Places, make_places
from service.models.config import ModelConfig
from service.models.embed import Embed
from service.models.engram import Engram
from service.models.layer import Layer, Program, rematerialise, scan_stacked, stack
from service.models.loss import next_token_loss
from service.models.mhc import expand_streams, reduce_streams
from service.models.moe import MoeMetrics
from service.models.mtp import Ahead, Mtp
from service.models.order import Mode
from service.models.primitives import RmsNorm, gather, parameter
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


def stack_names(model: ModelConfig) -> tuple[str, ...]:
    """Names of the decoder's parts that are stacks of layers: its runs, and MTP's depths."""
    return tuple(run.name for run in layer_runs(model)) + (("mtp",) if model.mtp.depth else ())


class Decoder(nnx.Module):
    """One DeepSeek-style decoder with its heads."""

    def __init__(self, program: Program, *, rngs: nnx.Rngs) -> None:
        model, train = program.config.model, program.config.train
        dtypes = {"dtype": train.dtype, "param_dtype": train.param_dtype}
        self.embed = Embed(model.vocab_size, model.dim, **dtypes, rngs=rngs)
        mapping = program.mapping
        for run in layer_runs(model):
            if mapping is not None and run.has_engram:
                setattr(self, run.engram_name, Engram(model, run.start, mapping=mapping, **dtypes, rngs=rngs))
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
        *,
        mode: Mode = "train",
        probes: Mapping[str, Any] | None = None,
    ) -> Losses:
        """Losses of one batch, in the array order of a call of this mode; gradients of stacked layers go to `probes` where given."""
        probes = probes or {}
        program = self.program
        model, train = program.config.model, program.config.train
        places = make_places(model, positions, segment_ids, order=program.order_of(mode))
        streams = expand_streams(self.embed(tokens), model.mhc.num_streams)
        moe: dict[str, MoeMetrics] = {}
        rows = self._hash(tokens, places)
        for run in layer_runs(model):
            if run.has_engram:
                streams = self._read_memory(getattr(self, run.engram_name), streams, rows[run.start], places)
            with jax.named_scope(f"{run.kind}_layers"):
                streams, metrics = scan_stacked(
                    getattr(self, run.name),
                    lambda layer, streams: layer(streams, places),
                    streams,
                    remat=program.remat,
                    probes=probes.get(run.name),
                )
            if metrics is not None:
                moe[run.name] = metrics
        # The barrier holds for gradients too: the backward pass finishes the head's gradient, and drops the logits, before it enters the
        # layers. Left to itself the compiler puts that off to the end and keeps the logits through all layers.
        hidden, head = jax.lax.optimization_barrier((reduce_streams(streams), self.head[...]))
        with jax.named_scope("logits"):
            head = gather(head, self.head.axes, train.dtype)

        def loss(hidden: Array, targets: Array, counts: Array) -> Any:
            return next_token_loss(hidden, head, targets, counts, num_chunks=train.vocab_chunks)

        with jax.named_scope("loss"):
            ahead = Ahead.start(tokens, targets, segment_ids, places.order)
        main = loss(self.final_norm(hidden), ahead.targets, ahead.counts)
        mtp = jnp.float32(0)
        if model.mtp.depth:
            losses, metrics = self.mtp(hidden, ahead, places, embed=self.embed, loss=loss, probes=probes.get("mtp", {}).get("depths"))
            mtp = jnp.mean(losses.mean())
            if metrics is not None:
                moe["mtp"] = metrics
        balance = sum((jnp.sum(metrics.balance_loss) for metrics in moe.values()), jnp.float32(0))
        return Losses(main.mean(), mtp, balance, main.tokens, moe)

    def _hash(self, tokens: Int[Array, "batch seq"], places: Places) -> dict[int, Int[Array, "batch seq hashes"]]:
        """The table rows of every Engram layer."""
        if self.program.mapping is None:
            return {}
        with jax.named_scope("engram"):
            return self.program.mapping(tokens, places.segment_ids, order=places.order)

    def _read_memory(
        self,
        engram: Engram,
        streams: Float[Array, "batch seq streams dim"],
        rows: Int[Array, "batch seq hashes"],
        places: Places,
    ) -> Float[Array, "batch seq streams dim"]:
        """The streams with what Engram adds before a layer's attention, rematerialised as a layer is."""
        graph, state = nnx.split(engram)
        order = places.order

        def read(state: Any, streams: Array, rows: Array, segment_ids: Array) -> Array:
            return streams + nnx.merge(graph, state)(streams, rows, segment_ids, order=order)

        return rematerialise(read, self.program.remat, in_scan=False)(state, streams, rows, places.segment_ids)
