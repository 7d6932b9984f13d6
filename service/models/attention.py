"""Multi-head latent attention under context parallelism: queries stay on their shard, what keys and values are made of is gathered.

Each rank gathers the compressed latents of the whole sequence (kv_lora_rank + rope values per token, 71 times less than the 128 heads
of DeepSeek-V3) and expands them itself; the backward pass then reduce-scatters latents, not keys and values.

`dot_product` forms the scores of a block of heads at a time, under `SCORE_BLOCK_BYTES`, and recomputes them in the backward pass, so that
[heads, seq, seq] never stands whole. `flash` is JAX's bundled splash kernel on TPU; on other platforms it is dot_product.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from service.models.axes import axis_size, constrain, spec
from service.models.config import ModelConfig, YarnConfig
from service.models.order import Order, to_time_order
from service.models.primitives import RmsNorm, parameter, rope_frequencies, rope_tables, rotate, score_scale, weight
from service.models.rules import RULES

SCORE_BLOCK_BYTES = 512 << 20
"""Most bytes of float32 scores per device that dot_product attention forms at once (one head at least)."""

MASKED = -1e30
"""Score of a pair that may not attend: finite, so that a row with no legal key (padding) gives finite values."""


class Places(NamedTuple):
    """Where each token stands: its position in its document, its document (0 is padding), its rope angles; and in which order they lie."""

    positions: Int[Array, "batch seq"]
    segment_ids: Int[Array, "batch seq"]
    cos: Float[Array, "batch seq rope"]
    sin: Float[Array, "batch seq rope"]
    order: Order
    """Of this call's sequence over the context ranks; not an array."""


def active_yarn(model: ModelConfig, seq_len: int) -> YarnConfig | None:
    """The model's YaRN, where the sequence exceeds the length it was first trained on."""
    return model.yarn if model.yarn is not None and seq_len > model.yarn.original_seq_len else None


def make_places(
    model: ModelConfig, positions: Int[Array, "batch seq"], segment_ids: Int[Array, "batch seq"], *, order: Order = Order.NATURAL
) -> Places:
    """Places of a batch that lies in `order`, angles computed once for all layers."""
    frequencies = rope_frequencies(model.mla.qk_rope_head_dim, theta=model.rope_theta, yarn=active_yarn(model, positions.shape[1]))
    return Places(positions, segment_ids, *rope_tables(positions, frequencies), order)


