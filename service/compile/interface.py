"""The contract between whoever wants a program weighed and the child process that does it; no JAX here.

The child (`python -m service.compile.child`) reads one `CompileRequest` as one line of JSON on stdin, which stays open: when it closes,
the one who asked is gone and the child ends itself. It writes JSON lines on stdout: `{"event": "progress", ...}` while it works, and
exactly one `{"event": "report", "report": {...}}` last. What it prints on stderr is its log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import Field

from service.models.config import ProgramName
from service.records import Depth, Record, Report, Toolchain


class CompileRequest(Record):
    """One program to compile."""

    spec: Mapping[str, Any] = Field(description="a validated spec, as `Spec.as_json()` gives it")
    program: ProgramName
    depth: Depth = "memory"
    work_dir: str = Field(description="this child's own directory, not there yet: dump, TMPDIR, logs; the runner makes and removes it")
    artifact_dir: str | None = Field(default=None, description="where to leave files for keeping, PROGRAM.NAME each; null keeps nothing")
    capacity_bytes: int | None = Field(default=None, description="HBM capacity where it is known; null has the child ask the compiler")
    toolchain: Toolchain | None = Field(default=None, description="put in the report; filled in by the runner")


class ChildLimits(Record):
    """When a child is killed."""

    wall_seconds: float = 1800.0
    rss_bytes: int = 8 << 30


class ProgressEvent(Record):
    """A phase the child entered."""

    name: str = Field(description="topology, build, trace, lower, compile, analyse, code_generation, retry")
    seconds: float = Field(description="since the child process started")
    data: Mapping[str, Any] = Field(
        default={},
        description="analyse and code_generation: peak_bytes, allocated_bytes, capacity_bytes; retry: reason. Empty for the others",
    )


class Compiler(Protocol):
    """Weighs one program; the runner is the real one, tests bring their own."""

    def __call__(
        self,
        request: CompileRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> Report:
        """Return the report; every way a child can end is a report, never an exception."""
        ...
