"""The token-weighted next-token loss, with logits that need not stand whole."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from service.models.axes import axis_size, constrain


class WeightedLoss(NamedTuple):
    """A sum of losses over tokens and the number of tokens that count; of each depth where several are stacked."""

    total: Float[Array, "*depths"]
    tokens: Float[Array, "*depths"]

    def mean(self) -> Float[Array, "*depths"]:
        """Loss per counted token; 0 where none counts."""
        return self.total / jnp.maximum(self.tokens, 1.0)


def next_token_loss(
    hidden: Float[Array, "batch seq dim"],
    head: Float[Array, "dim vocab"],
    targets: Int[Array, "batch seq"],
    counts: Bool[Array, "batch seq"],
    *,
    num_chunks: int,
) -> WeightedLoss:
    """Cross-entropy of `targets` under the logits hidden @ head, in float32, summed over the tokens that count.

    Each rank's part of the sequence is processed in `num_chunks` pieces, so that batch * seq * vocab / num_chunks logits stand at once;
    with more than one, a piece's logits are computed again in the backward pass instead of being kept.

    Raises:
        ValueError: the sequence does not divide into the chunks of the context ranks.
    """
    batch, seq, _ = hidden.shape
    ranks = axis_size("context")
    if seq % (ranks * num_chunks):
        raise ValueError(
            f"seq_len {seq} does not divide into {num_chunks} vocab_chunks on each of {ranks} ranks; use a divisor of {seq // ranks}"
        )

    def chunk_loss(hidden: Array, head: Array, targets: Array, counts: Array) -> Array:
        """[batch, ranks, chunk, …] of every array; the sum over tokens."""
        with jax.named_scope("logits"):
            logits = jnp.einsum("brcd,dv->brcv", hidden, head, preferred_element_type=jnp.float32)
            logits = constrain(logits, "batch", "seq", None, "vocab")
        # The target's logit by comparison, not by a gather, which would collect a vocabulary that is cut over `tensor`.
        is_target = targets[..., None] == jnp.arange(logits.shape[-1])
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return jnp.sum(jnp.where(counts, losses, 0.0))

    with jax.named_scope("loss"):
        # Cut within each rank's part: chunks of the whole sequence would leave all ranks but one idle.
        pieces = [x.reshape(batch, ranks, num_chunks, seq // (ranks * num_chunks), *x.shape[2:]) for x in (hidden, targets, counts)]
        tokens = jnp.sum(counts, dtype=jnp.float32)
        if num_chunks == 1:
            hidden, targets, counts = (x[:, :, 0] for x in pieces)
            return WeightedLoss(chunk_loss(hidden, head, targets, counts), tokens)
        again = jax.checkpoint(chunk_loss, prevent_cse=False)

        def add_chunk(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, None]:
            hidden, targets, counts = chunk
            return total + again(hidden, head, targets, counts), None

        total, _ = jax.lax.scan(add_chunk, jnp.float32(0), tuple(jnp.moveaxis(x, 2, 0) for x in pieces))
        return WeightedLoss(total, tokens)
