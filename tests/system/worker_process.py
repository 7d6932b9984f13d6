"""A real worker whose children are tests/system/phased_child.py: `python worker_process.py CONTROL_DIR`, settings from the environment."""

from __future__ import annotations

import sys
from pathlib import Path

from service.compile.runner import ChildCompiler
from service.settings import Settings
from service.worker.loop import run_worker_process

if __name__ == "__main__":
    control_dir, *options = sys.argv[1:]
    command = (sys.executable, "-P", str(Path(__file__).with_name("phased_child.py")), control_dir)
    compiler = ChildCompiler(command=command)
    sys.exit(run_worker_process(Settings.from_environment(), stop_on_eof="--stop-on-eof" in options, compiler=compiler))
