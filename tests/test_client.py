"""The HTTP client: against the real application, and against connections that break."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from fastapi.testclient import TestClient

from service.api.app import create_app
from service.records import JobStatus
from service.settings import Settings
from service.steps_records import CheckResult, CheckStatus, StepsReport, StepsStatus
from service.storage.interface import WorkerStatus
from service.storage.store import SqlStore, open_store
from tests.browser.samples import make_report
from tests.browser.stored import add
from weighbridge import client as client_module
from weighbridge.cli import main
from weighbridge.client import Client, ClientError

SPEC = {"scenario": "tiny-v5e-4", "model": {"preset": "tiny"}, "train": {"seq_len": 128}, "mesh": {"topology": "v5e-4", "fsdp": 4}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    store = open_store(Settings(data_dir=tmp_path))
    yield store
    store.close()


@pytest.fixture
def server(tmp_path: Path, store: SqlStore) -> TestClient:
    return TestClient(create_app(Settings(data_dir=tmp_path, poll_seconds=0.01), store=store), base_url="http://127.0.0.1")


def connected_to(server: TestClient) -> httpx.MockTransport:
    """A transport that hands each request to the application; streams come as a whole, so jobs must have ended."""

    def answer(request: httpx.Request) -> httpx.Response:
        given = server.request(request.method, str(request.url), headers=dict(request.headers), content=request.read())
        return httpx.Response(given.status_code, headers={"content-type": given.headers.get("content-type", "")}, content=given.content)

    return httpx.MockTransport(answer)


@pytest.fixture
def client(server: TestClient) -> Iterator[Client]:
    with Client("http://127.0.0.1", transport=connected_to(server)) as client:
        yield client


def answering(*answers: Callable[[httpx.Request], httpx.Response]) -> tuple[Client, list[httpx.Request]]:
    """A client whose connections are answered by these, in order."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[len(asked) - 1](request)

    return Client("http://there", transport=httpx.MockTransport(answer), reconnect_seconds=0), asked


def events(*names: str, first: int) -> str:
    return "retry: 1000\n\n" + "".join(
        f'id: {number}\nevent: {name}\ndata: {{"n": {number}}}\n\n: still here\n\n' for number, name in enumerate(names, start=first)
    )


def test_a_job_is_submitted_seen_and_cancelled(client: Client) -> None:
    job = client.submit(SPEC, git={"commit_sha": "c0ffee"})
    assert (job["status"], job["scenario"], job["git"]["commit_sha"]) == ("queued", "tiny-v5e-4", "c0ffee")
    assert client.job(job["id"])["id"] == job["id"]
    assert client.reports(job["id"]) == []
    assert client.cancel(job["id"])["status"] == "cancelled"
    assert [event.name for event in client.events(job["id"])][-1] == "finished"


def test_a_wrong_spec_brings_every_problem(client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.submit(SPEC | {"mesh": {"topology": "v5e-4", "fsdp": 3}, "depth": "deep"})
    assert caught.value.status == 422
    assert {problem["path"] for problem in caught.value.problems} >= {"depth", "mesh"}


def test_an_unknown_job_is_an_error_and_not_an_empty_answer(client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.reports("absent")
    assert caught.value.status == 404


def test_a_broken_stream_goes_on_after_the_last_event() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    client, asked = answering(
        lambda _: httpx.Response(200, text=events("queued", "claimed", first=1)),
        broken,
        lambda _: httpx.Response(200, text=events("finished", first=3)),
    )
    assert [(event.sequence, event.name, event.data) for event in client.events("j")] == [
        (1, "queued", {"n": 1}),
        (2, "claimed", {"n": 2}),
        (3, "finished", {"n": 3}),
    ]
    assert [request.headers.get("last-event-id") for request in asked] == [None, "2", "2"]


def test_a_server_that_stays_away_is_given_up_with_its_reason() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    client, asked = answering(*[refuse] * client_module._RECONNECTS)
    with pytest.raises(ClientError, match="lost job j on http://there: connection refused; the job itself goes on"):
        list(client.events("j"))
    assert len(asked) == client_module._RECONNECTS


def test_no_server_is_told_with_what_to_do() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(ClientError, match=r"no answer from http://there .*weighbridge serve.*--server") as caught:
        answering(refuse)[0].job("j")
    assert caught.value.status is None


def test_an_answer_that_is_no_problem_document_is_told_by_its_status() -> None:
    client, _ = answering(lambda _: httpx.Response(502, text="<html>bad gateway</html>"))
    with pytest.raises(ClientError, match="HTTP 502 from http://there/api/v1/jobs/j") as caught:
        client.job("j")
    assert caught.value.status == 502


def test_a_token_goes_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_TOKEN", "secret")
    client, asked = answering(lambda _: httpx.Response(200, json={}))
    client.job("j")
    assert asked[0].headers["authorization"] == "Bearer secret"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, server: TestClient) -> Callable[..., Result]:
    """Runs `weighbridge` with its client connected to the application."""
    real = Client.__init__

    def connect(self: Client, url: str | None = None) -> None:
        real(self, url or "http://127.0.0.1", transport=connected_to(server))

    monkeypatch.setattr(Client, "__init__", connect)
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


def test_submit_names_the_job_and_its_page(command: Callable[..., Result], store: SqlStore, tmp_path: Path) -> None:
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(SPEC))
    result = command("submit", str(spec_file), "--project", "looms")
    (job,) = store.list_jobs().jobs
    assert result.output.split() == [job.id, "queued", f"http://127.0.0.1/jobs/{job.id}"]
    assert (job.status, job.git.project) == (JobStatus.QUEUED, "looms")


