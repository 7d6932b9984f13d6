"""A child that walks through a compile's phases without compiling, and stops at any of them for as long as a test wants it to.

`python phased_child.py CONTROL_DIR`. At each phase it leaves a file `reached.PROGRAM.PHASE.PID` in the directory, and waits there while a
file `hold.PROGRAM.PHASE` exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from service.lifeline import Lifeline

PHASES = ("start", "lower", "compile", "analyse")


def main() -> None:
    import os

    lifeline = Lifeline()
    request = lifeline.receive()
    control_dir = Path(sys.argv[1])
    print("the log's last line", file=sys.stderr, flush=True)
    for phase in PHASES:
        lifeline.send({"event": "progress", "name": phase, "seconds": lifeline.seconds, "data": {}})
        point = f"{request['program']}.{phase}"
        (control_dir / f"reached.{point}.{os.getpid()}").touch()
        while (control_dir / f"hold.{point}").exists():
            time.sleep(0.01)
    if request["artifact_dir"] is not None:
        (Path(request["artifact_dir"]) / f"{request['program']}.module.pb").write_bytes(b"HLO")
    report = {"program": request["program"], "status": "ok", "depth": request["depth"], "peak_bytes": 4_321}
    lifeline.finish({"event": "report", "report": report})


if __name__ == "__main__":
    main()
