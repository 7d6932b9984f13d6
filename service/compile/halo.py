"""What context ranks exchange with their neighbours, measured in the compiled program beside its closed form.

Per use, rank and sequence the convolution of an Engram layer sends its halo once in array order and twice under load balance, whatever the
sequence's length; a shift sends one token's ids likewise. On the wire the first and the last rank send one halo where the others send two:
2 * halo * (cp - 1) in all. Under rematerialisation the convolution's exchange runs three times: forward, forward again, and transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.compile.collective_report import per_step, total
from service.compile.collectives import CollectiveInstance
from service.models.config import DTYPE_BYTES, StepConfig
from service.models.order import chunks_per_rank, resolve_order
from service.records import HaloUse

_ID_BYTES = 4
_SHIFTED_IDS = 3
"""Tokens, targets and segments of the tokens ahead cross in one exchange per MTP depth."""
_PHASES = ("forward", "remat", "backward", "optimizer", None)


@dataclass(frozen=True, slots=True)
class _Use:
    """One kind of exchange: how to know its collectives, and its closed form per step and device."""

    name: str
    is_part: Callable[[CollectiveInstance], bool]
    expected_bytes: int
    gather_bytes: int


def measure_halo(instances: Sequence[CollectiveInstance], config: StepConfig | None) -> tuple[HaloUse, ...]:
    """Every exchange the configuration calls for, one row per phase it runs in; none without a configuration or context parallelism.

    An exchange that the configuration calls for and the program lacks has a row that says so.
    """
    if config is None or config.axes.context == 1:
        return ()
    rows: list[HaloUse] = []
    for use in _uses(config):
        parts = [instance for instance in instances if use.is_part(instance)]
        phases = [phase for phase in _PHASES if any(part.phase == phase for part in parts)]
        rows.extend(_row(use, phase, [part for part in parts if part.phase == phase]) for phase in phases)
        if not parts and use.expected_bytes:
            rows.append(_row(use, "forward", []))
    return tuple(rows)


def local_batch(config: StepConfig) -> int:
    """Sequences that one device holds a part of."""
    return config.global_batch // config.axes.batch_shards


def _uses(config: StepConfig) -> list[_Use]:
    model, train = config.model, config.train
    order = resolve_order(config.context, cp=config.axes.context, mode="train", has_engram=model.engram is not None)
    chunks, batch = chunks_per_rank(order), local_batch(config)
    uses = []
    if model.engram is not None:
        layers, channels = len(model.engram.layers), model.mhc.num_streams * model.dim
        token_bytes = layers * batch * channels * DTYPE_BYTES[train.dtype]
        uses.append(_Use("engram_conv", _is_conv, token_bytes * chunks * model.engram.halo, token_bytes * train.seq_len))
        # One gather serves every layer: the ids are hashed in natural order before the layers.
        ids = batch * train.seq_len * _ID_BYTES * (2 if model.engram.respect_documents else 1)
        uses.append(_Use("engram_ids", _is_id_gather, ids if config.load_balanced else 0, ids))
    if model.mtp.depth:
        token_bytes = model.mtp.depth * batch * _SHIFTED_IDS * _ID_BYTES
        uses.append(_Use("mtp_shift", _is_mtp_shift, token_bytes * chunks, token_bytes * train.seq_len))
    return uses


def _is_conv(instance: CollectiveInstance) -> bool:
    return instance.kind == "collective-permute" and "short_conv" in instance.module.split("/") and instance.dtypes != ("s32",)


def _is_id_gather(instance: CollectiveInstance) -> bool:
    return (
        instance.kind == "all-gather"
        and instance.reach.axes == ("context",)
        and instance.module == "engram"
        and instance.dtypes == ("s32",)
    )


def _is_mtp_shift(instance: CollectiveInstance) -> bool:
    return instance.kind == "collective-permute" and instance.module.split("/")[0] == "mtp" and instance.dtypes == ("s32",)


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
        expected_payload_bytes=use.expected_bytes,
        verdict=_verdict(use, phase, parts, payload),
        gather_bytes=use.gather_bytes,
    )


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
    if payload == use.expected_bytes:
        return "equal"
    dtypes = ", ".join(sorted({dtype for part in parts for dtype in part.dtypes}))
    if use.expected_bytes and payload % use.expected_bytes == 0:
        return f"{payload // use.expected_bytes} times the closed form: run more than once in this phase, or sent wider ({dtypes})"
    if payload < use.expected_bytes:
        return f"below the closed form by {use.expected_bytes - payload} bytes: part of it was merged or is not needed in the {phase} phase"
    return f"above the closed form by {payload - use.expected_bytes} bytes: padded, or sent wider ({dtypes})"