STEPS_SPEC = {
    "scenario": "real-steps",
    "model": {"preset": "tiny"},
    "train": {"seq_len": 64},
    "mesh": {"fsdp": 2},
    "steps": {"devices": "cpu:2"},
}


def test_a_spec_of_real_steps_is_submitted_as_such_and_its_outcome_printed(
    command: Callable[..., Result], store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(STEPS_SPEC))

    def run_while_followed(client: Client) -> None:
        # The first thing that following asks: nothing runs here but what this does.
        claim = store.claim_job("worker", kinds=("steps",), memory_bytes=None, lease_seconds=60, max_attempts=3, platforms=("cpu",))
        assert claim is not None
        step = {"step": 0, "metrics": {"loss": 6.25}}
        progress = {"program": "steps", "name": "step", "seconds": 1.5, "data": {"steps": [step]}}
        store.append_event(claim.lease, "progress", progress)
        check = CheckResult(name="loss_falls", status=CheckStatus.FAILED, claim="the loss falls")
        store.save_steps_report(claim.lease, StepsReport(status=StepsStatus.CHECKS_FAILED, phase="done", checks=(check,)))
        store.finish_job(claim.lease, JobStatus.SUCCEEDED)

    monkeypatch.setattr(Client, "num_workers", run_while_followed)
    result = command("submit", str(spec_file), "--wait")
    assert (result.exit_code, store.list_jobs().jobs[0].kind) == (1, "steps")
    assert "✗ a check failed" in result.stdout
    assert "steps: step 0, loss 6.250000 (at 1.5 s)" in result.stderr
    assert "steps: checks failed" in result.stderr


def test_a_kind_that_the_spec_is_not_for_sends_nothing(command: Callable[..., Result], store: SqlStore, tmp_path: Path) -> None:
    for spec, options, told in (
        (STEPS_SPEC, ("--kind", "compile"), "this is a spec for real steps"),
        (SPEC, ("--kind", "steps"), "this is a spec to compile"),
        (STEPS_SPEC, ("--depth", "full"), "--program and --depth are of compiles"),
    ):
        spec_file = tmp_path / "spec.json"
        spec_file.write_text(json.dumps(spec))
        result = command("submit", str(spec_file), *options)
        assert result.exit_code == 2
        assert told in result.stderr
        assert "compiled" not in result.stderr
    assert store.list_jobs().jobs == ()


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_job_that_no_worker_will_take_is_told_to_wait(
    command: Callable[..., Result], store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "events", interrupt)
    if is_alive:
        now = datetime.now(UTC)
        store.record_worker(
            WorkerStatus(id="w", host="mill", pid=7, kinds=("compile",), slots=1, memory_bytes=1, started_at=now, seen_at=now)
        )
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(SPEC))
    result = command("submit", str(spec_file), "--wait")
    (job,) = store.list_jobs().jobs
    assert result.exit_code == 130
    assert f"no longer following; job {job.id} goes on" in result.stderr
    assert result.stderr.count("no worker is running on the server; the job waits") == (0 if is_alive else 1)


def test_a_server_that_does_not_count_its_workers_is_not_guessed_about() -> None:
    client, _ = answering(lambda _: httpx.Response(404, text="not here"), lambda _: httpx.Response(200, json={"status": "ready"}))
    assert (client.num_workers(), client.num_workers()) == (None, None)


@pytest.mark.parametrize(("token", "told"), [("", "was sent none"), ("wrong", "does not know the one that was sent")])
def test_a_server_that_wants_a_token_is_told_with_the_variable_for_it(monkeypatch: pytest.MonkeyPatch, token: str, told: str) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_TOKEN", token)
    client, _ = answering(lambda _: httpx.Response(401, json={"detail": "send a token: `Authorization: Bearer TOKEN`"}))
    with pytest.raises(ClientError, match=f"http://there takes requests with a token, and {told}; put the right one in WEIGHBRIDGE_TOKEN"):
        client.job("j")


def test_the_project_can_come_from_its_variable(
    command: Callable[..., Result], store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_PROJECT", "mills")
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(SPEC))
    command("submit", str(spec_file))
    (job,) = store.list_jobs().jobs
    assert job.git.project == "mills"


def test_submit_and_wait_ends_as_compile_does(command: Callable[..., Result], store: SqlStore, tmp_path: Path) -> None:
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(SPEC))
    command("submit", str(spec_file))
    claim = store.claim_job("worker", kinds=("compile",), memory_bytes=None, lease_seconds=60, max_attempts=3)
    assert claim is not None
    store.save_report(claim.lease, make_report(scale=4))
    store.finish_job(claim.lease, JobStatus.SUCCEEDED)
    result = command("submit", str(spec_file), "--wait")
    assert result.exit_code == 1
    assert "does not fit  needs 112.15 GiB" in result.stdout


def test_two_jobs_are_compared_by_their_ids(command: Callable[..., Result], store: SqlStore) -> None:
    base, head = add(store, "a", [make_report()]), add(store, "b", [make_report(scale=1.5)])
    result = command("compare", base, head)
    assert result.exit_code == 0
    assert "peak +13.68 GiB (27.35 GiB → 41.03 GiB, +50.00 %)" in result.stdout
    assert "scenario: a → b" in result.stdout
