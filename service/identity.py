"""The identity of a result: two requests with equal identities have equal results, so the second need not be measured; no JAX here."""

from __future__ import annotations

import hashlib
import json

from service.compile.toolchain import read_toolchain, toolchain_fingerprint
from service.records import JobKind
from service.spec import Spec


def identify(spec: Spec, kind: JobKind) -> str:
    """SHA-256 over the kind, the spec's canonical hash, and the toolchain of this installation with the model's source.

    The spec has passed `require_kind`.
    """
    if kind == "steps":
        assert spec.steps is not None
        arguments: dict[str, object] = {"devices": spec.steps.devices}
    else:
        arguments = spec.topology.arguments()
    toolchain = read_toolchain(arguments, spec.compiler_options)
    parts = [kind, spec.canonical_hash(), toolchain_fingerprint(toolchain)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
