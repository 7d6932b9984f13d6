"""Reads the spec that a command was given, with everything the command line changes in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from service.errors import Problem, SpecError
from service.records import JobKind
from service.spec import Spec, parse_spec, read_spec_text, require_kind
from weighbridge.overrides import apply_overrides


def read_spec(
    path: Path, assignments: tuple[str, ...], *, kind: JobKind | None, programs: tuple[str, ...] = (), depth: str | None = None
) -> tuple[Spec, JobKind]:
    """The checked spec, and what it is for: `kind`, or where that is None what the spec has the sections for.

    Raises:
        SpecError: the spec is wrong, or not one for `kind`.
        click.UsageError: the file cannot be read, or an option does not go with the kind.
    """
    data = read_spec_text(_read_text(path))
    if isinstance(data, dict):
        data = apply_overrides(data, assignments)
        data |= ({"programs": list(programs)} if programs else {}) | ({"depth": depth} if depth else {})
    spec = parse_spec(data)
    if kind is None:
        kind = "steps" if spec.mesh.topology is None else "compile"
    if kind == "steps" and (programs or depth):
        raise click.UsageError("--program and --depth are of compiles; real steps run every program that the spec needs")
    problems = list(_lacks(spec, kind, path))
    if problems:
        raise SpecError(problems)
    require_kind(spec, kind)
    return spec, kind


def _read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise click.UsageError(f"{path} cannot be read: {reason}; give a spec like those in examples/") from error


def _lacks(spec: Spec, kind: JobKind, path: Path) -> Iterator[Problem]:
    """What the spec would need for this kind, with the command that takes it as it is."""
    if kind == "compile" and spec.mesh.topology is None:
        yield Problem(
            "mesh.topology",
            None,
            "is missing: this is a spec for real steps, which names devices to run on and no topology to compile for",
            f"run it with `weighbridge steps {path}`, or name a topology like v5p-512",
        )
    if kind == "steps" and spec.steps is None:
        devices = f"cpu:{spec.mesh.num_devices}"
        yield Problem(
            "steps",
            None,
            "is missing: this is a spec to compile, which names no devices to run on",
            f"a section like {{devices: {devices}}}, here by --set steps.devices={devices}; `weighbridge compile {path}` takes it as it is",
        )
