"""Jobs of kind steps: their reports, the devices they need, and the devices that workers have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "steps_reports",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("steps_schema", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("failure_kind", sa.String(length=32), nullable=True),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("num_devices", sa.Integer(), nullable=True),
        sa.Column("num_steps", sa.Integer(), nullable=False, comment="warm-up included"),
        sa.Column("num_replays", sa.Integer(), nullable=False),
        sa.Column("num_checks_failed", sa.Integer(), nullable=False),
        sa.Column("median_step_seconds", sa.Float(), nullable=True),
        sa.Column("predicted_bytes", sa.BigInteger(), nullable=True),
        sa.Column("measured_bytes", sa.BigInteger(), nullable=True),
        sa.Column("child_peak_rss_bytes", sa.BigInteger(), nullable=True, comment="of the steps child, on the host"),
        sa.Column("body", sa.LargeBinary(), nullable=False, comment="the whole report as JSON, compressed with zstd"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_steps_reports_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_steps_reports")),
    )
    op.add_column(
        "jobs",
        sa.Column(
            "platform",
            sa.String(length=16),
            nullable=True,
            comment="devices a worker must have; null where any worker will do",
        ),
    )
    op.add_column(
        "workers",
        sa.Column("platforms", sa.JSON(), nullable=False, server_default="[]", comment="of the devices that are attached"),
    )


def downgrade() -> None:
    op.drop_column("workers", "platforms")
    op.drop_column("jobs", "platform")
    op.drop_table("steps_reports")
