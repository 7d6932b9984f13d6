"""Each of the compiler's error texts is taken for what it is; texts here have the compiler's wording and numbers of our own."""

from __future__ import annotations

import pytest

from service.compile.failures import (
    LOCK_FILE_MESSAGE,
    MAX_MESSAGE_CHARACTERS,
    ErrorKind,
    classify_error,
    find_check_failure,
    is_before_code_generation,
    read_log_tail,
    stated_hbm_bytes,
)
from service.records import FailureKind

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10

BEFORE_CODE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (128.50G)"
    " exceeds available HBM (95.75G). HLO module: jit_step.\nSee https://example.invalid/error_1000 for more details."
)
AFTER_CODE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.25G of"
    " 15.75G hbm. Exceeded hbm capacity by 512.00M.\n\nTotal hbm usage >= 16.50G:\n    reserved        258.00M\n    arguments 0B"
)

TEXTS = [
    ("before code generation", BEFORE_CODE, ErrorKind.HBM, int(128.5 * GIB), int(95.75 * GIB)),
    ("after code generation", AFTER_CODE, ErrorKind.HBM, int(16.25 * GIB), int(15.75 * GIB)),
    (
        "cores apart",
        "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 30.50G, SparseCore Hbm usage 2.25G, exceeding available bytes: 31.25G",
        ErrorKind.HBM,
        int(32.75 * GIB),
        int(31.25 * GIB),
    ),
    (
        "one allocation in hbm",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Allocation (size=51539607552) would exceed memory (size=17179869184) ::"
        " #allocation3 [shape = 'u8[51539607552]{0}', space=hbm, size = 0xffffffffffffffff]",
        ErrorKind.HBM,
        51539607552,
        17179869184,
    ),
    ("one allocation, space unsaid", "Allocation (size=9000) would exceed memory (size=8000)", ErrorKind.HBM, 9000, 8000),
    (
        "one allocation in smem",
        "Allocation (size=1572864) would exceed memory (size=1048576) :: #allocation7 [shape = 'u8[1572864]{0}', space=smem]",
        ErrorKind.ON_CHIP,
        1572864,
        1048576,
    ),
    (
        "vmem",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 20.50M of 16.00M vmem.",
        ErrorKind.ON_CHIP,
        int(20.5 * MIB),
        16 * MIB,
    ),
    (
        "smem",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.50M of 1.00M smem. Exceeded smem capacity by 512.0K.",
        ErrorKind.ON_CHIP,
        int(1.5 * MIB),
        MIB,
    ),
    (
        "scoped vmem by code",
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem while allocating on stack for"
        ' %kernel.3 = bf16[96,640]{1,0:T(8,128)(2,1)} custom-call(%a), custom_call_target="tpu_custom_call". hbm is not at fault',
        ErrorKind.ON_CHIP,
        None,
        None,
    ),
    (
        "scoped vmem by limit",
        "RESOURCE_EXHAUSTED: Scoped allocation with size 18.00M and limit 16.00M exceeded scoped vmem limit by 2.00M.",
        ErrorKind.ON_CHIP,
        None,
        None,
    ),
    ("no figures", "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm while allocating a buffer", ErrorKind.HBM, None, None),
    ("code alone", "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: the program is too large", ErrorKind.HBM, None, None),
    (
        "mentions hbm",
        "INTERNAL: RET_CHECK failure (layout.cc:77) hbm buffer has no layout; out of memory spaces",
        ErrorKind.INTERNAL,
        None,
        None,
    ),
    (
        "a failed check",
        "Check failed: entries[i] <= std::numeric_limits<uint32_t>::max() (4294967301 vs. 4294967295)",
        ErrorKind.INTERNAL,
        None,
        None,
    ),
    ("host allocation", "RESOURCE_EXHAUSTED: std::bad_alloc", ErrorKind.HOST_MEMORY, None, None),
    ("host mapping", "INTERNAL: mmap failed: Cannot allocate memory", ErrorKind.HOST_MEMORY, None, None),
    ("unknown name", "INVALID_ARGUMENT: Invalid TPU external name: TPU v12x", ErrorKind.UNSUPPORTED, None, None),
    (
        "hosts do not divide",
        'INVALID_ARGUMENT: Topology layout "v5p:2x3x1" is not divisible by the given (or default) chips_per_host_bounds "2x2x1"',
        ErrorKind.UNSUPPORTED,
        None,
        None,
    ),
    ("anything else", "UNIMPLEMENTED: no such lowering", ErrorKind.INTERNAL, None, None),
    ("nothing", "", ErrorKind.INTERNAL, None, None),
]


@pytest.mark.parametrize(("text", "kind", "needed", "available"), [row[1:] for row in TEXTS], ids=[row[0] for row in TEXTS])
def test_each_text_is_taken_for_what_it_is(text: str, kind: ErrorKind, needed: int | None, available: int | None) -> None:
    error = classify_error(text)
    assert (error.kind, error.needed_bytes, error.available_bytes) == (kind, needed, available)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        (ErrorKind.ON_CHIP, FailureKind.VMEM),
        (ErrorKind.HOST_MEMORY, FailureKind.HOST_MEMORY),
        (ErrorKind.UNSUPPORTED, FailureKind.UNSUPPORTED),
        (ErrorKind.INTERNAL, FailureKind.COMPILER),
    ],
)
def test_only_hbm_is_a_result_and_everything_else_a_failure_of_its_own_kind(kind: ErrorKind, failure: FailureKind) -> None:
    text = next(row[1] for row in TEXTS if row[2] is kind)
    assert classify_error(text).as_failure("the log").kind is failure
    with pytest.raises(AssertionError):
        classify_error(BEFORE_CODE).as_failure()


def test_lock_file_is_told_and_its_advice_is_never_shown() -> None:
    text = 'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".'
    error = classify_error(text)
    assert error.kind is ErrorKind.LOCK_FILE
    assert error.message == LOCK_FILE_MESSAGE
    assert "rm" not in error.as_failure().message.split()
    assert read_log_tail(f"before\n{text}\nafter".encode()) == "before\nafter"


def test_message_leaves_out_the_table_of_buffers_and_the_address() -> None:
    assert classify_error(BEFORE_CODE).message.endswith("HLO module: jit_step.")
    assert classify_error(AFTER_CODE).message.endswith("Exceeded hbm capacity by 512.00M.")
    assert len(classify_error("x" * 9000).message) == MAX_MESSAGE_CHARACTERS


def test_only_the_first_check_states_the_capacity_within_its_rounding() -> None:
    assert is_before_code_generation(BEFORE_CODE)
    assert not is_before_code_generation(AFTER_CODE)
    assert stated_hbm_bytes(AFTER_CODE) is None
    bounds = stated_hbm_bytes(BEFORE_CODE)
    assert bounds is not None
    assert bounds == (int(95.745 * GIB), int(95.755 * GIB) + 1)


def test_reason_of_an_abort_is_the_last_failed_check_of_the_log() -> None:
    log = "I0101 loading\nF0101 12:00:00 7 layout.cc:9] Check failed: a == b (3 vs. 5)\n*** stack ***\n    @ 0x7f step()"
    assert find_check_failure(log) == "F0101 12:00:00 7 layout.cc:9] Check failed: a == b (3 vs. 5)"
    assert find_check_failure("I0101 loading\nall is well") is None


def test_log_tail_is_bounded_and_survives_bytes_that_are_no_text() -> None:
    tail = read_log_tail(b"a\0b\xff\n" * 20000)
    assert len(tail.encode()) <= 3 * (16 << 10)
    assert set(tail.split()[1:]) == {"ab�"}
