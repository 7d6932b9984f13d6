"""Real compiles of small programs, each made once per test run by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.compile.catalog import find_topology
from service.compile.environment import child_environment
from tests.compile import finding_programs
from tests.compile.tpu_programs import MESHES

TOGETHER = (
    (
        "scan_of_6_with_3_halos",
        "nested_scans_7_by_5",
        "combined_all_reduce",
        "all_gather_over_two_axes",
        "reduce_scatter",
        "all_to_all",
        "ragged_all_to_all",
        "loop_with_bound_from_data",
        "loop_that_counts_down_by_3",
        "branch_with_all_reduce",
        "offload_to_host",
    ),
    finding_programs.NAMES,
)
"""Compiled in one process each, since starting it takes longer than compiling them."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler left of one program."""

    topology: str
    dump: bytes
    copy: bytes
    """The module as the compiler wrote it once more."""
    statistics: dict[str, int]
    """Of `memory_analysis()`; empty where the program was refused."""
    error: str

    @property
    def family(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def axes(self) -> dict[str, int]:
        return MESHES[self.topology]


CompileOnTpu = Callable[[str, str], Compiled]


@pytest.fixture(scope="session")
def compile_on_tpu(tmp_path_factory: pytest.TempPathFactory) -> CompileOnTpu:
    """`compile_on_tpu(topology, name)`: the program of `tpu_programs` compiled for that mocked topology."""
    known: dict[tuple[str, str], Compiled] = {}

    def compiled(topology: str, name: str) -> Compiled:
        if (topology, name) not in known:
            names = next((together for together in TOGETHER if name in together), (name,))
            work_dir = tmp_path_factory.mktemp("tpu")
            for program, result in compile_programs(topology, names, work_dir).items():
                known[topology, program] = result
        return known[topology, name]

    return compiled


def compile_programs(topology: str, names: tuple[str, ...], work_dir: Path) -> dict[str, Compiled]:
    """The named programs compiled in one child process that writes under `work_dir` alone."""
    device_topology = find_topology(topology.partition("*")[0])
    for directory in ("tmp", "log"):
        (work_dir / directory).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.compile.tpu_programs", topology, str(work_dir / "out"), *names]
    root = Path(__file__).parent.parent.parent
    ended = subprocess.run(command, env=child_environment(device_topology, work_dir), cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    results = {}
    for name in names:
        directory = work_dir / "out" / name
        (dump,) = directory.glob("*.after_optimizations.hlo.pb")
        (copy,) = (
            *directory.glob("*.after_optimizations_after_buffer_assignment.hlo.pb"),
            *directory.glob("*.oom_intermediate_module.hlo.pb"),
        )
        statistics, error = directory / "memory_analysis.json", directory / "error.txt"
        results[name] = Compiled(
            topology=topology,
            dump=dump.read_bytes(),
            copy=copy.read_bytes(),
            statistics=json.loads(statistics.read_text()) if statistics.exists() else {},
            error=error.read_text() if error.exists() else "",
        )
    return results
