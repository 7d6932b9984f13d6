"""Which layers run in one scan; no JAX here.

Layers of one kind in a row are one run: one stacked set of parameters and one compiled body, whatever its length. An Engram module
reads before a layer's attention as a piece of its own, so it ends the run before it and the layer after it stays of the ordinary kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.models.config import ModelConfig


@dataclass(frozen=True)
class LayerRun:
    """Layers `start` to `stop` - 1, all of one kind."""

    kind: Literal["dense", "moe"]
    start: int
    stop: int
    has_engram: bool
    """An Engram module reads before the first of these layers."""

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Name of the run's parameters: `moe_layers_3_60` holds layers 3 to 60."""
        return f"{self.kind}_layers_{self.start}_{self.stop - 1}"

    @property
    def engram_name(self) -> str:
        """Name of the Engram module before the run: `engram_1` reads before layer 1."""
        return f"engram_{self.start}"


def layer_runs(model: ModelConfig) -> tuple[LayerRun, ...]:
    """The runs of `model`, in order.

    Raises:
        ValueError: an Engram layer, or the number of dense layers, lies beyond the model's layers.
    """
    if model.first_num_dense_layers > model.num_layers:
        raise ValueError(
            f"first_num_dense_layers is {model.first_num_dense_layers} of {model.num_layers} layers; use at most {model.num_layers}"
        )
    engram = set(model.engram.layers) if model.engram else set()
    if beyond := sorted(layer for layer in engram if layer >= model.num_layers):
        raise ValueError(f"engram.layers names {beyond} and the model has layers 0 to {model.num_layers - 1}; name one of them")
    starts = sorted({0, *engram, model.first_num_dense_layers} - {model.num_layers})
    return tuple(
        LayerRun("dense" if start < model.first_num_dense_layers else "moe", start, stop, start in engram)
        for start, stop in zip(starts, [*starts[1:], model.num_layers], strict=True)
    )
