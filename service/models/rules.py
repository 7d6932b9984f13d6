"""The one table of logical-to-mesh rules, as data; no JAX here, so that a spec can be checked against it before a child starts."""

from __future__ import annotations

from collections.abc import Mapping

RULES: Mapping[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "streams": (),
    "dim": (),
    # weights: state that is not experts' is cut over fsdp, expert and context together
    "embed": ("fsdp", "expert", "context"),
    "lora": (),
    "heads_embed": ("tensor", "fsdp", "expert", "context"),
    "head_dim": (),
    "layers": (),
    "norm": (),
    "experts": ("expert",),
    "expert_embed": (),
    "expert_mlp": ("fsdp", "context", "tensor"),
    "router_experts": (),
    "engram_rows": ("fsdp", "expert", "context"),
    "engram_dim": (),
    "engram_all_rows": (),
    "engram_columns": ("fsdp", "expert", "context"),
    "channels": (),
    "kernel": (),
}
"""Logical axis to the mesh axes it is cut over. An axis that is not here is an error, never a replica."""
