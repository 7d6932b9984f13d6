"""Remembers HBM capacities in a small JSON file, by compiler and topology; no JAX here."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from service.compile.toolchain import compiler_fingerprint
from service.records import Toolchain


class CapacityCache:
    """Capacities that the compiler has stated; any number of processes may use one file at once.

    What cannot be read is measured again: an unreadable or half-known file is never an error, and is replaced at the next `store`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, toolchain: Toolchain) -> int | None:
        """HBM bytes per device that this compiler allows on this topology; None where it was not asked yet."""
        return self._read().get(compiler_fingerprint(toolchain))

    def store(self, toolchain: Toolchain, capacity_bytes: int) -> None:
        """Remember a capacity. Of two processes that store at once one may be lost, and is measured again."""
        known = self._read()
        key = compiler_fingerprint(toolchain)
        if known.get(key) == capacity_bytes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            partial.write_text(json.dumps(known | {key: capacity_bytes}, indent=1, sort_keys=True))
            partial.replace(self._path)
        finally:
            partial.unlink(missing_ok=True)

    def _read(self) -> dict[str, int]:
        try:
            data = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict):
            return {}
        return {key: value for key, value in data.items() if isinstance(value, int) and not isinstance(value, bool) and value > 0}
