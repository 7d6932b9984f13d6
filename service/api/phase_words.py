"""The phase that a job is in, or failed in, in words that follow "while" and "Running"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.records import Event, Failure, FailureKind
from service.steps.interface import STEPS_PROGRAM

PHASE_WORDS: Mapping[str, str] = {
    "start": "starting",
    "topology": "setting up the topology for",
    "build": "building",
    "trace": "tracing",
    "lower": "lowering",
    "compile": "compiling",
    "analyse": "analysing",
    "code_generation": "generating code for",
    "retry": "waiting to load libtpu for",
    "devices": "finding the devices",
    "estimate": "estimating the memory",
    "init": "making the state",
    "warmup": "warming up",
    "steps": "running steps",
    "memory": "reading the memory",
    "checks": "checking",
}
"""Names of the children's progress events; for a compile child the program follows. Other events of theirs begin no phase."""

_FAILURE_WORDS: Mapping[FailureKind, str] = {
    FailureKind.LOWERING: "error",
    FailureKind.VMEM: "on-chip memory exhausted",
    FailureKind.HOST_MEMORY: "the host ran out of memory",
    FailureKind.DEVICE_MEMORY: "the devices ran out of memory",
    FailureKind.NOT_FINITE: "the loss is not finite",
    FailureKind.COMPILER: "compiler error",
    FailureKind.ANALYSIS: "the dump cannot be analysed",
    FailureKind.CRASHED: "crashed",
    FailureKind.KILLED_RSS: "killed at the memory limit",
    FailureKind.KILLED_WALL: "killed at the time limit",
    FailureKind.UNSUPPORTED: "not supported",
    FailureKind.LOST: "the worker was lost",
}


def phase_words(events: Iterable[Event], program: str | None = None) -> str:
    """What the last attempt did last, or did last for `program`: `tracing candidate`; empty where it told nothing."""
    words = ""
    for event in events:
        if event.name == "claimed":
            words = ""
        elif event.name == "progress" and event.data.get("name") in PHASE_WORDS and program in (None, event.data.get("program")):
            words = words_of(event.data["name"], event.data.get("program", ""))
    return words


def words_of(phase: str, program: str) -> str:
    """One phase of one child; empty for a phase without words."""
    words = PHASE_WORDS.get(phase, "")
    return words if not words or program == STEPS_PROGRAM else f"{words} {program}"


def failure_title(failure: Failure, words: str) -> str:
    """The headline of a failure: `Failed: crashed while compiling candidate`."""
    during = f" while {words}" if words else ""
    if failure.kind is FailureKind.CANCELLED:
        return f"Cancelled{during}"
    return f"Failed: {_FAILURE_WORDS[failure.kind]}{during}"
