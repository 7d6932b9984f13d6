"""Every error as `application/problem+json` (RFC 9457), in one shape, whoever raised it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from service.errors import Problem, ServiceError, SpecError
from service.spec_problems import legal_by_error, problems_of, spell_float

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MACHINE_PATHS = ("/api/", "/healthz", "/readyz", "/metrics")
"""Paths whose readers are programs: errors there are never pages."""

ErrorPage = Callable[[Request, int, str, str, Sequence[Problem]], Response]
"""Renders an error for a person: request, status, title, detail, problems. Set as `app.state.error_page`."""


class RequestError(ServiceError):
    """A request, apart from its spec, that cannot be understood; carries every problem found."""

    status = 422
    title = "The request cannot be understood"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{p.path}: {p.message}" for p in problems))
        self.problems = tuple(problems)


class MediaTypeError(ServiceError):
    """A body in a format that is not read."""

    status = 415
    title = "Unsupported media type"


class ProblemItem(BaseModel):
    """One thing wrong with the request."""

    path: str = Field(description="where, dotted: in the spec, or from `body`, `query` or `header` on", examples=["mesh.fsdp"])
    value: Any = Field(description="what stood there; what JSON has no word for, as NaN, is text", examples=[7])
    message: str = Field(examples=["the mesh has 14 devices and the topology has 4"])
    legal: str = Field(description="what would be accepted", examples=["axes whose product is 4"])


class ProblemDetails(BaseModel):
    """The body of every error."""

    type: str = Field(default="about:blank", description="always about:blank: the status and the title say what kind it is")
    title: str = Field(examples=["The spec cannot be weighed"])
    status: int = Field(examples=[422])
    detail: str
    instance: str = Field(description="path of the request", examples=["/api/v1/jobs"])
    problems: list[ProblemItem] = Field(description="empty where there is one problem only, which `detail` tells")


PROBLEM_RESPONSE: dict[str, Any] = {"model": ProblemDetails, "content": {MEDIA_TYPE: {}}}


def problem_response(
    path: str, status: int, title: str, detail: str, problems: Sequence[Problem] = (), headers: dict[str, str] | None = None
) -> JSONResponse:
    """The one shape. `problems` may hold values of any type: what JSON has no word for is written as text."""
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": path,
        "problems": [problem.as_dict() for problem in problems],
    }
    return JSONResponse(_spellable(body), status_code=status, headers=headers, media_type=MEDIA_TYPE)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception that leaves a route; pages answer in HTML where `app.state.error_page` is set."""

    def answer(
        request: Request, status: int, title: str, detail: str, problems: Sequence[Problem] = (), headers: dict[str, str] | None = None
    ) -> Response:
        error_page: ErrorPage | None = getattr(app.state, "error_page", None)
        if error_page is not None and not request.url.path.startswith(MACHINE_PATHS):
            return error_page(request, status, title, detail, problems)
        return problem_response(request.url.path, status, title, detail, problems, headers)

    def answer_service_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        if error.status >= 500:
            logger.error("%s %s: %s", request.method, request.url.path, error.detail)
        if isinstance(error, SpecError):
            # What is wrong with a spec as a whole has no path of its own.
            error = SpecError([replace(problem, path=problem.path or "spec") for problem in error.problems])
        problems = error.problems if isinstance(error, SpecError | RequestError) else ()
        return answer(request, error.status, error.title, error.detail, problems)

    def answer_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = request_problems(error.errors(), BaseModel)
        refusal = RequestError(problems)
        return answer(request, refusal.status, refusal.title, refusal.detail, problems)

    def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        title = HTTPStatus(error.status_code).phrase
        detail = f"{request.method} {request.url.path}: {title.lower()}" if error.detail == title else str(error.detail)
        return answer(request, error.status_code, title, detail, headers=dict(error.headers or {}))

    def answer_unexpected(request: Request, error: Exception) -> Response:
        # What broke is for the log alone: it may quote what a stranger should not read.
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(request, 500, ServiceError.title, "something broke inside the service; its log has the details")

    app.add_exception_handler(ServiceError, answer_service_error)
    app.add_exception_handler(RequestValidationError, answer_validation)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer_unexpected)


def body_path(location: Sequence[str | int]) -> str:
    """Where in a JSON body: `body.git.branch`; what is in the spec is told as for a spec file, `mesh.fsdp`."""
    parts = location[1:] if location[:1] == ("spec",) and len(location) > 1 else ("body", *location)
    return ".".join(map(str, parts))


def request_problems(errors: Iterable[Mapping[str, Any]], model: type[BaseModel]) -> list[Problem]:
    """A problem for each of pydantic's errors of a request's own fields, in the words that a spec's errors are told in."""
    return [_problem(error, model) for error in errors]


def _problem(error: Mapping[str, Any], model: type[BaseModel]) -> Problem:
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "enum":
        kind = "literal_error"
    # FastAPI gives its errors as data; made an error again, they are told by the one translation there is.
    made = ValidationError.from_exception_data(model.__name__, [{"type": kind, "loc": tuple(error["loc"]), "input": value, "ctx": context}])
    (problem,) = problems_of(made, model)
    if kind in ("string_too_short", "string_too_long"):
        # The bound that was crossed; what else a field may be, as null, does not help whoever gave a text.
        return replace(problem, legal=legal_by_error(kind, context))
    if kind == "extra_forbidden" and not problem.legal:
        return replace(problem, legal="the parameters that the API's description lists for this path")
    return problem


def _spellable(value: Any) -> Any:
    """`value` as JSON and UTF-8 can write it: text for numbers that are not finite, and for what is neither number, text nor collection."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return spell_float(value)
    if isinstance(value, Mapping):
        return {_spellable(str(key)): _spellable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spellable(each) for each in value]
    # Half of a surrogate pair can be written as an escape, in JSON and in YAML, but not as UTF-8.
    return str(value).encode(errors="backslashreplace").decode()
