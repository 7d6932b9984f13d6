"""Directories of a worker's children, and the removal of those that a killed worker left behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def own_directory(work_dir: Path, worker_id: str) -> Iterator[Path]:
    """A directory that is this worker's while it lives, and anybody's to remove afterwards.

    A file lock says that it lives: the kernel gives that up with the process, however it ends, and no number is ever used again
    as a process id could be.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    remove_abandoned(work_dir)
    lock_path, directory = work_dir / f"{worker_id}.lock", work_dir / worker_id
    unlocked_path = lock_path.with_suffix(".new")
    with unlocked_path.open("xb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Only now under the name that others look for: they would take an unlocked one for abandoned.
        unlocked_path.rename(lock_path)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            lock_path.unlink(missing_ok=True)


def remove_abandoned(work_dir: Path) -> None:
    """Remove the directories of workers that no longer live."""
    for lock_path in work_dir.glob("*.lock"):
        with contextlib.suppress(FileNotFoundError), lock_path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            directory = lock_path.with_suffix("")
            if directory.exists():
                logger.info("removing what a dead worker left: %s", directory)
                shutil.rmtree(directory, ignore_errors=True)
            os.unlink(lock_path)
