"""A clock for what is measured of a child that takes its time to start."""

from __future__ import annotations

import time
from collections.abc import Callable


class StandingClock:
    """In place of the module `time`: stands still until `is_begun`, then goes as the real one does."""

    def __init__(self, is_begun: Callable[[], bool]) -> None:
        self._is_begun = is_begun
        self._begun_at: float | None = None

    def monotonic(self) -> float:
        if self._begun_at is None:
            if not self._is_begun():
                return 0.0
            self._begun_at = time.monotonic()
        return time.monotonic() - self._begun_at

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(seconds)
