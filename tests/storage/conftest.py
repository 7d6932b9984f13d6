"""A database of its own per test, and a clock that tests turn by hand.

The database is a SQLite file. With `POSTGRESQL_URL` in the environment (a database in which schemas can be made, and psycopg installed),
every test of the store runs on PostgreSQL too.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

from service.storage.artifacts import ArtifactDirectory
from service.storage.database import create_store_engine, upgrade_database
from service.storage.interface import Claim
from service.storage.store import SqlStore
from tests.storage.samples import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite'}"


@pytest.fixture(params=["sqlite", "postgresql"] if "POSTGRESQL_URL" in os.environ else ["sqlite"])
def database_url(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[str]:
    if request.param == "sqlite":
        yield sqlite_url
        return
    url, schema = make_url(os.environ["POSTGRESQL_URL"]), f"test_{secrets.token_hex(6)}"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    yield url.update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")
    engine.dispose()


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
