"""How rows of an Engram table are read, and their gradient written, when the table is cut over the mesh: neither is ever gathered whole.

Two cuts. By columns, every shard holds head_dim / shards columns of all rows: ids are all-gathered, each shard reads its columns for
everyone, and an all-to-all brings each token's columns together; what moves is what is read, once. By rows, every shard holds a range
of rows: each shard reads what it has of everyone's rows, zeros elsewhere, and a reduce-scatter adds the parts; `shards` times as much
moves, in chunks. Columns narrower than a lane row would be padded to it in HBM, so a table is cut by columns exactly where
head_dim / shards is a multiple of 128.

Row ids are int32 and no offset in elements is ever formed, since tables go far beyond 2**31 elements.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from service.models.axes import axis_size, spec
from service.models.primes import INT32_MAX
from service.models.rules import RULES

Cut = Literal["rows", "columns"]

LANES = 128
"""Width of a TPU vector register; a trailing dim that is no multiple of it is padded to it in HBM."""
SHARD_AXES = RULES["engram_rows"]
REPLICA_AXES = ("data",)
"""Axes over which tokens are cut and the table is not."""
CHUNK_BYTES = 256 << 20
"""Bound of the buffer in which a row-cut shard reads for everyone, and so of the tokens in one chunk."""
TABLE_AXES: dict[Cut, tuple[str, str]] = {"rows": ("engram_rows", "engram_dim"), "columns": ("engram_all_rows", "engram_columns")}
"""Logical axes of the table under each cut."""


def num_table_shards() -> int:
    """Pieces a table is cut in on the mesh that is set."""
    return axis_size(*SHARD_AXES)


def choose_cut(head_dim: int, num_shards: int) -> Cut:
    """By columns where every shard's columns fill whole lane rows, else by rows.

    Held by tests/models/test_engram_tpu.py: one 3,621,802 × 512 bfloat16 table read and written by 8 × 1024 tokens over 4 v5p chips
    takes 32 MiB beyond table and gradient by columns, and 128 MiB by rows.
    """
    return "columns" if head_dim % (LANES * num_shards) == 0 else "rows"


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def read_rows(
    table: Float[Array, "rows width"], ids: Int32[Array, "batch seq hashes"], cut: Cut, dtype: str
) -> Float[Array, "batch seq hashes width"]:
    """`table[ids]` in `dtype`, for ids below the number of rows.

    The gradient comes in the table's own dtype, so that no float32 copy of a bfloat16 table stands beside it. Nothing is lost by that: all
    that lands on one row is first added in float32 in a buffer of the tokens' size, and each row is then rounded once, as casting a
    float32 gradient would do. (`segment_sum` straight into bfloat16 would round at every token, and lose those that read a common row.)

    Raises:
        ValueError: rows and ids together exceed int32.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return table[ids].astype(dtype)
    tokens = spec("batch", "seq")
    read = partial(_read_columns if cut == "columns" else _read_owned_rows, dtype=dtype)
    return jax.shard_map(read, in_specs=(spec(*TABLE_AXES[cut]), tokens), out_specs=tokens, check_vma=False)(table, ids)


def _read_forward(
    table: Float[Array, "rows width"], ids: Int32[Array, "batch seq hashes"], cut: Cut, dtype: str
) -> tuple[Float[Array, "batch seq hashes width"], tuple[Float[Array, "rows width"], Int32[Array, "batch seq hashes"]]]:
    # The table, a parameter that is alive anyway, carries its dtype and rows to the backward pass.
    return read_rows(table, ids, cut, dtype), (table, ids)


def _read_backward(
    cut: Cut,
    dtype: str,
    residuals: tuple[Float[Array, "rows width"], Int32[Array, "batch seq hashes"]],
    gradient: Float[Array, "batch seq hashes width"],
) -> tuple[Float[Array, "rows width"], None]:
    del dtype
    table, ids = residuals
    rows, table_dtype = table.shape[0], str(table.dtype)
    if jax.sharding.get_abstract_mesh().empty:
        return _write(gradient.reshape(-1, table.shape[1]), ids.reshape(-1), rows=rows, dtype=table_dtype), None
    tokens = spec("batch", "seq")
    write = partial(_write_columns if cut == "columns" else _write_owned_rows, rows=rows, dtype=table_dtype)
    return jax.shard_map(write, in_specs=(tokens, tokens), out_specs=spec(*TABLE_AXES[cut]), check_vma=False)(gradient, ids), None


read_rows.defvjp(_read_forward, _read_backward)


def _read_columns(
    table: Float[Array, "rows width_local"], ids: Int32[Array, "batch_local seq_local hashes"], *, dtype: str
) -> Float[Array, "batch_local seq_local hashes width"]:
    """This shard's tokens, whole. Sends batch_local * seq_local * hashes * width elements at most, and the ids."""
    everyones = jax.lax.all_gather(ids, SHARD_AXES)
    columns = table.at[everyones].get(mode="promise_in_bounds").astype(dtype)  # [shards, batch_local, seq_local, hashes, width_local]
    return jax.lax.all_to_all(columns, SHARD_AXES, split_axis=0, concat_axis=4, tiled=True)[0]


