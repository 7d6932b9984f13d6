"""A damaged dump gives a refusal with its reason, never a wrong number and never another error."""

from __future__ import annotations

import random
from typing import Any

import pytest

from service.compile.analyse import AnalysisContext, analyse, read
from service.compile.dump import check_copy, module_size
from service.errors import AnalysisError
from tests.compile.conftest import Compiled, CompileOnTpu

pytestmark = pytest.mark.tpu

CONTEXT = AnalysisContext(mesh_axes={"fsdp": 2, "context": 2}, device_slices=(0,) * 4, family="v5e")


@pytest.fixture
def compiled(compile_on_tpu: CompileOnTpu) -> Compiled:
    return compile_on_tpu("v5e:2x2", "train_step_in_vmem")


@pytest.fixture
def dump(compiled: Compiled) -> bytes:
    return compiled.dump


def numbers(damaged: bytes) -> dict[str, Any] | None:
    """Every byte count of memory that is reported from the dump alone, without the compiler's second copy; None where it is refused.

    Bytes by module are not among them: a scope's name stands in the dump once, so that only the copy tells a damaged one.
    """
    try:
        fields = analyse(read(damaged), context=CONTEXT).fields
    except AnalysisError:
        return None
    totals = {name: value for name, value in fields.items() if isinstance(value, int) and not name.startswith(("module", "unattributed"))}
    return totals | {"num_points": fields["timeline"].num_points, "usage": [point.live_bytes for point in fields["timeline"].points]}


@pytest.mark.parametrize("count", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_flipped_bits_change_no_number(dump: bytes, count: int) -> None:
    intact = numbers(dump)
    chance = random.Random(20)
    refused = 0
    for trial in range(count):
        damaged = bytearray(dump)
        # Half of the damage goes to the buffer assignment, which is the last fifth of the file.
        position = chance.randrange(len(dump) * 4 // 5 if trial % 2 else 0, len(dump))
        damaged[position] ^= 1 << chance.randrange(8)
        measured = numbers(bytes(damaged))
        refused += measured is None
        # What a flip leaves readable is a name, a scope or a source line: no number.
        assert measured in (None, intact), f"byte {position} of {len(dump)}"
    assert refused > count / 4


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_with_the_compilers_second_copy_flipped_bits_change_nothing_at_all(compiled: Compiled, count: int) -> None:
    intact = analyse(read(compiled.dump), context=CONTEXT)
    check_copy(compiled.dump, compiled.copy)
    chance = random.Random(22)
    accepted = 0
    for trial in range(count):
        damaged = bytearray(compiled.dump)
        # Nine of ten in the buffer assignment, of which there is no copy.
        position = chance.randrange(0 if trial % 10 == 0 else len(compiled.copy), len(damaged))
        damaged[position] ^= 1 << chance.randrange(8)
        try:
            check_copy(bytes(damaged), compiled.copy)
            measured = analyse(read(bytes(damaged)), context=CONTEXT)
        except AnalysisError:
            continue
        assert position >= len(compiled.copy)
        assert measured == intact, f"byte {position} of {len(damaged)}"
        accepted += 1
    assert accepted < count / 2


@pytest.mark.parametrize("name", ["train_step_in_vmem", "train_step_too_large"])
def test_the_compilers_second_copy_is_the_beginning_of_the_dump(compile_on_tpu: CompileOnTpu, name: str) -> None:
    compiled = compile_on_tpu("v5e:2x2", name)
    assert module_size(compiled.dump) == len(compiled.copy) > len(compiled.dump) / 2
    check_copy(compiled.dump, compiled.copy)
    for other in (
        b"",
        compiled.copy[:-1],
        compiled.copy + b"\0",
        bytes([*compiled.copy[:99], compiled.copy[99] ^ 1, *compiled.copy[100:]]),
    ):
        with pytest.raises(AnalysisError, match=rf"second copy of it \({len(other)} bytes\) part at byte \d+"):
            check_copy(compiled.dump, other)


def test_truncation_anywhere_is_refused(dump: bytes) -> None:
    for length in (*range(0, 64, 7), *range(1000, len(dump), len(dump) // 40), len(dump) - 1):
        assert numbers(dump[:length]) is None


def test_lost_or_doubled_stretch_is_refused_or_harmless(dump: bytes) -> None:
    intact = numbers(dump)
    chance = random.Random(21)
    for _ in range(60):
        start = chance.randrange(len(dump))
        length = chance.choice((1, 8, 64, 4096))
        for damaged in (dump[:start] + dump[start + length :], dump[:start] + dump[start : start + length] + dump[start:]):
            assert numbers(damaged) in (None, intact)


def test_zeros_where_a_page_was_never_written_are_refused_or_harmless(dump: bytes) -> None:
    intact = numbers(dump)
    for start in range(0, len(dump), 4096):
        measured = numbers(dump[:start] + bytes(len(dump[start : start + 4096])) + dump[start + 4096 :])
        assert measured in (None, intact)


def test_wrong_mesh_is_refused(dump: bytes) -> None:
    with pytest.raises(AnalysisError, match=r"the mesh \{'fsdp': 2, 'context': 4\} has 8"):
        analyse(read(dump), context=AnalysisContext(mesh_axes={"fsdp": 2, "context": 4}, device_slices=(0,) * 8, family="v5e"))
