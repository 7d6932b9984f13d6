"""Takes collectives together for the report: by kind, axes, module and phase, with per-step bytes and the least link time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from service.compile.collectives import WIRE_FACTORS, CollectiveInstance
from service.compile.groups import DCN, ICI
from service.compile.links import least_seconds
from service.records import Collective, CollectiveTotals

_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Links:
    """Over what the program's devices are linked."""

    family: str
    devices_per_chip: int

    def least_seconds(self, wire_bytes: int | None, link: str) -> float | None:
        if wire_bytes is None:
            return None
        return least_seconds(wire_bytes, link=link, family=self.family, devices_per_chip=self.devices_per_chip)


def per_step(instance: CollectiveInstance) -> tuple[int | None, int | None, int | None]:
    """(count, payload bytes, wire bytes) of one collective per step; None where unknown. Fractions of a byte round up."""
    count = instance.count.value
    payload, wire = instance.payload_bytes, instance.wire_bytes
    return (
        count,
        None if count is None or payload is None else count * payload,
        None if count is None or wire is None else math.ceil(count * wire),
    )


def total(parts: Iterable[int | None]) -> int | None:
    """The sum; None where any part is unknown, so that nothing is lowered silently."""
    known = list(parts)
    return None if any(part is None for part in known) else sum(part for part in known if part is not None)


def group_collectives(instances: Sequence[CollectiveInstance], links: Links) -> tuple[Collective, ...]:
    """The report's collectives, most wire bytes first, unknown ones before all."""
    groups: dict[tuple[object, ...], list[CollectiveInstance]] = {}
    for instance in instances:
        reach = instance.reach
        size = 2 if instance.kind == "collective-permute" else reach.group_size
        key = (instance.kind, reach.axes, size, reach.link, instance.module, instance.phase, instance.is_compiler_made)
        groups.setdefault(key, []).append(instance)
    records = [_record(members, links) for members in groups.values()]
    return tuple(sorted(records, key=lambda c: (c.wire_bytes is not None, -(c.wire_bytes or 0), c.kind, c.module, c.phase or "")))


def _record(members: list[CollectiveInstance], links: Links) -> Collective:
    first = members[0]
    counted = [per_step(member) for member in members]
    wire_bytes = total(wire for _, _, wire in counted)
    link: Literal["ici", "dcn"] = "dcn" if first.reach.link == DCN else "ici"
    return Collective(
        kind=first.kind,
        is_known=first.is_known,
        axes=first.reach.axes,
        group_size=2 if first.kind == "collective-permute" else first.reach.group_size,
        link=link,
        module=first.module,
        phase=first.phase,
        is_compiler_made=first.is_compiler_made,
        static_count=len(members),
        per_step_count=total(count for count, _, _ in counted),
        payload_bytes=total(payload for _, payload, _ in counted),
        wire_bytes=wire_bytes,
        wire_factor=WIRE_FACTORS.get(first.kind, "unknown"),
        link_seconds=links.least_seconds(wire_bytes, first.reach.link),
        unknown_reason=_reason(members),
        names=tuple(member.name for member in members[:_MAX_NAMES]),
    )


def _reason(members: list[CollectiveInstance]) -> str | None:
    reasons: dict[str, None] = {}
    for member in members:
        if not member.is_known:
            reasons[f"opcode {member.kind} is not known to this version"] = None
        for reason in (member.count.reason, member.reach.reason):
            if reason:
                reasons[reason] = None
    return "; ".join(reasons) or None


def sum_collectives(instances: Sequence[CollectiveInstance], links: Links) -> CollectiveTotals:
    """The totals of one program."""
    counted = [(instance.reach.link, *per_step(instance)) for instance in instances]
    by_link = {link: total(wire for on, _, _, wire in counted if on == link) for link in (ICI, DCN)}
    # A link without traffic takes no time, also where its bandwidth is not published.
    seconds = [0.0 if wire == 0 else links.least_seconds(wire, link) for link, wire in by_link.items()]
    known = [second for second in seconds if second is not None]
    return CollectiveTotals(
        static_count=len(instances),
        per_step_count=total(count for _, count, _, _ in counted),
        ici_wire_bytes=by_link[ICI],
        dcn_wire_bytes=by_link[DCN],
        link_seconds=max(known) if len(known) == len(seconds) else None,
    )


def collectives_json(instances: Sequence[CollectiveInstance]) -> bytes:
    """Every collective of the program, one object each, for the artifact."""
    rows = []
    for instance in instances:
        count, payload, wire = per_step(instance)
        rows.append(
            {
                "kind": instance.kind,
                "name": instance.name,
                "computation": instance.computation,
                "axes": instance.reach.axes,
                "group_size": instance.reach.group_size,
                "link": instance.reach.link,
                "module": instance.module,
                "phase": instance.phase,
                "scope": instance.op_name,
                "is_compiler_made": instance.is_compiler_made,
                "dtypes": instance.dtypes,
                "shapes": instance.shapes,
                "per_step_count": count,
                "payload_bytes": payload,
                "wire_bytes": wire,
                "unknown_reason": _reason([instance]),
            }
        )
    return json.dumps({"collectives": rows}, separators=(",", ":")).encode()
