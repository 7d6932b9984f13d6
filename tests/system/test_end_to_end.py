"""One real spec through the whole service: HTTP, queue, worker, real compiler, store, and back; as `python -m service serve` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.settings import Settings
from tests.system.sites import stop

pytestmark = [pytest.mark.system, pytest.mark.tpu]

SPEC: dict[str, Any] = {
    "scenario": "two-dense-layers",
    "model": {
        "preset": "tiny",
        "num_layers": 2,
        "first_num_dense_layers": 2,
        "engram": None,
        "experts": None,
        "mtp": {"depth": 0},
        "mhc": {"num_streams": 1},
    },
    "train": {"seq_len": 128},
    "mesh": {"topology": "v5e-4", "fsdp": 4},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    settings = Settings(data_dir=tmp_path, port=0)
    environment = {**os.environ, **settings.as_environment()}
    process = subprocess.Popen([sys.executable, "-m", "service", "serve"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with httpx.Client(base_url=address, timeout=60) as client:
            yield process, client
        assert stop(process) == 0
    finally:
        process.kill()
        process.wait()


def names_of_finished(client: httpx.Client, job_id: str) -> list[str]:
    """Names of a job's events and phases, read from the stream until it ends."""
    with client.stream("GET", f"/api/v1/jobs/{job_id}/events", timeout=300) as answer:
        return [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]


def test_a_real_spec_is_weighed_through_the_service(server: tuple[subprocess.Popen[str], httpx.Client]) -> None:
    process, client = server
    posted = client.post("/api/v1/jobs", json={"spec": SPEC, "git": {"project": "trainer", "commit_sha": "c0ffee"}})
    assert posted.status_code == 202, posted.text
    job_id = posted.json()["id"]
    names = names_of_finished(client, job_id)
    assert (names[:2], names[-2:]) == (["queued", "claimed"], ["report", "finished"])
    assert names.count("progress") >= 5

    answer = client.get(f"/api/v1/jobs/{job_id}/report").json()
    assert answer["job"]["status"] == "succeeded", answer["job"]["failure"]
    (report,) = answer["reports"]
    assert (report["status"], report["depth"], report["num_devices"]) == ("ok", "memory", 4)
    assert sum(report["classes"].values()) == sum(report["modules"].values()) == report["peak_bytes"]
    assert report["argument_bytes"] < report["peak_bytes"] <= report["allocated_bytes"] < report["capacity_bytes"]
    assert report["capacity_bytes"] - report["allocated_bytes"] == report["headroom_bytes"]
    # Float32 parameters and two moments of them lie over four devices; tiles pad these small ones.
    assert report["argument_bytes"] > 3 * 4 * report["num_parameters"] / 4
    assert report["toolchain"]["jax"] == version("jax")

    artifacts = client.get(f"/api/v1/jobs/{job_id}/artifacts").json()["artifacts"]
    assert artifacts
    for artifact in artifacts:
        content = client.get(f"/api/v1/jobs/{job_id}/artifacts/{artifact['name']}").content
        assert len(content) == artifact["size_bytes"]
        assert artifact["name"].startswith("candidate.")
    assert client.get(f"/jobs/{job_id}").status_code == 200

    again = client.post("/api/v1/jobs", json={"spec": SPEC | {"scenario": "the-same-by-another-name"}}).json()
    assert (again["status"], again["answered_from"]) == ("succeeded", job_id)

    # Neither process has loaded the compiler: no library of it is mapped.
    for service_process in [psutil.Process(process.pid), *psutil.Process(process.pid).children()]:
        mapped = Path(f"/proc/{service_process.pid}/maps").read_text()
        assert "sqlite" in mapped
        assert not [line for line in mapped.splitlines() if "jaxlib" in line or "libtpu" in line]


def test_real_steps_run_through_the_service(server: tuple[subprocess.Popen[str], httpx.Client]) -> None:
    _, client = server
    steps = {"devices": "cpu:2", "num_steps": 3, "warmup_steps": 1, "check_steps": 2, "checks": ["same_seed"]}
    spec = SPEC | {"scenario": "two-layers-cpu-2", "mesh": {"fsdp": 2}, "train": {"seq_len": 64, "dtype": "float32"}, "steps": steps}
    posted = client.post("/api/v1/jobs", json={"spec": spec, "kind": "steps"})
    assert posted.status_code == 202, posted.text
    job_id = posted.json()["id"]
    assert names_of_finished(client, job_id)[-2:] == ["report", "finished"]
    answer = client.get(f"/api/v1/jobs/{job_id}/steps").json()
    report = answer["report"]
    assert (answer["job"]["status"], answer["is_final"], report["status"]) == ("succeeded", True, "ok"), report["failure"]
    losses = [step["metrics"]["loss"] for step in report["steps"]]
    assert [step["step"] for step in report["steps"]] == [0, 1, 2, 3]
    # Random parameters guess evenly over the vocabulary of 512: about ln 512 = 6.24.
    assert all(5.7 < loss < 6.9 for loss in losses)
    assert [(check["name"], check["status"]) for check in report["checks"]] == [("same_seed", "passed")]
    assert report["memory"]["predicted_bytes"] > 0
    headers = {"Accept": "application/json"}
    events = client.get(f"/api/v1/jobs/{job_id}/events", headers=headers).json()["events"]
    told = [step["metrics"]["loss"] for event in events if event["data"].get("name") == "step" for step in event["data"]["data"]["steps"]]
    assert told == losses, "each step was an event while it ran"
    assert client.get(f"/jobs/{job_id}").status_code == 200


@pytest.mark.slow
def test_the_public_case_passes_its_checks_through_the_service(server: tuple[subprocess.Popen[str], httpx.Client]) -> None:
    _, client = server
    text = (Path(__file__).parents[2] / "examples" / "steps-deepseek-custom-cpu-8.yaml").read_text()
    posted = client.post("/api/v1/jobs?kind=steps", content=text, headers={"Content-Type": "application/yaml"})
    assert posted.status_code == 202, posted.text
    job_id = posted.json()["id"]
    with client.stream("GET", f"/api/v1/jobs/{job_id}/events", timeout=1800) as answer:
        assert [line for line in answer.iter_lines() if line.startswith("event: ")][-1] == "event: finished"
    report = client.get(f"/api/v1/jobs/{job_id}/steps").json()["report"]
    assert report["failure"] is None
    assert {check["name"]: check["detail"] for check in report["checks"] if check["status"] != "passed"} == {}
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["load_balance"]["deviation"] <= 1e-6
    assert checks["context_parallel"]["deviation"] <= 1e-6
    assert len(checks["load_balance"]["numbers"]["loss_on"]) == 10
    page = client.get(f"/jobs/{job_id}").text
    assert page.count(">passed<") == len(report["checks"]) == 10
