"""The service's errors, raised at its borders: each says what was given, what is legal and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an input: where, what stood there, why it cannot be, and what would be legal."""

    path: str
    value: Any
    message: str
    legal: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ServiceError(Exception):
    """Base of what a border may answer; `status` is the HTTP status, `title` a short fixed sentence."""

    status = 500
    title = "Internal error"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class SpecError(ServiceError):
    """A spec that cannot be weighed; carries every problem found, not the first."""

    status = 422
    title = "The spec cannot be weighed"

    def __init__(self, problems: list[Problem]) -> None:
        assert problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count}: " + "; ".join(f"{p.path}: {p.message}" for p in problems))
        self.problems = tuple(problems)


class NotFoundError(ServiceError):
    """What was asked for does not exist."""

    status = 404
    title = "Not found"


class ConflictError(ServiceError):
    """The request contradicts what is stored."""

    status = 409
    title = "Conflict"


class TooLargeError(ServiceError):
    """A body, list or string beyond its bound."""

    status = 413
    title = "Too large"


class AnalysisError(ServiceError):
    """A dump that cannot be read or does not add up; nothing measured from it can be trusted, so nothing is reported."""

    status = 500
    title = "The compiler's dump cannot be analysed"
