"""A real worker whose steps children are tests/steps/fake_child.py: `python steps_worker_process.py CONTROL_DIR`."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from service.settings import Settings
from service.steps.runner import ChildSteps
from service.worker.loop import run_worker

if __name__ == "__main__":
    # The control directory on the command line is how a test finds what it started.
    fake_child = Path(__file__).parent.parent / "steps" / "fake_child.py"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run_worker(Settings.from_environment(), stop, run_steps=ChildSteps((sys.executable, "-P", str(fake_child), sys.argv[1])))
