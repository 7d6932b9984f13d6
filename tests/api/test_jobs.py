"""Posting specs, and reading what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from service.records import JobStatus
from service.steps_records import StepsReport, StepsStatus
from service.storage.interface import Lease
from service.storage.store import SqlStore
from tests.storage.samples import report_of

Spec = dict[str, Any]


def claim(store: SqlStore) -> Lease:
    taken = store.claim_job("w1", kinds=["compile"], memory_bytes=None, lease_seconds=60, max_attempts=3)
    assert taken is not None
    return taken.lease


def measure(store: SqlStore, artifacts: dict[str, Path] | None = None) -> None:
    lease = claim(store)
    store.save_report(lease, report_of(), artifacts=artifacts)
    store.finish_job(lease, JobStatus.SUCCEEDED)


def test_a_posted_spec_is_a_queued_job_at_the_place_that_location_names(client: TestClient, spec: Spec) -> None:
    git = {"project": "looms", "commit_sha": "c0ffee", "ancestors": ["beef"], "pull_request": 17}
    answer = client.post("/api/v1/jobs", json={"spec": spec, "git": git})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["status"], job["kind"], job["scenario"]) == ("queued", "compile", "tiny-v5e-4")
    assert job["git"] == {**git, "branch": None, "base_sha": None}
    assert job["spec"]["train"]["beta2"] == 0.95, "defaults are filled in"
    assert answer.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert client.get(answer.headers["location"]).json() == job


def test_a_yaml_spec_with_a_query_is_the_same_job_as_its_json(client: TestClient, spec: Spec) -> None:
    by_json = client.post("/api/v1/jobs", json={"spec": spec, "git": {"branch": "main"}, "depth": "full"}).json()
    by_yaml = client.post(
        "/api/v1/jobs",
        params={"branch": "main", "depth": "full"},
        content=yaml.safe_dump(spec),
        headers={"Content-Type": "application/yaml; charset=utf-8"},
    ).json()
    same = ("spec", "spec_hash", "identity", "git", "kind", "scenario")
    assert {name: by_yaml[name] for name in same} == {name: by_json[name] for name in same}
    assert by_json["spec"]["depth"] == "full"


def test_everything_wrong_with_a_spec_comes_in_one_answer(client: TestClient, spec: Spec) -> None:
    spec["mesh"] = {"topology": "v5e-4", "fdsp": 2}
    spec["train"]["seq_len"] = 0
    answer = client.post("/api/v1/jobs", json={"spec": spec})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (body["title"], body["status"], body["instance"]) == ("The spec cannot be weighed", 422, "/api/v1/jobs")
    problems = {problem["path"]: problem for problem in body["problems"]}
    assert {"mesh.fdsp", "train.seq_len"} <= set(problems)
    assert "did you mean fsdp" in problems["mesh.fdsp"]["message"]
    assert client.get("/api/v1/jobs").json() == {"jobs": [], "next_cursor": None}


@pytest.mark.parametrize(
    ("content", "media_type", "status", "text"),
    [
        (b"{", "application/json", 422, "JSON"),
        (b"[]", "application/json", 422, "mapping"),
        (b"\xff", "application/yaml", 422, "not UTF-8"),
        (b"a: [", "application/yaml", 422, "not readable as YAML"),
        (b"spec: {}", "text/plain", 415, "send application/json"),
        (b"{}", None, 415, "of no named type"),
        (b'{"spec": {}, "force": "perhaps"}', "application/json", 422, "force"),
        (b'{"spec": {}, "git": {"pull_request": 99999999999999999999999}}', "application/json", 422, "pull_request"),
        (b'{"spec": {}, "git": {"ancestors": ["' + b"f" * 65 + b'"]}}', "application/json", 422, "ancestors"),
        (b"[" * 9_000, "application/json", 422, "JSON nested deeper than 33 levels"),
        (b'{"spec": ' + b"[" * 40 + b"]" * 40 + b"}", "application/json", 422, "JSON nested deeper than 33 levels"),
        (b'{"spec": {"scenario": "\xff"}}', "application/json", 422, "not UTF-8"),
        (b'{"spec": {"depth": ' + b"7" * 5_000 + b"}}", "application/json", 422, "not readable as JSON"),
        (b'{"spec": {"\\ud800": "\\ud800"}}', "application/json", 422, "ud800"),
        (b'"\\ud800": 1', "application/yaml", 422, "ud800"),
        (b"train: {seq_len: 2026-03-04}", "application/yaml", 422, "2026-03-04"),
        (b"[" * 9_000, "application/yaml", 422, "nested deeper than 32 levels"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_with_its_reason(
    client: TestClient, content: bytes, media_type: str | None, status: int, text: str
) -> None:
    answer = client.post("/api/v1/jobs", content=content, headers={"Content-Type": media_type} if media_type else {})
    assert answer.status_code == status
    assert text in answer.text
    assert set(answer.json()) == {"type", "title", "status", "detail", "instance", "problems"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_named_by_path_with_what_is_legal(client: TestClient, number: str) -> None:
    train = '{"seq_len": 128, "per_device_batch": ' + number + "}"
    content = '{"spec": {"model": {"preset": "tiny"}, "mesh": {"topology": "v5e-4", "fsdp": 4}, "train": ' + train + "}}"
    answer = client.post("/api/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    (problem,) = answer.json()["problems"]
    value = "Infinity" if number == "1e999" else number
    assert (problem["path"], problem["value"]) == ("train.per_device_batch", value)
    assert problem["message"] == f"{value} is not a finite number"
    assert problem["legal"].startswith("a number above 0 and at most 1,048,576")


def test_a_number_of_a_yaml_spec_that_is_not_finite_is_named_too(client: TestClient, spec: Spec) -> None:
    spec["train"]["per_device_batch"] = float("-inf")
    answer = client.post("/api/v1/jobs", content=yaml.safe_dump(spec), headers={"Content-Type": "application/yaml"})
    assert [(problem["path"], problem["value"]) for problem in answer.json()["problems"]] == [("train.per_device_batch", "-.inf")]


def test_a_key_that_stands_twice_is_refused_as_in_yaml(client: TestClient) -> None:
    content = b"""{"force": true, "force": false, "spec": {"scenario": "x", "model": {"preset": "tiny"},
        "mesh": {"topology": "v5e-4", "fsdp": 4}, "train": {"seq_len": 128, "seq_len": 64}}}"""
    answer = client.post("/api/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert [(problem["path"], problem["message"]) for problem in answer.json()["problems"]] == [
        ("body.force", "key 'force' stands twice"),
        ("train.seq_len", "key 'seq_len' stands twice"),
    ]


def test_what_is_wrong_around_the_spec_and_in_it_comes_in_one_answer(client: TestClient, spec: Spec) -> None:
    spec["train"] = {"sequence": 128}
    body = {"spec": spec | {"modle": 1}, "foo": 1, "git": {"project": "p" * 201, "pull_request": 0, "ancestors": ["f"] * 101}}
    answer = client.post("/api/v1/jobs", json=body)
    assert answer.status_code == 422
    told = {problem["path"]: (problem["message"], problem["legal"]) for problem in answer.json()["problems"]}
    assert told["body.foo"] == ("unknown field 'foo'", "spec, kind, git, force, depth")
    assert told["body.git.project"] == ("has 201 characters", "text of at most 200 characters")
    assert told["body.git.pull_request"] == ("0 is out of range", "a whole number at least 1 and below 2,147,483,648 or null")
    assert told["body.git.ancestors"][0] == "has 101 entries"
    assert told["body.git.ancestors"][1].startswith("a list of at most 100 entries")
    assert told["modle"][0] == "unknown field 'modle'; did you mean model?"
    assert {"train.sequence", "train.seq_len"} <= set(told)


@pytest.mark.parametrize(
    ("content", "media_type", "detail"),
    [
        (b"{", "application/json", "body: not readable as JSON at line 1, column 2: expecting property name enclosed in double quotes"),
        (b"[7]", "application/json", "body: is a list where a mapping belongs"),
        (b"7", "application/yaml", "1 problem: spec: a spec is a mapping, and this is int"),
        (b"a: [", "application/yaml", "1 problem: spec: not readable as YAML or JSON at line 1, column 5"),
    ],
)
def test_a_problem_of_the_whole_is_a_sentence_with_a_subject(client: TestClient, content: bytes, media_type: str, detail: str) -> None:
    answer = client.post("/api/v1/jobs", content=content, headers={"Content-Type": media_type})
    assert answer.json()["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("query", "message", "legal"),
    [
        ("limit=0", "'0' is out of range", "at least 1"),
        ("limit=many", "is the text 'many' where a whole number belongs", "a whole number"),
        ("status=done", "'done' is not one of the legal values", "'queued', 'running', 'succeeded', 'failed' or 'cancelled'"),
        ("scenario=" + "s" * 201, "has 201 characters", "text of at most 200 characters"),
    ],
)
def test_queries_are_refused_in_the_words_that_specs_are_refused_in(client: TestClient, query: str, message: str, legal: str) -> None:
    (problem,) = client.get(f"/api/v1/jobs?{query}").json()["problems"]
    assert (problem["message"], problem["legal"]) == (message, legal)


def test_an_empty_idempotency_key_and_an_unknown_parameter_are_refused_in_words(client: TestClient) -> None:
    headers = {"Content-Type": "application/yaml", "Idempotency-Key": ""}
    told = {p["path"]: p["legal"] for p in client.post("/api/v1/jobs?brunch=main", content=b"{}", headers=headers).json()["problems"]}
    assert told == {
        "query.brunch": "the parameters that the API's description lists for this path",
        "header.idempotency-key": "text of at least 1 character",
    }


def test_a_query_beside_a_json_body_is_refused_rather_than_ignored(client: TestClient, spec: Spec) -> None:
    answer = client.post("/api/v1/jobs", params={"branch": "main"}, json={"spec": spec})
    assert answer.status_code == 422
    assert "accompanies a YAML body" in answer.text


def test_a_body_above_the_limit_is_refused_whether_or_not_it_says_its_size(client: TestClient, spec: Spec) -> None:
    large = b'{"spec": {"scenario": "' + b"x" * 20_000 + b'"}}'
    declared = client.post("/api/v1/jobs", content=large, headers={"Content-Type": "application/json"})
    streamed = client.post("/api/v1/jobs", content=iter([large[:9_000], large[9_000:]]), headers={"Content-Type": "application/json"})
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "application/problem+json"
        assert "at most 20,000" in answer.json()["detail"]


def test_one_idempotency_key_is_one_job_and_another_request_with_it_a_conflict(client: TestClient, spec: Spec) -> None:
    key = {"Idempotency-Key": "run-5/attempt-3"}
    first = client.post("/api/v1/jobs", json={"spec": spec}, headers=key).json()
    again = client.post("/api/v1/jobs", json={"spec": {**spec, "programs": ["candidate"]}}, headers=key)
    assert (again.status_code, again.json()) == (202, first), "a default written out means the same"
    other = client.post("/api/v1/jobs", json={"spec": spec, "force": True}, headers=key)
    assert other.status_code == 409
    assert first["id"] in other.json()["detail"]


def test_a_spec_that_was_measured_is_answered_at_once_under_any_scenario_name(client: TestClient, store: SqlStore, spec: Spec) -> None:
    first = client.post("/api/v1/jobs", json={"spec": spec}).json()
    measure(store)
    spec["scenario"] = "another-name"
    spec["mesh"]["topology"] = "v5e:2x2"
    answered = client.post("/api/v1/jobs", json={"spec": spec}).json()
    assert (answered["status"], answered["answered_from"]) == ("succeeded", first["id"])
    assert client.get(f"/api/v1/jobs/{answered['id']}/report").json()["reports"][0]["peak_bytes"] == 1_300
    assert client.post("/api/v1/jobs", json={"spec": spec, "force": True}).json()["status"] == "queued"
    spec["train"]["seq_len"] = 256
    assert client.post("/api/v1/jobs", json={"spec": spec}).json()["status"] == "queued"


def test_reports_come_together_or_by_program(client: TestClient, store: SqlStore, spec: Spec) -> None:
    job = client.post("/api/v1/jobs", json={"spec": spec}).json()
    where = f"/api/v1/jobs/{job['id']}/report"
    assert client.get(where).json() == {"job": job, "reports": []}
    assert client.get(where, params={"program": "candidate"}).status_code == 404
    measure(store)
    report = client.get(where, params={"program": "candidate"}).json()["reports"][0]
    assert report == client.get(where).json()["reports"][0] == report_of().model_dump(mode="json")
    missing = client.get(where, params={"program": "dropless"})
    assert missing.status_code == 404
    assert "no report of a program 'dropless'" in missing.json()["detail"]


def test_artifacts_are_listed_and_come_back_byte_for_byte(client: TestClient, store: SqlStore, spec: Spec, tmp_path: Path) -> None:
    content = bytes(range(256)) * 37
    (tmp_path / "module").write_bytes(content)
    job = client.post("/api/v1/jobs", json={"spec": spec}).json()
    measure(store, {"candidate.hlo é.pb": tmp_path / "module"})
    (artifact,) = client.get(f"/api/v1/jobs/{job['id']}/artifacts").json()["artifacts"]
    assert (artifact["name"], artifact["size_bytes"]) == ("candidate.hlo é.pb", 9_472)
    answer = client.get(f"/api/v1/jobs/{job['id']}/artifacts/candidate.hlo é.pb")
    assert answer.content == content
    assert answer.headers["content-length"] == "9472"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''candidate.hlo%20%C3%A9.pb"
    again = client.get(answer.request.url, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["..%2f..%2fweighbridge.sqlite", "%2e%2e", "weighbridge.sqlite", "a%00b"])
def test_an_artifact_name_is_never_a_path(client: TestClient, store: SqlStore, spec: Spec, name: str) -> None:
    job = client.post("/api/v1/jobs", json={"spec": spec}).json()
    assert client.get(f"/api/v1/jobs/{job['id']}/artifacts/{name}").status_code == 404


def test_jobs_are_listed_newest_first_by_page_and_filter(client: TestClient, spec: Spec) -> None:
    ids = []
    for number in range(5):
        spec["scenario"] = f"s{number % 2}"
        ids.append(client.post("/api/v1/jobs", json={"spec": spec, "force": True}).json()["id"])
    first = client.get("/api/v1/jobs", params={"limit": 3}).json()
    second = client.get("/api/v1/jobs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [job["id"] for job in first["jobs"] + second["jobs"]] == ids[::-1]
    assert second["next_cursor"] is None
    assert [job["id"] for job in client.get("/api/v1/jobs", params={"scenario": "s1"}).json()["jobs"]] == [ids[3], ids[1]]
    assert client.get("/api/v1/jobs", params={"status": "running"}).json()["jobs"] == []


@pytest.mark.parametrize(
    ("query", "path"), [("status=done", "query.status"), ("limit=0", "query.limit"), ("limit=201", "query.limit"), ("cursor=%27", None)]
)
def test_a_query_that_means_nothing_is_refused_by_name(client: TestClient, query: str, path: str | None) -> None:
    answer = client.get(f"/api/v1/jobs?{query}")
    assert answer.status_code == 422
    assert [problem["path"] for problem in answer.json()["problems"]] == ([path] if path else [])


def test_a_queued_job_is_cancelled_at_once_and_again_without_effect(client: TestClient, spec: Spec) -> None:
    job = client.post("/api/v1/jobs", json={"spec": spec}).json()
    first, second = (client.post(f"/api/v1/jobs/{job['id']}/cancel") for _ in range(2))
    assert (first.status_code, first.json()["status"]) == (202, "cancelled")
    assert (second.status_code, second.json()) == (200, first.json())
    assert client.post("/api/v1/jobs/nothing/cancel").status_code == 404


def test_a_job_that_ended_has_nothing_to_cancel_and_one_that_runs_is_about_to_be(client: TestClient, store: SqlStore, spec: Spec) -> None:
    job = client.post("/api/v1/jobs", json={"spec": spec}).json()
    lease = claim(store)
    running = client.post(f"/api/v1/jobs/{job['id']}/cancel")
    assert (running.status_code, running.json()["status"], running.json()["cancel_requested"]) == (202, "running", True)
    store.finish_job(lease, JobStatus.SUCCEEDED)
    ended = client.post(f"/api/v1/jobs/{job['id']}/cancel")
    assert (ended.status_code, ended.json()["status"]) == (200, "succeeded")
    responses = client.get("/api/v1/openapi.json").json()["paths"]["/api/v1/jobs/{job_id}/cancel"]["post"]["responses"]
    assert "nothing to cancel" in responses["200"]["description"]


STEPS = {"devices": "cpu:4", "num_steps": 3}


def test_a_steps_job_needs_no_topology_and_is_measured_every_time(client: TestClient, store: SqlStore, spec: Spec) -> None:
    del spec["mesh"]["topology"]
    first = client.post("/api/v1/jobs", json={"spec": spec | {"steps": STEPS}, "kind": "steps"})
    assert first.status_code == 202, first.text
    job = first.json()
    where = f"/api/v1/jobs/{job['id']}/steps"
    waiting = client.get(where).json()
    assert (waiting["job"], waiting["is_final"], waiting["report"]["steps"]) == (job, False, [])
    taken = store.claim_job("w1", kinds=["steps"], memory_bytes=None, lease_seconds=60, max_attempts=3, platforms=["cpu"])
    assert taken is not None
    store.append_event(taken.lease, "progress", {"program": "steps", "name": "warmup", "seconds": 2.5, "data": {}})
    assert client.get(where).json()["report"]["phase"] == "warmup", "as far as it came"
    report = StepsReport(status=StepsStatus.OK, phase="done")
    store.save_steps_report(taken.lease, report)
    store.finish_job(taken.lease, JobStatus.SUCCEEDED)
    ended = client.get(where).json()
    assert (ended["is_final"], ended["report"]) == (True, report.model_dump(mode="json"))
    again = client.post("/api/v1/jobs", json={"spec": spec | {"steps": STEPS}, "kind": "steps"}).json()
    assert (again["status"], again["identity"]) == ("queued", job["identity"])


@pytest.mark.parametrize(
    ("kind", "section", "missing"),
    [("compile", {"steps": STEPS}, "mesh.topology"), ("steps", {}, "mesh.topology"), ("steps", None, "steps")],
)
def test_a_spec_without_what_its_kind_needs_is_refused_by_name(
    client: TestClient, spec: Spec, kind: str, section: Spec | None, missing: str
) -> None:
    if section is not None:
        del spec["mesh"]["topology"]
    answer = client.post("/api/v1/jobs", json={"spec": spec | (section or {}), "kind": kind})
    assert answer.status_code == 422
    assert [problem["path"] for problem in answer.json()["problems"]] == [missing]


def test_a_compile_job_has_no_steps(client: TestClient, spec: Spec) -> None:
    job = client.post("/api/v1/jobs", json={"spec": spec}).json()
    assert client.get(f"/api/v1/jobs/{job['id']}/steps").status_code == 404
