"""The tables, as SQLAlchemy Core metadata; columns say their units, and every byte count is per device unless it says otherwise."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite only counts up by itself on INTEGER PRIMARY KEY; elsewhere 64 bits.
RowNumber = BigInteger().with_variant(Integer, "sqlite")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC; naive datetimes are refused. SQLite keeps no zone, so it is added again when read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; moments are stored in UTC")
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


jobs = Table(
    "jobs",
    metadata,
    Column("number", RowNumber, primary_key=True, autoincrement=True, comment="order of arrival; what cursors count by"),
    Column("id", String(32), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("scenario", String(200), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("spec_hash", String(64), nullable=False),
    Column("identity", String(64), nullable=False),
    Column("programs", JSON, nullable=False, comment="names, in the order they are weighed"),
    Column("force", Boolean, nullable=False, comment="measure even where the identity was measured already"),
    Column("child_memory_bytes", BigInteger, nullable=False, comment="expected resident memory of one child, on the host"),
    Column("platform", String(16), comment="devices a worker must have; null where any worker will do"),
    Column("project", String(200)),
    Column("commit_sha", String(64)),
    Column("branch", String(255)),
    Column("base_sha", String(64)),
    Column("ancestors", JSON, nullable=False),
    Column("pull_request", Integer),
    Column("attempts", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("answered_from", String(32), ForeignKey("jobs.id"), comment="a job that was measured itself: one step leads to its reports"),
    Column("failure", JSON(none_as_null=True)),
    Column("num_events", Integer, nullable=False, comment="sequence of the newest event"),
    Column("lease_token", String(32)),
    Column("lease_worker_id", String(64)),
    Column("lease_expires_at", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    CheckConstraint("(lease_token IS NULL) = (status <> 'running')", name="lease_while_running"),
    Index(None, "status", "number"),
    Index(None, "identity", "status"),
    Index(None, "scenario", "number"),
    Index(None, "project", "number"),
    # A deleted row's number must not come back: a cursor would then point at another job.
    sqlite_autoincrement=True,
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("scope", String(200), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("request_hash", String(64), nullable=False),
    Column("job_id", String(32), ForeignKey("jobs.id"), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("job_id", String(32), ForeignKey("jobs.id"), primary_key=True),
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("name", String(64), nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

reports = Table(
    "reports",
    metadata,
    Column("job_id", String(32), ForeignKey("jobs.id"), primary_key=True),
    Column("program", String(64), primary_key=True),
    Column("position", Integer, nullable=False, comment="of the program in the job's list"),
    Column("report_schema", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("depth", String(16), nullable=False),
    Column("failure_kind", String(32)),
    Column("topology", String(64)),
    Column("num_devices", Integer),
    Column("capacity_bytes", BigInteger),
    Column("peak_bytes", BigInteger),
    Column("allocated_bytes", BigInteger),
    Column("argument_bytes", BigInteger),
    Column("output_bytes", BigInteger),
    Column("alias_bytes", BigInteger),
    Column("temp_bytes", BigInteger),
    Column("fragmentation_bytes", BigInteger),
    Column("padding_bytes", BigInteger),
    Column("host_bytes", BigInteger),
    Column("code_bytes", BigInteger),
    Column("headroom_bytes", BigInteger),
    Column("child_peak_rss_bytes", BigInteger, comment="of the compile child, on the host"),
    Column("total_seconds", Float),
    Column("body", LargeBinary, nullable=False, comment="the whole report as JSON, compressed with zstd"),
    Column("created_at", UtcDateTime, nullable=False),
)

steps_reports = Table(
    "steps_reports",
    metadata,
    Column("job_id", String(32), ForeignKey("jobs.id"), primary_key=True),
    Column("steps_schema", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("failure_kind", String(32)),
    Column("phase", String(32), nullable=False),
    Column("num_devices", Integer),
    Column("num_steps", Integer, nullable=False, comment="warm-up included"),
    Column("num_replays", Integer, nullable=False),
    Column("num_checks_failed", Integer, nullable=False),
    Column("median_step_seconds", Float),
    Column("predicted_bytes", BigInteger),
    Column("measured_bytes", BigInteger),
    Column("child_peak_rss_bytes", BigInteger, comment="of the steps child, on the host"),
    Column("body", LargeBinary, nullable=False, comment="the whole report as JSON, compressed with zstd"),
    Column("created_at", UtcDateTime, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("sha256", String(64), primary_key=True, comment="of the content, uncompressed"),
    Column("size_bytes", BigInteger, nullable=False, comment="uncompressed"),
    Column("stored_bytes", BigInteger, nullable=False, comment="on disk, compressed"),
    Column("created_at", UtcDateTime, nullable=False),
)

job_artifacts = Table(
    "job_artifacts",
    metadata,
    Column("job_id", String(32), ForeignKey("jobs.id"), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("program", String(64), nullable=False),
    Column("sha256", String(64), ForeignKey("artifacts.sha256"), nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("kinds", JSON, nullable=False),
    Column("platforms", JSON, nullable=False, server_default="[]", comment="of the devices that are attached"),
    Column("slots", Integer, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False, comment="of the host, that its children may be expected to take"),
    Column("started_at", UtcDateTime, nullable=False),
    Column("seen_at", UtcDateTime, nullable=False),
)
