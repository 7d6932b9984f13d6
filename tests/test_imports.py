"""Arrows never point back: which part may import which, and that only children load JAX; read from the source, not by importing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"jax", "jaxlib", "flax", "libtpu", "xprof", "optax"}

SHARED = {
    "service.records",
    "service.diff_records",
    "service.steps_records",
    "service.errors",
    "service.units",
    "service.settings",
    "service.spec",
    "service.spec_text",
    "service.identity",
    "service.resources",
    "service.verdict_text",
    "service.breakdown",
    "service.retry",
    "service.logs",
    "service.starter",
}
"""Plain data and rules that every part may use."""

RULES: Mapping[str, set[str]] = {
    "service.api": {
        "service.api",
        "service.gate",
        "service.storage.interface",
        "service.compile.catalog",
        "service.compile.toolchain",
        "service.compile.capacity_cache",
        "service.compile.diff",
        "service.steps.interface",
        "service.steps.findings",
        "service.models.config",
        "service.spec_problems",
        *SHARED,
    },
    "service.worker": {"service.worker", "service.storage.interface", "service.compile.interface", "service.steps.interface", *SHARED},
    "service.storage": {"service.storage", *SHARED},
    "service.compile": {"service.compile", "service.models", "service.supervision", "service.lifeline", *SHARED},
    "service.steps": {"service.steps", "service.compile", "service.models", "service.supervision", "service.lifeline", *SHARED},
    "service.models": {"service.models"},
    "weighbridge": {
        "weighbridge",
        "service.compile.catalog",
        "service.compile.interface",
        "service.compile.diff",
        "service.steps.interface",
        "service.models.config",
        *SHARED,
    },
}
"""What a package may import, by prefix of the module's name; `service` alone, which says where the package lies, everybody may."""

CLIENT_DEPENDENCIES = {"click", "httpx", "pydantic", "pydantic_core", "yaml", "rich"}
"""What an installation without extras has."""

ROOTS: Mapping[str, set[str]] = {
    "service.api.app": {"service.storage.store"},
    "service.api.server": {"service.storage.store", "service.worker.keeper"},
    "service.worker.loop": {"service.storage.store", "service.compile.runner", "service.steps.runner"},
}
"""Where parts are put together, and so what may be named beyond the rules."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in ("service", "weighbridge") for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def imports_of(module: str, *, at_import: bool) -> frozenset[str]:
    """Modules that `module` names in import statements: all of them, or those that run when it is imported itself."""
    return frozenset(_walk(ast.parse(MODULES[module].read_text()), at_import=at_import))


def _walk(node: ast.AST, *, at_import: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                yield name if name in MODULES else child.module or ""
        elif at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            # Names for the type checker: an arrow all the same, but nothing is loaded.
            if not at_import:
                yield from _walk(child, at_import=False)
        else:
            yield from _walk(child, at_import=at_import)


def is_within(module: str, prefixes: set[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("package", RULES)
def test_a_part_imports_only_what_its_rule_names(package: str) -> None:
    modules = [module for module in MODULES if is_within(module, {package})]
    assert modules
    wrong = {
        (module, imported)
        for module in modules
        # The command line names the server, the worker and the child inside the commands that need them.
        for imported in imports_of(module, at_import=package == "weighbridge")
        if imported.startswith(("service.", "weighbridge")) and not is_within(imported, RULES[package] | ROOTS.get(module, set()))
    }
    assert not wrong, "\n".join(f"{module} imports {imported}" for module, imported in sorted(wrong))


def test_shared_modules_import_only_shared_ones() -> None:
    allowed = SHARED | {
        "service.models.config",
        "service.compile.catalog",
        "service.compile.options",
        "service.compile.interface",
        "service.compile.pair",
        "service.compile.toolchain",
        "service.spec_checks",
        "service.spec_problems",
        "service.steps.config",
    }
    wrong = {
        (module, imported)
        for module in SHARED & set(MODULES)
        for imported in imports_of(module, at_import=False)
        if imported.startswith("service.") and not is_within(imported, allowed)
    }
    assert not wrong


def loaded_by(module: str) -> dict[str, tuple[str, ...]]:
    """Everything that is loaded when `module` is imported, with the way there: its packages, what they name, and so on."""
    way: dict[str, tuple[str, ...]] = {}
    waiting = [(module, (module,))]
    while waiting:
        current, path = waiting.pop()
        if current in way:
            continue
        way[current] = path
        if current in MODULES:
            parents = [current.rpartition(".")[0]] if "." in current else []
            waiting += [(name, (*path, name)) for name in [*imports_of(current, at_import=True), *parents]]
    return way


LIGHT = [
    module
    for module in MODULES
    if is_within(module, {"service.api", "service.worker", "service.storage", "weighbridge", "service.__main__", *SHARED})
    and "migrations" not in module
]


@pytest.mark.parametrize("module", LIGHT)
def test_neither_the_server_nor_the_worker_nor_the_client_loads_jax(module: str) -> None:
    heavy = {name: path for name, path in loaded_by(module).items() if name.partition(".")[0] in HEAVY}
    assert not heavy, "\n".join(" → ".join(path) for path in heavy.values())


def test_the_command_line_starts_with_what_a_client_has_installed() -> None:
    outside = {
        name: path
        for name, path in loaded_by("weighbridge.cli").items()
        if name.partition(".")[0] not in CLIENT_DEPENDENCIES | {"service", "weighbridge", "__future__"} | sys.stdlib_module_names
    }
    assert not outside, "\n".join(" → ".join(path) for path in outside.values())


def test_the_walk_sees_an_import_that_it_must_see() -> None:
    """The child does load JAX, though only when it runs; the model's code does when it is imported."""
    assert "jax" in {name.partition(".")[0] for name in loaded_by("service.models.axes")}
    assert any(name.startswith("service.models") for name in imports_of("service.compile.lower", at_import=False))
