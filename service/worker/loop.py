"""The worker: claims jobs while it has room, runs each in a thread of its own, and gives back what it cannot finish."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from service.compile.interface import Compiler
from service.compile.runner import ChildCompiler
from service.errors import ServiceError
from service.logs import log_to_stderr
from service.records import Failure, FailureKind, JobKind, JobStatus
from service.settings import Settings, SettingsError
from service.starter import when_starter_ends
from service.steps.interface import StepsRunner
from service.steps.runner import ChildSteps
from service.storage.interface import Claim, LeaseLostError, Store, StoreUnavailableError, WorkerStatus
from service.storage.store import SqlStore, open_store
from service.worker.compile_job import CompileJobRunner
from service.worker.devices import attached_platforms
from service.worker.directories import own_directory
from service.worker.held import STOPPED, HeldJob, LeaseKeeper
from service.worker.steps_job import StepsJobRunner

logger = logging.getLogger(__name__)


class JobRunner(Protocol):
    """Runs one held job to its end, or gives it back; lives in a thread of its own."""

    def __call__(self, held: HeldJob) -> None: ...


def run_worker(
    settings: Settings,
    stop_event: threading.Event,
    *,
    store: SqlStore | None = None,
    compiler: Compiler | None = None,
    run_steps: StepsRunner | None = None,
) -> None:
    """Work until `stop_event` is set; then children are killed and their jobs given back within seconds.

    `store` is the one that the settings name unless it was opened before, and is closed in the end; `compiler` and `run_steps` are the
    real ones unless a test brings its own.
    """
    store = store or open_store(settings)
    runners: dict[JobKind, JobRunner] = {
        "compile": CompileJobRunner(compiler or ChildCompiler(settings.capacity_cache), settings.child_limits),
        "steps": StepsJobRunner(run_steps or ChildSteps(), settings.child_limits),
    }
    try:
        worker_id = f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}"
        with own_directory(settings.work_dir, worker_id) as directory:
            Worker(settings, store, runners, worker_id, directory).run(stop_event)
    finally:
        store.close()


def run_worker_process(settings: Settings, *, stop_on_eof: bool = False, compiler: Compiler | None = None) -> int:
    """Be a worker until SIGTERM or SIGINT, or, with `stop_on_eof`, until stdin closes.

    Returns the exit code: 0 after an orderly stop, 2 where the database cannot be used.
    """
    log_to_stderr("worker")
    try:
        store = open_store(settings)
    except (ServiceError, SettingsError) as error:
        print(f"weighbridge: {error}", file=sys.stderr)
        return 2
    stop_event = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_event.set())
    if stop_on_eof:
        when_starter_ends(stop_event.set)
    run_worker(settings, stop_event, store=store, compiler=compiler)
    return 0


class Worker:
    """One process' worth of slots. `run` blocks; everything it starts has ended when it returns."""

    def __init__(self, settings: Settings, store: Store, runners: Mapping[JobKind, JobRunner], worker_id: str, directory: Path) -> None:
        self._settings = settings
        self._store = store
        self._runners = runners
        self._id = worker_id
        self._directory = directory
        self._platforms = attached_platforms()
        self._started_at = datetime.now(UTC)
        self._has_room = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._leases = LeaseKeeper(
            store,
            self._status,
            lease_seconds=settings.lease_seconds,
            beat_seconds=settings.heartbeat_seconds,
            look_seconds=min(settings.poll_seconds, settings.heartbeat_seconds),
        )

    def run(self, stop_event: threading.Event) -> None:
        logger.info("worker %s takes %d jobs at once", self._id, self._settings.worker_slots)
        self._leases.start()
        try:
            while not stop_event.is_set():
                self._has_room.clear()
                claim = self._claim()
                if claim is not None:
                    self._start(claim)
                else:
                    # A job that ends makes room, and may have been what others waited for; but a stop must be seen soon.
                    self._has_room.wait(self._settings.poll_seconds)
        finally:
            for held in self._leases.held():
                held.is_stopping.set()
            for thread in list(self._threads):
                thread.join()
            self._leases.stop()
            self._sign_off()

    def _claim(self) -> Claim | None:
        held = self._leases.held()
        if len(held) >= self._settings.worker_slots:
            return None
        kinds = set(self._runners)
        # The devices are all of one job's while its steps run: two at once would measure each other. The store sees to the host's other
        # workers in the same way.
        kinds -= {"steps"} & {each.job.kind for each in held}
        free_bytes = self._settings.worker_memory_bytes - sum(each.claim.child_memory_bytes for each in held)
        try:
            return self._store.claim_job(
                self._id,
                kinds=sorted(kinds),
                # Alone, a job runs whatever it is expected to need: waiting longer would not make more room.
                memory_bytes=free_bytes if held else None,
                lease_seconds=self._settings.lease_seconds,
                max_attempts=self._settings.max_attempts,
                platforms=self._platforms,
            )
        except ServiceError as error:
            logger.warning("no claim: %s", error.detail)
            return None

    def _start(self, claim: Claim) -> None:
        held = HeldJob(claim, self._store, self._directory / f"{claim.job.id}-{claim.lease.attempt}-{claim.lease.token[:6]}")
        self._leases.hold(held)
        thread = threading.Thread(target=self._run_job, args=(held,), name=f"job-{claim.job.id}")
        self._threads.add(thread)
        thread.start()

    def _run_job(self, held: HeldJob) -> None:
        logger.info("job %s, attempt %d: %s", held.job.id, held.claim.lease.attempt, held.job.scenario)
        try:
            held.directory.mkdir()
            self._run_or_record(held)
        except LeaseLostError as error:
            logger.warning("%s", error.detail)
        except ServiceError as error:
            logger.warning("job %s is left to expire: %s", held.job.id, error.detail)
        except Exception:
            logger.exception("job %s is left to expire", held.job.id)
        finally:
            shutil.rmtree(held.directory, ignore_errors=True)
            self._leases.let_go(held)
            self._threads.discard(threading.current_thread())
            self._has_room.set()

    def _run_or_record(self, held: HeldJob) -> None:
        """What breaks in the worker's own code would break again: it is the job's outcome, not a reason for another attempt."""
        try:
            self._runners[held.job.kind](held)
        except (LeaseLostError, StoreUnavailableError):
            if not held.is_stopping.is_set():
                raise
            held.release(STOPPED)
        except Exception as error:
            logger.exception("job %s failed in the worker", held.job.id)
            message = f"the worker could not run this job: {type(error).__name__}: {error}"
            failure = Failure(kind=FailureKind.CRASHED, message=message, log_tail=traceback.format_exc()[-8000:])
            held.finish(JobStatus.FAILED, failure)

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            id=self._id,
            host=socket.gethostname(),
            pid=os.getpid(),
            kinds=tuple(self._runners),
            platforms=self._platforms,
            slots=self._settings.worker_slots,
            memory_bytes=self._settings.worker_memory_bytes,
            started_at=self._started_at,
            seen_at=datetime.now(UTC),
        )

    def _sign_off(self) -> None:
        try:
            self._store.remove_worker(self._id)
        except ServiceError as error:
            logger.warning("could not sign off: %s", error.detail)
