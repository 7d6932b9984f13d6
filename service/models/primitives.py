"""The small pieces every part is made of: parameters with axes, gathered weights, RMSNorm, SwiGLU, and rope with YaRN."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from service.models.axes import constrain
from service.models.config import YarnConfig

GATHERED = frozenset({"embed"})
"""Logical axes of weights that are cut to store them, and gathered for use (fully sharded data parallelism)."""


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], *, dtype: str, fan_in: int | None = None, value: float = 0.0
) -> nnx.Param:
    """A parameter with its logical `axes`: normal with standard deviation 1/sqrt(fan_in), or filled with `value` where no fan is given."""
    if len(shape) != len(axes):
        raise ValueError(
            f"parameter of shape {shape} has {len(shape)} dims and {len(axes)} logical axes: {axes}; name one axis for each dim"
        )
    if fan_in is None:
        return nnx.Param(jnp.full(shape, value, dtype), axes=axes)
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)).astype(dtype), axes=axes)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x: Array, source: tuple[str | None, ...], target: tuple[str | None, ...]) -> Array:
    """`x` moved from the partition of logical axes `source` to that of `target`; its gradient comes back in `source`.

    A plain sharding constraint pins the gradient to `target` too, which makes an all-reduce out of what can be a reduce-scatter.
    """
    del source
    return constrain(x, *target)


def _reshard_forward(x: Array, source: tuple[str | None, ...], target: tuple[str | None, ...]) -> tuple[Array, None]:
    return reshard(x, source, target), None


def _reshard_backward(source: tuple[str | None, ...], target: tuple[str | None, ...], _: None, gradient: Array) -> tuple[Array]:
    del target
    return (constrain(gradient, *source),)


reshard.defvjp(_reshard_forward, _reshard_backward)


def weight(param: nnx.Param, dtype: str) -> Array:
    """`param` whole and in the compute `dtype`, ready for use (`gather`)."""
    return gather(param[...], param.axes, dtype)


def gather(array: Array, axes: tuple[str | None, ...], dtype: str) -> Array:
    """A weight with these logical axes, cast to `dtype` on its shard, then gathered over the axes it is only stored over.

    Its gradient is reduce-scattered in `dtype` and cast back on the shard. Heads, hidden width and vocabulary stay cut over `tensor`.
    """
    return reshard(array.astype(dtype), axes, tuple(None if axis in GATHERED else axis for axis in axes))


class RmsNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, statistics in float32."""

    def __init__(self, dim: int, *, eps: float, param_dtype: str, rngs: nnx.Rngs) -> None:
        self.scale = parameter(rngs, (dim,), ("norm",), dtype=param_dtype, value=1.0)
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead dim"]:
        with jax.named_scope("norm"):
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
            return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class SwiGlu(nnx.Module):
    """The dense feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> None:
        self.gate = parameter(rngs, (dim, hidden), ("embed", "mlp"), dtype=param_dtype, fan_in=dim)
        self.up = parameter(rngs, (dim, hidden), ("embed", "mlp"), dtype=param_dtype, fan_in=dim)
        # Kept transposed: the dim that is cut 256 ways comes first, where a TPU does not pad it to its tile of 128.
        self.down = parameter(rngs, (dim, hidden), ("embed", "mlp"), dtype=param_dtype, fan_in=hidden)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "batch seq dim"]) -> Float[Array, "batch seq dim"]:
        gate = constrain(x @ weight(self.gate, self.dtype), "batch", "seq", "mlp")
        up = constrain(x @ weight(self.up, self.dtype), "batch", "seq", "mlp")
        hidden = checkpoint_name(jax.nn.silu(gate) * up, "mlp_hidden")
        return constrain(jnp.einsum("bsf,df->bsd", hidden, weight(self.down, self.dtype)), "batch", "seq", "dim")


def rope_frequencies(dim: int, *, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """float32 [dim / 2]: radians per position of each rotated pair, stretched by YaRN where it is given (arXiv 2309.00071, section 3.2).

    Pairs that turn more than `beta_fast` times over the original length keep their frequency, those that turn less than `beta_slow` times
    are slowed by `factor`, and a linear ramp over the pair's index lies between.
    """
    frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is not None:

        def pair_that_turns(times: float) -> float:
            return dim * math.log(yarn.original_seq_len / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
        slowed = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        frequencies = frequencies * (1 - slowed) + frequencies / yarn.factor * slowed
    return frequencies.astype(np.float32)


def score_scale(qk_head_dim: int, yarn: YarnConfig | None) -> float:
    """What scores are multiplied by: 1/sqrt(width), times mscale squared under YaRN, mscale = 0.1 * yarn.mscale * ln(factor) + 1."""
    scale = qk_head_dim**-0.5
    if yarn is None or yarn.factor <= 1:
        return scale
    return scale * (0.1 * yarn.mscale * math.log(yarn.factor) + 1) ** 2


def rope_tables(
    positions: Int[Array, "batch seq"], frequencies: np.ndarray
) -> tuple[Float[Array, "batch seq rope"], Float[Array, "batch seq rope"]]:
    """Cosine and sine of every position's angles in float32, each angle twice in a row: the two halves of an interleaved pair."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(np.repeat(frequencies, 2))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "*lead rope"], cos: Float[Array, "*#lead rope"], sin: Float[Array, "*#lead rope"]) -> Float[Array, "*lead rope"]:
    """Interleaved rope: the pair (x[2i], x[2i+1]) turned by its angle.

    Neighbours are brought together by two rolls, not by strided slices or a trailing dim of 2, which a TPU would pad to 128.
    """
    wide = x.astype(jnp.float32)
    is_first = np.arange(x.shape[-1]) % 2 == 0
    partner = jnp.where(is_first, -jnp.roll(wide, -1, axis=-1), jnp.roll(wide, 1, axis=-1))
    return (wide * cos + partner * sin).astype(x.dtype)