def _write_columns(
    gradient: Float[Array, "batch_local seq_local hashes width"],
    ids: Int32[Array, "batch_local seq_local hashes"],
    *,
    rows: int,
    dtype: str,
) -> Float[Array, "rows width_local"]:
    """The gradient of this shard's columns; the reverse of `_read_columns`."""
    everyones = jax.lax.all_gather(ids, SHARD_AXES)
    columns = jax.lax.all_to_all(gradient[None], SHARD_AXES, split_axis=4, concat_axis=0, tiled=True)
    written = _write(columns.reshape(-1, columns.shape[-1]), everyones.reshape(-1), rows=rows, dtype=dtype)
    return jax.lax.psum(written, REPLICA_AXES)


def _read_owned_rows(
    table: Float[Array, "rows_local width"], ids: Int32[Array, "batch_local seq_local hashes"], *, dtype: str
) -> Float[Array, "batch_local seq_local hashes width"]:
    """This shard's tokens, added up out of what each shard owns, a chunk of tokens at a time."""
    rows_local, width = table.shape

    def read(_: None, ids: Int32[Array, "tokens hashes"]) -> tuple[None, Float[Array, "tokens hashes width"]]:
        owned = _owned(jax.lax.all_gather(ids, SHARD_AXES), rows_local)
        parts = table.at[owned].get(mode="fill", fill_value=0).astype(dtype)  # [shards, tokens, hashes, width]
        return None, jax.lax.psum_scatter(parts, SHARD_AXES, scatter_dimension=0)

    chunks = _token_chunks(ids, width * jnp.dtype(dtype).itemsize)
    return jax.lax.scan(read, None, chunks)[1].reshape(*ids.shape, width)


def _write_owned_rows(
    gradient: Float[Array, "batch_local seq_local hashes width"],
    ids: Int32[Array, "batch_local seq_local hashes"],
    *,
    rows: int,
    dtype: str,
) -> Float[Array, "rows_local width"]:
    """The gradient of the rows this shard owns.

    Several chunks add to one row, so their sum is held in float32, for one table at a time, and rounded at the end; one chunk needs none.
    """
    rows_local, width = rows // num_table_shards(), gradient.shape[-1]
    chunks = _token_chunks(ids, width * gradient.dtype.itemsize)
    gradients = gradient.reshape(*chunks.shape, width)

    def everyones(
        ids: Int32[Array, "tokens hashes"], gradient: Float[Array, "tokens hashes width"]
    ) -> tuple[Int32[Array, " ids"], Float[Array, "ids width"]]:
        owned = _owned(jax.lax.all_gather(ids, SHARD_AXES), rows_local)
        return owned.reshape(-1), jax.lax.all_gather(gradient, SHARD_AXES).reshape(-1, width)

    def add(
        total: Float[Array, "rows_local width"], chunk: tuple[Int32[Array, "tokens hashes"], Float[Array, "tokens hashes width"]]
    ) -> tuple[Float[Array, "rows_local width"], None]:
        owned, landed = everyones(*chunk)
        return total.at[owned].add(landed.astype(jnp.float32), mode="drop"), None

    if len(chunks) == 1:
        owned, landed = everyones(chunks[0], gradients[0])
        written = _write(landed, owned, rows=rows_local, dtype=dtype)
    else:
        written = jax.lax.scan(add, jnp.zeros((rows_local, width), jnp.float32), (chunks, gradients))[0].astype(dtype)
    return jax.lax.psum(written, REPLICA_AXES)


def _owned(ids: Int32[Array, "*shape"], rows_local: int) -> Int32[Array, "*shape"]:
    """The place of each row on this shard; `rows_local`, which is out of bounds, for rows of other shards."""
    place = ids - jax.lax.axis_index(SHARD_AXES) * rows_local
    return jnp.where((place >= 0) & (place < rows_local), place, rows_local)


def _token_chunks(ids: Int32[Array, "batch_local seq_local hashes"], row_bytes: int) -> Int32[Array, "chunks tokens hashes"]:
    """The ids in the fewest equal chunks of tokens for which what all shards read at once is within CHUNK_BYTES."""
    batch, seq_len, hashes = ids.shape
    tokens = batch * seq_len
    fewest = max(1, min(tokens, -(-num_table_shards() * tokens * hashes * row_bytes // CHUNK_BYTES)))
    count = next(count for count in range(fewest, tokens + 1) if tokens % count == 0)
    return ids.reshape(count, tokens // count, hashes)


def _write(gradient: Float[Array, "ids width"], ids: Int32[Array, " ids"], *, rows: int, dtype: str) -> Float[Array, "rows width"]:
    """Zeros, but at each id the sum of what has that id, added in float32 and rounded once; ids from `rows` on are dropped."""
    if rows + len(ids) > INT32_MAX:
        raise ValueError(f"{rows:,} table rows and {len(ids):,} ids exceed int32 together; cut the table over more devices")
    by_row = jnp.argsort(ids)
    ids = ids[by_row]
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    slot = jnp.cumsum(is_first) - 1  # which of the distinct ids, ascending
    sums = jax.ops.segment_sum(gradient[by_row].astype(jnp.float32), slot, num_segments=len(ids), indices_are_sorted=True)
    # Slots without an id name rows beyond the table, each another, so that all indices are distinct.
    row = (rows + jnp.arange(len(ids), dtype=jnp.int32)).at[slot].set(ids, indices_are_sorted=True)
    # Not marked as sorted: the compiler then orders the sums itself, in one buffer of the tokens' size less.
    return jnp.zeros((rows, gradient.shape[-1]), dtype).at[row].set(sums.astype(dtype), mode="drop", unique_indices=True)
