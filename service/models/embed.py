"""The token embedding: a table cut by width, read without gathering it."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from service.models.axes import axis_size, constrain, spec
from service.models.primitives import parameter
from service.models.rules import RULES


class Embed(nnx.Module):
    """Rows of a [vocab, dim] table, one for each token.

    The table is cut over `dim`. Each device looks the tokens of all devices up in its own columns, and an all-to-all hands every device
    the whole rows of its own tokens. So neither the table (1.9 GB for DeepSeek-V3) nor its gradient ever stands whole on a device, and
    what crosses the links is batch * seq * dim of activations, plus the int32 tokens.
    """

    def __init__(self, vocab_size: int, dim: int, *, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> None:
        self.table = parameter(rngs, (vocab_size, dim), (None, "embed"), dtype=param_dtype, fan_in=dim)
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq dim"]:
        with jax.named_scope("embed"):
            if axis_size(*RULES["embed"]) == 1:
                return constrain(self.table[...][tokens].astype(self.dtype), "batch", "seq", "dim")
            table, tokens_spec = spec(*self.table.axes), spec("batch", "seq")
            look_up = jax.shard_map(
                self._look_up_on_shard, in_specs=(table, tokens_spec), out_specs=spec("batch", "seq", "dim"), check_vma=False
            )
            return look_up(self.table[...], tokens)

    def _look_up_on_shard(
        self, table: Float[Array, "vocab dim_local"], tokens: Int[Array, "batch_local seq_local"]
    ) -> Float[Array, "batch_local seq_local dim"]:
        everyone = jax.lax.all_gather(tokens, RULES["embed"])
        columns = table[everyone].astype(self.dtype)  # [devices, batch_local, seq_local, dim_local]
        return jax.lax.all_to_all(columns, RULES["embed"], split_axis=0, concat_axis=3, tiled=True)[0]
