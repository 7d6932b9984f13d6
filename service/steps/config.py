"""What a job of kind `steps` runs: the `steps` section of a spec, as frozen data; no JAX here."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from service.models.config import Frozen, illegal

MAX_CPU_DEVICES = 64

CheckName = Literal[
    "load_balance",
    "context_parallel",
    "halo_conv",
    "mtp_shift",
    "dense_reference",
    "replay",
    "overflow_flag",
    "table_gradients",
    "loss_falls",
    "same_seed",
]

CHECKS: tuple[CheckName, ...] = get_args(CheckName)
"""Every check, in the order they are run and shown."""


class StepsConfig(Frozen):
    """Real train steps on attached devices: where, how many, and what is proven with them."""

    devices: str = Field(default="auto", description="cpu:N (N virtual devices of the host), gpu, tpu, or auto: whatever is attached")
    model: Literal["full", "tiny-of-same-shape"] = Field(
        default="full", description="tiny-of-same-shape: fewer layers and experts, narrower widths, every mechanism kept"
    )
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = Field(default=10, description="steps that are timed")
    warmup_steps: Annotated[int, Field(ge=0, le=100)] = Field(default=2, description="steps before them: real, but not timed")
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(default=0, description="of the parameters and of the data")
    matmul_precision: Literal["default", "high", "highest"] = "highest"
    look_ahead: Annotated[int, Field(ge=0, le=1)] = Field(
        default=1, description="candidate steps started before the flag of the one before is read; 1 hides the read and holds a third state"
    )
    force_overflow: Literal["none", "small_factor", "skewed_router"] = Field(
        default="none",
        description="make the candidate overflow in every step: a buffer below the mean load, or a router that prefers few experts",
    )
    checks: tuple[CheckName, ...] = Field(
        default=CHECKS, strict=False, max_length=len(CHECKS), description="those that do not apply say so"
    )
    check_steps: Annotated[int, Field(ge=1, le=1000)] = Field(default=10, description="steps of each run that a check compares")

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, devices: str) -> str:
        count = re.fullmatch(r"cpu:([1-9][0-9]?)", devices)
        if devices not in ("auto", "gpu", "tpu") and (count is None or int(count[1]) > MAX_CPU_DEVICES):
            raise illegal(f"{devices!r:.80} names no devices", f"auto, gpu, tpu, or cpu:N with N from 1 to {MAX_CPU_DEVICES}")
        return devices

    @property
    def total_steps(self) -> int:
        """Steps of the main run: warm-up and timed."""
        return self.warmup_steps + self.num_steps

    @property
    def num_cpu_devices(self) -> int | None:
        """Virtual devices asked of the host; None where other devices are asked for."""
        return int(self.devices.removeprefix("cpu:")) if self.devices.startswith("cpu:") else None
