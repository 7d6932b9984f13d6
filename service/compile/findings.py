"""What a person would want to be told about a program: each finding names buffer, module, bytes and the spec's field to change.

Every finding rests on something the compiler wrote. None is an error: a program with findings runs. tests/compile/test_findings.py has for
each a program that raises it and one that does not.

Where there is no such thing, null stands for it. No field of the spec mends `padding` (a shape of the model's code) or `unattributed` (code
outside named scopes); the suggestion then says what else to do. `moe_factor_without_effect` is about no buffer, and the compiler does not
say what it costs. `involuntary_rematerialisation` has module and bytes where its warning names a scope and the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.compile.attribution import UNATTRIBUTED
from service.compile.buffers import AttributedBuffer, BufferBook
from service.compile.collective_report import per_step, total
from service.compile.collectives import CollectiveInstance
from service.compile.halo import local_batch
from service.compile.hlo import Program
from service.compile.memory import MemoryDump
from service.compile.resharding import find_reshardings
from service.models.config import ModelConfig, ProgramName, StepConfig
from service.records import STATE_CLASSES, Finding, HaloUse
from service.units import format_bytes

_NOTABLE_SHARE = 0.01
"""Share of the peak below which a buffer is not worth a finding."""
_NOTABLE_BYTES = 1 << 20
_PADDING_FACTOR = 2
_PADDING_SHARE = 0.001
"""Share of the peak that tiles must waste in one buffer: small arrays are always padded, and nobody gains by mending them."""
_DOMINANT_SHARE = 0.2
_UNATTRIBUTED_SHARE = 0.03
_MAX_PER_KIND = 8
_HOLD_OTHER_TOKENS = frozenset({"mla", "dispatch", "experts", "combine"})
"""Scopes that have more than a rank's own tokens: attention needs everyone's keys and values, and experts get assignments from anywhere."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What findings are made from."""

    program: Program
    memory: MemoryDump
    book: BufferBook
    at_peak: Sequence[AttributedBuffer]
    classes: Mapping[str, int]
    unattributed_bytes: int
    collectives: Sequence[CollectiveInstance]
    halo: Sequence[HaloUse]
    mesh_axes: Mapping[str, int]
    config: StepConfig | None
    step_program: ProgramName
    """Which of the spec's programs this is: it decides which of its fields have a say."""
    state_donated: bool
    compiler_log: str


def find_findings(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings of one program, most bytes first; those without bytes last."""
    rules = (
        _donation_lost,
        _offload_ignored,
        _replicated_arguments,
        _involuntary_rematerialisation,
        _halo_gathered,
        _padding,
        _context_parallelism_unused,
        _moe_buffers_dominate,
        _moe_factor_without_effect,
        _unattributed,
    )
    found = [finding for rule in rules for finding in rule(evidence)]
    return tuple(sorted(found, key=lambda finding: -(finding.bytes or 0)))


def _notable(evidence: Evidence) -> int:
    return max(_NOTABLE_BYTES, int(evidence.memory.peak_bytes * _NOTABLE_SHARE))


def _donation_lost(evidence: Evidence) -> Iterator[Finding]:
    """State that the step was asked to reuse, and whose memory no output takes over."""
    if not evidence.state_donated:
        return
    lost = [
        buffer
        for buffer in evidence.at_peak
        if buffer.what.buffer_class in STATE_CLASSES and not evidence.memory.allocations[buffer.life.allocation].is_aliased
    ]
    if not lost:
        return
    size = sum(buffer.life.size for buffer in lost)
    yield Finding(
        kind="donation_lost",
        message=f"{len(lost)} donated arguments, {format_bytes(size)} in all, are not reused by the new state; both stand at once",
        module=lost[0].what.module,
        buffer=lost[0].what.op_name,
        bytes=size,
        spec_field="train.param_dtype" if lost[0].what.buffer_class == "parameters" else "train.moment_dtype",
        suggestion="give the new state the shapes, dtypes and shardings of the old one: a buffer is reused only by an equal one",
    )


def _offload_ignored(evidence: Evidence) -> Iterator[Finding]:
    """Tensors named for host memory, and nothing there."""
    config = evidence.config
    if config is None or not config.train.remat.offload or evidence.memory.host_bytes:
        return
    names = ", ".join(config.train.remat.offload)
    saved = evidence.classes.get("saved_activations", 0)
    largest = next((buffer for buffer in evidence.at_peak if buffer.what.buffer_class == "saved_activations"), None)
    yield Finding(
        kind="offload_ignored",
        message=f"{names} are to be offloaded and the program keeps nothing in host memory; {format_bytes(saved)} are saved on the device",
        module=largest.what.module if largest else None,
        buffer=evidence.book.record(largest).name if largest else None,
        bytes=saved,
        spec_field="train.remat.offload",
        suggestion="name tensors that a layer computes and its policy would keep; with policy none nothing is offloaded",
    )


def _replicated_arguments(evidence: Evidence) -> Iterator[Finding]:
    """Large state that every device of some axis holds whole. Over `data` that is what data parallelism means.

    The module may call its axes otherwise than the mesh does; over which axes such state is cut is unknown, and nothing is said of it.
    """
    notable = _notable(evidence)
    count = 0
    for buffer in evidence.at_peak:
        parameter = evidence.memory.allocations[buffer.life.allocation].parameter
        if parameter is None or buffer.life.size < notable or buffer.what.buffer_class not in STATE_CLASSES:
            continue
        axes = evidence.program.sharded_axes(parameter[0])
        if axes is None or not set(axes) <= set(evidence.mesh_axes):
            continue
        unused = [axis for axis, size in evidence.mesh_axes.items() if size > 1 and axis not in (*axes, "data")]
        if unused and count < _MAX_PER_KIND:
            count += 1
            copies = " × ".join(f"{axis} {evidence.mesh_axes[axis]}" for axis in unused)
            yield Finding(
                kind="large_replicated_buffer",
                message=f"{buffer.what.op_name} takes {format_bytes(buffer.life.size)} on every device: it is not cut over {copies}",
                module=buffer.what.module,
                buffer=buffer.what.op_name,
                bytes=buffer.life.size,
                spec_field=f"mesh.{unused[0]}",
                suggestion=f"cut it over {' and '.join(unused)}, or make {unused[0]} smaller in favour of an axis it is cut over",
            )


def _involuntary_rematerialisation(evidence: Evidence) -> Iterator[Finding]:
    """The partitioner's own warning that it gathers a tensor whole to change its sharding."""
    for resharding in find_reshardings(evidence.compiler_log)[:_MAX_PER_KIND]:
        pieces = "a tensor" if resharding.piece is None else f"the pieces {resharding.piece} of a tensor"
        where = resharding.op_name or "a place it does not name"
        yield Finding(
            kind="involuntary_rematerialisation",
            message=f"the compiler gathers {pieces} on every device to change its sharding, at {where}",
            module=resharding.module,
            buffer=resharding.operation,
            bytes=resharding.gathered_bytes,
            spec_field="mesh",
            suggestion="make the shardings before and after it agree, or choose axes whose sizes divide each other",
        )


def _halo_gathered(evidence: Evidence) -> Iterator[Finding]:
    """The convolution's activations gathered over the context ranks where a halo exchange would do, or the exchange gone.

    Only what lies under the convolution's own scope counts: a table's gradient and a gathered weight can have the sequence's shape.
    """
    config = evidence.config
    if config is None or config.axes.context == 1 or config.model.engram is None:
        return
    gathers = [
        instance
        for instance in evidence.collectives
        if instance.kind in ("all-gather", "all-to-all")
        and "context" in (instance.reach.axes or ())
        and "short_conv" in instance.module.split("/")
        and _holds_sequence(instance, config)
    ]
    missing = [use for use in evidence.halo if use.name == "engram_conv" and use.static_count == 0]
    if not gathers and not missing:
        return
    payload = total(per_step(instance)[1] for instance in gathers)
    gathered = "the convolution's neighbours are fetched by gathering the sequence over context ranks, not by a halo exchange"
    absent = "the convolution's halo exchange is not in the program; look for a gather of the sequence among the collectives"
    yield Finding(
        kind="halo_gathered",
        message=gathered if gathers else absent,
        module=gathers[0].module if gathers else "engram/short_conv",
        buffer=gathers[0].name if gathers else None,
        bytes=payload or None,
        spec_field="mesh.context",
        suggestion="run the convolution inside shard_map over context; with other axes automatic, keep its operands' sharding pinned",
    )


def _holds_sequence(instance: CollectiveInstance, config: StepConfig) -> bool:
    """Whether a collective is given at least as much as one device's activations; by size, since the compiler turns their dims about."""
    local_elements = local_batch(config) * config.train.seq_len // config.axes.context * config.model.dim
    is_float = any(dtype.startswith(("bf", "f")) for dtype in instance.dtypes)
    return is_float and any(math.prod(shape) >= local_elements for shape in instance.shapes)


def _padding(evidence: Evidence) -> Iterator[Finding]:
    """Buffers at the peak that tiles blow up beyond twice their size."""
    worst = []
    least = max(_NOTABLE_BYTES, int(evidence.memory.peak_bytes * _PADDING_SHARE))
    for buffer in evidence.at_peak:
        waste = evidence.book.padding_bytes(buffer.life)
        logical = buffer.life.size - waste
        if logical and buffer.life.size > _PADDING_FACTOR * logical and waste >= least:
            worst.append((waste, logical, buffer))
    worst.sort(key=lambda entry: -entry[0])
    for waste, logical, buffer in worst[:_MAX_PER_KIND]:
        record = evidence.book.record(buffer)
        dims = " × ".join(str(dim) for dim in record.shape)
        yield Finding(
            kind="padding",
            message=f"{record.dtype} {dims} needs {format_bytes(logical)} and takes {format_bytes(record.padded_bytes)} as {record.layout}",
            module=record.module,
            buffer=record.name,
            bytes=waste,
            spec_field=None,
            suggestion="no field alone mends it: have the model put a dim of at least 128 last; "
            "a tile is 8 rows of 128 in float32, 16 of 128 in bfloat16",
        )


def _context_parallelism_unused(evidence: Evidence) -> Iterator[Finding]:
    """Activations at the peak that hold the whole sequence although it is cut over context ranks."""
    config = evidence.config
    if config is None or config.axes.context == 1:
        return
    kept = ("saved_activations", "rematerialised", "temporaries")
    buffers = [
        buffer
        for buffer in evidence.at_peak
        if buffer.what.buffer_class in kept
        and not _HOLD_OTHER_TOKENS.intersection(buffer.what.module.split("/"))
        and holds_whole_sequence(evidence.book.record(buffer).shape, config)
    ]
    size = sum(buffer.life.size for buffer in buffers)
    if size < _notable(evidence):
        return
    yield Finding(
        kind="context_parallelism_unused",
        message=f"{len(buffers)} activations hold all {config.train.seq_len} tokens on each of {config.axes.context} context ranks",
        module=buffers[0].what.module,
        buffer=evidence.book.record(buffers[0]).name,
        bytes=size,
        spec_field="mesh.context",
        suggestion="pin the sequence dim to context where they are made, or set context to 1 and give its devices to fsdp",
    )


def holds_whole_sequence(shape: Sequence[int], config: StepConfig) -> bool:
    """Whether an array has a device's sequences whole: dims [batch, seq_len] side by side, as the model lays them, and something per token.

    Dims of 1 count: without them a batch of one sequence would be found in every dim of that length. And where one sequence is as long as
    the model is wide somewhere, one layer's weight looks like it; both dims must be there then.
    """
    batch, seq_len = local_batch(config), config.train.seq_len
    starts = [at for at in range(len(shape) - 1) if tuple(shape[at : at + 2]) == (batch, seq_len)]
    if not any(math.prod(shape[at + 2 :]) > 1 for at in starts):
        return False
    return batch > 1 or seq_len not in _widths(config.model) or list(shape).count(seq_len) > 1


def _widths(model: ModelConfig) -> set[int]:
    """Every size in a model's configuration, and the products that its weights outside attention have as a dim."""
    sizes = _integers(model.model_dump(exclude={"yarn"})) | {model.mhc.num_streams * model.dim}
    if model.experts is not None:
        sizes.add(model.experts.num_shared_experts * model.experts.expert_dim)
    if model.engram is not None:
        sizes.add(model.engram.embedding_dim)
    return sizes


def _integers(value: object) -> set[int]:
    """Every integer in nested plain data."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return {size for part in value for size in _integers(part)}
    return {value} if isinstance(value, int) else set()


def _moe_buffers_dominate(evidence: Evidence) -> Iterator[Finding]:
    """Receive buffers of experts that are a large part of the peak, and the field that this program reads for their size."""
    size = evidence.classes.get("moe_dispatch", 0)
    if size < _DOMINANT_SHARE * evidence.memory.peak_bytes:
        return
    largest = next(buffer for buffer in evidence.at_peak if buffer.what.buffer_class == "moe_dispatch")
    field, suggestion = _receive_buffer_field(evidence)
    yield Finding(
        kind="moe_buffers_dominate",
        message=f"buffers for tokens sent between experts are {size / evidence.memory.peak_bytes:.0%} of the peak",
        module=largest.what.module,
        buffer=evidence.book.record(largest).name,
        bytes=size,
        spec_field=field,
        suggestion=suggestion,
    )


def _receive_buffer_field(evidence: Evidence) -> tuple[str | None, str]:
    """(spec field, what to do) to make receive buffers smaller; no field where no configuration is behind the program."""
    if evidence.config is None:
        return None, "send fewer tokens at a time"
    if evidence.step_program == "dropless":
        return "moe.dropless.token_chunks", "use more token chunks: the buffers of one stand at a time"
    if evidence.config.axes.expert == 1:
        return "train.per_device_batch", "with one expert rank the buffers are the device's own assignments: give it fewer tokens"
    if evidence.config.moe.ragged_buffer_factor == -1:
        return "moe.ragged_buffer_factor", "use a factor with retry_when_tokens_dropped instead of the worst case"
    return "moe.ragged_buffer_factor", "use a smaller factor, with retry_when_tokens_dropped"


def _moe_factor_without_effect(evidence: Evidence) -> Iterator[Finding]:
    """A receive-buffer factor where nothing is sent between experts: one rank holds all of its assignments, whatever the factor."""
    config = evidence.config
    if config is None or evidence.step_program != "candidate" or config.axes.expert > 1:
        return
    has_experts = config.model.experts is not None and config.model.num_moe_layers > 0
    if not has_experts or config.moe.ragged_buffer_factor == -1:
        return
    if any(instance.kind == "ragged-all-to-all" for instance in evidence.collectives):
        return
    retry = ", and the retry's second program and undonated state serve nothing" if config.moe.retry_when_tokens_dropped else ""
    yield Finding(
        kind="moe_factor_without_effect",
        message=f"a factor of {config.moe.ragged_buffer_factor:g} changes nothing: one expert rank sends no token and drops none{retry}",
        module="moe_layers/moe",
        spec_field="moe.ragged_buffer_factor",
        suggestion="set mesh.expert above 1, or leave the factor at -1 and retry_when_tokens_dropped false",
    )


def _unattributed(evidence: Evidence) -> Iterator[Finding]:
    """More bytes without a module than can be left aside, and the largest buffer of them."""
    if evidence.unattributed_bytes <= _UNATTRIBUTED_SHARE * evidence.memory.peak_bytes:
        return
    largest = next(buffer for buffer in evidence.at_peak if buffer.what.module == UNATTRIBUTED)
    yield Finding(
        kind="unattributed",
        message=f"{evidence.unattributed_bytes / evidence.memory.peak_bytes:.1%} of the peak belongs to no named scope",
        module=UNATTRIBUTED,
        buffer=evidence.book.record(largest).name,
        bytes=evidence.unattributed_bytes,
        spec_field=None,
        suggestion="no field of the spec names it: put the code that makes it under jax.named_scope",
    )
