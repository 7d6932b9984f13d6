"""How a token sees its neighbours in time when the sequence is cut over the `context` axis: history from before, the next token from after.

Activations are never gathered: each context rank sends the few tokens at the seams of its chunks, by `ppermute` inside a `shard_map`
that is manual over `context` alone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from service.models.axes import axis_size
from service.models.order import Order, check_sequence, chunks_per_rank

CONTEXT = "context"


def exchange_left_halo(
    x: Shaped[Array, "batch seq_local *rest"], *, halo: int, order: Order
) -> Shaped[Array, "batch chunks halo_and_chunk *rest"]:
    """Each chunk of this rank with the last `halo` tokens of its natural predecessor before it; zeros before chunk 0.

    Runs inside `shard_map`; shapes are per device. In array order a rank holds one chunk: one ppermute, batch * halo * rest elements. Under
    DUAL_CHUNK_SWAP it holds chunks r and 2*cp-1-r: two ppermutes of that size, in opposite directions. No wrap-around link exists: its
    data would be thrown away, so the first and last rank send one halo where the others send two.
    """
    batch, seq_local, *rest = x.shape
    num_chunks = chunks_per_rank(order)
    length = seq_local // num_chunks
    chunks = x.reshape(batch, num_chunks, length, *rest)
    # Not [-halo:], which is everything when the halo is 0.
    tails = chunks[:, :, length - halo :]
    history = [_from_rank_before(tails[:, 0])]
    if order is Order.DUAL_CHUNK_SWAP:
        # Second chunks run backwards over the ranks; the last rank's second chunk follows its own first.
        is_last = jax.lax.axis_index(CONTEXT) == jax.lax.axis_size(CONTEXT) - 1
        history.append(jnp.where(is_last, tails[:, 0], _from_rank_after(tails[:, 1])))
    return jnp.concatenate([jnp.stack(history, axis=1), chunks], axis=2)


def exchange_next_token(x: Shaped[Array, "batch seq_local *rest"], *, order: Order) -> Shaped[Array, "batch seq_local *rest"]:
    """At each position the token that follows it in time; zero after the last.

    Runs inside `shard_map`; shapes are per device. The mirror of `exchange_left_halo` with one token: one ppermute in array order, two
    under DUAL_CHUNK_SWAP. Striped ranks hold no two neighbours, so there the whole shard travels (int32 ids only, in practice).
    """
    if order is Order.STRIPED:
        return _next_striped(x)
    batch, seq_local, *rest = x.shape
    num_chunks = chunks_per_rank(order)
    chunks = x.reshape(batch, num_chunks, seq_local // num_chunks, *rest)
    heads = chunks[:, :, :1]
    following = [_from_rank_after(heads[:, 0])]
    if order is Order.DUAL_CHUNK_SWAP:
        is_last = jax.lax.axis_index(CONTEXT) == jax.lax.axis_size(CONTEXT) - 1
        following = [jnp.where(is_last, heads[:, 1], following[0]), _from_rank_before(heads[:, 1])]
    shifted = jnp.concatenate([chunks[:, :, 1:], jnp.stack(following, axis=1)], axis=2)
    return shifted.reshape(x.shape)


def _next_striped(x: Shaped[Array, "batch seq_local *rest"]) -> Shaped[Array, "batch seq_local *rest"]:
    size = jax.lax.axis_size(CONTEXT)
    from_next = jax.lax.ppermute(x, CONTEXT, [(rank, (rank - 1) % size) for rank in range(size)])
    # The last rank's successors stand one row further on the first rank.
    is_last = jax.lax.axis_index(CONTEXT) == size - 1
    return jnp.where(is_last, _shift_left(from_next), from_next)


def _shift_left(x: Shaped[Array, "batch seq *rest"]) -> Shaped[Array, "batch seq *rest"]:
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def _from_rank_before(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """What rank r-1 holds; zeros on the first rank, to which no link leads."""
    return jax.lax.ppermute(x, CONTEXT, [(rank, rank + 1) for rank in range(jax.lax.axis_size(CONTEXT) - 1)])


def _from_rank_after(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """What rank r+1 holds; zeros on the last rank."""
    return jax.lax.ppermute(x, CONTEXT, [(rank + 1, rank) for rank in range(jax.lax.axis_size(CONTEXT) - 1)])


def chunks_with_history(
    x: Shaped[Array, "batch seq *rest"], *, halo: int, order: Order = Order.NATURAL
) -> Shaped[Array, "batch chunks halo_and_chunk *rest"]:
    """The sequence as runs of consecutive tokens, each with `halo` tokens of history before it (zeros before the first).

    Global shapes; chunks are cut over `context` and lie in array order, so that `[:, :, halo:]` reshaped to [batch, seq] is `x` again.
    Halo 0 sends nothing; otherwise every rank's payload is `halo` tokens per sequence, twice that under DUAL_CHUNK_SWAP, however long
    the sequence is.

    Raises:
        ValueError: the sequence does not divide, a chunk is shorter than the halo, or the order keeps no runs (striped).
    """
    cp = axis_size(CONTEXT)
    batch, seq_len, *rest = x.shape
    if order is Order.STRIPED:
        raise ValueError("striped order keeps no two neighbouring tokens on a rank, so no history can be exchanged; use dual_chunk_swap")
    if cp == 1:
        return jnp.pad(x[:, None], [(0, 0), (0, 0), (halo, 0), *[(0, 0) for _ in rest]])
    check_sequence(seq_len, cp=cp, order=order, halo=halo)
    num_chunks = chunks_per_rank(order) * cp
    if halo == 0:
        return x.reshape(batch, num_chunks, seq_len // num_chunks, *rest)
    return jax.shard_map(
        partial(exchange_left_halo, halo=halo, order=order),
        in_specs=P(None, CONTEXT),
        out_specs=P(None, CONTEXT),
        axis_names={CONTEXT},
    )(x)


def shift_left_in_time(x: Shaped[Array, "batch seq *rest"], *, order: Order = Order.NATURAL) -> Shaped[Array, "batch seq *rest"]:
    """At each array position the token that follows it in time; zero for the last of the sequence. Any dtype.

    Global shapes. Sends one token per rank and sequence in array order, two under DUAL_CHUNK_SWAP.

    Raises:
        ValueError: the sequence does not divide for the mesh's context ranks and `order`.
    """
    cp = axis_size(CONTEXT)
    check_sequence(x.shape[1], cp=cp, order=order)
    if cp == 1:
        return _shift_left(x)
    return jax.shard_map(
        partial(exchange_next_token, order=order), in_specs=P(None, CONTEXT), out_specs=P(None, CONTEXT), axis_names={CONTEXT}
    )(x)
