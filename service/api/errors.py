"""Every error as `application/problem+json` (RFC 9457), in one shape, whoever raised it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from service.errors import Problem, ServiceError, SpecError

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

    path: str = Field(description="where, dotted", examples=["mesh.fsdp"])
    value: Any = Field(description="what stood there", examples=[7])
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
    """The one shape. `problems` may hold values of any type that JSON can spell."""
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": path,
        "problems": [jsonable_encoder(problem.as_dict()) for problem in problems],
    }
    return JSONResponse(body, status_code=status, headers=headers, media_type=MEDIA_TYPE)


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
        problems = error.problems if isinstance(error, SpecError | RequestError) else ()
        return answer(request, error.status, error.title, error.detail, problems)

    def answer_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [_problem(item) for item in error.errors()]
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


def _problem(item: dict[str, Any]) -> Problem:
    """A problem from one error of FastAPI's own validation of paths, queries and headers."""
    source, *rest = item["loc"]
    context = item.get("ctx", {})
    legal = ", ".join(f"{name} {value}" for name, value in context.items()) or item["msg"]
    return Problem(".".join([str(source), *map(str, rest)]), item.get("input"), item["msg"], legal)
