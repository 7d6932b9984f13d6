"""Compares two reports: which classes, modules, buffers and collectives make up the difference of their peaks, to the byte. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from service.diff_records import BufferDiff, CollectiveDiff, FieldDiff, PartDiff, ReportDiff
from service.records import Buffer, Collective, Finding, HaloUse, Report

_TOTALS = (
    "peak_bytes",
    "allocated_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "fragmentation_bytes",
    "padding_bytes",
    "host_bytes",
    "code_bytes",
    "capacity_bytes",
    "headroom_bytes",
    "num_parameters",
)

Change = Literal["appeared", "gone", "grew", "shrank", "moved", "equal", "unlisted"]


def diff_reports(
    base: Report, head: Report, *, base_spec: Mapping[str, Any] | None = None, head_spec: Mapping[str, Any] | None = None
) -> ReportDiff:
    """What changed from `base` to `head`. Both must have been measured; unknown numbers stay unknown.

    Raises:
        ValueError: a report has no peak, so there is nothing to compare.
    """
    for side, report in (("base", base), ("head", head)):
        if report.peak_bytes is None:
            raise ValueError(
                f"the {side} report of program {report.program!r} has status {report.status} and no peak; compare measured reports"
            )
    incomparable = tuple(_incomparable(base, head))
    spec = tuple(_differing("", base_spec, head_spec)) if base_spec is not None and head_spec is not None else ()
    return ReportDiff(
        is_comparable=not incomparable,
        incomparable=incomparable,
        spec=spec,
        findings=() if incomparable else tuple(_policy_without_effect(base, head, spec)),
        totals=tuple(_part(name, getattr(base, name), getattr(head, name)) for name in _TOTALS),
        classes=_parts(base.classes, head.classes),
        modules=_parts(base.modules, head.modules),
        buffers=tuple(_buffers(base, head)),
        collectives=tuple(_collectives(base, head)),
        halo=_halo(base.halo, head.halo),
    )


def _policy_without_effect(base: Report, head: Report, spec: Sequence[FieldDiff]) -> Iterable[Finding]:
    """A finding where only what is kept for the backward pass was changed, and not one byte of what is kept."""
    fields = [field.path for field in spec if field.path != "scenario"]
    if not fields or not all(path.startswith("train.remat.") for path in fields):
        return
    before, after = [(r.peak_bytes, r.allocated_bytes, r.host_bytes, r.classes.get("saved_activations", 0)) for r in (base, head)]
    if before == after:
        yield Finding(
            kind="policy_without_effect",
            message=f"{' and '.join(fields)} changed, and peak, allocated, host and saved bytes are the same to the byte",
            bytes=0,
            module=None,
            spec_field=fields[0],
            suggestion="name tensors that this model has and the policy does not keep already",
        )


def _incomparable(base: Report, head: Report) -> Iterable[FieldDiff]:
    """Differences that are neither the code's nor the spec's own; the model's source is the code and not among them."""
    for name in ("program", "depth"):
        if getattr(base, name) != getattr(head, name):
            yield FieldDiff(path=name, base=getattr(base, name), head=getattr(head, name))
    yield from _differing("topology", base.topology, head.topology)
    toolchains = [report.toolchain.model_dump(mode="json", exclude={"model_source"}) if report.toolchain else {} for report in (base, head)]
    yield from _differing("toolchain", *toolchains)


def _differing(path: str, base: Any, head: Any) -> Iterable[FieldDiff]:
    """The leaves that differ, by dotted path."""
    if isinstance(base, Mapping) and isinstance(head, Mapping):
        for key in dict.fromkeys((*base, *head)):
            yield from _differing(f"{path}.{key}" if path else str(key), base.get(key), head.get(key))
    elif base != head:
        yield FieldDiff(path=path, base=base, head=head)


def _part(name: str, base: int | None, head: int | None) -> PartDiff:
    return PartDiff(name=name, base=base, head=head, delta=None if base is None or head is None else head - base)


def _parts(base: Mapping[str, int], head: Mapping[str, int]) -> tuple[PartDiff, ...]:
    parts = [_part(name, base.get(name, 0), head.get(name, 0)) for name in dict.fromkeys((*base, *head))]
    return tuple(sorted(parts, key=lambda part: (-abs(part.delta or 0), part.name)))


@dataclass(frozen=True, slots=True)
class _Alike:
    """Buffers of one side that nothing tells apart."""

    sample: Buffer
    count: int
    bytes: int


def _buffers(base: Report, head: Report) -> Iterable[BufferDiff]:
    """Every buffer of either list matched: first by scope and shape, then by scope, then by shape; the rest appeared or went.

    Reports list their largest buffers; what is smaller is one entry where its bytes or its number changed, so that the deltas sum to
    the peaks' difference. Where neither did, there is none: that two sums agree does not make their buffers the same.
    """
    left, right = _alike(base.buffers), _alike(head.buffers)
    found: list[BufferDiff] = []
    for key_of in (_by_scope_and_shape, _by_scope, _by_shape):
        for before, after in _match(left, right, key_of):
            found.append(_compared(before, after, is_moved=key_of is _by_shape))
    found += [_compared(before, None) for before in left.values()]
    found += [_compared(None, after) for after in right.values()]
    unlisted = [(report.peak_bytes or 0) - sum(buffer.padded_bytes for buffer in report.buffers) for report in (base, head)]
    counts = [(report.num_buffers_at_peak or len(report.buffers)) - len(report.buffers) for report in (base, head)]
    if unlisted[0] != unlisted[1] or counts[0] != counts[1]:
        found.append(_unlisted(unlisted, counts))
    return sorted(found, key=lambda diff: (-abs(diff.delta_bytes), diff.change == "equal", -diff.head_bytes, diff.scope))


