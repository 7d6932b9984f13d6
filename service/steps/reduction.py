"""`tiny-of-same-shape`: a model small enough for any device with every mechanism of the full one kept; no JAX here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from service.models.config import EngramConfig, ExpertsConfig, MeshAxes, MlaConfig, ModelConfig
from service.models.costs import num_shards

_DIM, _MLP, _EXPERT_WIDTH, _HEADS, _VOCABULARY = 64, 96, 48, 4, 512
_MOE_LAYERS, _EXPERTS, _ROWS = 2, 8, 251


def reduce_model(model: ModelConfig, axes: MeshAxes) -> ModelConfig:
    """`model` with few layers, experts and table rows and narrow widths, each divisible over the mesh wherever the model's own are.

    Kept as they are: dense before MoE layers, query with or without low rank, YaRN, the router's rule with its groups, bias and shared
    experts, Engram on a layer of its own with its n-gram orders, kernel and so its halo, mHC's streams, MTP's depth. A size that is smaller
    already stays, and a large mesh leaves larger sizes.
    """
    stored = num_shards("embed", axes)
    dense = min(model.first_num_dense_layers, 1)
    num_layers = min(model.num_layers, dense + _MOE_LAYERS) if model.num_moe_layers else min(model.num_layers, _MOE_LAYERS)
    first_dense = dense if model.num_moe_layers else num_layers
    return model.model_copy(
        update={
            "vocab_size": _fit(_VOCABULARY, model.vocab_size, num_shards("vocab", axes)),
            "num_layers": num_layers,
            "first_num_dense_layers": first_dense,
            "dim": _fit(_DIM, model.dim, stored),
            **_reduce_attention(model, axes),
            "mlp_dim": None if model.mlp_dim is None else _fit(_MLP, model.mlp_dim, num_shards("mlp", axes)),
            "experts": None if model.experts is None else _reduce_experts(model.experts, axes),
            "engram": None if model.engram is None else _reduce_engram(model.engram, num_layers, model.vocab_size, stored),
        }
    )


def _fit(target: int, size: int, multiple: int) -> int:
    """`size`, or the multiple next above `target` where that is smaller."""
    return min(size, math.ceil(target / multiple) * multiple)


def _missing_factor(shards: int, size: int) -> int:
    """What `size` is to be multiplied by, or by a multiple of it, so that it divides over `shards`."""
    return shards // math.gcd(shards, size)


def _reduce_attention(model: ModelConfig, axes: MeshAxes) -> dict[str, Any]:
    """`num_heads` and `mla`. Keys and values of all heads together are cut over more shards than there may be heads."""
    mla = model.mla
    reduced = MlaConfig(
        q_lora_rank=None if mla.q_lora_rank is None else _fit(24, mla.q_lora_rank, num_shards("embed", axes)),
        kv_lora_rank=min(mla.kv_lora_rank, 16),
        qk_nope_head_dim=min(mla.qk_nope_head_dim, 12),
        qk_rope_head_dim=min(mla.qk_rope_head_dim, 8),
        v_head_dim=min(mla.v_head_dim, 20),
    )
    whole = num_shards("heads", axes)

    def multiple(mla: MlaConfig) -> int:
        return math.lcm(whole, _missing_factor(num_shards("heads_embed", axes), mla.qk_nope_head_dim + mla.v_head_dim))

    if model.num_heads % multiple(reduced):
        # No number of heads as narrow as these is both small enough and divisible; the model's own width is.
        reduced = reduced.model_copy(update={"qk_nope_head_dim": mla.qk_nope_head_dim, "v_head_dim": mla.v_head_dim})
    return {"num_heads": _fit(_HEADS, model.num_heads, multiple(reduced)), "mla": reduced}


def _reduce_experts(experts: ExpertsConfig, axes: MeshAxes) -> ExpertsConfig:
    # A divisor of the model's, so that its experts, if no fewer will do, divide in groups as well.
    num_groups = max((n for n in range(2, 5) if experts.num_groups % n == 0), default=experts.num_groups)
    # Whole groups on whole ranks, two experts or more in a group, and no fewer than a token chooses.
    multiple = math.lcm(num_groups, axes.expert)
    chosen = min(experts.num_experts_per_token, 2)
    least = max(_EXPERTS, 2 * num_groups, 2 * axes.expert)
    num_experts = _fit(least, experts.num_experts, multiple)
    return experts.model_copy(
        update={
            "num_experts": num_experts,
            "num_experts_per_token": chosen,
            "expert_dim": _fit(_EXPERT_WIDTH, experts.expert_dim, num_shards("expert_mlp", axes)),
            "num_groups": num_groups,
            "num_groups_per_token": min(experts.num_groups_per_token, max(1, num_groups // 2)),
        }
    )


def _reduce_engram(engram: EngramConfig, num_layers: int, vocab_size: int, stored: int) -> EngramConfig:
    # One Engram layer where the model's first stands, if that layer is left, and never so that two share one.
    layers = sorted({min(layer, num_layers - 1) for layer in engram.layers})[:2]
    num_heads = min(engram.num_heads, 2)
    if engram.head_dim % _missing_factor(stored, num_heads * engram.num_orders):
        num_heads = engram.num_heads
    return engram.model_copy(
        update={
            "layers": tuple(layers),
            "num_heads": num_heads,
            "head_dim": _fit(32, engram.head_dim, _missing_factor(stored, num_heads * engram.num_orders)),
            "base_sizes": tuple(min(size, _ROWS + 56 * order) for order, size in enumerate(engram.base_sizes)),
            "pad_id": min(engram.pad_id, min(vocab_size, _VOCABULARY) - 1),
        }
    )


def describe_reduction(full: ModelConfig, reduced: ModelConfig) -> dict[str, tuple[str, str]]:
    """Dotted path of each field that differs to its value in full and reduced."""
    before, after = dict(_leaves(full.model_dump(mode="json"))), dict(_leaves(reduced.model_dump(mode="json")))
    return {path: (str(before[path]), str(value)) for path, value in after.items() if before.get(path) != value}


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
