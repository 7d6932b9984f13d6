"""What a spec can name: the model presets and the topologies, with every count derived."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from service.api.dependencies import SettingsDep
from service.compile.capacity_cache import CapacityCache
from service.compile.catalog import FAMILIES, Topology, named_topologies
from service.compile.toolchain import read_toolchain
from service.models.config import PRESETS, ModelConfig
from service.records import Record

router = APIRouter(prefix="/catalog", tags=["catalog"])


class Preset(Record):
    name: str
    description: str
    model: ModelConfig


class PresetList(Record):
    presets: tuple[Preset, ...]


class TopologyEntry(Record):
    """A topology with a user's name; any other shape within the family's bounds can be asked for as `family:AxBxC`."""

    name: str
    family: str
    family_title: str
    shape: str = Field(description="chips along each dim")
    jax_name: str = Field(description="what libtpu is asked for")
    num_chips: int
    num_devices: int
    devices_per_chip: int
    wraps: tuple[bool, ...] = Field(description="which dims close to a ring")
    capacity_bytes: int | None = Field(description="HBM per device as the compiler states it; null until it was asked for this topology")


class TopologyList(Record):
    topologies: tuple[TopologyEntry, ...]


@router.get("/presets", summary="Model presets")
def list_presets() -> PresetList:
    """Every preset with all its fields, each of which a spec may override."""
    return PresetList(
        presets=tuple(Preset(name=name, description=inspect.getdoc(make) or "", model=make()) for name, make in PRESETS.items())
    )


@router.get("/topologies", summary="TPU topologies")
def list_topologies(settings: SettingsDep) -> TopologyList:
    """Every topology that has a user's name, smallest first in each family."""
    cache = CapacityCache(settings.capacity_cache)
    return TopologyList(topologies=tuple(_entry(t, cache) for family in FAMILIES for t in named_topologies(family)))


def _entry(topology: Topology, cache: CapacityCache) -> TopologyEntry:
    shown: dict[str, Any] = {name: value for name, value in topology.describe().items() if name in TopologyEntry.model_fields}
    return TopologyEntry(
        **shown,
        family_title=FAMILIES[topology.family].title,
        jax_name=topology.jax_name,
        capacity_bytes=cache.find(read_toolchain(topology.arguments())),
    )
