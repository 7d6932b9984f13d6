"""For supervisors and monitoring: alive, ready, and counts in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from service.api.dependencies import SettingsDep, StoreDep
from service.records import JobStatus, Record
from service.settings import Settings
from service.storage.interface import Store

router = APIRouter(tags=["health"])

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Health(Record):
    status: Literal["ok"] = "ok"


class Readiness(Record):
    status: Literal["ready"] = "ready"
    num_workers: int
    """Workers that made themselves known within the last lease; with none, jobs wait."""


@router.get("/healthz", summary="Is the process alive")
def get_health() -> Health:
    return Health()


@router.get("/readyz", summary="Can requests be answered")
def get_readiness(store: StoreDep, settings: SettingsDep) -> Readiness:
    """503 while the database does not answer or stands at another migration."""
    store.ping()
    return Readiness(num_workers=_count_live_workers(store, settings))


@router.get("/metrics", summary="Counts for monitoring", response_class=PlainTextResponse)
def get_metrics(store: StoreDep, settings: SettingsDep) -> Response:
    """Gauges in Prometheus' text format."""
    counts = store.count_jobs()
    kinds = sorted({kind for kind, _ in counts})
    jobs = [({"kind": kind, "status": status.value}, counts.get((kind, status), 0)) for kind in kinds for status in JobStatus]
    return PlainTextResponse(
        _family("weighbridge_build_info", "Version of the service; always 1", [({"version": version("weighbridge")}, 1)])
        + _family("weighbridge_jobs", "Jobs by kind and status", jobs)
        + _family("weighbridge_workers", "Workers seen within the last lease", [({}, _count_live_workers(store, settings))]),
        media_type=_TEXT_FORMAT,
    )


def _count_live_workers(store: Store, settings: Settings) -> int:
    since = datetime.now(UTC) - timedelta(seconds=settings.lease_seconds)
    return sum(worker.seen_at >= since for worker in store.list_workers())


def _family(name: str, help_text: str, samples: Iterable[tuple[Mapping[str, str], int]]) -> str:
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
    for labels, value in samples:
        # Label values are names of this service's own; none holds a quote, a backslash or a line break.
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")
    return "\n".join(lines) + "\n"
