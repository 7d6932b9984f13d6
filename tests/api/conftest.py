"""The application on a real SQLite file, asked over its own protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api.app import create_app
from service.settings import Settings
from service.storage.store import SqlStore, open_store

LOOPBACK = "http://127.0.0.1"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, poll_seconds=0.01, max_body_bytes=20_000)


@pytest.fixture
def store(settings: Settings) -> Iterator[SqlStore]:
    store = open_store(settings)
    yield store
    store.close()


@pytest.fixture
def client(settings: Settings, store: SqlStore) -> TestClient:
    # Errors inside the service are answered as a client sees them, not raised into the test.
    return TestClient(create_app(settings, store=store), base_url=LOOPBACK, raise_server_exceptions=False)


@pytest.fixture
def spec() -> dict[str, Any]:
    return {"scenario": "tiny-v5e-4", "model": {"preset": "tiny"}, "train": {"seq_len": 128}, "mesh": {"topology": "v5e-4", "fsdp": 4}}
