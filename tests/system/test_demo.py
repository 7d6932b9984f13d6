"""The demo as a newcomer runs it: service, worker, compiler, page, and nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.system
def test_the_demo_weighs_an_example_names_its_page_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from weighbridge.cli import main; main()", "demo", "--exit", "--port", "0", "--example", "tiny-v5e-4"]
    result = subprocess.run([*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    page = re.search(r"http://127\.0\.0\.1:\d+/jobs/[0-9a-f]+", result.stdout)
    assert page
    assert re.search(r"tiny-v5e-4, candidate: fits, needs [\d.]+ \w+, 15\.75 GiB available per device", result.stdout)
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.group())
