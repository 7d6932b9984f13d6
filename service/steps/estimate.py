"""What the steps need at least, before anything is allocated, and the refusal where that is more than there is."""

from __future__ import annotations

import math
from typing import Any

import jax

from service.models.config import StepConfig
from service.models.train_step import TrainProgram
from service.steps_records import DeviceFacts, Estimate, MemoryComparison
from service.units import format_bytes


class DoesNotFitError(Exception):
    """The steps were refused: they cannot fit; says what is needed, what there is, and what could be done."""


def bytes_per_device(tree: Any) -> int:
    """Bytes that the shards of these abstract or real arrays take on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def estimate_memory(config: StepConfig, program: TrainProgram, *, num_states: int, devices: DeviceFacts) -> Estimate:
    """A lower bound of what each device holds at the peak: the states, one gradient of every parameter, the batch, one piece of logits.

    The state's bytes are exact (abstract shapes and shardings). Activations and collectives' buffers are left out, so that nothing is
    refused that could fit; the compiler's own figure, checked next, counts them.
    """
    axes, train = config.axes, config.train
    state_bytes = bytes_per_device(program.abstract_state)
    gradient_bytes = bytes_per_device(program.abstract_state["params"])
    batch_bytes = bytes_per_device(program.abstract_batch)
    sequences, positions = config.global_batch // axes.batch_shards, train.seq_len // axes.context // train.vocab_chunks
    logits_bytes = sequences * positions * (config.model.vocab_size // axes.tensor) * 4
    needed = num_states * state_bytes + gradient_bytes + batch_bytes + logits_bytes
    return Estimate(
        state_bytes=state_bytes,
        num_states=num_states,
        gradient_bytes=gradient_bytes,
        batch_bytes=batch_bytes,
        logits_bytes=logits_bytes,
        needed_bytes=needed,
        total_needed_bytes=needed * (devices.num_devices if devices.memory_is_shared else 1),
        available_bytes=devices.memory_bytes,
    )


def refuse_unless_fits(estimate: Estimate, devices: DeviceFacts, *, is_reduced: bool) -> None:
    """Raises:
    DoesNotFitError: the lower bound exceeds what there is.
    """
    if estimate.fits:
        return
    parts = (
        f"{estimate.num_states} states of {format_bytes(estimate.state_bytes)}, gradients {format_bytes(estimate.gradient_bytes)}, "
        f"batch {format_bytes(estimate.batch_bytes)}, logits {format_bytes(estimate.logits_bytes)}"
    )
    raise DoesNotFitError(_sentence("at least", estimate.needed_bytes, estimate.total_needed_bytes, devices, is_reduced, f" ({parts})"))


def refuse_unless_predicted_to_fit(memory: MemoryComparison, devices: DeviceFacts, *, is_reduced: bool) -> None:
    """Raises:
    DoesNotFitError: the compiler's figure for these programs on these devices exceeds what there is.
    """
    total = memory.total_predicted_bytes if devices.memory_is_shared else memory.predicted_bytes
    if devices.memory_bytes is not None and total > devices.memory_bytes:
        raise DoesNotFitError(_sentence("as compiled", memory.predicted_bytes, total, devices, is_reduced, ""))


def _sentence(how: str, needed: int, total: int, devices: DeviceFacts, is_reduced: bool, parts: str) -> str:
    shared = f", {format_bytes(total)} on the {devices.num_devices} that share the host's memory" if devices.memory_is_shared else ""
    advice = "use a smaller model, batch or sequence, or more devices"
    if not is_reduced:
        advice = "set steps.model to tiny-of-same-shape, which keeps every mechanism in small sizes, or " + advice
    return f"needs {how} {format_bytes(needed)} per device{parts}{shared}; {format_bytes(devices.memory_bytes)} are available; {advice}"
