"""Conditional memory: what a token's recent n-grams read from a large table, gated by the hidden state and smoothed over time.

Source: Engram, arXiv 2601.07372, section 2. Which rows are read is in hashing.py, how they are read from a sharded table in
engram_table.py.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from service.models.axes import constrain
from service.models.config import ModelConfig
from service.models.engram_table import TABLE_AXES, choose_cut, num_table_shards, read_rows
from service.models.halo import chunks_with_history
from service.models.hashing import HashMapping
from service.models.order import Order
from service.models.primes import num_padded_rows
from service.models.primitives import parameter, weight

GATE_FLOOR = 1e-6


class StreamNorm(nnx.Module):
    """RMSNorm over the last dim, one scale for each stream, statistics in float32."""

    def __init__(self, num_streams: int, dim: int, *, eps: float, param_dtype: str, rngs: nnx.Rngs) -> None:
        self.scale = parameter(rngs, (num_streams, dim), ("streams", "norm"), dtype=param_dtype, value=1.0)
        self.eps = eps

    def __call__(self, x: Float[Array, "batch seq streams dim"]) -> Float[Array, "batch seq streams dim"]:
        with jax.named_scope("norm"):
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
            return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class ShortConv(nnx.Module):
    """RMSNorm per stream, a causal depthwise convolution over time on streams * dim channels, SiLU.

    The kernel starts at zero and has no bias; tap k reads the token (kernel_size - 1 - k) * dilation earlier. Written as a sum of
    shifted products: unlike a convolution it can leave out taps that cross a document, and XLA cannot scale its kernel gradient by the
    replicas of the batch.
    """

    def __init__(self, model: ModelConfig, *, param_dtype: str, rngs: nnx.Rngs) -> None:
        assert model.engram is not None
        num_streams, dim = model.mhc.num_streams, model.dim
        self.norm = StreamNorm(num_streams, dim, eps=model.norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.kernel = parameter(rngs, (model.engram.kernel_size, num_streams, dim), ("kernel", "streams", "dim"), dtype=param_dtype)
        self.dilation, self.halo = model.engram.max_ngram, model.engram.halo
        self.respect_documents = model.engram.respect_documents

    def __call__(
        self,
        x: Float[Array, "batch seq streams dim"],
        segment_ids: Int32[Array, "batch seq"] | None = None,
        *,
        order: Order = Order.NATURAL,
    ) -> Float[Array, "batch seq streams dim"]:
        """The smoothed streams, in the array order `order` of the input.

        Across context ranks each chunk receives the `halo` tokens before it, (kernel_size - 1) * dilation; no activation is gathered.

        Raises:
            ValueError: a chunk is shorter than the halo, or documents are respected and `segment_ids` is None.
        """
        with jax.named_scope("short_conv"):
            history = chunks_with_history(self.norm(x), halo=self.halo, order=order)
            length = history.shape[2] - self.halo
            documents = self._documents(segment_ids, order)
            kernel = self.kernel[...].astype(jnp.float32)
            total = jnp.zeros((), jnp.float32)
            for tap in range(kernel.shape[0]):
                start = tap * self.dilation
                product = history[:, :, start : start + length].astype(jnp.float32) * kernel[tap]
                if documents is not None:
                    same = documents[:, :, start : start + length] == documents[:, :, self.halo :]
                    product = jnp.where(same[..., None, None], product, 0)
                total = total + product
            return constrain(jax.nn.silu(total).astype(x.dtype).reshape(x.shape), "batch", "seq", "streams", "dim")

    def _documents(self, segment_ids: Int32[Array, "batch seq"] | None, order: Order) -> Int32[Array, "batch chunks halo_and_chunk"] | None:
        """Segment ids with their history, where taps must not cross documents."""
        if not self.respect_documents:
            return None
        if segment_ids is None:
            raise ValueError("respect_documents is true and no segment_ids are given; pass those of the batch")
        return chunks_with_history(segment_ids, halo=self.halo, order=order)


class Engram(nnx.Module):
    """The Engram of one layer: its table, the gate's projections and norms, and the convolution."""

    def __init__(self, model: ModelConfig, layer: int, *, mapping: HashMapping, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> None:
        """Make the parameters; the table's rows are padded to the shards of the mesh that is set, and pads are never addressed.

        Raises:
            ValueError: the model or the layer has no Engram, or the rows exceed int32.
        """
        if model.engram is None:
            raise ValueError("model.engram is null; give its configuration or leave the layer out")
        engram, num_streams, dim = model.engram, model.mhc.num_streams, model.dim
        self.cut = choose_cut(engram.head_dim, num_table_shards())
        self.num_rows = mapping.num_rows(layer)
        """Rows that ids can name."""
        self.num_padded_rows = num_padded_rows(self.num_rows, num_table_shards() if self.cut == "rows" else 1)
        """Rows that are stored."""
        init = partial(parameter, rngs, dtype=param_dtype)
        self.table = init((self.num_padded_rows, engram.head_dim), TABLE_AXES[self.cut], fan_in=engram.head_dim)
        wide = engram.embedding_dim
        self.key_kernel = init((wide, num_streams, dim), ("embed", "streams", "dim"), fan_in=wide)
        self.key_bias = init((num_streams, dim), ("streams", "dim"))
        self.value_kernel = init((wide, dim), ("embed", "dim"), fan_in=wide)
        self.value_bias = init((dim,), ("dim",))
        self.key_norm = StreamNorm(num_streams, dim, eps=model.norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.query_norm = StreamNorm(num_streams, dim, eps=model.norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.short_conv = ShortConv(model, param_dtype=param_dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(
        self,
        hidden: Float[Array, "batch seq streams dim"],
        rows: Int32[Array, "batch seq hashes"],
        segment_ids: Int32[Array, "batch seq"] | None = None,
        *,
        order: Order = Order.NATURAL,
    ) -> Float[Array, "batch seq streams dim"]:
        """What to add to the residual streams before this layer's attention.

        Args:
            hidden: the residual streams, in array order `order`, as everything here.
            rows: this layer's entry of what the `HashMapping` gives.
            segment_ids: needed only where the model respects documents.

        Raises:
            ValueError: as `ShortConv`.
        """
        with jax.named_scope("engram"):
            memory = constrain(read_rows(self.table[...], rows, self.cut, self.dtype), "batch", "seq", None, None)
            memory = memory.reshape(*memory.shape[:2], -1)
            value = memory @ weight(self.value_kernel, self.dtype) + self.value_bias[...].astype(self.dtype)
            gated = self._gate(memory, hidden)[..., None] * value[:, :, None].astype(jnp.float32)
            gated = constrain(gated.astype(self.dtype), "batch", "seq", "streams", "dim")
            return checkpoint_name(gated + self.short_conv(gated, segment_ids, order=order), "engram_out")

    def _gate(
        self, memory: Float[Array, "batch seq wide"], hidden: Float[Array, "batch seq streams dim"]
    ) -> Float[Array, "batch seq streams"]:
        """How much of the memory each stream takes, in float32: sigmoid(sign(q) * sqrt(max(|q|, 1e-6))), q = key · query / sqrt(dim)."""
        key = jnp.einsum("bsw,wgd->bsgd", memory, weight(self.key_kernel, self.dtype)) + self.key_bias[...].astype(self.dtype)
        key = self.key_norm(constrain(key, "batch", "seq", "streams", "dim"))
        query = self.query_norm(hidden.astype(self.dtype))
        agreement = jnp.sum(key.astype(jnp.float32) * query.astype(jnp.float32), axis=-1) * hidden.shape[-1] ** -0.5
        return jax.nn.sigmoid(jnp.sign(agreement) * jnp.sqrt(jnp.maximum(jnp.abs(agreement), GATE_FLOOR)))
