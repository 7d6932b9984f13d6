"""Tells on stderr how far the children are: one live line on a terminal, a plain line per phase elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from service.records import Report

PHASES = {
    "start": "starting",
    "topology": "topology",
    "build": "abstract state",
    "trace": "tracing",
    "lower": "lowering",
    "compile": "compiling",
    "analyse": "reading the buffer assignment",
    "code_generation": "generating code",
    "retry": "trying again",
}


def outcome_of(report: Report) -> str:
    """How a program ended, in words: its status, or the kind of its failure."""
    return (report.failure.kind if report.failure else report.status).value.replace("_", " ")


class Progress:
    """Shows the phase of each program and the seconds since it started. Entered around the work; fed from any thread."""

    def __init__(self, programs: tuple[str, ...], console: Console, *, waiting: str = "starting") -> None:
        self._console = console
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._phases: dict[str, str] = dict.fromkeys(programs, waiting)
        self._done: dict[str, float] = {}
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def phase(self, program: str, name: str, seconds: float) -> None:
        """A program entered a phase, `seconds` after its child started."""
        words = PHASES.get(name, name.replace("_", " "))
        with self._lock:
            self._phases[program] = words
        if self._live is None:
            self._say(f"{program}: {words} (at {seconds:.1f} s)")

    def finished(self, program: str, verdict: str) -> None:
        """A program has its report."""
        seconds = time.monotonic() - self._started
        with self._lock:
            self._phases[program] = verdict
            self._done[program] = seconds
        if self._live is None:
            self._say(f"{program}: {verdict} (after {seconds:.1f} s)")

    def note(self, line: str) -> None:
        """A line that stays: where a job can be seen, what is being waited for."""
        self._say(line)

    def _say(self, line: str) -> None:
        with self._lock:
            self._console.print(Text(line), soft_wrap=True)

    def _line(self) -> Text:
        now = time.monotonic() - self._started
        line = Text()
        with self._lock:
            for program, words in self._phases.items():
                if line:
                    line.append("   ")
                line.append(program, style="bold")
                line.append(f" {words} ", style="green" if program in self._done else "cyan")
                line.append(f"{self._done.get(program, now):.1f} s", style="dim")
        return line
