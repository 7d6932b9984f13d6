"""A worker in a thread, on a real SQLite file, with a compiler that tests hold by the hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.identity import identify
from service.records import Job
from service.settings import Settings
from service.spec import parse_spec
from service.storage.interface import NewJob
from service.storage.store import SqlStore, open_store
from service.worker.loop import run_worker
from tests.worker.held_compiler import HeldCompiler
from tests.worker.held_steps import HeldSteps

Running = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, poll_seconds=0.02, heartbeat_seconds=0.05, lease_seconds=120)


@pytest.fixture
def store(settings: Settings) -> Iterator[SqlStore]:
    store = open_store(settings)
    yield store
    store.close()


@pytest.fixture
def compiler() -> HeldCompiler:
    return HeldCompiler()


@pytest.fixture
def steps() -> HeldSteps:
    return HeldSteps()


@pytest.fixture
def running(settings: Settings, compiler: HeldCompiler, steps: HeldSteps) -> Running:
    """A worker that runs for as long as the block does; its settings can be changed."""

    @contextmanager
    def run(**changes: Any) -> Iterator[None]:
        stop_event = threading.Event()
        doubles = {"compiler": compiler, "run_steps": steps}
        thread = threading.Thread(target=run_worker, args=(settings.model_copy(update=changes), stop_event), kwargs=doubles)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join(60)
        assert not thread.is_alive()

    return run


@pytest.fixture
def post(store: SqlStore) -> Callable[..., Job]:
    """Queue a job of the smallest spec; `seq_len` makes it another one."""

    def add(seq_len: int = 64, *, child_memory_bytes: int = 1 << 30, identity: str | None = None, **sections: Any) -> Job:
        spec = parse_spec(
            {
                "scenario": f"s{seq_len}",
                "model": {"preset": "tiny"},
                "train": {"seq_len": seq_len},
                "mesh": {"topology": "v5e-4", "fsdp": 4},
                **sections,
            }
        )
        new = NewJob(
            scenario=spec.scenario,
            spec=spec.as_json(),
            spec_hash=spec.canonical_hash(),
            identity=identity or identify(spec, "compile"),
            programs=spec.programs,
            child_memory_bytes=child_memory_bytes,
        )
        return store.add_job(new).job

    return add


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Return as soon as a condition holds; fail when it does not within a minute."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it did not come about in a minute"
            time.sleep(0.01)

    return wait
