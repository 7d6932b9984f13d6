"""Lists what a spec can name: model presets and topologies."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from service.compile.catalog import FAMILIES, named_topologies
from service.models.config import PRESETS
from service.units import format_count
from weighbridge.documents import to_json


def print_catalog(what: str | None, *, as_json: bool) -> None:
    """Both lists, or the one named by `what`."""
    if as_json:
        content: dict[str, object] = {}
        if what in (None, "presets"):
            content["presets"] = [{"name": name, "model": make().model_dump(mode="json")} for name, make in PRESETS.items()]
        if what in (None, "topologies"):
            content["topologies"] = [topology.describe() for family in FAMILIES for topology in named_topologies(family)]
        click.echo(to_json(content), nl=False)
        return
    console = Console(highlight=False)
    if what in (None, "presets"):
        console.print(_presets())
    if what is None:
        console.print()
    if what in (None, "topologies"):
        console.print(_topologies())


def _presets() -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("Preset", no_wrap=True)
    for name in ("Layers", "Width", "Experts"):
        table.add_column(name, justify="right")
    table.add_column("What it is")
    for name, make in PRESETS.items():
        model = make()
        experts = f"{model.experts.num_experts_per_token} of {model.experts.num_experts}" if model.experts else "-"
        described = (make.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, str(model.num_layers), format_count(model.dim), experts, described)
    return table


def _topologies() -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("Topology", no_wrap=True)
    table.add_column("Shape", no_wrap=True)
    table.add_column("Chips", justify="right")
    table.add_column("Devices", justify="right")
    for family in FAMILIES:
        for topology in named_topologies(family):
            table.add_row(topology.name, topology.jax_name, format_count(topology.num_chips), format_count(topology.num_devices))
    return table
