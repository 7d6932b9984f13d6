"""Which versions measured a result, read without loading any of them: part of every result's identity; no JAX here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import service.models
from service.records import Toolchain

EXTRACTOR_VERSION = "2"
"""Version of the code that turns the compiler's dump into a report (service/compile). Raise it whenever a number in a report could change
for the same program: it is part of the toolchain, so that such a change is never taken for a change of the program."""

NOT_INSTALLED = "not installed"


def read_toolchain(topology_arguments: Mapping[str, Any], compiler_options: Mapping[str, str | int | bool] | None = None) -> Toolchain:
    """The toolchain of this installation, for one topology (`Topology.arguments()`) and the spec's compiler options.

    A server without the compile extra reads `not installed` for what it lacks; the worker's toolchain is the one that counts.
    """
    return Toolchain(
        jax=_version("jax") or NOT_INSTALLED,
        jaxlib=_version("jaxlib") or NOT_INSTALLED,
        libtpu=_version("libtpu") or NOT_INSTALLED,
        flax=_version("flax") or NOT_INSTALLED,
        optax=_version("optax") or NOT_INSTALLED,
        xprof=_version("xprof"),
        extractor=EXTRACTOR_VERSION,
        model_source=hash_sources(Path(service.models.__file__).parent),
        compiler_options=dict(compiler_options or {}),
        topology_arguments=dict(topology_arguments),
    )


def toolchain_fingerprint(toolchain: Toolchain) -> str:
    """SHA-256 that is equal exactly when everything that decides a result besides the spec is equal; xprof decides nothing."""
    return _digest(toolchain.model_dump(mode="json", exclude={"xprof"}))


def compiler_fingerprint(toolchain: Toolchain) -> str:
    """SHA-256 of the compiler alone, with its options and topology: what the capacity it allows depends on."""
    return _digest(toolchain.model_dump(mode="json", include={"jaxlib", "libtpu", "compiler_options", "topology_arguments"}))


def hash_sources(package: Path) -> str:
    """SHA-256 over the names and contents of a package's Python files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        # Lengths make the boundaries part of the hash: no two sets of files can run into the same bytes.
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
