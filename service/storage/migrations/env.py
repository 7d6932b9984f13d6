"""Runs migrations on the connection that `upgrade_database` hands over, inside its transaction."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from service.storage.tables import metadata


def run_migrations(connection: Connection) -> None:
    # Batch mode: SQLite cannot alter a column, so the table is copied.
    # All migrations are one transaction, which SQLite can do too since `database` begins it explicitly.
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run_migrations(given)
else:
    # `alembic revision --autogenerate` at a developer's shell: compare with a database named by -x url=…
    url = context.get_x_argument(as_dictionary=True)["url"]
    with create_engine(url).begin() as connection:
        run_migrations(connection)
