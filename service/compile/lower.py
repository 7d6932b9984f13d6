"""What a child weighs: a program that can be built over mock devices, traced and lowered; made from a spec here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from service.compile.catalog import Topology
from service.compile.interface import CompileRequest
from service.models.config import MeshAxes, ProgramName, StepConfig
from service.models.costs import count_parameters
from service.models.train_step import build_train_program
from service.spec import parse_spec


@dataclass(frozen=True)
class BuiltProgram:
    """A step with abstract arguments, ready to be traced under its mesh."""

    jitted: Any
    arguments: tuple[Any, ...]
    """Trees of `jax.ShapeDtypeStruct` with shardings."""
    state_donated: bool
    num_parameters: int | None
    """Total over all devices, by the closed form: Engram's padding rows are none. None where no model of this project is behind it."""


class Weighed(Protocol):
    """A program that can be weighed, wherever it comes from."""

    @property
    def topology(self) -> Topology: ...
    @property
    def axes(self) -> MeshAxes: ...
    @property
    def compiler_options(self) -> Mapping[str, bool | int | str]: ...
    @property
    def step_config(self) -> StepConfig | None:
        """None where no model of this project is behind it: the analysis then has no closed forms to compare with."""
        ...

    def build(self, mesh: Mesh) -> BuiltProgram:
        """The step over `mesh`, which is set. Raises ValueError, with what is wrong, where it cannot be sharded over it."""
        ...


@dataclass(frozen=True)
class SpecProgram:
    """One of the train steps of a spec."""

    topology: Topology
    axes: MeshAxes
    compiler_options: Mapping[str, bool | int | str]
    step_config: StepConfig
    program: ProgramName

    def build(self, mesh: Mesh) -> BuiltProgram:
        built = build_train_program(self.step_config, self.program, mesh)
        return BuiltProgram(
            jitted=built.jitted(),
            arguments=(built.abstract_state, built.abstract_batch),
            state_donated=0 in built.donate_argnums,
            num_parameters=sum(count_parameters(self.step_config.model).values()),
        )


def load_spec_program(request: CompileRequest) -> SpecProgram:
    """The train step that a request names.

    Raises:
        SpecError: the spec was not checked before it was sent here.
    """
    spec = parse_spec(request.spec)
    config = spec.step_config()
    return SpecProgram(spec.topology, config.axes, spec.compiler_options, config, request.program)


def module_name(lowered: jax.stages.Lowered) -> str:
    """The name of the module, which is part of the names of the files that the compiler dumps of it."""
    module: Any = lowered.compiler_ir("stablehlo")
    return str(module.operation.attributes["sym_name"].value)
