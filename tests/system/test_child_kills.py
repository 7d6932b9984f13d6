"""Real compile children and their parents are killed with SIGKILL at every phase: the end is recorded, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.compile.interface import ChildLimits, CompileRequest, ProgressEvent
from service.compile.runner import ChildCompiler
from service.records import Depth, FailureKind, Report, ReportStatus
from tests.system.sites import PATIENCE_SECONDS, Site, runs

pytestmark = [pytest.mark.system, pytest.mark.tpu]

SPEC = {
    "scenario": "killed",
    "model": {"preset": "tiny", "num_layers": 1, "experts": None, "engram": None, "mtp": {"depth": 0}, "mhc": {"num_streams": 1}},
    "train": {"seq_len": 64, "per_device_batch": 1},
    "mesh": {"topology": "v5e-4", "fsdp": 4},
}

PARENT = """
import sys
from pathlib import Path
from service.compile.interface import ChildLimits, CompileRequest
from service.compile.runner import ChildCompiler
import json
spec, work_dir, *command = sys.argv[1:]
request = CompileRequest(spec=json.loads(spec), program="candidate", depth="full", work_dir=work_dir)
compiler = ChildCompiler(command=command)
compiler(request, limits=ChildLimits(), on_event=lambda event: print(event.name, flush=True), is_cancelled=lambda: False)
"""


def child_held_in(phase: str) -> tuple[str, ...]:
    """The command of a child that compiles as any other, and says nothing more once it has entered a phase."""
    return (sys.executable, "-P", str(Path(__file__).with_name("silenced_child.py")), phase)


def weigh(tmp_path: Path, kill_in: str, depth: Depth = "full") -> tuple[Report, list[psutil.Process]]:
    """A run whose child is killed as it enters a phase, and every process that belonged to it."""
    family: list[psutil.Process] = []
    # The browser tests' driver lives as long as the test run.
    others = set(psutil.Process().children())

    def kill(event: ProgressEvent) -> None:
        if event.name == kill_in:
            (child,) = set(psutil.Process().children()) - others
            family.extend([child, *child.children(recursive=True)])
            os.kill(child.pid, signal.SIGKILL)

    request = CompileRequest(spec=SPEC, program="candidate", depth=depth, work_dir=str(tmp_path / "work"))
    compiler = ChildCompiler(tmp_path / "capacity.json", command=child_held_in(kill_in))
    report = compiler(request, limits=ChildLimits(), on_event=kill, is_cancelled=lambda: False)
    return report, family


@pytest.mark.parametrize("phase", ["topology", "trace", "compile", "code_generation"])
def test_a_child_killed_in_any_phase_is_a_recorded_crash_and_leaves_nothing(tmp_path: Path, phase: str) -> None:
    report, family = weigh(tmp_path, phase)
    assert report.status is ReportStatus.FAILED
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CRASHED
    assert report.failure.message.startswith(f"ended by SIGKILL during {phase}")
    assert family
    assert not any(runs(process) for process in family)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("phase", ["topology", "lower", "compile"])
def test_a_child_whose_parent_is_killed_ends_itself(tmp_path: Path, phase: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(SPEC), str(tmp_path / "work"), *child_held_in(phase)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert parent.stdout is not None
    try:
        while parent.stdout.readline().strip() != phase:
            assert parent.poll() is None
        (child,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    try:
        Site.wait_until(lambda: not runs(child))
    finally:
        if runs(child):
            child.kill()


def test_a_child_ends_when_its_parent_closes_stdin(tmp_path: Path) -> None:
    # Without the kernel's help: what a system without PR_SET_PDEATHSIG relies on.
    script = (
        "import service.lifeline as l, time; l._die_with_parent = lambda: None;"
        "line = l.Lifeline(); line.receive(); line.send({'event': 'progress'}); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"{}\n")
    child.stdin.flush()
    assert child.stdout.readline()
    child.stdin.close()
    assert child.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL
    child.stdout.close()
