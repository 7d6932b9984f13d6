"""What to weigh: the one schema of a spec, read from YAML or JSON, checked whole before anything starts; no JAX here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

import yaml
from pydantic import Field, SkipValidation, ValidationError, model_validator

from service.compile.catalog import Topology, find_topology
from service.errors import Problem, SpecError
from service.models.config import (
    PRESETS,
    ContextConfig,
    Frozen,
    MeshAxes,
    ModelConfig,
    MoeConfig,
    ProgramName,
    StepConfig,
    TrainConfig,
)
from service.records import Depth, JobKind
from service.spec_checks import MISSING_TOPOLOGY, check_spec, check_topology_name
from service.spec_problems import nearest, problems_of, shorten
from service.spec_text import read_plain
from service.steps.config import StepsConfig

MAX_SPEC_CHARACTERS = 64_000


class ModelSpec(ModelConfig):
    """A preset with any field overridden; what is stored is the result, field by field."""

    preset: str

    @model_validator(mode="before")
    @classmethod
    def _override_preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and _is_preset(data.get("preset")):
            return _merge(PRESETS[data["preset"]]().model_dump(mode="json"), data)
        return data

    def config(self) -> ModelConfig:
        """The architecture alone, without the preset's name."""
        return ModelConfig.model_validate(self.model_dump(exclude={"preset"}))


class MeshSpec(MeshAxes):
    """The topology, and how its devices are laid out as mesh axes."""

    topology: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="what is compiled for; only a spec with a steps section, which names its devices, can do without"
    )
    slices: Annotated[int, Field(ge=1, le=64)] = 1

    def axes(self) -> MeshAxes:
        """The mesh axes alone."""
        return MeshAxes(**{name: getattr(self, name) for name in MeshAxes.model_fields})


class Spec(Frozen):
    """What to weigh. Made by `parse_spec`, which also checks what no single field can say."""

    scenario: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="letters, digits and any of . _ - after the first"
    )
    model: ModelSpec
    train: TrainConfig
    mesh: MeshSpec
    context: ContextConfig = ContextConfig()
    moe: MoeConfig = MoeConfig()
    programs: tuple[ProgramName, ...] = Field(default=("candidate",), strict=False, min_length=1, max_length=2)
    depth: Depth = "memory"
    compiler_options: Mapping[str, SkipValidation[bool | int]] = Field(
        default={}, max_length=32, description="each value is checked by its option's name: `spec_checks`"
    )
    steps: StepsConfig | None = Field(default=None, description="real steps on attached devices; null where the spec is only compiled")

    @cached_property
    def topology(self) -> Topology:
        """What the programs are compiled for. A spec that passed `require_kind(spec, "compile")` has one."""
        assert self.mesh.topology is not None
        return find_topology(self.mesh.topology, self.mesh.slices)

    def step_config(self) -> StepConfig:
        """What the train step depends on."""
        return StepConfig(model=self.model.config(), train=self.train, axes=self.mesh.axes(), context=self.context, moe=self.moe)

    def as_json(self) -> dict[str, Any]:
        """Plain data from which `parse_spec` makes this spec again."""
        return self.model_dump(mode="json")

    def canonical_hash(self) -> str:
        """SHA-256 of what decides the result: the scenario's and the preset's names do not, nor how the topology was spelled."""
        data = self.as_json()
        del data["scenario"], data["model"]["preset"]
        if self.mesh.topology is not None:
            data["mesh"]["topology"] = self.topology.jax_name
        if self.steps is None:
            del data["steps"]
        data["programs"] = sorted(data["programs"])
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_spec(text: str) -> Spec:
    """A spec from YAML or JSON text (JSON is YAML).

    Raises:
        SpecError: the text cannot be read, or the spec is wrong; carries every problem.
    """
    return parse_spec(read_spec_text(text))


