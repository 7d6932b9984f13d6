"""Which table rows a token's recent n-grams read: hash ids from compressed token ids (Engram, arXiv 2601.07372, section 2.2)."""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from service.models.axes import axis_size, constrain
from service.models.config import EngramConfig
from service.models.order import Order, to_array_order, to_time_order
from service.models.primes import INT32_MAX, layer_primes, num_table_rows

LAYER_SEED_STRIDE = 10007


def layer_multipliers(engram: EngramConfig, layer: int, num_ids: int) -> Int32[np.ndarray, " ngram"]:
    """One odd multiplier for each place of the n-gram, drawn from the seed `engram.seed + 10007 * layer`.

    Bounded by (2**31 - 1) // num_ids, so that id * multiplier never leaves int32 for an id below `num_ids`.
    """
    half_bound = max(1, INT32_MAX // num_ids // 2)
    generator = np.random.default_rng(engram.seed + LAYER_SEED_STRIDE * layer)
    return (2 * generator.integers(0, half_bound, size=engram.max_ngram) + 1).astype(np.int32)


class HashMapping:
    """From tokens to the flat-table rows that each Engram layer reads.

    Holds NumPy arrays only, converted where they are used: jax arrays made here would be tracers when a model is built under jit, and
    every later step would fail with UnexpectedTracerError. The vocabulary's table enters a program as one int32[vocab] literal (0.5 MB
    for 129,280 tokens), used once per step; everything else is a few dozen numbers.

    Two mappings with equal configuration and equal tables are equal, so that rebuilding a model does not retrace its step.
    """

    def __init__(self, engram: EngramConfig, table: Int32[np.ndarray, " vocab"]) -> None:
        """Keep the compression table; draw primes and multipliers.

        Raises:
            ValueError: the pad token is not in the table, or a layer's rows exceed int32.
        """
        if engram.pad_id >= len(table):
            raise ValueError(f"pad_id {engram.pad_id} is not among the {len(table)} token ids; use a smaller pad_id")
        self.engram = engram
        self.table = table
        self.pad_id = int(table[engram.pad_id])
        self.num_ids = int(table.max()) + 1
        self.moduli = {layer: np.asarray(primes, dtype=np.int32) for layer, primes in layer_primes(engram).items()}
        self.multipliers = {layer: layer_multipliers(engram, layer, self.num_ids) for layer in engram.layers}

    @cached_property
    def _identity(self) -> tuple[EngramConfig, bytes]:
        return self.engram, self.table.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashMapping) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def num_rows(self, layer: int) -> int:
        """Rows of the layer's flat table, pads apart."""
        return num_table_rows(self.engram, layer)

    def offsets(self, layer: int) -> Int32[np.ndarray, " hashes"]:
        """First row of each head's own range of the flat table, orders outermost."""
        sizes = self.moduli[layer].reshape(-1)
        return np.cumsum(np.concatenate([[0], sizes[:-1]]), dtype=np.int32)

    def compress(self, tokens: Int32[Array, "batch seq"]) -> Int32[Array, "batch seq"]:
        """The compressed id of each token; negative ids pass through."""
        return jnp.where(tokens < 0, tokens, jnp.asarray(self.table).at[tokens].get(mode="clip"))

    def __call__(
        self, tokens: Int32[Array, "batch seq"], segment_ids: Int32[Array, "batch seq"] | None = None, *, order: Order = Order.NATURAL
    ) -> dict[int, Int32[Array, "batch seq hashes"]]:
        """The flat-table rows that each token reads, for each Engram layer; input and output are in array order `order`.

        Under context parallelism the int32 compressed ids (with `respect_documents` the segment ids too) are all-gathered over `context`
        and hashed in time: 4 * batch * seq bytes, once for all layers; no activation moves.

        Raises:
            ValueError: documents are respected and `segment_ids` is None.
        """
        cp = axis_size("context")
        segments = None
        with jax.named_scope("hash"):
            ids = self._in_time(self.compress(tokens), cp, order)
            if self.engram.respect_documents:
                if segment_ids is None:
                    raise ValueError("respect_documents is true and no segment_ids are given; pass those of the batch")
                segments = self._in_time(segment_ids, cp, order)
            windows = [self._earlier(ids, segments, distance) for distance in range(self.engram.max_ngram)]
            rows = {}
            for layer in self.engram.layers:
                in_time = constrain(self._hash(windows, layer), "batch", None, None)
                rows[layer] = constrain(to_array_order(in_time, cp=cp, order=order), "batch", "seq", None)
            return rows

    def _in_time(self, x: Int32[Array, "batch seq"], cp: int, order: Order) -> Int32[Array, "batch seq"]:
        """The whole sequence on every context rank, in time."""
        return to_time_order(constrain(x, "batch", None), cp=cp, order=order)

    def _earlier(
        self, ids: Int32[Array, "batch seq"], segments: Int32[Array, "batch seq"] | None, distance: int
    ) -> Int32[Array, "batch seq"]:
        """The id `distance` tokens earlier; the pad id before the sequence (and, where documents are respected, the document) starts."""
        if distance == 0:
            return ids
        earlier = _shift_right(ids, distance, self.pad_id)
        if segments is None:
            return earlier
        return jnp.where(_shift_right(segments, distance, -1) == segments, earlier, self.pad_id)

    def _hash(self, windows: list[Int32[Array, "batch seq"]], layer: int) -> Int32[Array, "batch seq hashes"]:
        """XOR of id * multiplier over the n-gram, modulo each head's prime, plus the head's offset."""
        mixed = windows[0] * int(self.multipliers[layer][0])
        hashes = []
        for place, moduli in enumerate(self.moduli[layer], start=1):
            mixed = mixed ^ (windows[place] * int(self.multipliers[layer][place]))
            hashes.append(mixed[:, :, None] % moduli)
        return jnp.concatenate(hashes, axis=-1) + self.offsets(layer)


def _shift_right(x: Int32[Array, "batch seq"], distance: int, fill: int) -> Int32[Array, "batch seq"]:
    batch, seq_len = x.shape
    distance = min(distance, seq_len)
    return jnp.concatenate([jnp.full((batch, distance), fill, x.dtype), x[:, : seq_len - distance]], axis=1)
