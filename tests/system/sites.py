"""A place for real processes of the service: its directories, what runs there, and how far the children are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from service.identity import identify
from service.records import Job
from service.settings import Settings
from service.spec import parse_spec
from service.storage.database import write
from service.storage.interface import NewJob
from service.storage.store import SqlStore, open_store

SPEC: dict[str, Any] = {
    "scenario": "tiny-v5e-4",
    "model": {"preset": "tiny"},
    "train": {"seq_len": 64},
    "mesh": {"topology": "v5e-4", "fsdp": 4},
    "moe": {"ragged_buffer_factor": 1.0, "retry_when_tokens_dropped": True},
    "programs": ["candidate", "dropless"],
}


PATIENCE_SECONDS = 120
"""For what comes about in a second or two where nothing else runs; a busy machine takes longer, and that is no failure."""


class Site:
    """Everything is under one directory of its own, whose path is on the command line of every process started here."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.control_dir = directory / "control"
        self.control_dir.mkdir()
        defaults = {"data_dir": directory / "data", "port": 0, "poll_seconds": 0.05, "heartbeat_seconds": 0.2, "lease_seconds": 60}
        self.settings = Settings(**defaults | settings)
        self.store: SqlStore = open_store(self.settings)
        self._started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *options: str) -> subprocess.Popen[str]:
        """Start `worker_process` or `server_process`."""
        path = Path(__file__).with_name(f"{script}.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(path), str(self.control_dir), *options],
            env={**os.environ, **self.settings.as_environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def post(self, **changes: Any) -> Job:
        """Queue a job in the store, as the server would."""
        spec = parse_spec(SPEC | changes)
        return self.store.add_job(
            NewJob(
                scenario=spec.scenario,
                spec=spec.as_json(),
                spec_hash=spec.canonical_hash(),
                identity=identify(spec, "compile"),
                programs=spec.programs,
                child_memory_bytes=1 << 30,
            )
        ).job

    def hold(self, point: str) -> None:
        """Have children wait at PROGRAM.PHASE."""
        (self.control_dir / f"hold.{point}").touch()

    def let_go(self, point: str) -> None:
        (self.control_dir / f"hold.{point}").unlink()

    def children_at(self, point: str) -> list[int]:
        """Process ids of all children that ever reached PROGRAM.PHASE."""
        return [int(path.suffix[1:]) for path in self.control_dir.glob(f"reached.{point}.*")]

    def wait_for_child(self, point: str, *, count: int = 1) -> int:
        """Wait until `count` children have reached PROGRAM.PHASE; returns the id of one that lives."""
        self.wait_until(lambda: len(self.children_at(point)) == count)
        running = {process.pid for process in self.running()}
        (alive,) = [pid for pid in self.children_at(point) if pid in running]
        return alive

    def expire_leases(self) -> None:
        """Let a lease's time be over at once."""
        with write(self.store._engine) as connection:
            connection.exec_driver_sql("UPDATE jobs SET lease_expires_at = '2001-01-01 00:00:00' WHERE status = 'running'")

    def freeze(self, worker: subprocess.Popen[str]) -> None:
        """Stop a worker where it stands, but not in the middle of a write: that would lock the database for all others."""
        with write(self.store._engine):
            worker.send_signal(signal.SIGSTOP)
            self.wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)

    def wait_until_ended(self, job_id: str) -> Job:
        self.wait_until(lambda: self.store.get_job(job_id).finished_at is not None)
        return self.store.get_job(job_id)

    def event_names(self, job_id: str) -> list[str]:
        """Names of a job's events, progress apart."""
        return [event.name for event in self.store.list_events(job_id) if event.name != "progress"]

    def running(self) -> list[psutil.Process]:
        """Processes of this site, those that only wait to be reaped apart."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.control_dir) in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def wait_until_nothing_runs(self) -> None:
        self.wait_until(lambda: not self.running())

    @staticmethod
    def wait_until(condition: Callable[[], bool]) -> None:
        """Return as soon as a condition holds; fail when it does not within `PATIENCE_SECONDS`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"it did not come about in {PATIENCE_SECONDS} s"
            time.sleep(0.02)

    def close(self) -> None:
        """Whatever a failed test left is ended here; each process by its own id."""
        for process in self.running():
            process.kill()
        for started in self._started:
            started.wait(PATIENCE_SECONDS)
            if started.stdout is not None:
                started.stdout.close()
        self.store.close()


def runs(process: psutil.Process) -> bool:
    """Whether a process still runs; one that has ended and waits to be reaped, which of an orphan init does in its own time, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(process: subprocess.Popen[str]) -> int:
    """Ask a process to stop, and return its exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_SECONDS)
