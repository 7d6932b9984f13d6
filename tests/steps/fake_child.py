"""A steps child without JAX: sends findings, then ends in the way that the spec's scenario names."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from service.lifeline import Lifeline


def step(index: int, loss: float | None) -> dict[str, Any]:
    metrics = {"loss": loss, "main_loss": loss, "mtp_loss": None, "balance_loss": 0.25, "tokens": 96, "has_moe_overflow": False}
    return {
        "step": index,
        "is_warmup": index < 2,
        "program": "candidate",
        "seconds": 0.5 + index,
        "tokens_per_second": 96 / (0.5 + index),
        "metrics": metrics,
        "flags_equal": True,
    }


def main() -> None:
    lifeline = Lifeline()
    request = lifeline.receive()
    ending = request["spec"]["scenario"]

    def tell(name: str, data: dict[str, Any]) -> None:
        lifeline.send({"event": "progress", "name": name, "seconds": lifeline.seconds, "data": data})

    tell("devices", {})
    tell("known", {"mesh": {"fsdp": 4}, "num_parameters": 1234})
    tell("steps", {})
    tell("step", {"steps": [step(0, 7.5), step(1, 7.25)]})
    tell("step", {"steps": [step(2, 7.125)]})
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "silent":
        os._exit(3)
    if ending == "garbled":
        tell("known", {"no_such_field": 1})
    if ending == "hungry":
        ballast = bytearray(600 << 20)
        ballast[::4096] = b"x" * len(ballast[::4096])
    if ending in ("endless", "hungry"):
        time.sleep(600)
    check = {"name": "same_seed", "status": "failed" if ending == "failing" else "passed", "claim": "equal"}
    tell("check", check)
    tell("done", {})
    report = {"status": "checks_failed" if ending == "failing" else "ok", "phase": "done", "steps": [step(0, 7.5)], "checks": [check]}
    lifeline.finish({"event": "report", "report": report})


if __name__ == "__main__":
    main()
