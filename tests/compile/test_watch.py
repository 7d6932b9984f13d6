"""The dump is read when it is whole and not before; both by a scripted compiler and by the real one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from service.compile.analyse import read
from service.compile.catalog import find_topology
from service.compile.failures import ErrorKind, classify_error
from service.compile.lower import module_name
from service.compile.topology import mock_devices
from service.compile.watch import Compilation

ASSIGNED = "after_optimizations.hlo.pb"
NEXT = "after_optimizations_after_buffer_assignment.hlo.pb"


class ScriptedCompiler:
    """Writes the files it is told to, then waits to be let on, then returns or raises."""

    def __init__(self, dump_dir: Path) -> None:
        self._dump_dir = dump_dir
        self._goes_on = threading.Event()
        self._error: Exception | None = None
        self.options: Mapping[str, Any] = {}

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        self.options = compiler_options or {}
        assert self._goes_on.wait(30)
        if self._error:
            raise self._error
        return "compiled"

    def write(self, stage: str, *, module: str = "jit_step", number: int = 0) -> Path:
        self._dump_dir.mkdir(exist_ok=True)
        path = self._dump_dir / f"module_{number:04}.{module}.cl_1014.{stage}"
        path.write_bytes(b"dump of " + path.name.encode())
        return path

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._goes_on.set()


@pytest.fixture
def compiler(tmp_path: Path) -> ScriptedCompiler:
    return ScriptedCompiler(tmp_path / "dump")


def start(compiler: ScriptedCompiler, module: str = "jit_step", options: Mapping[str, Any] | None = None) -> Compilation:
    return Compilation(compiler, module=module, options=options or {}, dump_dir=compiler._dump_dir)


def returns_within(seconds: float, call: Callable[[], Any]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_dump_that_may_be_half_written_is_not_given_out(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler)
    dump = compiler.write(ASSIGNED)
    assert not returns_within(0.2, compilation.wait_for_dump)
    assert not compilation.is_assigned
    compiler.write(NEXT)
    assert compilation.wait_for_dump() == dump
    assert compilation.is_assigned
    compiler.end()


def test_end_of_a_refused_compile_makes_its_dump_safe(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler)
    dump = compiler.write(ASSIGNED)
    compiler.end(RuntimeError("does not fit"))
    assert compilation.wait_for_dump() == dump
    assert not compilation.is_assigned
    with pytest.raises(RuntimeError, match="does not fit"):
        compilation.wait()


def test_a_compile_that_ends_before_it_assigned_anything_has_no_dump(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler)
    compiler.end(RuntimeError("unknown option"))
    assert compilation.wait_for_dump() is None


def test_other_modules_and_look_alikes_are_not_taken_for_the_program(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler)
    for module in ("jit_broadcast", "jit_step_1", "jit_step.helper.more", "xjit_step"):
        compiler.write(ASSIGNED, module=module, number=7)
        compiler.write(NEXT, module=module, number=7)
    assert not returns_within(0.2, compilation.wait_for_dump)
    own = compiler.write(ASSIGNED, number=3)
    compiler.write(NEXT, number=3)
    assert compilation.wait_for_dump() == own
    compiler.end()


def test_a_compiler_that_starts_over_is_read_by_its_last_attempt(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler)
    for number in (9, 10):
        last = compiler.write(ASSIGNED, number=number)
        compiler.write(NEXT, number=number)
    assert compilation.wait_for_dump() == last
    compiler.end()


@pytest.mark.parametrize("stage", [NEXT, "oom_intermediate_module.hlo.pb"])
def test_the_second_copy_is_read_when_all_of_it_is_written(compiler: ScriptedCompiler, stage: str) -> None:
    compilation = start(compiler)
    dump = compiler.write(ASSIGNED, number=3)
    compiler.write(stage, number=2)
    copy = compiler.write(stage, number=3)
    whole = copy.read_bytes()
    copy.write_bytes(whole[:9])
    assert not returns_within(0.2, lambda: compilation.wait_for_copy(dump, len(whole)))
    copy.write_bytes(whole)
    assert compilation.wait_for_copy(dump, len(whole)) == whole
    compiler.end()


def test_a_compiler_that_ends_within_the_second_copy_or_before_it_is_not_waited_for(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler)
    dump = compiler.write(ASSIGNED)
    compiler.end()
    assert compilation.wait_for_copy(dump, 1000) is None
    cut = compiler.write(NEXT).read_bytes()
    assert compilation.wait_for_copy(dump, 1000) == cut


def test_options_of_the_spec_are_passed_on_beside_the_dumps(compiler: ScriptedCompiler) -> None:
    compilation = start(compiler, options={"xla_tpu_rwb_fusion": True})
    compiler.end()
    assert compilation.wait() == "compiled"
    assert compiler.options == {"xla_tpu_rwb_fusion": True, "xla_dump_to": str(compiler._dump_dir), "xla_dump_hlo_as_proto": True}


def lower(num_rows: int) -> jax.stages.Lowered:
    """A step over float32[num_rows, 8, 128] on one v5e device, 4096 bytes a row, whose result reuses its argument."""
    sharding = SingleDeviceSharding(mock_devices(find_topology("v5e-4"))[0])
    state = jax.ShapeDtypeStruct((num_rows, 8, 128), jnp.float32, sharding=sharding)

    def watched_step(state: jax.Array) -> jax.Array:
        return state + jnp.sum(jnp.sort(state, axis=-1) * state, axis=0)

    return jax.jit(watched_step, donate_argnums=0).lower(state)


@pytest.mark.tpu
def test_real_dump_is_whole_when_it_is_given_out_and_never_changes_after(tmp_path: Path) -> None:
    lowered = lower(3000)
    assert module_name(lowered) == "jit_watched_step"
    compilation = Compilation(lowered, module=module_name(lowered), options={}, dump_dir=tmp_path)
    path = compilation.wait_for_dump()
    assert path is not None
    early = path.read_bytes()
    statistics: Any = compilation.wait().memory_analysis()
    assert path.read_bytes() == early
    memory = read(early).memory
    assert memory.allocated_bytes == statistics.total_allocation_bytes
    assert memory.argument_bytes == memory.alias_bytes == 3000 * 4096


@pytest.mark.tpu
def test_real_compiler_never_writes_the_last_file_of_a_program_that_does_not_fit(tmp_path: Path) -> None:
    num_rows = (17 << 30) // 4096
    lowered = lower(num_rows)
    compilation = Compilation(lowered, module=module_name(lowered), options={}, dump_dir=tmp_path)
    path = compilation.wait_for_dump()
    assert path is not None
    assert [name for name in tmp_path.iterdir() if name.name.endswith(NEXT)] == []
    assert not compilation.is_assigned
    with pytest.raises(jax.errors.JaxRuntimeError) as refusal:
        compilation.wait()
    assert classify_error(str(refusal.value)).kind is ErrorKind.HBM
    memory = read(path.read_bytes()).memory
    assert memory.argument_bytes == num_rows * 4096
    assert memory.allocated_bytes >= num_rows * 4096


def test_cores_are_left_to_the_thread_that_asks_for_them() -> None:
    # In a process of its own: the threads of this one are to keep their priority.
    code = """
import os, threading
from service.compile.watch import yield_cores
ready, done = threading.Event(), threading.Event()
other = threading.Thread(target=lambda: (ready.set(), done.wait(30)))
other.start()
assert ready.wait(30)
yield_cores()
print(*(os.getpriority(os.PRIO_PROCESS, thread) - os.getpriority(os.PRIO_PROCESS, os.getppid()) for thread in (other.native_id, 0)))
done.set()
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.split() == ["10", "0"]
