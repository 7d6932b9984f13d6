"""Ctrl-C in the shell, or the SIGTERM of a CI runner: the compile ends with its child, and says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.resources import resource_directory
from tests.system.sites import PATIENCE_SECONDS, Site, runs


@pytest.mark.tpu
@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_a_stopped_compile_leaves_no_child_and_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    spec = resource_directory("examples") / "tiny-v5e-4.yaml"
    # A shell that starts the tests in the background has them ignore SIGINT, and all that they start.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from weighbridge.cli import main; main()"
    command = [sys.executable, "-c", code, "compile", str(spec), "--json"]
    environment = os.environ | {"WEIGHBRIDGE_DATA_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        # By then JAX is loaded and at work.
        line = next(line for line in process.stderr if "tracing" in line)
        assert line.startswith("candidate: tracing (at ")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        try:
            out, rest = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 130
    assert "interrupted; the compile was stopped" in rest
    assert out == ""
    Site.wait_until(lambda: not any(runs(child) for child in children))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("weighbridge-")] == []
