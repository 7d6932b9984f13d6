"""What a train step's state and buffers cost, as closed forms: parameters by part, argument bytes to the byte, and the large buffers of MoE
and remat; no JAX here.

Bytes are per device. The forms are written from the sizes alone; tests hold them against the model's real arrays and against the TPU
compiler (tests/models/test_costs.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from service.models.config import DTYPE_BYTES, EngramConfig, ExpertsConfig, MeshAxes, ModelConfig, ProgramName, StepConfig
from service.models.primes import num_padded_rows, num_table_rows
from service.models.rules import RULES
from service.models.runs import layer_runs

LANES = 128
"""Width of a TPU vector register: the tile's last dim."""
BATCH_ARRAYS = 4
"""tokens, targets, segment_ids, positions; int32 [batch, seq] each."""


@dataclass(frozen=True)
class ParameterArray:
    """One array of the parameters: its path in the state, the part it counts to, its whole shape and logical axes."""

    path: tuple[str, ...]
    part: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


def parameter_arrays(model: ModelConfig, mesh: MeshAxes | None = None) -> tuple[ParameterArray, ...]:
    """Every parameter of the model. Engram tables are padded for `mesh`; without one they have the rows that ids can name."""
    dim = model.dim
    arrays = [
        ParameterArray(("embed", "table"), "embed", (model.vocab_size, dim), (None, "embed")),
        ParameterArray(("final_norm", "scale"), "norm", (dim,), ("norm",)),
        ParameterArray(("head",), "head", (dim, model.vocab_size), ("embed", "vocab")),
    ]
    for run in layer_runs(model):
        if run.has_engram:
            arrays += _prefixed((run.engram_name,), _engram(model, run.start, mesh))
        arrays += _stacked((run.name,), run.length, _layer(model, run.kind))
    if model.mtp.depth:
        module = [
            *(ParameterArray((name, "scale"), "mtp", (dim,), ("norm",)) for name in ("hidden_norm", "embedding_norm", "final_norm")),
            *(ParameterArray((name,), "mtp", (dim, dim), ("embed", "dim")) for name in ("project_hidden", "project_embedding")),
            *_prefixed(("block",), _layer(model, "moe" if model.num_moe_layers else "dense"), part="mtp"),
        ]
        arrays += _stacked(("mtp", "depths"), model.mtp.depth, module)
    return tuple(arrays)


def _prefixed(prefix: tuple[str, ...], arrays: Sequence[ParameterArray], part: str | None = None) -> list[ParameterArray]:
    return [ParameterArray((*prefix, *a.path), part or a.part, a.shape, a.axes) for a in arrays]


def _stacked(prefix: tuple[str, ...], count: int, arrays: Sequence[ParameterArray]) -> list[ParameterArray]:
    return [ParameterArray((*prefix, *a.path), a.part, (count, *a.shape), ("layers", *a.axes)) for a in arrays]


def _layer(model: ModelConfig, kind: str) -> list[ParameterArray]:
    dim = model.dim
    arrays = [ParameterArray((name, "scale"), "norm", (dim,), ("norm",)) for name in ("attention_norm", "feed_forward_norm")]
    arrays += _prefixed(("attention",), list(_attention(model)))
    if kind == "dense":
        assert model.mlp_dim is not None
        arrays += _prefixed(("mlp",), _swiglu(dim, model.mlp_dim, "mlp"))
    else:
        assert model.experts is not None
        arrays += _prefixed(("moe",), list(_moe(dim, model.experts)))
    streams = model.mhc.num_streams
    if streams > 1:
        maps = 2 * streams + streams * streams
        connection = [
            ParameterArray(("norm",), "mhc", (streams, dim), ("streams", "norm")),
            ParameterArray(("projection",), "mhc", (maps, streams, dim), (None, "streams", "embed")),
            ParameterArray(("alpha",), "mhc", (3,), (None,)),
            ParameterArray(("beta",), "mhc", (maps,), (None,)),
        ]
        for name in ("attention_connection", "feed_forward_connection"):
            arrays += _prefixed((name,), connection)
    return arrays


def _attention(model: ModelConfig) -> Iterator[ParameterArray]:
    dim, mla, heads = model.dim, model.mla, model.num_heads
    q_in = mla.q_lora_rank or dim
    if mla.q_lora_rank is not None:
        yield ParameterArray(("q_down",), "mla", (dim, q_in), ("embed", "lora"))
        yield ParameterArray(("q_norm", "scale"), "mla", (q_in,), ("norm",))
    yield ParameterArray(("q_up",), "mla", (q_in, heads * mla.qk_head_dim), ("embed", "heads"))
    yield ParameterArray(("kv_down",), "mla", (dim, mla.kv_lora_rank + mla.qk_rope_head_dim), ("embed", "lora"))
    yield ParameterArray(("kv_norm", "scale"), "mla", (mla.kv_lora_rank,), ("norm",))
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield ParameterArray(("kv_up",), "mla", (mla.kv_lora_rank, up), ("lora", "heads_embed"))
    yield ParameterArray(("out",), "mla", (dim, heads * mla.v_head_dim), ("embed", "heads"))


