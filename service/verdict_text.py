"""The sentence that says whether a program fits, in the words that pages and the command line share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.records import Report, ReportStatus
from service.units import format_bytes

TITLES = {
    ReportStatus.OK: "Fits",
    ReportStatus.DOES_NOT_FIT: "Does not fit",
    ReportStatus.UNKNOWN: "Undecided",
    ReportStatus.FAILED: "Failed",
}

_SMALLER = "a smaller train.per_device_batch or train.seq_len"
_REMEDIES: Mapping[str, str] = {
    "saved_activations": f"a train.remat that saves less, or {_SMALLER}",
    "rematerialised": _SMALLER,
    "gradients": "parameters sharded over more devices (mesh.fsdp)",
    "parameter_copies": "parameters sharded over more devices (mesh.fsdp)",
    "collective_buffers": _SMALLER,
    "moe_dispatch": "a lower moe.ragged_buffer_factor with retry_when_tokens_dropped, or more moe.dropless.token_chunks",
    "logits": "more train.vocab_chunks",
    "temporaries": f"{_SMALLER}; the buffers at the peak say which",
}
"""What makes less of a class at the peak; the classes of arguments are told of together."""


def verdict_sentence(report: Report) -> str:
    """What is needed, what there is, and how far apart they are: `needs 41.50 GiB, 95.73 GiB available per device: 54.23 GiB free`."""
    if report.status == ReportStatus.FAILED:
        return report.failure.message if report.failure else "no report"
    sides = f"needs {format_bytes(report.allocated_bytes)}, {format_bytes(report.capacity_bytes)} available per device"
    if report.status == ReportStatus.UNKNOWN:
        return f"{sides}: too close to tell before code generation; weigh at depth full"
    if report.status == ReportStatus.DOES_NOT_FIT:
        over = None if report.headroom_bytes is None else -report.headroom_bytes
        if over is not None and over <= 0:
            return f"{sides} before program code, which takes the rest"
        return f"{sides}: {format_bytes(over)} too much"
    return f"{sides}: {format_bytes(report.headroom_bytes)} free"


def advice(report: Report) -> str:
    """Where to begin with a program that does not fit: at the state where it alone is too much, else at the largest class beside it.

    Empty for a program that fits, and where nothing was measured.
    """
    arguments, capacity = report.argument_bytes, report.capacity_bytes
    if report.status != ReportStatus.DOES_NOT_FIT or arguments is None or capacity is None:
        return ""
    if arguments >= capacity:
        return (
            f"State and batch alone take {format_bytes(arguments)}, so no remat policy or batch size helps: shard the state over more "
            "devices (mesh.topology, mesh.fsdp), or hold it in fewer bytes (train.param_dtype, train.moment_dtype)."
        )
    rest = {name: num_bytes for name, num_bytes in report.classes.items() if name in _REMEDIES and num_bytes}
    if not rest:
        return ""
    largest = max(rest, key=lambda name: rest[name])
    return (
        f"State and batch leave {format_bytes(capacity - arguments)}. The most beside them is {largest.replace('_', ' ')}, "
        f"{format_bytes(rest[largest])}: try {_REMEDIES[largest]}."
    )


def governing(reports: Sequence[Report]) -> Report | None:
    """The program that decides: a failed one before any other, then the most allocated; None of none."""
    return max(reports, key=lambda report: (report.status == ReportStatus.FAILED, report.allocated_bytes or 0), default=None)
