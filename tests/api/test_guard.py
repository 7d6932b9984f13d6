"""Who is answered, and what every answer carries."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api.app import create_app
from service.settings import Settings, SettingsError
from service.storage.store import SqlStore

TOKEN = "millstone"
TOKEN_SHA256 = hashlib.sha256(TOKEN.encode()).hexdigest()


@pytest.fixture
def guarded(settings: Settings, store: SqlStore) -> TestClient:
    """Listens on every address, and so asks for a token."""
    open_settings = settings.model_copy(update={"host": "0.0.0.0", "token_sha256": f"{'0' * 64},{TOKEN_SHA256}"})
    return TestClient(create_app(open_settings, store=store), base_url="http://weighbridge.example", raise_server_exceptions=False)


def test_listening_beyond_loopback_without_tokens_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0 can be reached.*WEIGHBRIDGE_TOKEN_SHA256.*sha256sum"):
        create_app(Settings(data_dir=tmp_path, host="0.0.0.0"))
    with pytest.raises(SettingsError, match="WEIGHBRIDGE_REQUIRE_TOKENS is set"):
        create_app(Settings(data_dir=tmp_path, require_tokens=True))


def test_a_token_is_taken_as_bearer_and_as_a_browsers_password(guarded: TestClient) -> None:
    assert guarded.get("/api/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert guarded.get("/api/v1/jobs", auth=("anyone", TOKEN)).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Digest {TOKEN}", "Basic !!", f"Bearer {TOKEN_SHA256}", TOKEN])
def test_anything_else_is_asked_for_a_token(guarded: TestClient, header: str | None) -> None:
    answer = guarded.get("/api/v1/jobs", headers={"Authorization": header} if header else {})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="weighbridge"')
    assert answer.json()["title"] == "Token needed"


def test_supervisors_need_no_token_and_learn_no_more_than_health(guarded: TestClient) -> None:
    assert guarded.get("/healthz").json() == {"status": "ok"}
    assert guarded.get("/readyz").json() == {"status": "ready", "num_workers": 0}
    assert guarded.get("/metrics").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8090", "127.0.0.1.evil.example", "", "[::2]", "["])
def test_on_loopback_a_foreign_host_name_is_not_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8090", "127.0.0.1:1", "[::1]:8090", "LOCALHOST"])
def test_every_name_of_loopback_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:81"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}, 404),
        ({}, 404),
    ],
)
def test_changes_are_not_taken_from_pages_elsewhere(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.post("/api/v1/jobs/nothing/cancel", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/nothing", "/metrics", "/healthz"])
def test_every_answer_forbids_scripts_of_others(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_what_breaks_inside_is_not_told_to_strangers(settings: Settings) -> None:
    class Broken:
        def get_job(self, job_id: str) -> Any:
            raise RuntimeError("password=hunter2")

    client = TestClient(create_app(settings, store=Broken()), base_url="http://127.0.0.1", raise_server_exceptions=False)
    answer = client.get("/api/v1/jobs/x")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert "hunter2" not in answer.text
