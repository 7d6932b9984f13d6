"""The train steps of a job as compiled for the devices it has: each compiled once, ahead of time, with its predicted memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from service.models.axes import make_mesh
from service.models.config import ProgramName, StepConfig
from service.models.data import synthetic_batch
from service.models.order import resolve_order
from service.models.train_step import BATCH_ARRAYS, Batch, Metrics, State, TrainProgram, build_train_program
from service.steps_records import ProgramMemory, StepMetrics


@dataclass(frozen=True)
class CompiledStep:
    """One program, ready to run."""

    config: StepConfig
    name: ProgramName
    mesh: Mesh
    program: TrainProgram
    memory: ProgramMemory
    executable: Any

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Start the step; returns before it has ended."""
        return self.executable(state, batch)

    @property
    def donates(self) -> bool:
        """Whether a call frees the state it is given."""
        return bool(self.program.donate_argnums)

    def batch_at(self, step: int, seed: int) -> Batch:
        """The packed synthetic batch of a step, on the devices, in the order that training input has."""
        config = self.config
        order = resolve_order(config.context, cp=config.axes.context, mode="train", has_engram=config.model.engram is not None)
        batch = synthetic_batch(
            batch=config.global_batch,
            seq_len=config.train.seq_len,
            vocab_size=config.model.vocab_size,
            packing=config.train.packing,
            cp=config.axes.context,
            order=order,
            seed=seed,
            step=step,
        )
        return {name: jax.device_put(getattr(batch, name), self.program.abstract_batch[name].sharding) for name in BATCH_ARRAYS}

    def place(self, state: State) -> State:
        """A state on the host (NumPy) put on this program's devices, as new buffers.

        Raises:
            ValueError: an array has another shape here: the mesh pads it to another number of shards.
        """

        def put(path: Any, array: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
            if array.shape != abstract.shape:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} is {array.shape} and {abstract.shape} on mesh {dict(self.mesh.shape)}; "
                    "compare meshes that cut the state in equally many pieces"
                )
            # A copy: the host platform's devices may otherwise share the array that later steps start from.
            return jax.device_put(array.copy(), abstract.sharding)

        return jax.tree.map_with_path(put, state, self.program.abstract_state)


class StepPrograms:
    """Compiles each (configuration, program) once."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._compiled: dict[tuple[StepConfig, ProgramName], CompiledStep] = {}

    def build(self, config: StepConfig, name: ProgramName) -> tuple[Mesh, TrainProgram]:
        """The program without compiling it; Engram hashes token ids uncompressed, since synthetic tokens are no tokenizer's.

        Raises:
            ValueError: model and mesh do not go together.
        """
        mesh = make_mesh(config.axes, self._devices)
        return mesh, build_train_program(config, name, mesh)

    def compile(self, config: StepConfig, name: ProgramName) -> CompiledStep:
        """The program, compiled for the devices; nothing is allocated for its arguments."""
        known = self._compiled.get((config, name))
        if known is not None:
            return known
        mesh, program = self.build(config, name)
        with jax.set_mesh(mesh):
            executable = program.jitted().lower(program.abstract_state, program.abstract_batch).compile()
        step = CompiledStep(config, name, mesh, program, read_program_memory(name, executable), executable)
        self._compiled[config, name] = step
        return step


def read_program_memory(name: ProgramName, executable: Any) -> ProgramMemory:
    """What the compiler says of a compiled program's memory, per device."""
    stats = executable.memory_analysis()
    arguments, outputs, alias = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.alias_size_in_bytes
    return ProgramMemory(
        program=name,
        argument_bytes=arguments,
        output_bytes=outputs,
        alias_bytes=alias,
        temp_bytes=stats.temp_size_in_bytes,
        # Not the compiler's `peak_memory_in_bytes`: the runtimes reserve all temporaries at once, and on CPU that figure leaves them out.
        allocated_bytes=arguments + outputs - alias + stats.temp_size_in_bytes,
    )


def to_host(state: State) -> State:
    """A copy of a state as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.array(leaf), state)


def discard(state: State) -> None:
    """Free a state's device buffers; computations that read them are let finish."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


def has_overflowed(metrics: Metrics) -> bool:
    """The flag, read by the host; waits for the step to end."""
    return bool(metrics["has_moe_overflow"])


def flags_equal(metrics: Metrics) -> bool:
    """Whether every device holds the same flag: hosts that read different ones would take different branches and hang."""
    return len({bool(shard.data) for shard in metrics["has_moe_overflow"].addressable_shards}) == 1


def read_metrics(config: StepConfig, metrics: Metrics) -> StepMetrics:
    """A step's metrics as the record keeps them; waits for the step to end."""
    load = np.asarray(metrics["expert_load"], dtype=np.float64) if "expert_load" in metrics else np.zeros((0, 1))
    return StepMetrics(
        loss=_finite(metrics["loss"]),
        main_loss=_finite(metrics["main_loss"]),
        mtp_loss=_finite(metrics["mtp_loss"]) if config.model.mtp.depth else None,
        balance_loss=_finite(metrics["balance_loss"]) if config.model.experts else None,
        tokens=int(metrics["tokens"]),
        has_moe_overflow=has_overflowed(metrics),
        dropped_fraction=tuple(np.asarray(metrics.get("dropped_fraction", ()), dtype=np.float64).tolist()),
        load_spread=tuple((load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)).tolist()) if load.size else (),
    )


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if np.isfinite(number) else None


@dataclass(frozen=True)
class StepsMade:
    """What some steps gave."""

    metrics: list[StepMetrics]
    loads: list[NDArray[np.int64]]
    """Assignments of each expert in each step, [layers, experts]; [0, 0] without experts."""
    state: State | None
    """The last one, on the host, where it was asked for."""


def run_steps(
    step: CompiledStep, initial: State, num_steps: int, batch_at: Callable[[int], Batch], *, keep_state: bool = False
) -> StepsMade:
    """`num_steps` steps from a host state, one after another."""
    state = step.place(initial)
    found, loads = [], []
    for index in range(num_steps):
        new, metrics = step(state, batch_at(index))
        found.append(read_metrics(step.config, metrics))
        loads.append(np.asarray(metrics.get("expert_load", np.zeros((0, 0))), dtype=np.int64))
        if not step.donates:
            discard(state)
        state = new
    last = to_host(state) if keep_state else None
    discard(state)
    return StepsMade(found, loads, last)


def losses(metrics: Iterable[StepMetrics], name: str = "loss") -> tuple[float | None, ...]:
    """One of the losses over steps."""
    return tuple(getattr(step, name) for step in metrics)
