"""What a job of kind `steps` keeps: every step, every check, and measured beside predicted memory, as frozen pydantic models.

Like `service.records`, which holds what compile jobs keep: bytes are integers per device unless a name says `total_`, and None means
"not known", or what the field's description says.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from service.models.config import ProgramName
from service.records import Failure, Record, Toolchain

STEPS_SCHEMA = 1
"""Version of the steps report's JSON; raised when a field changes its meaning or goes."""


class StepsStatus(StrEnum):
    """How the steps ended."""

    OK = "ok"
    """Every step ran and every check that applies passed."""
    CHECKS_FAILED = "checks_failed"
    DOES_NOT_FIT = "does_not_fit"
    """Refused before anything was allocated, or the devices ran out of memory."""
    FAILED = "failed"


class StepMetrics(Record):
    """What one execution of a step's program says; losses are None where they are not finite, which JSON cannot write."""

    loss: float | None = Field(description="what is minimised: main + weight * MTP + balance; null where not finite")
    main_loss: float | None = Field(description="next-token loss per token; null where not finite")
    mtp_loss: float | None = Field(description="mean over depths, before its weight; null without MTP or where not finite")
    balance_loss: float | None = Field(description="sum over MoE layers, weight included; null without experts or where not finite")
    tokens: int = Field(description="tokens of the main loss, over all devices")
    has_moe_overflow: bool
    dropped_fraction: tuple[float, ...] = Field(default=(), description="of the assignments, per MoE layer, MTP's last")
    load_spread: tuple[float, ...] = Field(default=(), description="largest over mean expert load, per MoE layer")


class StepRecord(Record):
    """One train step, in the order of training."""

    step: int = Field(description="counts from 0, warm-up included")
    is_warmup: bool
    program: ProgramName = Field(description="whose result counts")
    seconds: float = Field(description="from the end of the step before to the end of this one, replay included")
    tokens_per_second: float = Field(description="tokens of the main loss over `seconds`, all devices together")
    metrics: StepMetrics = Field(description="the ones that count")
    discarded: StepMetrics | None = Field(default=None, description="the candidate's, where it overflowed and the step was replayed")
    num_wasted: int = Field(default=0, description="look-ahead steps that were thrown away because they built on the discarded one")
    flags_equal: bool = Field(description="every device held the same overflow flag")

    @property
    def was_replayed(self) -> bool:
        return self.discarded is not None


class CheckStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


class CheckResult(Record):
    """One claim about the step, with the numbers that decided it."""

    name: str
    status: CheckStatus
    claim: str = Field(description="what is checked, in a sentence")
    detail: str = Field(default="", description="what was found, or why the check does not apply")
    deviation: float | None = Field(default=None, description="the largest deviation found; null where none was measured")
    tolerance: float | None = Field(default=None, description="the largest that passes; 0 asks for equal bits")
    numbers: Mapping[str, tuple[float | None, ...]] = Field(default={}, description="series that were compared, by name")
    seconds: float = 0.0


class DeviceFacts(Record):
    """The devices that ran the steps."""

    platform: Literal["cpu", "gpu", "tpu"]
    kind: str = Field(description="as the backend names it")
    num_devices: int
    memory_bytes: int | None = Field(description="that may be taken: one device's, or on CPU the host's for all; null where not told")
    memory_is_shared: bool = Field(description="all devices share `memory_bytes`: virtual devices of one host")


class Estimate(Record):
    """What the steps need at least, by closed forms and before anything is allocated, beside what there is."""

    state_bytes: int = Field(description="parameters, moments and router bias, per device")
    num_states: int = Field(description="states alive at once")
    gradient_bytes: int
    batch_bytes: int
    logits_bytes: int
    needed_bytes: int = Field(description="sum of the above, per device; a lower bound, activations not counted")
    total_needed_bytes: int = Field(description="over the devices that share the memory")
    available_bytes: int | None = Field(description="null where the backend does not tell; nothing is refused then")

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.total_needed_bytes <= self.available_bytes


class ProgramMemory(Record):
    """One program's memory as its ahead-of-time compile for these devices predicts it, per device."""

    program: ProgramName
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    allocated_bytes: int = Field(description="argument + output - alias + temp: what the runtime reserves for one execution")


class MemoryComparison(Record):
    """The most memory alive during the main run, predicted and measured."""

    state_bytes: int = Field(description="one train state, per device, as it lies there")
    num_states_held: int = Field(description="states that the loop keeps alive at once, that being computed included")
    programs: tuple[ProgramMemory, ...]
    predicted_bytes: int = Field(description="per device: the largest program with the other states beside it")
    measured_bytes: int | None = Field(description="per device; null where the backend does not tell")
    source: Literal["allocator", "host_rss_growth", "unknown"] = Field(
        description="allocator: peak bytes in use; host_rss_growth: of the child while it ran, over its devices, with all the host's noise"
    )
    total_predicted_bytes: int
    total_measured_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured_bytes is None else self.measured_bytes / self.predicted_bytes


class StepTimes(Record):
    """Distribution of the seconds of the timed steps."""

    num_steps: int
    mean_seconds: float
    min_seconds: float
    p10_seconds: float
    median_seconds: float
    p90_seconds: float
    max_seconds: float
    tokens_per_second: float = Field(description="tokens of all timed steps over their seconds, all devices together")


class StepsReport(Record):
    """What a job of kind `steps` found, as far as it came."""

    steps_schema: int = STEPS_SCHEMA
    status: StepsStatus
    failure: Failure | None = None
    phase: str = Field(description="the phase it ended in: done, or where it stopped")
    devices: DeviceFacts | None = None
    mesh: Mapping[str, int] = Field(default={}, description="axis to size, in mesh order")
    reduction: Mapping[str, tuple[str, str]] = Field(default={}, description="field of the model to (spec's, run's) value; empty: none")
    num_parameters: int | None = Field(default=None, description="total over all devices, of the model that ran")
    retry: bool = Field(default=False, description="candidate steps that overflowed were replayed with the dropless program")
    look_ahead: int | None = Field(default=None, description="steps started before a flag is read; null without retry")
    estimate: Estimate | None = None
    steps: tuple[StepRecord, ...] = ()
    expert_load: tuple[tuple[int, ...], ...] = Field(default=(), description="assignments over the run, per MoE layer and expert")
    times: StepTimes | None = Field(default=None, description="of the timed steps; null where none ended")
    checks: tuple[CheckResult, ...] = ()
    memory: MemoryComparison | None = None
    seconds: Mapping[str, float] = Field(default={}, description="wall seconds by phase")
    child_peak_rss_bytes: int | None = None
    toolchain: Toolchain | None = None
    warnings: tuple[str, ...] = ()

    @property
    def retry_seconds(self) -> tuple[float, float] | None:
        """Median seconds of a candidate step and of what a replay adds to one, warm-up apart; None unless both kinds of step were timed."""
        timed = [step for step in self.steps if not step.is_warmup]
        replayed = [step.seconds for step in timed if step.was_replayed]
        plain = [step.seconds for step in timed if not step.was_replayed]
        if not replayed or not plain:
            return None
        candidate = statistics.median(plain)
        return candidate, max(0.0, statistics.median(replayed) - candidate)

    @property
    def num_replays(self) -> int:
        return sum(step.was_replayed for step in self.steps)

    @property
    def overflow_rate(self) -> float | None:
        """Share of the steps whose candidate overflowed; None before the first step ended."""
        overflowed = sum(step.was_replayed or step.metrics.has_moe_overflow for step in self.steps)
        return overflowed / len(self.steps) if self.steps else None