def read_spec_text(text: str) -> Any:
    """The plain data in YAML or JSON text, unchecked: what `parse_spec` takes.

    Raises:
        SpecError: the text is too long or cannot be read.
    """
    if len(text) > MAX_SPEC_CHARACTERS:
        raise SpecError([Problem("", f"{len(text)} characters", "the spec is too long", f"at most {MAX_SPEC_CHARACTERS} characters")])
    try:
        return read_plain(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}, column {where.column + 1}" if where else ""
        reason = getattr(error, "problem", None) or str(error)
        raise SpecError([Problem("", text[:80], f"not readable as YAML or JSON{place}: {reason}", "one YAML or JSON mapping")]) from error


def parse_spec(data: Any) -> Spec:
    """A checked spec from plain data.

    Raises:
        SpecError: carries every problem found, of the schema and of what the fields say together.
    """
    if not isinstance(data, Mapping):
        kind = "nothing" if data is None else type(data).__name__
        raise SpecError([Problem("", kind, f"a spec is a mapping, and this is {kind}", f"keys: {', '.join(Spec.model_fields)}")])
    data = {**data}
    preset, target = _get(data, "model", "preset"), _get(data, "mesh", "topology") or _get(data, "steps", "devices")
    if "scenario" not in data and isinstance(preset, str) and isinstance(target, str):
        data["scenario"] = f"{preset}-{target}".replace(":", "-")[:100]

    problems: list[Problem] = []
    if isinstance(data.get("model"), Mapping) and not _is_preset(preset):
        close = nearest(preset, PRESETS) if isinstance(preset, str) else None
        hint = f"; did you mean {close}?" if close else ""
        problems.append(Problem("model.preset", shorten(preset), f"no such preset{hint}", ", ".join(PRESETS)))
    try:
        spec = Spec.model_validate(data)
    except ValidationError as error:
        schema = problems_of(error, Spec)
        # An unknown preset leaves its fields empty; their absence is the same mistake.
        problems += [p for p in schema if not (problems and p.path.startswith("model"))]
        sections = _valid_sections(data)
        problems += check_spec(sections)
        topology = _get(data, "mesh", "topology")
        if "mesh" not in sections and isinstance(topology, str) and all(p.path != "mesh.topology" for p in problems):
            problems += check_topology_name(topology)
        raise SpecError(problems) from error
    problems += check_spec({name: getattr(spec, name) for name in Spec.model_fields})
    if problems:
        raise SpecError(problems)
    return spec


def require_kind(spec: Spec, kind: JobKind) -> None:
    """Refuse a spec that lacks what a job of this kind needs.

    Raises:
        SpecError: a compile job without a topology, or a steps job without a steps section.
    """
    if kind == "compile" and spec.mesh.topology is None:
        raise SpecError([MISSING_TOPOLOGY])
    if kind == "steps" and spec.steps is None:
        raise SpecError(
            [Problem("steps", None, "is missing, and a job of kind steps runs what it says", "a mapping, like {devices: cpu:8}")]
        )


def _valid_sections(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that are sound by themselves, so that what is wrong between them is told in the same answer."""
    sections: dict[str, Any] = {} if data.get("steps") is not None else {"steps": None}
    classes: dict[str, type[Frozen]] = {
        "model": ModelSpec,
        "train": TrainConfig,
        "mesh": MeshSpec,
        "context": ContextConfig,
        "moe": MoeConfig,
    }
    if data.get("steps") is not None:
        classes["steps"] = StepsConfig
    for name, section in classes.items():
        try:
            sections[name] = section.model_validate(data.get(name, {}))
        except ValidationError:
            continue
    for name, kind in (("programs", list), ("compiler_options", dict)):
        if isinstance(data.get(name), kind):
            sections[name] = data[name]
    return sections


def _is_preset(name: Any) -> bool:
    return isinstance(name, str) and name in PRESETS


def _get(data: Mapping[str, Any], section: str, field: str) -> Any:
    inner = data.get(section)
    return inner.get(field) if isinstance(inner, Mapping) else None


def _merge(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged
