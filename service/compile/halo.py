"""What context ranks exchange with their neighbours, measured in the compiled program beside its closed form.

Per use, rank and sequence the convolution of an Engram layer sends its halo once in array order and twice under load balance, whatever the
sequence's length; a shift sends one token's ids likewise. On the wire the first and the last rank send one halo where the others send two:
2 * halo * (cp - 1) in all. Under rematerialisation the convolution's exchange runs three times: forward, forward again, and transposed.

    row               what crosses                                             per step and device, forward
    engram_conv       activations before each chunk of an Engram layer         layers * batch * chunks * halo * streams * dim
    engram_segments   segment ids before each chunk, to respect documents      batch * chunks * halo ids, once for all layers
    engram_ids        the compressed token ids, gathered to be hashed in time  batch * seq_len ids, in every order, once for all layers
    loss_shift        segment ids of the next token, for the loss              batch * chunks ids
    mtp_shift         token, target and segment of the next token              depth * batch * chunks * 3 ids

Striped ranks hold no two neighbours, so that a shift sends the rank's seq_len / cp tokens in place of one for each chunk. To hash within
documents the segment ids are gathered too; that has no row, since the masks of attention need the very same gather, and the compiler makes
one of both, which stands among the collectives under `batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from service.compile.collective_report import per_step, total
from service.compile.collectives import CollectiveInstance
from service.compile.scopes import BACKWARD, FORWARD, OPTIMIZER, REMAT
from service.models.config import DTYPE_BYTES, StepConfig
from service.models.order import Order, chunks_per_rank, resolve_order
from service.records import HaloUse

_ID_BYTES = 4
_IDS = ("s32",)
_SHIFTED_IDS = 3
"""Tokens, targets and segments of the tokens ahead cross in one exchange per MTP depth."""
_PHASES = (FORWARD, REMAT, BACKWARD, OPTIMIZER, None)


@dataclass(frozen=True, slots=True)
class _Use:
    """One kind of exchange: how to know its collectives, and its closed form per step and device."""

    name: str
    is_part: Callable[[CollectiveInstance], bool]
    expected_bytes: int
    gather_bytes: int
    remat_bytes: int | None = None
    """The closed form of the pass that is run again, where it is not the forward pass's."""
    may_hold: Callable[[CollectiveInstance], bool] = lambda _: False
    """Whether a collective may be this exchange merged with others, so that it can no longer be told."""

    def expected_in(self, phase: str | None) -> int:
        """The closed form of one phase."""
        return self.remat_bytes if phase == REMAT and self.remat_bytes is not None else self.expected_bytes


def measure_halo(instances: Sequence[CollectiveInstance], config: StepConfig | None) -> tuple[HaloUse, ...]:
    """Every exchange the configuration calls for, one row per phase it runs in; none without a configuration or context parallelism.

    An exchange that the configuration calls for and the program lacks has a row that says so. Where the compiler may have merged it with
    others its bytes are unknown.
    """
    if config is None or config.axes.context == 1:
        return ()
    rows: list[HaloUse] = []
    for use in _uses(config):
        parts = [instance for instance in instances if use.is_part(instance)]
        phases = [phase for phase in _PHASES if any(part.phase == phase for part in parts)]
        rows.extend(_row(use, phase, [part for part in parts if part.phase == phase]) for phase in phases)
        if not parts and use.expected_bytes:
            rows.append(_absent(use, next(filter(use.may_hold, instances), None)))
    return tuple(rows)


def local_batch(config: StepConfig) -> int:
    """Sequences that one device holds a part of."""
    return config.global_batch // config.axes.batch_shards


def _uses(config: StepConfig) -> list[_Use]:
    model, train, cp = config.model, config.train, config.axes.context
    order = resolve_order(config.context, cp=cp, mode="train", has_engram=model.engram is not None)
    chunks, batch = chunks_per_rank(order), local_batch(config)
    uses = []
    if model.engram is not None:
        layers, halo = len(model.engram.layers), chunks * model.engram.halo
        token_bytes = layers * batch * model.mhc.num_streams * model.dim * DTYPE_BYTES[train.dtype]
        uses.append(_Use("engram_conv", _is_conv, token_bytes * halo, token_bytes * train.seq_len))
        ids = batch * _ID_BYTES
        if model.engram.respect_documents:
            # Every layer sends the same ids: one exchange serves all, but each layer that is run again stands alone.
            uses.append(_Use("engram_segments", _is_conv_segments, ids * halo, ids * train.seq_len, remat_bytes=layers * ids * halo))
        whole = batch * train.seq_len
        may_hold = partial(_is_all_reduce_of, num_ids=whole)
        uses.append(_Use("engram_ids", _is_id_gather, whole * _ID_BYTES, whole * _ID_BYTES, may_hold=may_hold))
    shifted = train.seq_len // cp if order is Order.STRIPED else chunks
    uses.append(_shift("loss_shift", _is_loss_shift, batch * _ID_BYTES, shifted, train.seq_len))
    if model.mtp.depth:
        uses.append(_shift("mtp_shift", _is_mtp_shift, model.mtp.depth * batch * _SHIFTED_IDS * _ID_BYTES, shifted, train.seq_len))
    return uses


def _shift(name: str, is_part: Callable[[CollectiveInstance], bool], token_bytes: int, num_tokens: int, seq_len: int) -> _Use:
    return _Use(name, is_part, token_bytes * num_tokens, token_bytes * seq_len)


def _is_conv(instance: CollectiveInstance) -> bool:
    return _is_permute(instance, "short_conv") and instance.dtypes != _IDS


def _is_conv_segments(instance: CollectiveInstance) -> bool:
    return _is_permute(instance, "short_conv") and instance.dtypes == _IDS


def _is_id_gather(instance: CollectiveInstance) -> bool:
    # By the hash's own scope: where `context` alone cuts the table, its reader gathers row ids over the same axis.
    return instance.kind == "all-gather" and _is_in(instance, "hash") and instance.dtypes == _IDS


def _is_all_reduce_of(instance: CollectiveInstance, *, num_ids: int) -> bool:
    """Whether arrays of that many ids are summed over `context`: so the compiler writes gathers of ids when it merges several in one."""
    over_context = instance.kind == "all-reduce" and instance.reach.axes == ("context",) and instance.dtypes == _IDS
    return over_context and num_ids in map(math.prod, instance.shapes)


def _is_loss_shift(instance: CollectiveInstance) -> bool:
    return _is_permute(instance, "loss") and not _is_in(instance, "mtp") and instance.dtypes == _IDS


def _is_mtp_shift(instance: CollectiveInstance) -> bool:
    return _is_permute(instance, "mtp") and instance.dtypes == _IDS


def _is_permute(instance: CollectiveInstance, scope: str) -> bool:
    return instance.kind == "collective-permute" and _is_in(instance, scope)


def _is_in(instance: CollectiveInstance, scope: str) -> bool:
    """Whether the instance is over `context` alone and lies under that scope."""
    return instance.reach.axes == ("context",) and scope in instance.module.split("/")


def _row(use: _Use, phase: str | None, parts: list[CollectiveInstance]) -> HaloUse:
    counted = [per_step(part) for part in parts]
    payload = total(payload for _, payload, _ in counted)
    return HaloUse(
        name=use.name,
        phase=phase,
        static_count=len(parts),
        per_step_count=total(count for count, _, _ in counted),
        payload_bytes=payload,
        wire_bytes=total(wire for _, _, wire in counted),
        total_wire_bytes=total(_total_wire(part) for part in parts),
        expected_payload_bytes=use.expected_in(phase),
        verdict=_verdict(use, phase, parts, payload),
        gather_bytes=use.gather_bytes,
    )


def _absent(use: _Use, merged: CollectiveInstance | None) -> HaloUse:
    """The row of an exchange that is not found, with the collective it may have been merged into."""
    row = _row(use, FORWARD, [])
    if merged is None:
        return row
    arrays = f"{len(merged.shapes)} arrays" if len(merged.shapes) > 1 else "an array"
    verdict = f"unknown: the compiler writes small gathers as sums, and {merged.name}, of {arrays} over context, may hold this one"
    unknown = dict.fromkeys(("per_step_count", "payload_bytes", "wire_bytes", "total_wire_bytes"))
    return row.model_copy(update={**unknown, "verdict": verdict})


def _total_wire(part: CollectiveInstance) -> int | None:
    """What all devices together send per step."""
    count, wire = part.count.value, part.wire_bytes
    if count is None or wire is None:
        return None
    if part.kind == "collective-permute":
        senders = sum(source != target for source, target in part.reach.groups)
    else:
        senders = sum(len(group) for group in part.reach.groups)
    return math.ceil(count * wire * senders)


def _verdict(use: _Use, phase: str | None, parts: list[CollectiveInstance], payload: int | None) -> str:
    if not parts:
        return "missing: the program has no such exchange; look for a gather of the sequence among the collectives"
    if payload is None:
        reasons = [part.count.reason for part in parts if part.count.reason]
        return f"unknown: {reasons[0]}" if reasons else "unknown"
    expected = use.expected_in(phase)
    if payload == expected:
        return "equal"
    dtypes = ", ".join(sorted({dtype for part in parts for dtype in part.dtypes}))
    if expected and payload % expected == 0:
        return f"{payload // expected} times the closed form: run more than once in this phase, or sent wider ({dtypes})"
    if payload < expected:
        return f"below the closed form by {expected - payload} bytes: part of it was merged or is not needed in the {phase} phase"
    return f"above the closed form by {payload - expected} bytes: padded, or sent wider ({dtypes})"