def _swiglu(dim: int, hidden: int, part: str) -> list[ParameterArray]:
    return [ParameterArray((name,), part, (dim, hidden), ("embed", "mlp")) for name in ("gate", "up", "down")]


def _moe(dim: int, experts: ExpertsConfig) -> Iterator[ParameterArray]:
    yield ParameterArray(("router",), "router", (dim, experts.num_experts), ("embed", "router_experts"))
    for name in ("expert_gate", "expert_up", "expert_down"):
        shape = (experts.num_experts, experts.expert_dim, dim)
        yield ParameterArray((name,), "experts", shape, ("experts", "expert_mlp", "expert_embed"))
    if experts.num_shared_experts:
        yield from _prefixed(("shared",), _swiglu(dim, experts.num_shared_experts * experts.expert_dim, "shared"))


def _engram(model: ModelConfig, layer: int, mesh: MeshAxes | None) -> list[ParameterArray]:
    engram, streams, dim = model.engram, model.mhc.num_streams, model.dim
    assert engram is not None
    rows, table_axes = num_table_rows(engram, layer), ("engram_rows", "engram_dim")
    if mesh is not None:
        shards = num_row_shards(engram, mesh)
        if shards is None:
            table_axes = ("engram_all_rows", "engram_columns")
        else:
            rows = num_padded_rows(rows, shards)
    wide = engram.embedding_dim
    return [
        ParameterArray(("table",), "engram_table", (rows, engram.head_dim), table_axes),
        ParameterArray(("key_kernel",), "engram", (wide, streams, dim), ("embed", "streams", "dim")),
        ParameterArray(("key_bias",), "engram", (streams, dim), ("streams", "dim")),
        ParameterArray(("value_kernel",), "engram", (wide, dim), ("embed", "dim")),
        ParameterArray(("value_bias",), "engram", (dim,), ("dim",)),
        *(
            ParameterArray((*name, "scale"), "engram", (streams, dim), ("streams", "norm"))
            for name in (("key_norm",), ("query_norm",), ("short_conv", "norm"))
        ),
        ParameterArray(("short_conv", "kernel"), "engram", (engram.kernel_size, streams, dim), ("kernel", "streams", "dim")),
    ]


def num_row_shards(engram: EngramConfig, mesh: MeshAxes) -> int | None:
    """Pieces that the rows of an Engram table are cut in, to which they are padded; None where it is cut by columns."""
    shards = num_shards("engram_rows", mesh)
    return None if engram.head_dim % (LANES * shards) == 0 else shards