class Mla(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    def __init__(self, model: ModelConfig, *, flash: bool, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> None:
        """Make the parameters.

        Raises:
            ValueError: the heads do not divide over the mesh that is set.
        """
        mla, dim, heads = model.mla, model.dim, model.num_heads
        if heads % axis_size(*RULES["heads"]):
            raise ValueError(
                f"{heads} attention heads do not divide over tensor {axis_size(*RULES['heads'])}; change the axis or the heads"
            )
        q_in = mla.q_lora_rank or dim
        if mla.q_lora_rank is not None:
            self.q_down = parameter(rngs, (dim, q_in), ("embed", "lora"), dtype=param_dtype, fan_in=dim)
            self.q_norm = RmsNorm(q_in, eps=model.norm_eps, param_dtype=param_dtype, rngs=rngs)
        # Heads and their dims are one dim, and a wide dim is cut over many devices, or the first one is: a shard that is 2 to 28 wide in
        # its last two dims would be padded to a TPU tile, up to 64 times.
        self.q_up = parameter(rngs, (q_in, heads * mla.qk_head_dim), ("embed", "heads"), dtype=param_dtype, fan_in=q_in)
        self.kv_down = parameter(rngs, (dim, mla.kv_lora_rank + mla.qk_rope_head_dim), ("embed", "lora"), dtype=param_dtype, fan_in=dim)
        self.kv_norm = RmsNorm(mla.kv_lora_rank, eps=model.norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.kv_up = parameter(
            rngs,
            (mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
            ("lora", "heads_embed"),
            dtype=param_dtype,
            fan_in=mla.kv_lora_rank,
        )
        self.out = parameter(rngs, (dim, heads * mla.v_head_dim), ("embed", "heads"), dtype=param_dtype, fan_in=heads * mla.v_head_dim)
        self.model, self.mla, self.dtype, self.flash = model, mla, dtype, flash

    def __call__(self, x: Float[Array, "batch seq dim"], places: Places) -> Float[Array, "batch seq dim"]:
        mla = self.mla
        compressed = self.q_norm(x @ weight(self.q_down, self.dtype)) if mla.q_lora_rank is not None else x
        q = _by_head(compressed @ weight(self.q_up, self.dtype), mla.qk_head_dim)
        q = constrain(q, "batch", "heads", "seq", None)
        q_rope = rotate(q[..., mla.qk_nope_head_dim :], places.cos[:, None], places.sin[:, None])
        q = checkpoint_name(jnp.concatenate([q[..., : mla.qk_nope_head_dim], q_rope], axis=-1), "mla_q")

        latent, k_rope = jnp.split(x @ weight(self.kv_down, self.dtype), [mla.kv_lora_rank], axis=-1)
        latent = jnp.concatenate([self.kv_norm(latent), rotate(k_rope, places.cos, places.sin)], axis=-1)
        latent = checkpoint_name(constrain(latent, "batch", "seq", None), "mla_kv")

        out = checkpoint_name(self._attend(q, latent, places), "attention_out")
        out = jnp.moveaxis(out, 1, 2).reshape(*x.shape[:2], -1)
        return constrain(jnp.einsum("bsv,dv->bsd", out, weight(self.out, self.dtype)), "batch", "seq", "dim")

    def _attend(
        self, q: Float[Array, "batch heads seq qk"], latent: Float[Array, "batch seq latent"], places: Places
    ) -> Float[Array, "batch heads seq v"]:
        kv_up = self.kv_up[...].astype(self.dtype)
        # Of the call's length, as the angles are: one model object serves calls on both sides of YaRN's original length.
        scale = score_scale(self.mla.qk_head_dim, active_yarn(self.model, q.shape[2]))
        if jax.sharding.get_abstract_mesh().empty:
            return dot_product(q, *self._expand(latent, kv_up), *places[:2], *places[:2], scale=scale)
        local, whole = spec("batch", "seq"), spec("batch", None)
        heads = spec("batch", "heads", "seq", None)
        arguments: tuple[Any, ...] = (q, latent, kv_up, *places[:2], *places[:2])
        specs: tuple[Any, ...] = (heads, spec("batch", "seq", None), spec(*self.kv_up.axes), local, local, whole, whole)
        if self.flash:
            from service.models import flash  # half a second to import, for those who use it

            kernel, kernel_spec = flash.make_kernel(q.shape[1], q.shape[2], order=places.order)
            arguments, specs = (*arguments, kernel), (*specs, kernel_spec)
        # Every mesh axis is manual: a partly automatic shard_map turns permutes and gathers into more than was asked for.
        attend = partial(self._attend_on_shard, places.order, scale)
        return jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)(*arguments)

    def _attend_on_shard(
        self,
        order: Order,
        scale: float,
        q: Float[Array, "batch heads seq_local qk"],
        latent: Float[Array, "batch seq_local latent"],
        kv_up: Float[Array, "rank up_local"],
        q_positions: Int[Array, "batch seq_local"],
        q_segments: Int[Array, "batch seq_local"],
        k_positions: Int[Array, "batch seq"],
        k_segments: Int[Array, "batch seq"],
        kernel: Any = None,
    ) -> Float[Array, "batch heads seq_local v"]:
        kv_up = jax.lax.all_gather(kv_up, RULES["embed"], axis=1, tiled=True)
        latent = jax.lax.all_gather(latent, "context", axis=1, tiled=True)
        if kernel is None:
            k, v = self._expand(latent, kv_up)
            return dot_product(q, k, v, q_positions, q_segments, k_positions, k_segments, scale=scale)
        from service.models import flash

        # The kernel counts keys in time, so latents are put in time, at a fraction of the keys' bytes.
        latent, k_segments = (to_time_order(x, cp=axis_size("context"), order=order) for x in (latent, k_segments))
        q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        return flash.attend(kernel, q, *self._expand(latent, kv_up), q_segments, k_segments)

    def _expand(
        self, latent: Float[Array, "batch seq latent"], kv_up: Float[Array, "rank up"]
    ) -> tuple[Float[Array, "batch heads seq qk"], Float[Array, "batch heads seq v"]]:
        """Keys and values of every head out of the latents; the rope key is one for all heads."""
        compressed, k_rope = jnp.split(latent, [self.mla.kv_lora_rank], axis=-1)
        expanded = _by_head(compressed @ kv_up, self.mla.qk_nope_head_dim + self.mla.v_head_dim)
        k_nope, v = jnp.split(expanded, [self.mla.qk_nope_head_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:3], k_rope.shape[-1]))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v


def _by_head(x: Float[Array, "batch seq heads_dims"], head_dim: int) -> Float[Array, "batch heads seq {head_dim}"]:
    """Split the last dim by head and bring heads forward."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, head_dim), 2, 1)


def dot_product(
    q: Float[Array, "batch heads queries qk"],
    k: Float[Array, "batch heads keys qk"],
    v: Float[Array, "batch heads keys v"],
    q_positions: Int[Array, "batch queries"],
    q_segments: Int[Array, "batch queries"],
    k_positions: Int[Array, "batch keys"],
    k_segments: Int[Array, "batch keys"],
    *,
    scale: float,
) -> Float[Array, "batch heads queries v"]:
    """Softmax attention, causal by position within a document, in any order of queries and keys; scores and softmax in float32.

    Holds batch * block * queries * keys * 4 bytes of scores at once, where block is the most heads (a divisor of all) that keep this
    under `SCORE_BLOCK_BYTES`.
    """
    batch, heads, queries, _ = q.shape
    allowed = (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] != 0)
    allowed &= q_positions[:, :, None] >= k_positions[:, None, :]

    def attend_heads(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
        shares = jax.nn.softmax(jnp.where(allowed[:, None], scores, MASKED), axis=-1)
        return jnp.einsum("bhqk,bhkd->bhqd", shares.astype(v.dtype), v)

    block = heads_per_block(heads, bytes_per_head=batch * queries * k.shape[2] * 4)
    if block == heads:
        return attend_heads(q, k, v)
    blocks = [jnp.moveaxis(x.reshape(batch, heads // block, block, *x.shape[2:]), 1, 0) for x in (q, k, v)]
    out = jax.lax.map(jax.checkpoint(lambda block: attend_heads(*block), prevent_cse=False), tuple(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(batch, heads, queries, v.shape[-1])


def heads_per_block(heads: int, *, bytes_per_head: int) -> int:
    """The largest divisor of `heads` whose scores stay within `SCORE_BLOCK_BYTES`; 1 where one head exceeds it."""
    return max((n for n in range(1, heads + 1) if heads % n == 0 and n * bytes_per_head <= SCORE_BLOCK_BYTES), default=1)