def _unlisted(sizes: list[int], counts: list[int]) -> BufferDiff:
    return BufferDiff(
        change="unlisted",
        class_="",
        module="",
        scope="",
        dtype="",
        base_shape=None,
        head_shape=None,
        base_count=counts[0],
        head_count=counts[1],
        base_bytes=sizes[0],
        head_bytes=sizes[1],
        delta_bytes=sizes[1] - sizes[0],
    )


def _by_scope_and_shape(buffer: Buffer) -> Hashable:
    return buffer.class_, buffer.module, buffer.scope, buffer.dtype, buffer.shape


def _by_scope(buffer: Buffer) -> Hashable | None:
    # Without a scope there is nothing to know a buffer by but its shape.
    return (buffer.class_, buffer.module, buffer.scope) if buffer.scope else None


def _by_shape(buffer: Buffer) -> Hashable:
    return buffer.class_, buffer.dtype, buffer.shape


def _alike(buffers: Iterable[Buffer]) -> dict[Hashable, _Alike]:
    groups: dict[Hashable, _Alike] = {}
    for buffer in buffers:
        key = _by_scope_and_shape(buffer)
        known = groups.get(key, _Alike(buffer, 0, 0))
        groups[key] = _Alike(known.sample, known.count + 1, known.bytes + buffer.padded_bytes)
    return groups


def _match(
    left: dict[Hashable, _Alike], right: dict[Hashable, _Alike], key_of: Callable[[Buffer], Hashable | None]
) -> Iterable[tuple[_Alike, _Alike]]:
    """Take pairs with equal keys out of both sides, in order of size."""
    waiting: dict[Hashable, list[Hashable]] = {}
    for key, group in right.items():
        if (matched := key_of(group.sample)) is not None:
            waiting.setdefault(matched, []).append(key)
    for key in list(left):
        matched = key_of(left[key].sample)
        if matched is not None and waiting.get(matched):
            yield left.pop(key), right.pop(waiting[matched].pop(0))


def _compared(before: _Alike | None, after: _Alike | None, *, is_moved: bool = False) -> BufferDiff:
    sample = (after or before).sample  # type: ignore[union-attr]  # one of them is given
    sizes = (before.bytes if before else 0, after.bytes if after else 0)
    change: Change
    if before is None:
        change = "appeared"
    elif after is None:
        change = "gone"
    elif sizes[0] != sizes[1]:
        change = "grew" if sizes[1] > sizes[0] else "shrank"
    else:
        change = "moved" if is_moved else "equal"
    return BufferDiff(
        change=change,
        class_=sample.class_,
        module=sample.module,
        scope=sample.scope,
        dtype=sample.dtype,
        base_shape=before.sample.shape if before else None,
        head_shape=after.sample.shape if after else None,
        base_count=before.count if before else 0,
        head_count=after.count if after else 0,
        base_bytes=sizes[0],
        head_bytes=sizes[1],
        delta_bytes=sizes[1] - sizes[0],
    )


_COUNTED = ("static_count", "per_step_count", "payload_bytes", "wire_bytes")


def _collectives(base: Report, head: Report) -> Iterable[CollectiveDiff]:
    sides = [_by_place(report.collectives) for report in (base, head)]
    diffs = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        before, after = (side.get(key, dict.fromkeys(_COUNTED, 0)) for side in sides)
        if before != after:
            kind, axes, link, module, phase = key
            parts = {name: _part(name, before[name], after[name]) for name in _COUNTED}
            diffs.append(CollectiveDiff(kind=kind, axes=axes, link=link, module=module, phase=phase, **parts))
    return sorted(diffs, key=lambda diff: (diff.wire_bytes.delta is not None, -abs(diff.wire_bytes.delta or 0), diff.kind, diff.module))


def _by_place(collectives: Iterable[Collective]) -> dict[tuple[Any, ...], dict[str, int | None]]:
    """Counts by kind, axes, link, module and phase; a sum with an unknown part is unknown."""
    places: dict[tuple[Any, ...], dict[str, int | None]] = {}
    for collective in collectives:
        key = (collective.kind, collective.axes, collective.link, collective.module, collective.phase)
        sums = places.setdefault(key, dict.fromkeys(_COUNTED, 0))
        for name in _COUNTED:
            so_far, more = sums[name], getattr(collective, name)
            sums[name] = None if so_far is None or more is None else so_far + more
    return places


def _halo(base: Iterable[HaloUse], head: Iterable[HaloUse]) -> tuple[PartDiff, ...]:
    sides = [{f"{use.name}, {use.phase}": use.payload_bytes for use in uses} for uses in (base, head)]
    return tuple(_part(name, sides[0].get(name, 0), sides[1].get(name, 0)) for name in dict.fromkeys((*sides[0], *sides[1])))
