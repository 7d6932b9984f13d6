"""What pages are made of: one frozen dataclass per template, built from records; templates print these and compute nothing.

Here is what pages share, and the small pages; larger ones have a module of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from service.compile.catalog import FAMILIES, find_topology, named_topologies
from service.errors import Problem
from service.models.config import PRESETS, ModelConfig
from service.records import JobStatus, ReportStatus
from service.verdict_text import TITLES


@dataclass(frozen=True)
class Verdict:
    """An answer in words, and the CSS class that colours it; colour never stands alone."""

    css_class: str
    title: str
    sentence: str = ""


VERDICTS: Mapping[ReportStatus, Verdict] = {
    ReportStatus.OK: Verdict("fits", TITLES[ReportStatus.OK]),
    ReportStatus.DOES_NOT_FIT: Verdict("over", TITLES[ReportStatus.DOES_NOT_FIT]),
    ReportStatus.UNKNOWN: Verdict("open", TITLES[ReportStatus.UNKNOWN]),
    ReportStatus.FAILED: Verdict("failed", TITLES[ReportStatus.FAILED]),
}

JOB_STATES: Mapping[JobStatus, Verdict] = {
    JobStatus.QUEUED: Verdict("waiting", "Queued"),
    JobStatus.RUNNING: Verdict("running", "Running"),
    JobStatus.SUCCEEDED: Verdict("done", "Done"),
    JobStatus.FAILED: Verdict("failed", "Failed"),
    JobStatus.CANCELLED: Verdict("cancelled", "Cancelled"),
}


@dataclass(frozen=True)
class Moment:
    """An instant as people read it, and as machines do."""

    text: str
    iso: str


def moment(instant: datetime | None) -> Moment | None:
    """`instant` in UTC to the second; None stays None."""
    if instant is None:
        return None
    utc = instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    return Moment(f"{utc:%Y-%m-%d %H:%M:%S}", utc.isoformat())


@dataclass(frozen=True)
class TopologyLine:
    """One named topology."""

    name: str
    shape: str
    num_chips: int
    num_devices: int
    wraps: str


@dataclass(frozen=True)
class FamilyLine:
    """One TPU generation, with its named slices."""

    name: str
    title: str
    counts: str
    """What the number in a user's name counts."""
    capacity_bytes: int | None
    topologies: tuple[TopologyLine, ...]


@dataclass(frozen=True)
class PresetLine:
    """One model that a spec can start from."""

    name: str
    description: str
    model: ModelConfig
    parts: str
    """Mechanisms switched on beyond attention and feed-forward."""


@dataclass(frozen=True)
class CatalogContext:
    """catalog.html: the models and the topologies that can be named in a spec."""

    title: str
    presets: tuple[PresetLine, ...]
    families: tuple[FamilyLine, ...]


def catalog_context(*, capacities: Mapping[str, int]) -> CatalogContext:
    """The catalogue; `capacities` by family, where they are known."""
    return CatalogContext(
        title="Catalog",
        presets=tuple(_preset_line(name) for name in PRESETS),
        families=tuple(_family_line(name, capacities.get(name)) for name in FAMILIES),
    )


def _preset_line(name: str) -> PresetLine:
    make = PRESETS[name]
    model = make()
    parts = [
        label
        for label, is_on in (
            ("Engram", model.engram is not None),
            (f"mHC {model.mhc.num_streams}", model.mhc.num_streams > 1),
            (f"MTP {model.mtp.depth}", model.mtp.depth > 0),
            ("MoE", model.experts is not None),
        )
        if is_on
    ]
    return PresetLine(name, (make.__doc__ or "").strip().splitlines()[0], model, ", ".join(parts))


def _family_line(name: str, capacity_bytes: int | None) -> FamilyLine:
    family = FAMILIES[name]
    per_chip = "devices, two a chip" if family.devices_per_chip == 2 else "cores, two a chip"
    return FamilyLine(
        name=name,
        title=family.title,
        counts="chips" if family.name_counts_per_chip == 1 else per_chip,
        capacity_bytes=capacity_bytes,
        topologies=tuple(
            TopologyLine(
                name=topology.name,
                shape=topology.shape.replace("x", "×"),
                num_chips=topology.num_chips,
                num_devices=topology.num_devices,
                wraps=" ".join("xyz"[i] for i, wraps in enumerate(topology.wraps) if wraps) or "none",
            )
            for topology in named_topologies(name)
        ),
    )


def topology_sentence(name: str | None, slices: int) -> str:
    """A topology with its counts, `v5p-512 · 4×8×8 · 256 chips · 256 devices`; a name that is no longer known stands alone."""
    if name is None:
        return "no topology: real devices"
    try:
        topology = find_topology(name, slices)
    except ValueError:
        return name
    prefix = f"{slices} slices of " if slices > 1 else ""
    return f"{prefix}{topology.name} · {topology.shape.replace('x', '×')} · {topology.num_chips} chips · {topology.num_devices} devices"


@dataclass(frozen=True)
class Example:
    """A spec to start from."""

    name: str
    text: str


@dataclass(frozen=True)
class SubmitContext:
    """submit.html: a spec to weigh, and everything that is wrong with it."""

    title: str
    text: str
    problems: tuple[Problem, ...] = ()
    examples: tuple[Example, ...] = ()
    depth: str = "memory"
    force: bool = False


@dataclass(frozen=True)
class ErrorContext:
    """error.html: any error of a page, in words."""

    title: str
    status: int
    detail: str
    problems: tuple[Problem, ...]
