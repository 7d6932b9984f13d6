"""Small configurations for tests of real steps: every part on, sizes pairwise different, on eight CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.models.config import ContextConfig, DroplessConfig, MeshAxes, MhcConfig, MoeConfig, MtpConfig, StepConfig, TrainConfig
from tests.small_model import EVERYTHING

assert EVERYTHING.experts is not None
assert EVERYTHING.engram is not None
MODEL = EVERYTHING.model_copy(
    update={
        "num_heads": 8,
        "experts": EVERYTHING.experts.model_copy(update={"expert_dim": 16, "bias_update_rate": 0.001}),
        "engram": EVERYTHING.engram.model_copy(update={"head_dim": 12, "kernel_size": 4}),
        "mhc": MhcConfig(num_streams=2),
        "mtp": MtpConfig(depth=1),
    }
)
"""Every size that eight devices cut divides."""


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
