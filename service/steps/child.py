"""The steps child: reads one request, runs it on the devices, sends its report and ends (`python -m service.steps.child`).

Started by `service.steps.runner`, which sets its environment: devices and flags are fixed before JAX is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.lifeline import Lifeline
from service.steps.interface import StepsRequest


def main() -> None:
    """Answer one request from stdin and end the process."""
    lifeline = Lifeline()
    request = StepsRequest.model_validate(lifeline.receive())

    def tell(name: str, data: Mapping[str, Any]) -> None:
        lifeline.send({"event": "progress", "name": name, "seconds": lifeline.seconds, "data": dict(data)})

    # Here and not above: the lifeline stands before anything heavy is loaded.
    from service.steps.run import StepsRun

    report = StepsRun(request, tell).run()
    lifeline.finish({"event": "report", "report": report.model_dump(mode="json")})


if __name__ == "__main__":
    main()
