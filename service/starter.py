"""Tells a process of the service that whoever started it is gone, by whatever means."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def when_starter_ends(action: Callable[[], object]) -> None:
    """Call `action`, in a thread of its own, once stdin closes.

    Whoever started this process holds the other end of a pipe: when it dies, by kill -9 too, the kernel closes it.
    """

    def wait() -> None:
        # Not by sys.stdin: its lock would be held while the interpreter ends, which aborts it.
        while os.read(descriptor, 4096):
            pass
        action()

    descriptor = sys.stdin.fileno()
    threading.Thread(target=wait, name="starter", daemon=True).start()
