"""The server is killed at any moment, or its worker is: what was asked for is kept, finished, and nothing is left running."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator

import httpx
import psutil
import pytest

from service.records import JobStatus
from tests.system.sites import PATIENCE_SECONDS, SPEC, Site, stop

pytestmark = pytest.mark.system


def serve(site: Site) -> tuple[subprocess.Popen[str], str]:
    """A server that takes connections, and its address."""
    server = site.start("server_process")
    line = server.stdout.readline()
    assert line.startswith("Weighbridge is at http://127.0.0.1:"), line
    return server, line.split()[-1]


def worker_of(site: Site) -> psutil.Process:
    (worker,) = [process for process in site.running() if "worker_process" in " ".join(process.cmdline())]
    return worker


def post(address: str) -> httpx.Response:
    return httpx.post(f"{address}/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "run-17"}, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("point", ["candidate.start", "dropless.analyse"])
def test_a_killed_server_takes_its_worker_with_it_and_the_job_is_finished_by_the_next(site: Site, point: str) -> None:
    site.hold(point)
    server, address = serve(site)
    job = post(address).json()
    site.wait_for_child(point)
    server.kill()
    server.wait()
    site.wait_until_nothing_runs()
    # The worker saw the server go, and gave the job back in order: no lease has to expire.
    assert site.store.get_job(job["id"]).status is JobStatus.QUEUED

    site.let_go(point)
    server, address = serve(site)
    assert post(address).json()["id"] == job["id"], "the client that did not get its answer asks again, and finds its job"
    ended = site.wait_until_ended(job["id"])
    assert (ended.status, ended.attempts) == (JobStatus.SUCCEEDED, 1)
    assert len(httpx.get(f"{address}/api/v1/jobs/{job['id']}/report", timeout=PATIENCE_SECONDS).json()["reports"]) == 2
    assert stop(server) == 0
    site.wait_until_nothing_runs()


def read_events(address: str, job_id: str, *, after: int) -> Iterator[tuple[int, str]]:
    """Sequence and data of the events that a stream gives, as they come."""
    headers = {"Last-Event-ID": str(after)}
    with httpx.stream("GET", f"{address}/api/v1/jobs/{job_id}/events", headers=headers, timeout=PATIENCE_SECONDS) as answer:
        sequence = 0
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                sequence = int(value)
            elif name == "data":
                yield sequence, value


def test_a_reader_of_events_goes_on_at_the_next_server_where_the_killed_one_left_it(site: Site) -> None:
    site.hold("candidate.compile")
    server, address = serve(site)
    job_id = post(address).json()["id"]
    seen: list[int] = []

    def read_until_the_kill() -> None:
        for sequence, data in read_events(address, job_id, after=0):
            seen.append(sequence)
            if json.loads(data).get("name") == "compile":
                server.kill()

    with pytest.raises(httpx.RemoteProtocolError):
        read_until_the_kill()
    server.wait()
    site.wait_until_nothing_runs()
    site.let_go("candidate.compile")
    server, address = serve(site)
    seen += [sequence for sequence, _ in read_events(address, job_id, after=seen[-1])]
    assert seen == list(range(1, len(site.store.list_events(job_id)) + 1))
    assert site.store.get_job(job_id).status is JobStatus.SUCCEEDED
    assert stop(server) == 0


def test_a_worker_that_is_killed_beside_its_server_is_replaced(site: Site) -> None:
    site.hold("candidate.compile")
    server, address = serve(site)
    job = post(address).json()
    site.wait_for_child("candidate.compile")
    worker = worker_of(site)
    worker.kill()
    worker.wait(PATIENCE_SECONDS)
    site.expire_leases()
    site.let_go("candidate.compile")
    ended = site.wait_until_ended(job["id"])
    assert (ended.status, ended.attempts) == (JobStatus.SUCCEEDED, 2)
    assert worker_of(site).pid != worker.pid
    assert httpx.get(f"{address}/healthz", timeout=PATIENCE_SECONDS).json() == {"status": "ok"}
    assert stop(server) == 0
    site.wait_until_nothing_runs()


def test_a_server_that_is_asked_to_stop_ends_with_its_worker_while_events_are_read(site: Site) -> None:
    site.hold("candidate.compile")
    server, address = serve(site)
    job = post(address).json()
    site.wait_for_child("candidate.compile")
    with httpx.stream("GET", f"{address}/api/v1/jobs/{job['id']}/events", timeout=PATIENCE_SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert stop(server) == 0
    site.wait_until_nothing_runs()
    assert site.store.get_job(job["id"]).status is JobStatus.QUEUED


def test_a_server_that_is_asked_to_stop_as_soon_as_it_names_its_address_stops_in_order(site: Site) -> None:
    server, _ = serve(site)
    assert stop(server) == 0
    site.wait_until_nothing_runs()


def test_a_port_that_is_taken_is_said_and_nothing_is_started(site: Site) -> None:
    server, address = serve(site)
    site.wait_until(lambda: len(site.running()) == 2)
    site.settings = site.settings.model_copy(update={"port": int(address.rpartition(":")[2])})
    second = site.start("server_process")
    assert second.wait(PATIENCE_SECONDS) == 2
    assert len(site.running()) == 2, "the first server and its worker"
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_SECONDS) == 0
