"""The HTTP client: against the real application, and against connections that break."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from fastapi.testclient import TestClient

from service.api.app import create_app
from service.records import JobStatus
from service.settings import Settings
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
