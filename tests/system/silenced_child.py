"""The real compile child, which says nothing more once it has entered a phase: `python silenced_child.py PHASE`.

However late its parent comes to kill it, the last that was heard of it is that phase.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from service.compile.child import main
from service.lifeline import Lifeline

_send = Lifeline.send
_is_silent = threading.Event()


def send(self: Lifeline, message: Mapping[str, Any]) -> None:
    if _is_silent.is_set():
        threading.Event().wait()
    _send(self, message)
    if message.get("name") == sys.argv[1]:
        _is_silent.set()


if __name__ == "__main__":
    Lifeline.send = send  # type: ignore[method-assign]
    main()
