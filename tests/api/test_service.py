"""Catalogue, health, metrics and the description of the API."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from fastapi.testclient import TestClient

from service.api.examples import JOB_REQUEST, JOB_REQUEST_YAML
from service.models.config import PRESETS
from service.settings import Settings
from service.storage.store import SqlStore
from tests.storage.samples import new_job


def test_presets_are_shown_with_every_field(client: TestClient) -> None:
    presets = {preset["name"]: preset for preset in client.get("/api/v1/catalog/presets").json()["presets"]}
    assert set(presets) == set(PRESETS)
    assert presets["deepseek-v3-671b"]["model"]["experts"]["num_experts"] == 256
    assert presets["deepseek-v3-671b"]["description"].startswith("DeepSeek-V3: 671.03 B")


def test_topologies_tell_chips_from_devices(client: TestClient) -> None:
    topologies = {each["name"]: each for each in client.get("/api/v1/catalog/topologies").json()["topologies"]}
    shown = {name: (t["shape"], t["num_chips"], t["num_devices"], t["jax_name"]) for name, t in topologies.items()}
    assert shown["v5p-512"] == ("4x8x8", 256, 256, "v5p:4x8x8")
    assert shown["v5e-4"] == ("2x2", 4, 4, "v5e:2x2")
    assert shown["tpu7x-8"] == ("2x2x1", 4, 8, "tpu7x:2x2x1")


def test_a_capacity_is_shown_once_the_compiler_has_stated_it(client: TestClient, settings: Settings) -> None:
    from service.compile.capacity_cache import CapacityCache
    from service.compile.catalog import find_topology
    from service.compile.toolchain import read_toolchain

    CapacityCache(settings.capacity_cache).store(read_toolchain(find_topology("v5e-4").arguments()), 16_909_336_576)
    topologies = {each["name"]: each for each in client.get("/api/v1/catalog/topologies").json()["topologies"]}
    assert (topologies["v5e-4"]["capacity_bytes"], topologies["v5e-8"]["capacity_bytes"]) == (16_909_336_576, None)


def test_metrics_count_jobs_by_kind_and_status(client: TestClient, store: SqlStore) -> None:
    for identity in "abc":
        job = store.add_job(new_job(identity)).job
    store.request_cancel(job.id)
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert 'weighbridge_jobs{kind="compile",status="queued"} 2' in lines
    assert 'weighbridge_jobs{kind="compile",status="cancelled"} 1' in lines
    assert 'weighbridge_jobs{kind="compile",status="running"} 0' in lines
    assert "weighbridge_workers 0" in lines
    assert all(line.startswith(("# HELP weighbridge_", "# TYPE weighbridge_", "weighbridge_")) for line in lines)


def test_a_server_whose_database_is_not_migrated_is_alive_and_not_ready(settings: Settings) -> None:
    from service.api.app import create_app
    from service.storage.artifacts import ArtifactDirectory
    from service.storage.database import create_store_engine

    settings.data_dir.mkdir(exist_ok=True)
    store = SqlStore(create_store_engine(settings.resolved_database_url), ArtifactDirectory(settings.artifact_dir))
    client = TestClient(create_app(settings, store=store), base_url="http://127.0.0.1")
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["title"]) == (503, "Database not ready")
    store.close()


def test_the_application_opens_and_migrates_its_own_store(settings: Settings) -> None:
    from service.api.app import create_app

    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        assert client.get("/readyz").json()["status"] == "ready"


def test_every_example_of_the_description_can_be_posted(client: TestClient) -> None:
    for example in JOB_REQUEST.values():
        assert client.post("/api/v1/jobs", json=example["value"]).status_code == 202, example["summary"]
    for example in JOB_REQUEST_YAML.values():
        posted = client.post("/api/v1/jobs", content=example["value"], headers={"Content-Type": "application/yaml"})
        assert posted.status_code == 202, example["summary"]


def test_the_description_names_every_route_its_errors_and_examples(client: TestClient) -> None:
    description: dict[str, Any] = client.get("/api/v1/openapi.json").json()
    assert {path.removeprefix("/api/v1") for path in description["paths"]} == {
        "/jobs",
        "/jobs/{job_id}",
        "/jobs/{job_id}/cancel",
        "/jobs/{job_id}/events",
        "/jobs/{job_id}/report",
        "/jobs/{job_id}/steps",
        "/jobs/{job_id}/artifacts",
        "/jobs/{job_id}/artifacts/{name}",
        "/catalog/presets",
        "/catalog/topologies",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    content = description["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "application/yaml"}
    assert all(each["examples"] for each in content.values())
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            assert "application/problem+json" in operation["responses"]["4XX"]["content"], (method, path)
            assert "422" not in operation["responses"], "the framework's own shape of errors is not used"


def test_whatever_answers_get_answers_head_with_the_same_headers_and_no_content(client: TestClient, store: SqlStore) -> None:
    where = f"/api/v1/jobs/{store.add_job(new_job()).job.id}"
    for path in (
        "/api/v1/jobs",
        where,
        f"{where}/report",
        "/api/v1/catalog/topologies",
        "/healthz",
        "/metrics",
        "/jobs",
        "/static/site.css",
    ):
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers == got.headers, path
    assert client.head(f"{where}/events").headers["content-type"].startswith("text/event-stream"), "without waiting for the job's end"
    assert client.head("/api/v1/jobs/nothing").status_code == 404
    assert client.head(f"{where}/cancel").status_code == 405


def test_asking_every_route_loads_neither_jax_nor_libtpu(settings: Settings, spec: dict[str, Any]) -> None:
    script = f"""
import sys
from fastapi.testclient import TestClient
from service.api.app import create_app
from service.settings import Settings
with TestClient(create_app(Settings(data_dir={str(settings.data_dir)!r})), base_url="http://127.0.0.1") as client:
    job = client.post("/api/v1/jobs", json={{"spec": {spec!r}}})
    assert job.status_code == 202, job.text
    where = job.headers["location"]
    client.post(where + "/cancel")
    for path in (where, where + "/events", where + "/report", where + "/artifacts", "/api/v1/jobs", "/api/v1/catalog/presets",
                 "/api/v1/catalog/topologies", "/api/v1/openapi.json", "/readyz", "/metrics", "/", "/jobs", where.removeprefix("/api/v1")):
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
print([name for name in ("jax", "jaxlib", "flax", "libtpu", "xprof") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
