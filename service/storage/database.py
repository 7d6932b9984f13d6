"""Engines, transactions and migrations: everything that differs between SQLite and other databases is here."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError

from service.settings import PREFIX, SettingsError
from service.storage.interface import StoreUnavailableError

BUSY_SECONDS = 30
"""How long a statement waits for another process's write to SQLite; the longest write here takes milliseconds."""

_MIGRATIONS = Path(__file__).parent / "migrations"
# Any 64-bit numbers will do, as long as they stay the same: PostgreSQL's advisory locks are known by number.
_UPGRADE_LOCK = 7_382_001
_QUEUE_LOCK = 7_382_002
_WRITE = "weighbridge_write"
_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    # SQLAlchemy would take psycopg2, which the extra does not bring.
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "postgresql+psycopg2": "postgresql+psycopg2",
}
_LEGAL_URLS = "give sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME, or leave it empty for SQLite in the data directory"


def create_store_engine(url: str) -> Engine:
    """An engine on `url` whose transactions are what `read` and `write` below expect; connects to nothing yet.

    Raises:
        SettingsError: no URL of a database that can be used, or its driver is not installed.
    """
    parsed = _read_url(url)
    if parsed.get_backend_name() == "postgresql":
        try:
            return create_engine(parsed, pool_pre_ping=True)
        except ImportError as error:
            raise _refuse_url(url, f"needs a driver ({error}); run: pip install 'weighbridge[postgresql]', which brings psycopg") from error
    if parsed.database in (None, "", ":memory:"):
        raise _refuse_url(url, f"is a database in one process's memory, which server and workers cannot share; {_LEGAL_URLS}")
    engine = create_engine(parsed, connect_args={"timeout": BUSY_SECONDS}, pool_size=8, max_overflow=32)
    event.listen(engine, "connect", _prepare_sqlite_connection)
    event.listen(engine, "begin", _begin_sqlite_transaction)
    return engine


def _read_url(url: str) -> URL:
    """Raises SettingsError: not one of `_LEGAL_URLS`."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise _refuse_url(url, f"is not the URL of a database; {_LEGAL_URLS}") from error
    if parsed.drivername not in _DRIVERS:
        raise _refuse_url(url, f"names a database or a driver that is not supported; {_LEGAL_URLS}")
    return parsed.set(drivername=_DRIVERS[parsed.drivername])


def _refuse_url(url: str, reason: str) -> SettingsError:
    # User and password stand before the last @, and a password can stand in the query; one that cannot be read is cut in the same way.
    shown = re.sub(r"^(.*?//)?.*@", r"\1***@", url, flags=re.DOTALL).partition("?")[0]
    return SettingsError(f"{PREFIX}DATABASE_URL is {shown!r}, which {reason}")


def _prepare_sqlite_connection(connection: sqlite3.Connection, _record: Any) -> None:
    # The driver would begin transactions late, at the first INSERT, and not at all for SELECT and DDL: `_begin_…` does it instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    # In WAL mode NORMAL loses at most the last transactions to a power cut, never consistency; a killed process loses nothing.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin_sqlite_transaction(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once, without waiting, when another wrote in between; so
    # those that will write take the write lock at their start, where SQLite does wait.
    writes = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def read(engine: Engine) -> Iterator[Connection]:
    """One transaction that sees one state of the database and changes nothing."""
    with _translated(), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def write(engine: Engine) -> Iterator[Connection]:
    """One transaction that may write; committed at the end, rolled back on an exception."""
    with _translated(), engine.connect().execution_options(**{_WRITE: True}) as connection, connection.begin():
        yield connection


@contextmanager
def _translated() -> Iterator[None]:
    """What the database cannot do now, as against what was wrongly asked of it: locked for too long, full, unreachable, shut down."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        # A driver's text may have several lines; what is logged and answered has one.
        raise StoreUnavailableError(f"the database does not answer: {' '.join(str(error.orig).split())}") from error


def serialise_queue(connection: Connection) -> None:
    """Let no other transaction decide on claims until this one ends; SQLite's write lock has seen to it already."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _QUEUE_LOCK})


def _migration_config() -> Config:
    config = Config()
    # The option is interpolated: a percent sign in the directory's name has to be doubled.
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def upgrade_database(engine: Engine) -> None:
    """Bring the database to the newest migration.

    Safe when several processes start at once: one migrates, the others wait and find it done.

    Raises:
        StoreUnavailableError: the database does not answer, or its file cannot be made or is none.
    """
    if engine.dialect.name == "sqlite":
        assert engine.url.database is not None
        path = Path(engine.url.database)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _set_wal_mode(engine)
        except (OSError, sqlite3.DatabaseError) as error:
            raise StoreUnavailableError(
                f"{path} cannot be used as the database: {error}; name another with {PREFIX}DATA_DIR or {PREFIX}DATABASE_URL"
            ) from error
    config = _migration_config()
    with write(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _UPGRADE_LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _set_wal_mode(engine: Engine) -> None:
    """Switch the file to write-ahead logging, so that readers never wait for a writer; the file remembers it."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        connection = engine.raw_connection()
        try:
            cursor = connection.cursor()
            (mode,) = cursor.execute("PRAGMA journal_mode=WAL").fetchone()
            cursor.close()
        except sqlite3.OperationalError:
            # Two processes that switch at once: SQLite does not wait here, whatever its timeout.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            if mode != "wal":
                raise StoreUnavailableError(
                    f"{engine.url.database} cannot use write-ahead logging (journal mode stays {mode!r}); put it on a local file system"
                )
            return
        finally:
            connection.close()


def newest_revision() -> str:
    """The migration that this version's code expects."""
    head = ScriptDirectory.from_config(_migration_config()).get_current_head()
    assert head is not None
    return head


def check_database(engine: Engine, expected_revision: str) -> None:
    """Raises StoreUnavailableError where the database does not answer or stands at another migration."""
    with read(engine) as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    if current != expected_revision:
        raise StoreUnavailableError(
            f"the database is at migration {current}, this version needs {expected_revision}; run `python -m service upgrade`"
        )