def count_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters by part, over all devices: embed, head, norm, mla, mlp, router, experts, shared, mhc, engram, engram_table, mtp.

    MTP modules are a part of their own, and not in the published size of a main model. The router's bias is state, no parameter.
    """
    counts: dict[str, int] = {}
    for array in parameter_arrays(model):
        counts[array.part] = counts.get(array.part, 0) + array.num_parameters
    return counts


@dataclass(frozen=True)
class ArgumentBytes:
    """What the compiled step takes as arguments on one device."""

    parameters: int
    first_moment: int
    second_moment: int
    router_bias: int
    step: int
    batch: int

    @property
    def state(self) -> int:
        """Everything that a donating step updates in place."""
        return self.parameters + self.first_moment + self.second_moment + self.router_bias + self.step

    @property
    def total(self) -> int:
        return self.state + self.batch


def argument_bytes(config: StepConfig, *, tiled: bool = True) -> ArgumentBytes:
    """Argument bytes of one device: as a TPU lays them out, or the logical bytes where not `tiled` (CPU, GPU)."""
    model, train, mesh = config.model, config.train, config.axes
    arrays = parameter_arrays(model, mesh)

    def total(dtype: str) -> int:
        return sum(_bytes(shard_shape(array.shape, array.axes, mesh), DTYPE_BYTES[dtype], tiled) for array in arrays)

    moment = total(train.moment_dtype or train.param_dtype)
    bias = 0
    if model.experts is not None and model.experts.bias:
        stacks = [run.length for run in layer_runs(model) if run.kind == "moe"]
        stacks += [model.mtp.depth] if model.mtp.depth and model.num_moe_layers else []
        bias = sum(_bytes((count, model.experts.num_experts), 4, tiled) for count in stacks)
    batch = shard_shape((config.global_batch, train.seq_len), ("batch", "seq"), mesh)
    return ArgumentBytes(
        parameters=total(train.param_dtype),
        first_moment=moment,
        second_moment=moment,
        router_bias=bias,
        step=_bytes((), 4, tiled),
        batch=BATCH_ARRAYS * _bytes(batch, 4, tiled),
    )


def shard_shape(shape: Sequence[int], axes: Sequence[str | None], mesh: MeshAxes) -> tuple[int, ...]:
    """The part of an array that one device holds; sizes are taken to divide (`axes.check_divides`)."""
    return tuple(size // num_shards(axis, mesh) for size, axis in zip(shape, axes, strict=True))


def num_shards(axis: str | None, mesh: MeshAxes) -> int:
    """Pieces that a dim with this logical axis is cut in; 1 for None."""
    sizes = mesh.as_dict()
    return math.prod(sizes[mesh_axis] for mesh_axis in (RULES[axis] if axis is not None else ()))


def _bytes(shape: Sequence[int], itemsize: int, tiled: bool) -> int:
    return padded_bytes(shape, itemsize) if tiled else math.prod(shape) * itemsize


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array of 2- or 4-byte elements in HBM, in the layout the TPU compiler gives an argument.

    A tile is 128 elements of one dim by 1, 2, 4 or 8 of another (by 2 at least for 2-byte elements, which are packed in pairs); the
    compiler takes the two dims for which padding to whole tiles costs least. One dim alone is tiled by a power of two from 128 to
    1024. A scalar takes 512 bytes.
    """
    packing = 4 // itemsize
    if not shape:
        return 512
    if len(shape) == 1:
        tile = min(1024, max(128 * packing, _power_of_two(shape[0])))
        return _up(shape[0], tile) * itemsize

    def padded(rows: int, lanes: int) -> int:
        others = math.prod(shape) // (shape[rows] * shape[lanes])
        tile = max(packing, min(8, _power_of_two(shape[rows])))
        return others * _up(shape[rows], tile) * _up(shape[lanes], LANES) * itemsize

    return min(padded(*dims) for dims in permutations(range(len(shape)), 2))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def tokens_per_device(config: StepConfig) -> int:
    """Tokens of one device's part of the batch and sequence."""
    return config.global_batch // config.axes.batch_shards * (config.train.seq_len // config.axes.context)


def receive_rows(num_tokens: int, *, num_chosen: int, num_experts: int, num_ranks: int, buffer_factor: float) -> int:
    """Rows of one rank's receive buffer, for `num_tokens` tokens on each sending rank: what the exchange reserves, and what is reported.

    With T = num_tokens * num_chosen assignments a rank: int(T * min(num_ranks, num_experts / num_chosen)) for factor -1, the most that can
    arrive, since a token's experts are distinct; int(T * factor) for a positive factor, and never more than can arrive. One rank sends
    to no one and holds its own T rows, whatever the factor.
    """
    # In integers: T * num_experts / num_chosen is num_tokens * num_experts exactly, where a float quotient can fall one row short.
    worst = num_tokens * min(num_ranks * num_chosen, num_experts)
    if buffer_factor == -1 or num_ranks == 1:
        return worst
    return max(1, min(int(num_tokens * num_chosen * buffer_factor), worst))


def moe_receive_rows(config: StepConfig, program: ProgramName) -> int:
    """Rows of one device's receive buffer, for one chunk of tokens; the worst case for dropless. 0 for a model without experts."""
    experts, moe = config.model.experts, config.moe
    if experts is None:
        return 0
    dropless = program == "dropless"
    return receive_rows(
        tokens_per_device(config) // (moe.dropless.token_chunks if dropless else 1),
        num_chosen=experts.num_experts_per_token,
        num_experts=experts.num_experts,
        num_ranks=config.axes.expert,
        buffer_factor=-1.0 if dropless else moe.ragged_buffer_factor,
    )


def moe_receive_bytes(config: StepConfig, program: ProgramName) -> int:
    """One receive buffer: rows * dim in the compute dtype. A backward pass holds two."""
    return moe_receive_rows(config, program) * config.model.dim * DTYPE_BYTES[config.train.dtype]


def saved_carry_bytes(config: StepConfig) -> int:
    """What full remat keeps of the forward pass: the residual streams before each layer, MTP apart."""
    model = config.model
    return model.num_layers * tokens_per_device(config) * model.mhc.num_streams * model.dim * DTYPE_BYTES[config.train.dtype]
