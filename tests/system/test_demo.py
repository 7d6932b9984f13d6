"""The demo as a newcomer runs it: service, worker, compiler, page, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.identity import identify
from service.records import JobStatus
from service.resources import resource_directory
from service.settings import Settings
from service.spec import load_spec
from service.storage.interface import NewJob
from service.storage.store import open_store
from tests.browser.samples import make_report
from tests.system.sites import PATIENCE_SECONDS, Site, runs
from weighbridge import demo as demo_module
from weighbridge.client import Client, JobEvent

CODE = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from weighbridge.cli import main; main()"
"""Under nohup the tests ignore SIGHUP, and so would all that they start."""
COMMAND = (sys.executable, "-c", CODE, "demo", "--port", "0", "--example", "tiny-v5e-4")


def answer_beforehand(data_dir: Path) -> None:
    """Put a report of the example in the store, so that the demo has its answer at once and serves on."""
    spec = load_spec((resource_directory("examples") / "tiny-v5e-4.yaml").read_text())
    store = open_store(Settings(data_dir=data_dir))
    store.add_job(
        NewJob(
            scenario=spec.scenario,
            spec=spec.as_json(),
            spec_hash=spec.canonical_hash(),
            identity=identify(spec, "compile"),
            programs=spec.programs,
            child_memory_bytes=1,
        )
    )
    claim = store.claim_job("w", kinds=("compile",), memory_bytes=None, lease_seconds=60, max_attempts=3)
    assert claim is not None
    store.save_report(claim.lease, make_report())
    store.finish_job(claim.lease, JobStatus.SUCCEEDED)
    store.close()


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "stage", "code"),
    [
        (signal.SIGTERM, "Weighbridge runs at", 130),
        (signal.SIGTERM, "Open it in a browser", 0),
        (signal.SIGHUP, "Open it in a browser", 0),
        (signal.SIGKILL, "Open it in a browser", -signal.SIGKILL),
    ],
    ids=["terminated-while-weighing", "terminated", "terminal-closed", "killed"],
)
def test_the_service_ends_with_the_demo_however_that_ends(tmp_path: Path, number: signal.Signals, stage: str, code: int) -> None:
    if stage != "Weighbridge runs at":
        answer_beforehand(tmp_path)
    with subprocess.Popen([*COMMAND, "--data-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            assert any(stage in line for line in demo.stdout)
            started: list[psutil.Process] = []

            def has_worker() -> bool:
                started[:] = psutil.Process(demo.pid).children(recursive=True)
                return any("worker" in process.cmdline() for process in started if runs(process))

            Site.wait_until(has_worker)
            demo.send_signal(number)
            demo.communicate(timeout=PATIENCE_SECONDS)
        finally:
            demo.kill()
        assert demo.returncode == code
    assert len(started) >= 2, "the service and its worker"
    Site.wait_until(lambda: not any(runs(process) for process in started))


def test_a_demo_without_an_answer_does_not_end_as_one_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_service(*_: object) -> Iterator[None]:
        yield

    class NoAnswer(Client):
        def submit(self, *_: object, **__: object) -> dict[str, Any]:
            return {"id": "j", "kind": "compile", "status": "queued"}

        def num_workers(self) -> int | None:
            return None

        def events(self, job_id: str) -> Iterator[JobEvent]:
            yield JobEvent(1, "finished", {})

        def reports(self, job_id: str) -> list[dict[str, Any]]:
            return []

    monkeypatch.setattr(demo_module, "_service", no_service)
    monkeypatch.setattr(demo_module, "Client", NoAnswer)
    assert demo_module.run_demo(Settings(data_dir=tmp_path, port=0), example="tiny-v5e-4", leave=True) == 3


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.system
def test_the_demo_weighs_an_example_names_its_page_and_leaves_nothing_running(tmp_path: Path) -> None:
    result = subprocess.run([*COMMAND, "--exit", "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    page = re.search(r"http://127\.0\.0\.1:\d+/jobs/[0-9a-f]+", result.stdout)
    assert page
    assert re.search(r"tiny-v5e-4, candidate: fits, needs [\d.]+ \w+, 15\.75 GiB available per device", result.stdout)
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.group())
