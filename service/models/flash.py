"""JAX's bundled splash attention kernel (TPU only), with a mask that is causal in time whatever the order of the queries.

Causal in time within one segment is what positions and segment ids say too: documents are whole runs of time, and positions count in them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from service.models.axes import axis_size
from service.models.order import Order, time_index

BLOCKS = (512, 256, 128)
"""Queries and keys a kernel works on at once: the largest that divides. A TPU lane row is the smallest."""


class TimeMask(masks.CausalMask):
    """Causal, for queries that stand at `times` and keys in time."""

    def __init__(self, times: np.ndarray) -> None:
        super().__init__((len(times), len(times)))
        self.q_sequence = times.astype(np.int32)


def block_size(seq_local: int) -> int:
    """The kernel's block for this many queries on a device.

    Raises:
        ValueError: no block divides them.
    """
    for block in BLOCKS:
        if seq_local % block == 0:
            return block
    raise ValueError(
        f"flash attention works on blocks of 128 tokens and a device has {seq_local} queries; use a multiple of 128, or dot_product"
    )


def make_kernel(num_heads: int, seq_len: int, *, order: Order) -> tuple[Any, Any]:
    """The kernel for all heads and queries of the mesh that is set, and its `shard_map` specs: heads over `tensor`, queries over `context`.

    Each device's kernel takes its own queries, in array order, and all keys, in time.

    Raises:
        ValueError: as `block_size`.
    """
    ranks = axis_size("context")
    block = block_size(seq_len // ranks)
    mask = TimeMask(time_index(seq_len, ranks, order))
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
        ),
        head_shards=axis_size("tensor"),
        q_seq_shards=ranks,
    )
    return kernel, kernel.manual_sharding_spec(NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec("tensor", "context")))


def attend(
    kernel: Any,
    q: Float[Array, "batch heads queries qk"],
    k: Float[Array, "batch heads keys qk"],
    v: Float[Array, "batch heads keys v"],
    q_segments: Int[Array, "batch queries"],
    k_segments: Int[Array, "batch keys"],
) -> Float[Array, "batch heads queries v"]:
    """Attention on one device, inside `shard_map`; keys, values and their segments are in time. Queries come scaled."""
    return jax.vmap(lambda q, k, v, *segments: kernel(q, k, v, segment_ids=splash.SegmentIds(*segments)))(q, k, v, q_segments, k_segments)
