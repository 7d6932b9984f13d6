"""Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams, mixed by maps that each token computes.

With one stream a sub-layer's output is simply added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from service.models.axes import constrain
from service.models.config import ModelConfig
from service.models.primitives import parameter, weight

EPSILON = 1e-6


class Maps(NamedTuple):
    """What one sub-layer does with the streams of each token, in float32. Batch and seq are last: a TPU pads small trailing dims."""

    pre: Float[Array, "streams batch seq"]
    """Share of each stream in the sub-layer's input."""
    post: Float[Array, "streams batch seq"]
    """How much of the sub-layer's output each stream takes."""
    residual: Float[Array, "streams streams batch seq"]
    """[k, m]: share of old stream k in new stream m; its columns sum to one."""


class HyperConnection(nnx.Module):
    """The connection around one sub-layer."""

    def __init__(self, model: ModelConfig, *, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> None:
        streams = self.num_streams = model.mhc.num_streams
        self.iterations, self.eps, self.dtype = model.mhc.sinkhorn_iterations, model.norm_eps, dtype
        if streams == 1:
            return
        num_maps = 2 * streams + streams * streams
        self.norm = parameter(rngs, (streams, model.dim), ("streams", "norm"), dtype=param_dtype, value=1.0)
        self.projection = parameter(
            rngs, (num_maps, streams, model.dim), (None, "streams", "embed"), dtype=param_dtype, fan_in=streams * model.dim
        )
        self.alpha = parameter(rngs, (3,), (None,), dtype=param_dtype, value=0.01)
        # pre reads the mean of the streams, post gives each the whole output, residual starts close to the identity.
        start = np.concatenate([np.full(streams, -np.log(max(streams - 1, 1e-3))), np.zeros(streams), 5.0 * np.eye(streams).reshape(-1)])
        self.beta = nnx.Param(jnp.asarray(start, param_dtype), axes=(None,))

    def __call__(
        self, streams: Float[Array, "batch seq streams dim"], sublayer: Callable[[Float[Array, "batch seq dim"]], tuple[Array, Any]]
    ) -> tuple[Float[Array, "batch seq streams dim"], Any]:
        """The streams after `sublayer` (which returns its output and something of its own) and that something."""
        if self.num_streams == 1:
            out, extra = sublayer(streams[:, :, 0])
            return constrain(streams + out[:, :, None], "batch", "seq", "streams", "dim"), extra
        with jax.named_scope("mhc"):
            maps = self.maps(streams)
            mixed = jnp.einsum("kbs,bskd->bsd", maps.pre, streams.astype(jnp.float32)).astype(streams.dtype)
        out, extra = sublayer(constrain(mixed, "batch", "seq", "dim"))
        with jax.named_scope("mhc"):
            kept = jnp.einsum("kmbs,bskd->bsmd", maps.residual, streams.astype(jnp.float32))
            spread = jnp.einsum("mbs,bsd->bsmd", maps.post, out.astype(jnp.float32))
            return constrain((kept + spread).astype(streams.dtype), "batch", "seq", "streams", "dim"), extra

    def maps(self, streams: Float[Array, "batch seq streams dim"]) -> Maps:
        """The three maps of every token, out of the normalised, flattened streams through one fused projection."""
        count = self.num_streams
        wide = streams.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=(2, 3)) + self.eps)
        scaled = weight(self.projection, self.dtype) * self.norm[...].astype(self.dtype)
        # The norm's division is one number per token, so it follows the projection: the normalised streams never stand.
        h = jnp.einsum("bskd,nkd->nbs", streams.astype(self.dtype), scaled, preferred_element_type=jnp.float32) * inverse_rms
        alpha = jnp.repeat(self.alpha[...].astype(jnp.float32), np.array([count, count, count * count]), total_repeat_length=h.shape[0])
        h = alpha[:, None, None] * h + self.beta[...].astype(jnp.float32)[:, None, None]
        pre, post, residual = jnp.split(h, [count, 2 * count])
        residual = residual.reshape(count, count, *h.shape[1:])
        return Maps(jax.nn.sigmoid(pre) + EPSILON, 2 * jax.nn.sigmoid(post), sinkhorn(residual, iterations=self.iterations))


def sinkhorn(logits: Float[Array, "k m *rest"], *, iterations: int) -> Float[Array, "k m *rest"]:
    """A nearly doubly stochastic matrix out of any: rows by softmax, then columns and rows divided in turn, columns last.

    Exactly: softmax over m, plus epsilon; divided by (sum over k + epsilon); then `iterations` - 1 times by (sum over m + epsilon) and
    by (sum over k + epsilon). So columns are divided `iterations` times and sum to one; rows nearly do.
    """

    def divide(matrix: Array, axis: int) -> Array:
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + EPSILON)

    def rows_then_columns(matrix: Array, _: None) -> tuple[Array, None]:
        return divide(divide(matrix, 1), 0), None

    first = divide(jax.nn.softmax(logits, axis=1) + EPSILON, 0)
    return jax.lax.scan(rows_then_columns, first, length=iterations - 1)[0]


def expand_streams(x: Float[Array, "batch seq dim"], num_streams: int) -> Float[Array, "batch seq {num_streams} dim"]:
    """Every stream starts as a copy of the embedding."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], num_streams, x.shape[2]))


def reduce_streams(streams: Float[Array, "batch seq streams dim"]) -> Float[Array, "batch seq dim"]:
    """The streams' sum."""
    return jnp.sum(streams.astype(jnp.float32), axis=2).astype(streams.dtype)
