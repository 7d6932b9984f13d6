"""Products of sizes that must stay within what an index or a byte count can hold; no JAX here.

Each field has a bound of its own, far above anything real, and fields that pass can still multiply to what no compiler can express. What
is only too large for a device is no mistake: that it does not fit is a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from service.errors import Problem
from service.models.config import MeshAxes, ModelConfig, StepConfig
from service.models.costs import moe_receive_rows, parameter_arrays
from service.models.primes import INT32_MAX
from service.spec_sharding import cut_dims

MAX_PARAMETERS = 2**48
"""Of a whole model. An array of 4-byte elements can be padded 1024-fold, and the state holds three: below 2**62 bytes in all."""
MAX_ELEMENTS = 2**56
"""Of one intermediate, over all devices and layers: 2**58 bytes, so that the sum of a program's stays within int64 too."""


def check_tokens(train: Any, mesh: Any) -> Iterator[Problem]:
    """Positions, and rows of what has one row a token, are numbered in int32."""
    batch = round(train.per_device_batch * mesh.num_devices)
    if batch * train.seq_len > INT32_MAX:
        yield Problem(
            "train.seq_len",
            train.seq_len,
            f"{batch:,} sequences of {train.seq_len:,} are {batch * train.seq_len:,} tokens a step, more than int32 can number",
            f"at most {INT32_MAX // batch:,}, or a smaller per_device_batch" if batch <= INT32_MAX else "a smaller per_device_batch",
        )


def check_dims(model: ModelConfig, mesh: MeshAxes) -> Iterator[Problem]:
    """No dim of a parameter is beyond an int32 index. Rows of Engram tables have a check of their own."""
    told: set[str] = set()
    for dim in cut_dims(model, mesh):
        if dim.size > INT32_MAX and dim.field not in told:
            told.add(dim.field)
            yield Problem(
                f"model.{dim.field}",
                dim.value,
                f"gives {dim.array} a dim of {dim.size:,}, more than int32 can index",
                f"at most {INT32_MAX * dim.value // dim.size:,} with the other sizes as they are",
            )


def check_parameters(model: ModelConfig, mesh: MeshAxes) -> Iterator[Problem]:
    """All parameters together. Takes a model whose layers can be, and whose Engram rows are within int32."""
    arrays = parameter_arrays(model, mesh)
    total = sum(array.num_parameters for array in arrays)
    if total > MAX_PARAMETERS:
        largest = max(arrays, key=lambda array: array.num_parameters)
        shape = " × ".join(f"{size:,}" for size in largest.shape)
        yield Problem(
            "model",
            total,
            f"has {total:,} parameters; {'.'.join(largest.path)} alone is {shape}",
            f"sizes that multiply to at most {MAX_PARAMETERS:,} parameters",
        )


def check_intermediates(model: ModelConfig, train: Any, mesh: MeshAxes, context: Any, moe: Any) -> Iterator[Problem]:
    """The largest of what a step computes. Takes sizes that divide."""
    config = StepConfig(model=model, train=train, axes=mesh, context=context, moe=moe)
    rows = moe_receive_rows(config, "candidate"), moe_receive_rows(config, "dropless")
    if max(rows) > INT32_MAX:
        path, given = ("train.seq_len", train.seq_len) if rows[0] > INT32_MAX else ("moe.dropless.token_chunks", moe.dropless.token_chunks)
        yield Problem(
            path,
            given,
            f"each device would receive up to {max(rows):,} rows of its experts' tokens, more than int32 can number",
            "fewer tokens on each device, or a smaller ragged_buffer_factor" if rows[0] > INT32_MAX else "more chunks",
        )
    name, elements = max(intermediates(config), key=lambda pair: pair[1])
    if elements > MAX_ELEMENTS:
        yield Problem(
            "train.seq_len",
            train.seq_len,
            f"{name} would have {elements:,} elements over all devices and layers",
            f"shorter sequences, a smaller batch or narrower sizes, so that they are at most {MAX_ELEMENTS:,}",
        )


def intermediates(config: StepConfig) -> Iterator[tuple[str, int]]:
    """Name and elements, over all devices and layers, of what a step computes beside its parameters, whether or not it is ever whole."""
    model, train = config.model, config.train
    mla, heads = model.mla, model.num_heads
    tokens = config.global_batch * train.seq_len
    widths = {
        "the residual streams": model.mhc.num_streams * model.dim,
        "the queries": heads * mla.qk_head_dim,
        "the keys and values": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
        "the latents": (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim,
        "the hidden values of the dense layers": model.mlp_dim or 0,
    }
    if train.attention == "dot_product":
        widths["the attention scores"] = heads * train.seq_len
    if (experts := model.experts) is not None:
        widths["the router's scores"] = experts.num_experts
        widths["the hidden values of the shared experts"] = experts.num_shared_experts * experts.expert_dim
        rows = max(moe_receive_rows(config, "candidate"), moe_receive_rows(config, "dropless")) * config.axes.num_devices
        yield "the experts' rows", model.num_layers * rows * max(model.dim, experts.expert_dim)
    if model.engram is not None:
        widths["what Engram reads"] = model.engram.embedding_dim
    for name, width in widths.items():
        yield name, model.num_layers * tokens * width
    yield "the logits", tokens * model.vocab_size
