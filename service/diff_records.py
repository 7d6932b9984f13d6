"""What a comparison of two reports says, as frozen pydantic models: for the command line, the compare page and later the gate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from service.records import Finding, Record


class FieldDiff(Record):
    """A value that is not the same on both sides; null where a side has none."""

    path: str
    base: Any
    head: Any


class PartDiff(Record):
    """One part of a total on both sides; 0 where a side does not have it, null where it is not known."""

    name: str
    base: int | None
    head: int | None
    delta: int | None


class BufferDiff(Record):
    """Buffers at the peak that are alike on both sides, or are on one side only; bytes of all of them together."""

    change: Literal["appeared", "gone", "grew", "shrank", "moved", "equal", "unlisted"] = Field(
        description="moved: same class, dtype and shape under another scope; unlisted: the buffers too small for either report's list"
    )
    class_: str = Field(alias="class")
    module: str
    scope: str
    dtype: str
    base_shape: tuple[int, ...] | None
    head_shape: tuple[int, ...] | None
    base_count: int
    head_count: int
    base_bytes: int
    head_bytes: int
    delta_bytes: int

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)


class CollectiveDiff(Record):
    """Collectives of one kind, axes, module and phase on both sides; a side without them counts 0, an unknown number is null."""

    kind: str
    axes: tuple[str, ...] | None
    link: str
    module: str
    phase: str | None
    static_count: PartDiff
    per_step_count: PartDiff
    payload_bytes: PartDiff
    wire_bytes: PartDiff


class ReportDiff(Record):
    """What changed between two reports; deltas are head - base."""

    is_comparable: bool = Field(description="same program, topology, depth and toolchain: a difference is then the code's or the spec's")
    incomparable: tuple[FieldDiff, ...] = Field(description="what makes it incomparable: toolchain, topology, program or depth")
    spec: tuple[FieldDiff, ...] = Field(description="fields of the spec that differ; empty where the specs were not given")
    findings: tuple[Finding, ...] = Field(default=(), description="of the change: a remat or offload policy without effect")
    totals: tuple[PartDiff, ...]
    classes: tuple[PartDiff, ...] = Field(description="every class of either side; the deltas sum to the peaks' difference")
    modules: tuple[PartDiff, ...] = Field(description="every module of either side; the deltas sum to the peaks' difference")
    buffers: tuple[BufferDiff, ...] = Field(description="largest change first; the deltas sum to the peaks' difference")
    collectives: tuple[CollectiveDiff, ...] = Field(description="those that differ, largest change of wire bytes first")
    halo: tuple[PartDiff, ...] = Field(description="payload bytes of each exchange and phase of either side")
