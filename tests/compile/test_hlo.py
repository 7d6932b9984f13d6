"""The optimised program is read as the compiler wrote it: recorded compiles, layouts and sizes, loops and sources."""

from __future__ import annotations

import re

import pytest

from service.compile.hlo import Program
from service.compile.shapes import dtype_name, layout_text, logical_bytes, padded_bytes, shape_at
from service.errors import AnalysisError
from tests.compile.hlo_text import RECORDED, module_from_text, program_from_text, recorded

FILES = sorted(path.stem for path in RECORDED.glob("*.hlo"))


@pytest.mark.parametrize("name", FILES)
def test_recorded_file_names_versions_and_command_and_no_machine(name: str) -> None:
    text = (RECORDED / f"{name}.hlo").read_text()
    versions, command = text.splitlines()[:2]
    assert re.fullmatch(r"// jax [\d.]+, jaxlib [\d.]+, libtpu [\d.]+", versions)
    assert command.startswith("// python -m tests.recorded.record (")
    assert not re.search(r'"/(?!\d)', text), "a source path is absolute"


@pytest.mark.parametrize("name", FILES)
def test_every_instruction_of_a_recorded_module_is_read(name: str) -> None:
    text = (RECORDED / f"{name}.hlo").read_text()
    written = re.findall(r"^  (?:ROOT )?%([\w.\-]+) = ", text, flags=re.MULTILINE)
    assert sorted(instruction.name for instruction in recorded(name).instructions.values()) == sorted(written)


@pytest.mark.parametrize("name", FILES)
def test_layouts_are_written_as_the_compiler_writes_them(name: str) -> None:
    text = (RECORDED / f"{name}.hlo").read_text()
    checked = 0
    for instruction in recorded(name).instructions.values():
        shape = instruction.shape
        if not shape.tuple_shapes and shape.dimensions:
            dims = ",".join(str(dim) for dim in shape.dimensions)
            assert f"%{instruction.name} = {dtype_name(shape)}[{dims}]{layout_text(shape)} " in text
            checked += 1
    assert checked


def test_users_and_callers_mirror_operands_and_calls() -> None:
    program = recorded("v5e-2x4.nested_scans_7_by_5")
    for instruction in program.instructions.values():
        assert all(instruction.id in program.users[operand] for operand in instruction.operands)
        assert all(instruction.id in program.callers[called] for called in instruction.called)


def test_loop_parts_are_told_apart_by_the_conditions_truth_value() -> None:
    program = recorded("v5e-2x4.nested_scans_7_by_5")
    for loop in (i for i in program.instructions.values() if i.opcode == "while"):
        body, condition = program.loop_parts(loop)
        assert dtype_name(program.root_of(condition).shape) == "pred"
        assert dtype_name(program.root_of(body).shape) == "tuple"


def test_source_is_the_innermost_frame() -> None:
    program = recorded("v5e-2x4.nested_scans_7_by_5")
    permute = next(i for i in program.instructions.values() if i.opcode == "collective-permute-start")
    path, line = program.frames_of(permute)[0].split(":")
    assert path == "tests/compile/tpu_programs.py"
    assert int(line) > 1


SHAPES = [
    # 9 rows of bf16 take 16.
    ("bf16[9,256]{1,0:T(8,128)(2,1)}", 9 * 256 * 2, 16 * 256 * 2),
    ("bf16[2,9,4096]{2,1,0:T(8,128)(2,1)}", 2 * 9 * 4096 * 2, 2 * 16 * 4096 * 2),
    # The minor-most dim is padded to 128 lanes: 32 times for four streams.
    ("f32[1000,4]{1,0:T(8,128)}", 1000 * 4 * 4, 1000 * 128 * 4),
    # Layout order, not shape order, decides what is minor.
    ("f32[3,500]{0,1:T(8,128)}", 3 * 500 * 4, 504 * 128 * 4),
    ("f32[]{:T(128)}", 4, 128 * 4),
    ("pred[5,7]{1,0:T(4,128)(4,1)}", 35, 8 * 128),
    ("s32[300]{0:T(1024)}", 1200, 4096),
    ("s32[2,3]{1,0}", 24, 24),
    ("s4[3,5]{1,0:E(4)}", 8, 8),
]


@pytest.mark.parametrize(("text", "logical", "padded"), SHAPES)
def test_padded_bytes_round_every_tiled_dim_up(text: str, logical: int, padded: int) -> None:
    program = program_from_text(f"HloModule m\n\nENTRY %e {{\n  ROOT %p = {text} parameter(0)\n}}\n")
    shape = program.root_of(program.entry).shape
    assert (logical_bytes(shape), padded_bytes(shape)) == (logical, padded)


def test_shape_at_follows_an_index_and_refuses_what_is_not_there() -> None:
    program = program_from_text("HloModule m\n\nENTRY %e {\n  ROOT %p = (f32[3], (s32[], bf16[5,7])) parameter(0)\n}\n")
    shape = program.root_of(program.entry).shape
    found = shape_at(shape, (1, 1))
    assert found is not None
    assert list(found.dimensions) == [5, 7]
    assert shape_at(shape, (1, 2)) is None
    assert shape_at(shape, (0, 0)) is None


def test_program_that_contradicts_itself_is_refused() -> None:
    text = (RECORDED / "v5e-2x4.combined_all_reduce.hlo").read_text()
    for damage in ("operand", "call", "entry", "root"):
        module = module_from_text(text)
        computation = module.computations[0]
        if damage == "operand":
            next(i for c in module.computations for i in c.instructions if i.operand_ids).operand_ids[0] = 10**15
        elif damage == "call":
            next(i for c in module.computations for i in c.instructions if i.called_computation_ids).called_computation_ids[0] = 10**15
        elif damage == "entry":
            module.entry_computation_id = 10**15
        else:
            computation.root_id = 10**15
        with pytest.raises(AnalysisError, match="corrupted"):
            Program(module)
