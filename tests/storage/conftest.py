"""A real SQLite file per test, and a clock that tests turn by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.storage.artifacts import ArtifactDirectory
from service.storage.database import create_store_engine, upgrade_database
from service.storage.interface import Claim
from service.storage.store import SqlStore
from tests.storage.samples import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite'}"


@pytest.fixture
def store(database_url: str, tmp_path: Path, clock: Clock) -> Iterator[SqlStore]:
    engine = create_store_engine(database_url)
    upgrade_database(engine)
    store = SqlStore(engine, ArtifactDirectory(tmp_path / "artifacts"), clock=clock)
    yield store
    store.close()


@pytest.fixture
def claim(store: SqlStore) -> Callable[..., Claim | None]:
    """Claims as worker `w1` with everything allowed, unless said otherwise."""

    def take(
        worker_id: str = "w1", *, memory_bytes: int | None = None, lease_seconds: float = 60, max_attempts: int = 3, kinds=("compile",)
    ):
        return store.claim_job(worker_id, kinds=kinds, memory_bytes=memory_bytes, lease_seconds=lease_seconds, max_attempts=max_attempts)

    return take
