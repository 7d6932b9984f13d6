"""Following a job: order, resumption, and an end."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.records import Job, JobStatus
from service.storage.store import SqlStore
from tests.storage.samples import new_job, report_of


def read_stream(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Id, name and data of each event of a whole stream."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            events.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return events


def run_job(store: SqlStore) -> None:
    claim = store.claim_job("w1", kinds=["compile"], memory_bytes=None, lease_seconds=60, max_attempts=3)
    assert claim is not None
    store.append_event(claim.lease, "progress", {"program": "candidate", "name": "lower", "seconds": 1.5, "data": {}})
    store.save_report(claim.lease, report_of())
    store.finish_job(claim.lease, JobStatus.SUCCEEDED)


NAMES = ["queued", "claimed", "progress", "report", "finished"]


def test_a_stream_gives_events_as_they_come_and_ends_with_the_job(client: TestClient, store: SqlStore) -> None:
    job = store.add_job(new_job()).job
    # The stream is asked for while the job waits; the job runs only once its first event has come through.
    worker = threading.Thread(target=run_job, args=(store,))
    with client.stream("GET", f"/api/v1/jobs/{job.id}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        worker.start()
        text = "".join(answer.iter_text())
    worker.join()
    events = read_stream(text)
    assert [(number, name) for number, name, _ in events] == list(enumerate(NAMES, start=1))
    assert events[2][2].items() >= {"program": "candidate", "name": "lower", "seconds": 1.5}.items()
    assert events[3][2].items() >= {"status": "ok", "peak_bytes": 1_300, "allocated_bytes": 1_311, "capacity_bytes": 17_000}.items()
    assert events[4][2].items() >= {"status": "succeeded", "answered_from": None, "failure_kind": None}.items()


def test_a_reader_that_comes_back_misses_none_and_sees_none_twice(client: TestClient, store: SqlStore) -> None:
    job = store.add_job(new_job()).job
    run_job(store)
    for seen in range(5):
        answer = client.get(f"/api/v1/jobs/{job.id}/events", headers={"Last-Event-ID": str(seen)})
        assert [name for _, name, _ in read_stream(answer.text)] == NAMES[seen:]
    assert [name for _, name, _ in read_stream(client.get(f"/api/v1/jobs/{job.id}/events?after=3").text)] == NAMES[3:]


def test_a_reader_that_saw_the_end_is_told_not_to_come_back(client: TestClient, store: SqlStore) -> None:
    job = store.add_job(new_job()).job
    store.request_cancel(job.id)
    assert client.get(f"/api/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "3"}).status_code == 204


def test_a_job_that_ends_while_the_reader_is_answered_still_tells_its_end(
    client: TestClient, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.add_job(new_job()).job
    look_up = store.get_job

    def look_up_and_end(job_id: str) -> Job:
        seen = look_up(job_id)
        store.request_cancel(job_id)
        return seen

    monkeypatch.setattr(store, "get_job", look_up_and_end)
    answer = client.get(f"/api/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "1"})
    assert [name for _, name, _ in read_stream(answer.text)] == ["cancel_requested", "finished"]


def test_events_also_come_as_a_page_of_json(client: TestClient, store: SqlStore) -> None:
    job = store.add_job(new_job()).job
    run_job(store)
    headers = {"Accept": "application/json"}
    page = client.get(f"/api/v1/jobs/{job.id}/events", params={"after": 1, "limit": 2}, headers=headers).json()
    assert [(event["sequence"], event["name"]) for event in page["events"]] == [(2, "claimed"), (3, "progress")]
    assert client.get(f"/api/v1/jobs/{job.id}/events", params={"after": 5}, headers=headers).json() == {"events": []}


def test_events_of_no_job_are_not_found(client: TestClient) -> None:
    assert client.get("/api/v1/jobs/nothing/events").status_code == 404
