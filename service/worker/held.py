"""Jobs that a worker holds: their leases are renewed, and their runners told when to stop, by one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from service.errors import NotFoundError, ServiceError, SpecError
from service.records import Failure, FailureKind, Job, JobStatus, Report
from service.steps_records import StepsReport
from service.storage.interface import Claim, LeaseLostError, Store, StoreUnavailableError, WorkerStatus

logger = logging.getLogger(__name__)

STOPPED = "the worker was told to stop"

UNAVAILABLE_PAUSE_SECONDS = 1.0
"""Between two tries to write while the database does not answer."""


class HeldJob:
    """One claimed job, as its runner sees it. Writes go to the store under the lease, and wait out a database that does not answer.

    `is_unwanted` is what a runner asks all the time: True once the lease is lost, the job is to be cancelled, or the worker is to stop.
    """

    def __init__(self, claim: Claim, store: Store, directory: Path) -> None:
        self.claim = claim
        self.directory = directory
        """This attempt's own; made and removed by the worker."""
        self._store = store
        self._is_lost = threading.Event()
        self.is_cancelled = threading.Event()
        self.is_stopping = threading.Event()

    @property
    def job(self) -> Job:
        """As it was claimed."""
        return self.claim.job

    def is_unwanted(self) -> bool:
        return self._is_lost.is_set() or self.is_cancelled.is_set() or self.is_stopping.is_set()

    def lose(self) -> None:
        """Note that the lease is lost; every later write raises LeaseLostError."""
        self._is_lost.set()

    def append_event(self, name: str, data: Mapping[str, Any]) -> None:
        self._write(lambda: self._store.append_event(self.claim.lease, name, data))

    def restate_identity(self, identity: str) -> Job:
        return self._write(lambda: self._store.restate_identity(self.claim.lease, identity))

    def save_report(self, report: Report, artifacts: Mapping[str, Path]) -> None:
        self._write(lambda: self._store.save_report(self.claim.lease, report, artifacts=artifacts))

    def save_steps_report(self, report: StepsReport) -> None:
        self._write(lambda: self._store.save_steps_report(self.claim.lease, report))

    def get_steps_report(self) -> StepsReport:
        return self._write(lambda: self._store.get_steps_report(self.job.id))

    def list_reports(self) -> tuple[Report, ...]:
        return self._write(lambda: self._store.list_reports(self.job.id))

    def finish(self, status: JobStatus, failure: Failure | None = None) -> None:
        self._write(lambda: self._store.finish_job(self.claim.lease, status, failure=failure))

    def refuse_spec(self, error: SpecError) -> None:
        """End a job whose spec this version refuses: it was posted to another one."""
        message = f"the spec was valid when it was posted, and is not for this version: {error.detail}"
        self.finish(JobStatus.FAILED, Failure(kind=FailureKind.UNSUPPORTED, message=message))

    def release(self, reason: str) -> None:
        # Not waited out: a worker that is told to stop stops, and the lease expires by itself.
        self._store.release_job(self.claim.lease, reason=reason)

    def _write[T](self, write: Callable[[], T]) -> T:
        while True:
            if self._is_lost.is_set():
                raise LeaseLostError(f"the lease on job {self.job.id} was lost")
            try:
                return write()
            except StoreUnavailableError as error:
                logger.warning("job %s waits: %s", self.job.id, error.detail)
                if self.is_stopping.wait(UNAVAILABLE_PAUSE_SECONDS):
                    raise


class LeaseKeeper:
    """Renews leases, looks for cancellation, and makes the worker known, in a thread of its own."""

    def __init__(self, store: Store, status: Callable[[], WorkerStatus], *, lease_seconds: float, beat_seconds: float, look_seconds: float):
        """`beat_seconds` lie between two renewals, `look_seconds` between two looks for a request to cancel."""
        self._store, self._status = store, status
        self._lease_seconds, self._beat_seconds, self._look_seconds = lease_seconds, beat_seconds, look_seconds
        self._held: dict[str, HeldJob] = {}
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_ended.set()
        self._thread.join()

    def hold(self, held: HeldJob) -> None:
        with self._lock:
            self._held[held.job.id] = held

    def let_go(self, held: HeldJob) -> None:
        with self._lock:
            del self._held[held.job.id]

    def held(self) -> list[HeldJob]:
        with self._lock:
            return list(self._held.values())

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._is_ended.is_set():
            is_beat = time.monotonic() >= next_beat
            if is_beat:
                next_beat = time.monotonic() + self._beat_seconds
                self._try(lambda: self._store.record_worker(self._status()))
            for held in self.held():
                self._try(partial(self._renew if is_beat else self._look, held))
            self._is_ended.wait(self._look_seconds)

    def _try(self, action: Callable[[], None]) -> None:
        """A database that does not answer for a moment must not end the thread: the next beat comes before the lease expires."""
        try:
            action()
        except ServiceError as error:
            logger.warning("no heartbeat: %s", error.detail)
        except Exception:
            logger.exception("no heartbeat")

    def _renew(self, held: HeldJob) -> None:
        try:
            state = self._store.renew_lease(held.claim.lease, lease_seconds=self._lease_seconds)
        except (LeaseLostError, NotFoundError):
            self._lose(held)
        else:
            if state.cancel_requested:
                held.is_cancelled.set()

    def _look(self, held: HeldJob) -> None:
        if self._store.get_job(held.job.id).cancel_requested:
            held.is_cancelled.set()

    def _lose(self, held: HeldJob) -> None:
        # A job that its own runner has just ended has no lease either.
        if held in self.held():
            logger.warning("lost the lease on job %s", held.job.id)
            held.lose()
