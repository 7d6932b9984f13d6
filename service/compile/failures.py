"""Tells the compiler's error texts apart: what did not fit where, and what was no matter of memory at all; no JAX here.

One classifier for all of them, held by a table of texts in tests/compile/test_failures.py. A text that merely mentions HBM is no HBM
exhaustion: only the sentences below are. Texts are those of libtpu 0.0.52 and those public reports and XLA's list of error codes show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from service.records import Failure, FailureKind

MAX_MESSAGE_CHARACTERS = 2000
LOG_TAIL_BYTES = 16 << 10


class ErrorKind(StrEnum):
    """What a compiler's error text is about."""

    HBM = "hbm"
    """The program does not fit: a result, not a failure."""
    ON_CHIP = "on_chip"
    """vmem or smem; no other sharding or batch is to blame than that of one kernel."""
    HOST_MEMORY = "host_memory"
    LOCK_FILE = "lock_file"
    """libtpu was being loaded by another process; passes by itself."""
    UNSUPPORTED = "unsupported"
    """A topology or device this toolchain cannot mock."""
    INTERNAL = "internal"
    """Anything else."""


@dataclass(frozen=True)
class CompilerError:
    """A compiler's error text, understood. Bytes come from figures rounded to two decimals, except in allocation texts."""

    kind: ErrorKind
    message: str
    needed_bytes: int | None = None
    available_bytes: int | None = None

    def as_failure(self, log_tail: str = "") -> Failure:
        """The failure to record. Not for HBM: not fitting is a result."""
        assert self.kind is not ErrorKind.HBM
        return Failure(kind=_FAILURE_KINDS[self.kind], message=self.message, log_tail=log_tail)


_FAILURE_KINDS = {
    ErrorKind.ON_CHIP: FailureKind.VMEM,
    ErrorKind.HOST_MEMORY: FailureKind.HOST_MEMORY,
    ErrorKind.LOCK_FILE: FailureKind.COMPILER,
    ErrorKind.UNSUPPORTED: FailureKind.UNSUPPORTED,
    ErrorKind.INTERNAL: FailureKind.COMPILER,
}

LOCK_FILE_MESSAGE = "libtpu was being loaded by another process each time it was tried; submit the job again"
"""Shown in place of libtpu's own text, whose advice to delete the lock file breaks the other process."""

_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_REQUIRED = re.compile(rf"total memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Ran out of memory in memory space (\w+)\. Used {_SIZE} of {_SIZE}")
_BY_CORE = re.compile(
    rf"TensorCore Hbm usage:?\s*{_SIZE},?\s*SparseCore Hbm usage:?\s*{_SIZE},?\s*(?:exceeding|exceeds) available (?:bytes|HBM):?\s*{_SIZE}",
    re.IGNORECASE,
)
_ALLOCATION = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)(?:.*?space=(\w+))?", re.DOTALL)
_SPACE = re.compile(r"Ran out of memory in memory space (\w+)|exceeded scoped (vmem) limit", re.IGNORECASE)
_LOCK = re.compile(r"multi-process lockfile|libtpu_lockfile|The TPU is already in use by", re.IGNORECASE)
_UNSUPPORTED = re.compile(
    r"Invalid TPU external name|is not divisible by the given \(or default\) chips_per_host_bounds|Topology .{0,200}not supported"
    r"|no plugin .{0,80}(?:gpu|cuda|rocm)|Unknown backend",
    re.IGNORECASE,
)
_HOST = re.compile(r"std::bad_alloc|Cannot allocate memory|\bMemoryError\b|mmap failed", re.IGNORECASE)
_ON_CHIP_SPACES = frozenset({"vmem", "smem", "cmem", "sflag", "spmem", "tilespmem"})


def classify_error(text: str) -> CompilerError:
    """What an error text of the compiler, or the log of one that aborted, says."""
    message = _first_paragraph(text)
    if _LOCK.search(text):
        return CompilerError(ErrorKind.LOCK_FILE, LOCK_FILE_MESSAGE)
    if match := _REQUIRED.search(text):
        return CompilerError(ErrorKind.HBM, message, _size(*match.groups()[:2]), _size(*match.groups()[2:]))
    if match := _USED.search(text):
        space, used, available = match[1].lower(), _size(match[2], match[3]), _size(match[4], match[5])
        if space == "hbm":
            return CompilerError(ErrorKind.HBM, message, used, available)
        kind = ErrorKind.ON_CHIP if space in _ON_CHIP_SPACES else ErrorKind.INTERNAL
        return CompilerError(kind, message, used, available)
    if match := _BY_CORE.search(text):
        tensor_core, sparse_core, available = (_size(*match.groups()[i : i + 2]) for i in (0, 2, 4))
        return CompilerError(ErrorKind.HBM, message, tensor_core + sparse_core, available)
    if match := _ALLOCATION.search(text):
        space = (match[3] or "hbm").lower()
        kind = ErrorKind.HBM if space == "hbm" else ErrorKind.ON_CHIP if space in _ON_CHIP_SPACES else ErrorKind.INTERNAL
        return CompilerError(kind, message, int(match[1]), int(match[2]))
    if "CompileTimeScopedVmemOom" in text:
        return CompilerError(ErrorKind.ON_CHIP, message)
    if match := _SPACE.search(text):
        space = (match[1] or match[2]).lower()
        if space == "hbm":
            return CompilerError(ErrorKind.HBM, message)
        return CompilerError(ErrorKind.ON_CHIP if space in _ON_CHIP_SPACES else ErrorKind.INTERNAL, message)
    if "CompileTimeHbmOom" in text:
        return CompilerError(ErrorKind.HBM, message)
    if _UNSUPPORTED.search(text):
        return CompilerError(ErrorKind.UNSUPPORTED, message)
    if _HOST.search(text):
        return CompilerError(ErrorKind.HOST_MEMORY, message)
    return CompilerError(ErrorKind.INTERNAL, message)


def is_before_code_generation(text: str) -> bool:
    """Whether an HBM text is that of the first check, which compares allocated bytes alone, without program code."""
    return _REQUIRED.search(text) is not None


def stated_hbm_bytes(text: str) -> tuple[int, int] | None:
    """Least and most bytes of available HBM that the first check's text can mean, given its rounding; None for other texts."""
    match = _REQUIRED.search(text)
    if match is None:
        return None
    number, unit = match[3], _UNITS[match[4]]
    half_digit = 0.5 / 10 ** len(number.partition(".")[2])
    return int((float(number) - half_digit) * unit), int((float(number) + half_digit) * unit) + 1


def find_check_failure(log: str) -> str | None:
    """The line of a log that says why the compiler aborted itself: a failed check or a fatal error; None where none does."""
    lines = [line for line in log.splitlines() if re.search(r"Check fail(?:ed|ure)|RET_CHECK failure|^F\d{4} |Fatal Python error", line)]
    return lines[-1].strip()[:MAX_MESSAGE_CHARACTERS] if lines else None


def read_log_tail(log: bytes) -> str:
    """The last of a log as text that can be shown and stored; libtpu's advice to delete its lock file is left out."""
    text = log[-LOG_TAIL_BYTES:].decode("utf-8", errors="replace").replace("\0", "")
    return "\n".join(line for line in text.splitlines() if not _LOCK.search(line)).strip()


def _first_paragraph(text: str) -> str:
    """The text without the tables of buffers, which the report gives exactly, and without the pointer to a web page."""
    paragraph = re.split(r"\n\s*\n|\nSee https?://", text.strip(), maxsplit=1)[0]
    return " ".join(paragraph.split())[:MAX_MESSAGE_CHARACTERS]


def _size(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
