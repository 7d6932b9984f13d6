"""A real server with tests/system/worker_process.py beside it: `python server_process.py CONTROL_DIR`, settings from the environment."""

from __future__ import annotations

import sys
from pathlib import Path

from service.api.server import run_server
from service.settings import Settings

if __name__ == "__main__":
    command = (sys.executable, "-P", str(Path(__file__).with_name("worker_process.py")), sys.argv[1], "--stop-on-eof")
    sys.exit(run_server(Settings.from_environment(), worker_command=command))
