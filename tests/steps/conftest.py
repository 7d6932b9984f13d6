"""Small configurations for tests of real steps: every part on, sizes pairwise different, on eight CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.models.config import (
    ContextConfig,
    DroplessConfig,
    EngramConfig,
    ExpertsConfig,
    MeshAxes,
    MhcConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    StepConfig,
    TrainConfig,
)

MODEL = ModelConfig(
    vocab_size=80,
    num_layers=2,
    first_num_dense_layers=1,
    dim=24,
    num_heads=8,
    mla=MlaConfig(q_lora_rank=16, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6),
    mlp_dim=28,
    experts=ExpertsConfig(num_experts=6, num_experts_per_token=2, expert_dim=16, num_groups=3, num_groups_per_token=2),
    engram=EngramConfig(layers=(1,), max_ngram=2, num_heads=2, head_dim=12, base_sizes=(37,), kernel_size=4),
    mhc=MhcConfig(num_streams=2),
    mtp=MtpConfig(depth=1),
)


@pytest.fixture
def make_config() -> Callable[..., StepConfig]:
    """A step over fsdp 2 × expert 2 × context 2 with any section replaced."""

    def make(**changes: Any) -> StepConfig:
        sections: dict[str, Any] = {
            "model": MODEL,
            "train": TrainConfig(seq_len=48, per_device_batch=0.5, dtype="float32", param_dtype="float32"),
            "axes": MeshAxes(fsdp=2, expert=2, context=2),
            "context": ContextConfig(),
            "moe": MoeConfig(ragged_buffer_factor=0.75, retry_when_tokens_dropped=True, dropless=DroplessConfig(token_chunks=2)),
        }
        return StepConfig(**(sections | changes))

    return make
