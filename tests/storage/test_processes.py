"""Several processes on one database: each job is given once, sequences have no gap, and migrations run once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import event, insert, inspect

from service.settings import SettingsError
from service.storage.artifacts import ArtifactDirectory
from service.storage.database import (
    check_database,
    create_store_engine,
    newest_revision,
    read,
    upgrade_database,
    write,
)
from service.storage.interface import StoreUnavailableError
from service.storage.rows import values_of_new_job
from service.storage.store import SqlStore
from service.storage.tables import jobs
from tests.storage.samples import new_job

CLAIM_ALL = """
import sys
from pathlib import Path
from service.records import JobStatus
from service.storage.artifacts import ArtifactDirectory
from service.storage.database import create_store_engine
from service.storage.store import SqlStore
url, name = sys.argv[1:]
store = SqlStore(create_store_engine(url), ArtifactDirectory(Path("unused")))
sys.stdin.readline()
while claim := store.claim_job(name, kinds=["compile"], memory_bytes=None, lease_seconds=60, max_attempts=3):
    for step in range(3):
        store.append_event(claim.lease, "progress", {"step": step})
    store.finish_job(claim.lease, JobStatus.SUCCEEDED)
    print(claim.job.id)
"""

UPGRADE = """
import sys
from service.storage.database import create_store_engine, upgrade_database
sys.stdin.readline()
upgrade_database(create_store_engine(sys.argv[1]))
"""


def run_together(script: str, *arguments: tuple[str, ...]) -> list[str]:
    """Start one process for each tuple of arguments, let all of them go at once, and return what each printed."""
    processes = [
        subprocess.Popen([sys.executable, "-c", script, *each], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for each in arguments
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_processes_that_claim_at_once_get_each_job_once(store: SqlStore, database_url: str) -> None:
    ids = [store.add_job(new_job(str(number))).job.id for number in range(40)]
    claimed = Counter(line for output in run_together(CLAIM_ALL, *[(database_url, f"w{n}") for n in range(4)]) for line in output.split())
    assert claimed == dict.fromkeys(ids, 1)
    for job_id in ids:
        events = store.list_events(job_id)
        assert [(e.sequence, e.name) for e in events] == [
            (1, "queued"),
            (2, "claimed"),
            (3, "progress"),
            (4, "progress"),
            (5, "progress"),
            (6, "finished"),
        ]
        assert store.get_job(job_id).attempts == 1


def test_processes_that_start_at_once_migrate_a_new_database_once(database_url: str) -> None:
    run_together(UPGRADE, *[(database_url,)] * 4)
    engine = create_store_engine(database_url)
    check_database(engine, newest_revision())
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM alembic_version").scalar_one() == 1
        if engine.dialect.name == "sqlite":
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    engine.dispose()


def test_the_migrations_make_the_tables_that_the_code_describes(store: SqlStore, database_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    from service.storage.tables import metadata

    engine = create_store_engine(database_url)
    with read(engine) as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata) == []
    engine.dispose()


def test_a_database_at_another_migration_is_not_ready_and_says_what_to_run(database_url: str) -> None:
    engine = create_store_engine(database_url)
    with pytest.raises(StoreUnavailableError, match=r"at migration None.*run `python -m service upgrade`"):
        check_database(engine, newest_revision())
    engine.dispose()


def test_a_migration_that_fails_leaves_nothing_behind(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    engine = create_store_engine(database_url)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("disk full")

    # The last table that the first migration makes has a foreign key to the first one; refuse it there.
    real = op.create_table
    monkeypatch.setattr(op, "create_table", lambda name, *rest, **options: (refuse if name == "reports" else real)(name, *rest, **options))
    with pytest.raises(RuntimeError, match="disk full"):
        upgrade_database(engine)
    assert inspect(engine).get_table_names() == []
    monkeypatch.undo()
    upgrade_database(engine)
    assert "reports" in inspect(engine).get_table_names()
    engine.dispose()


def test_a_transaction_that_raises_changes_nothing(store: SqlStore, database_url: str) -> None:
    engine = create_store_engine(database_url)
    job = store.add_job(new_job()).job

    def change_and_fail() -> None:
        with write(engine) as connection:
            connection.exec_driver_sql("UPDATE jobs SET scenario = 'changed'")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        change_and_fail()
    assert store.get_job(job.id) == job
    engine.dispose()


def test_a_database_that_cannot_be_written_is_unavailable_and_nothing_was_changed(sqlite_url: str) -> None:
    engine = create_store_engine(sqlite_url)
    upgrade_database(engine)
    store = SqlStore(engine, ArtifactDirectory(Path("unused")))
    job = store.add_job(new_job()).job
    with engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count={pages}"))
    with pytest.raises(StoreUnavailableError, match="full"):
        store.add_job(new_job("b", spec={"padding": "x" * 50_000}))
    assert store.list_jobs().jobs == (job,)
    store.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "sqlite://",
            "'sqlite://', which is a database in one process's memory, which server and workers cannot share; give sqlite:///PATH",
        ),
        ("foo", "'foo', which is not the URL of a database; give sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"),
        ("postgresql://h:port/looms", "'postgresql://h:port/looms', which is not the URL of a database"),
        ("postgresql//me:hidden@h/looms", "'postgresql//***@h/looms', which is not the URL of a database"),
        (
            "mysql://me:hidden@h/looms",
            "'mysql://***@h/looms', which names a database or a driver that is not supported; give sqlite:///PATH",
        ),
        ("sqlite+aiosqlite:///looms", "'sqlite+aiosqlite:///looms', which names a database or a driver that is not supported"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_can_and_without_its_password(url: str, told: str) -> None:
    with pytest.raises(SettingsError, match="WEIGHBRIDGE_DATABASE_URL is " + re.escape(told)) as refusal:
        create_store_engine(url)
    assert "hidden" not in str(refusal.value)


def test_postgresql_is_reached_by_the_driver_that_the_extra_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        SettingsError, match=r"'postgresql://\*\*\*@h/looms', which needs a driver .*psycopg.*pip install 'weighbridge\[postgresql\]'"
    ):
        create_store_engine("postgresql://me:hidden@h/looms?password=hidden")


def test_a_file_that_is_no_database_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear miller, " * 100)
    (tmp_path / "directory").mkdir()
    for path, reason in (("letter", "file is not a database"), ("directory", "unable to open"), ("letter/store.sqlite", "File exists")):
        with pytest.raises(StoreUnavailableError, match=f"{path} cannot be used as the database: .*{reason}"):
            upgrade_database(create_store_engine(f"sqlite:///{tmp_path / path}"))


def test_the_tables_are_spelled_for_postgresql_too() -> None:
    """What can be held without a server; with one, every test here runs on it (see conftest.py)."""
    from sqlalchemy import select
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateTable

    from service.storage.tables import metadata

    for table in metadata.sorted_tables:
        CreateTable(table).compile(dialect=postgresql.dialect())
    assert "BIGSERIAL" in str(CreateTable(jobs).compile(dialect=postgresql.dialect()))
    assert str(select(jobs.c.id).with_for_update().compile(dialect=postgresql.dialect())).endswith("FOR UPDATE")


def test_a_database_of_the_first_migration_keeps_its_jobs_through_the_next(database_url: str) -> None:
    from alembic import command

    from service.storage import database

    engine = create_store_engine(database_url)
    config = database._migration_config()
    with write(engine) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        assert "platform" not in {column["name"] for column in inspect(connection).get_columns("jobs")}
        filled = values_of_new_job(new_job(), job_id="old", force=False, now=datetime(2026, 3, 5, 7, 11, 13, tzinfo=UTC))
        connection.execute(insert(jobs).values({name: value for name, value in filled.items() if name != "platform"}))
        connection.exec_driver_sql("INSERT INTO workers VALUES ('w', 'h', 1, '[]', 1, 1, '2026-03-05 07:11:13', '2026-03-05 07:11:13')")
    upgrade_database(engine)
    store = SqlStore(engine, ArtifactDirectory(Path("unused")))
    assert store.get_job("old").spec == new_job().spec
    assert [worker.platforms for worker in store.list_workers()] == [()]
    store.close()
