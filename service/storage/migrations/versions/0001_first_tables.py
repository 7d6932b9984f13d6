"""The first tables: jobs, their events, reports and artifacts, idempotency keys, and workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.String(length=64), nullable=False, comment="of the content, uncompressed"),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False, comment="uncompressed"),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False, comment="on disk, compressed"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifacts")),
    )
    op.create_table(
        "jobs",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
            comment="order of arrival; what cursors count by",
        ),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("scenario", sa.String(length=200), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_hash", sa.String(length=64), nullable=False),
        sa.Column("identity", sa.String(length=64), nullable=False),
        sa.Column("programs", sa.JSON(), nullable=False, comment="names, in the order they are weighed"),
        sa.Column("force", sa.Boolean(), nullable=False, comment="measure even where the identity was measured already"),
        sa.Column("child_memory_bytes", sa.BigInteger(), nullable=False, comment="expected resident memory of one child, on the host"),
        sa.Column("project", sa.String(length=200), nullable=True),
        sa.Column("commit_sha", sa.String(length=64), nullable=True),
        sa.Column("branch", sa.String(length=255), nullable=True),
        sa.Column("base_sha", sa.String(length=64), nullable=True),
        sa.Column("ancestors", sa.JSON(), nullable=False),
        sa.Column("pull_request", sa.Integer(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column(
            "answered_from",
            sa.String(length=32),
            nullable=True,
            comment="a job that was measured itself: one step leads to its reports",
        ),
        sa.Column("failure", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("num_events", sa.Integer(), nullable=False, comment="sequence of the newest event"),
        sa.Column("lease_token", sa.String(length=32), nullable=True),
        sa.Column("lease_worker_id", sa.String(length=64), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(lease_token IS NULL) = (status <> 'running')", name=op.f("ck_jobs_lease_while_running")),
        sa.ForeignKeyConstraint(["answered_from"], ["jobs.id"], name=op.f("fk_jobs_answered_from")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_identity_status"), ["identity", "status"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_project_number"), ["project", "number"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_scenario_number"), ["scenario", "number"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_status_number"), ["status", "number"], unique=False)

    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False, comment="of the host, that its children may be expected to take"),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.PrimaryKeyConstraint("job_id", "sequence", name=op.f("pk_events")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("scope", sa.String(length=200), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_idempotency_keys_job_id")),
        sa.PrimaryKeyConstraint("scope", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "job_artifacts",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("program", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_artifacts_job_id")),
        sa.ForeignKeyConstraint(["sha256"], ["artifacts.sha256"], name=op.f("fk_job_artifacts_sha256")),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_job_artifacts")),
    )
    op.create_table(
        "reports",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("program", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False, comment="of the program in the job's list"),
        sa.Column("report_schema", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("depth", sa.String(length=16), nullable=False),
        sa.Column("failure_kind", sa.String(length=32), nullable=True),
        sa.Column("topology", sa.String(length=64), nullable=True),
        sa.Column("num_devices", sa.Integer(), nullable=True),
        sa.Column("capacity_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("allocated_bytes", sa.BigInteger(), nullable=True),
        sa.Column("argument_bytes", sa.BigInteger(), nullable=True),
        sa.Column("output_bytes", sa.BigInteger(), nullable=True),
        sa.Column("alias_bytes", sa.BigInteger(), nullable=True),
        sa.Column("temp_bytes", sa.BigInteger(), nullable=True),
        sa.Column("fragmentation_bytes", sa.BigInteger(), nullable=True),
        sa.Column("padding_bytes", sa.BigInteger(), nullable=True),
        sa.Column("host_bytes", sa.BigInteger(), nullable=True),
        sa.Column("code_bytes", sa.BigInteger(), nullable=True),
        sa.Column("headroom_bytes", sa.BigInteger(), nullable=True),
        sa.Column("child_peak_rss_bytes", sa.BigInteger(), nullable=True, comment="of the compile child, on the host"),
        sa.Column("total_seconds", sa.Float(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=False, comment="the whole report as JSON, compressed with zstd"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_reports_job_id")),
        sa.PrimaryKeyConstraint("job_id", "program", name=op.f("pk_reports")),
    )


def downgrade() -> None:
    op.drop_table("reports")
    op.drop_table("job_artifacts")
    op.drop_table("idempotency_keys")
    op.drop_table("events")
    op.drop_table("workers")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_status_number"))
        batch_op.drop_index(batch_op.f("ix_jobs_scenario_number"))
        batch_op.drop_index(batch_op.f("ix_jobs_project_number"))
        batch_op.drop_index(batch_op.f("ix_jobs_identity_status"))

    op.drop_table("jobs")
    op.drop_table("artifacts")
