"""A child that behaves as the spec's scenario says, to try the runner on; it loads no JAX. Run by tests/compile/test_runner.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from service.lifeline import Lifeline

HANG = [sys.executable, "-c", "import time; time.sleep(600)"]
HOLD_AND_HANG = [sys.executable, "-c", "import time; held = b'x' * (512 << 20); print(flush=True); time.sleep(600)"]
"""Takes the kernel a while to end, as a compiler with its memory does."""


def main() -> None:
    lifeline = Lifeline()
    request = lifeline.receive()
    work_dir = Path(request["work_dir"])

    def progress(name: str, **data: Any) -> None:
        lifeline.send({"event": "progress", "name": name, "seconds": lifeline.seconds, "data": {"pid": os.getpid(), **data}})

    def report() -> dict[str, Any]:
        return {"event": "report", "report": {"program": request["program"], "status": "ok", "depth": request["depth"], "peak_bytes": 4321}}

    print("the log's last line", file=sys.stderr, flush=True)
    progress("compile")
    match request["spec"]["scenario"]:
        case "reports":
            print("a library prints this on stdout")
            lifeline.finish(report())
        case "reports-then-hangs":
            lifeline.send(report())
            time.sleep(600)
        case "reports-much":
            lifeline.finish(report() | {"report": report()["report"] | {"warnings": ["w" * 1000] * 9000}})
        case "hangs":
            time.sleep(600)
        case "says-more-when-looked-at":
            while not (work_dir / "looked-at").exists():
                time.sleep(0.01)
            progress("analyse")
            (work_dir / "said").touch()
            time.sleep(600)
        case "hangs-and-ignores-sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            progress("compile", deaf=True)
            time.sleep(600)
        case "has-a-child-of-its-own":
            progress("compile", grandchild=subprocess.Popen(HANG).pid)
            time.sleep(600)
        case "leaves-a-child-behind":
            grandchild = subprocess.Popen(HOLD_AND_HANG, stdout=subprocess.PIPE)
            assert grandchild.stdout is not None
            grandchild.stdout.readline()
            progress("compile", grandchild=grandchild.pid)
            sys.exit(3)
        case "takes-memory":
            # Not without end: a parent that looks late must not find the host without memory.
            held = bytearray(os.urandom(1 << 20)) * 512
            time.sleep(600)
            del held
        case "aborts":
            print("F0102 03:04:05 7 layout.cc:9] Check failed: a == b (3 vs. 5)", file=sys.stderr, flush=True)
            os.abort()
        case "exits":
            print("ImportError: no module named half", file=sys.stderr, flush=True)
            sys.exit(7)
        case "sends-nonsense":
            os.write(lifeline._messages, b'not json\n[1]\n{"event": "unknown"}\n{"event": ')
            lifeline.send({})
            lifeline.finish({"event": "report", "report": {"status": "splendid"}})
        case "is-locked-twice":
            counter = work_dir.parent / "attempts"
            attempts = int(counter.read_text()) + 1 if counter.exists() else 1
            counter.write_text(str(attempts))
            lifeline.finish({"event": "locked"} if attempts <= 2 else report())
        case "is-always-locked":
            lifeline.finish({"event": "locked"})
        case "shows-its-surroundings":
            environment = dict(os.environ)
            progress("compile", environment=environment, directory=os.getcwd(), leader=os.getpid() == os.getsid(0), request=request)
            lifeline.finish(report())


if __name__ == "__main__":
    main()
