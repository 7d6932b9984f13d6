"""Reads the names JAX leaves in a program: named-scope paths with their transforms, and pytree paths of arguments.

A scope path is what `jax.named_scope` and JAX's transforms wrote into `op_name`, for example
`jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/moe/router/dot_general`. The phase is in the transforms
(`transpose` is the backward pass, `rematted_computation` within it the forward pass run again), the module in the named scopes, and the
last word is the primitive. An entry parameter carries its pytree path instead: `state['params']['layers']['moe']['router']`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

FORWARD, REMAT, BACKWARD, OPTIMIZER, INPUT = "forward", "remat", "backward", "optimizer", "input"

_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "linearize", "batch", "named_call"})
"""Wrappers around a scope's name; what is inside is the scope."""

_STRUCTURE = frozenset(
    {
        "body", "body_jaxpr", "checkpoint", "closed_call", "cond", "cond_jaxpr", "core_call", "custom_jvp_call", "custom_partitioning",
        "custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr", "main", "pallas_call", "pjit", "remat", "remat2", "rematted_computation",
        "scan", "shard_map", "while", "xla_call", "xla_pmap",
        # primitives that the compiler expands, so that they stand above the last word
        "dot_general", "ragged_all_to_all", "ragged_dot_general", "scatter-add",
    }
)  # fmt: skip
"""Words of JAX's own machinery; they say how a scope is run, not what it is."""

_PYTREE = re.compile(r"^\w+(\.\w+)*\[[^\]]*\](\[[^\]]*\]|\.\w+)*$")
"""A pytree path with at least one key in brackets: `broadcast.249` is a name the compiler gave, no path."""
_PYTREE_KEY = re.compile(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[(?:<flat index )?(\d+)>?\]|\.(\w+)")
_WRAPPED = re.compile(r"^(\w+)\((.*)\)$", re.DOTALL)
_SCOPE_NAME = re.compile(r"^[A-Za-z_][\w.\-]*$")
"""What a scope may be called; an einsum's subscripts stand in the path too and are none."""
_BRANCH = re.compile(r"^branch_\d+_fun$")
_KERNEL = re.compile(r"^(static_sparsity_)?splash(_|$)")
"""Scopes inside the bundled attention kernel; the module that calls it is what a reader knows."""

_STATE_ROLES = {
    "mu": "optimizer_first_moment",
    "nu": "optimizer_second_moment",
    "router_bias": "router_bias",
    "params": "parameters",
}
"""Key in the state's pytree to the class of what hangs below it; the first of these in the path decides."""

_MODULE_OF_KEY = {
    "attention": "mla",
    "attention_connection": "mhc",
    "block": "",
    "depths": "",
    "feed_forward_connection": "mhc",
    "expert_down": "experts",
    "expert_gate": "experts",
    "expert_up": "experts",
    "head": "logits",
    "router": "router",
}
"""Pytree keys whose named scope is called otherwise, or that have none; a weight and the work done with it are one module."""

_LAYER_RANGE = re.compile(r"_\d+(_\d+)?$")
_NORM = re.compile(r"^\w+_norm$")


@dataclass(frozen=True, slots=True)
class Scope:
    """What one `op_name` says."""

    path: tuple[str, ...]
    """The named scopes, outermost first, or the pytree keys that lead to a parameter's module."""
    phase: str | None
    """forward, remat, backward, optimizer or input; None where the name does not tell."""
    role: str | None = None
    """For a pytree path: the class of the argument (one of BUFFER_CLASSES); None for a scope path."""

    @property
    def module(self) -> str:
        return "/".join(self.path)


@lru_cache(maxsize=65536)
def parse_scope(op_name: str) -> Scope:
    """What `op_name` says; an empty path where it names no scope. A name that merges several (`a;b`) gives the first with a scope."""
    if ";" in op_name:
        scopes = [parse_scope(part.strip()) for part in op_name.split(";")]
        return next((scope for scope in scopes if scope.path), scopes[0])
    if _PYTREE.match(op_name):
        return parse_argument(op_name)
    parts = _split(op_name)
    path: list[str] = []
    for position, part in enumerate(parts):
        name, is_wrapped = _unwrap(part)
        is_primitive = position == len(parts) - 1 and not is_wrapped
        is_scope = _SCOPE_NAME.match(name) and name not in _STRUCTURE and not _BRANCH.match(name) and not _KERNEL.match(name)
        # A scope that its transform repeats (`jvp(moe)/moe`) is one scope.
        if is_scope and not is_primitive and (not path or path[-1] != name):
            path.append(name)
    return Scope(tuple(path), _phase(op_name, path))


def _phase(op_name: str, path: list[str]) -> str | None:
    if OPTIMIZER in path:
        return OPTIMIZER
    if "transpose(" in op_name:
        return REMAT if "rematted_computation" in op_name else BACKWARD
    return FORWARD if "jvp(" in op_name else None


def _split(op_name: str) -> list[str]:
    """Split at the slashes that are not inside parentheses."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(op_name):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "/" and depth == 0:
            parts.append(op_name[start:position])
            start = position + 1
    parts.append(op_name[start:])
    return parts


def _unwrap(part: str) -> tuple[str, bool]:
    """The scope inside transforms, and whether there were any; the name of a jitted function is not a scope."""
    is_wrapped = False
    while match := _WRAPPED.match(part):
        is_wrapped = True
        if match[1] not in _TRANSFORMS:
            return "", True
        part = match[2]
    return part, is_wrapped


@lru_cache(maxsize=65536)
def parse_argument(path: str) -> Scope:
    """What the pytree path of an argument says: `state['params']['layers']['mlp']['up']` is a parameter of module `layers/mlp`."""
    root = re.match(r"\w*", path)[0]  # type: ignore[index]
    keys = [a or b or c or d for a, b, c, d in _PYTREE_KEY.findall(path)]
    if root == "batch":
        return Scope(("batch",), INPUT, "batch")
    for position, key in enumerate(keys):
        if key in _STATE_ROLES:
            # NNX hangs a `value` beneath each leaf, and lists count: neither names a module.
            below = [name for name in keys[position + 1 :] if name not in ("value", "raw_value") and not name.isdigit()]
            return Scope(_module_path(below), INPUT, _STATE_ROLES[key])
    return Scope((root,) if root else (), INPUT, "other_arguments")


def _module_path(keys: list[str]) -> tuple[str, ...]:
    """The modules that lead to a parameter, called as their named scopes are; the leaf counts only where it names a module itself."""
    path = []
    for position, key in enumerate(keys):
        is_leaf = position == len(keys) - 1
        name = _LAYER_RANGE.sub("", key)
        name = "norm" if _NORM.match(name) else _MODULE_OF_KEY.get(name, "" if is_leaf and position else name)
        if name:
            path.append(name)
    return tuple(path)
