"""The contract between whoever wants a program weighed and the child process that does it; no JAX here.

The child (`python -m service.compile.child`) reads one `CompileRequest` as JSON on stdin and writes JSON lines on stdout: progress
events while it works, and exactly one `{"event": "report", "report": {...}}` last. What it prints on stderr is its log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import Field

from service.models.config import ProgramName
from service.records import Depth, Record, Report


class CompileRequest(Record):
    """One program to compile."""

    spec: Mapping[str, Any] = Field(description="a validated spec, as `Spec.model_dump(mode='json')` gives it")
    program: ProgramName
    depth: Depth = "memory"
    work_dir: str = Field(description="a directory of this child's own: dump, TMPDIR and libtpu log go there; the runner removes it")
    artifact_dir: str | None = Field(default=None, description="where to leave the optimised HLO proto for keeping; null keeps nothing")


class ChildLimits(Record):
    """When a child is killed."""

    wall_seconds: float = 1800.0
    rss_bytes: int = 8 << 30


class ProgressEvent(Record):
    """A phase the child entered or finished."""

    name: str = Field(description="topology, build, trace, lower, compile, analyse, code_generation")
    seconds: float = Field(description="since the child started")
    data: Mapping[str, Any] = {}


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
