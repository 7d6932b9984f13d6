"""Talks to a Weighbridge server over HTTP: submits specs, follows jobs, reads reports. For the command line and for users' own scripts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from weighbridge.address import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE

_RECONNECTS = 20
"""Most times in a row that a broken stream of events is taken up again without a new event."""


@dataclass(frozen=True)
class JobEvent:
    """One event of a job: its place in the order, what happened, and the details."""

    sequence: int
    name: str
    data: Mapping[str, Any]


class ClientError(Exception):
    """The server could not be reached, or refused; `problems` are those of a spec, each with path, value, message and legal."""

    def __init__(self, message: str, *, status: int | None = None, problems: tuple[Mapping[str, Any], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; None where there was no answer."""
        self.problems = problems


class Client:
    """One server. Use as a context manager; methods raise ClientError."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        reconnect_seconds: float = 1.0,
    ) -> None:
        """`url` and `token` are otherwise read from WEIGHBRIDGE_URL and WEIGHBRIDGE_TOKEN; `transport` is for tests."""
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self._reconnect_seconds = reconnect_seconds
        token = token or os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(30.0), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def submit(
        self, spec: Mapping[str, Any], *, kind: str = "compile", git: Mapping[str, Any] | None = None, force: bool = False
    ) -> dict[str, Any]:
        """Ask for `spec` to be weighed, or run with `kind` steps; the job. What was weighed before is answered at once unless `force`."""
        return self._json("POST", "/api/v1/jobs", json={"spec": spec, "kind": kind, "git": dict(git or {}), "force": force})

    def job(self, job_id: str) -> dict[str, Any]:
        """The job as it stands."""
        return self._json("GET", f"/api/v1/jobs/{job_id}")

    def steps(self, job_id: str) -> dict[str, Any]:
        """What the steps of a job of kind `steps` showed, as far as it came."""
        report: dict[str, Any] = self._json("GET", f"/api/v1/jobs/{job_id}/steps")["report"]
        return report

    def num_workers(self) -> int | None:
        """Workers that are alive, without which jobs wait; None where the server does not tell."""
        try:
            count = self._json("GET", "/readyz").get("num_workers")
        except ClientError:
            return None
        return count if isinstance(count, int) else None

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Ask for the job to be stopped."""
        return self._json("POST", f"/api/v1/jobs/{job_id}/cancel")

    def reports(self, job_id: str) -> list[dict[str, Any]]:
        """The reports of a job, in the order of its programs; empty where nothing was measured."""
        try:
            reports: list[dict[str, Any]] = self._json("GET", f"/api/v1/jobs/{job_id}/report")["reports"]
        except ClientError as error:
            # A job that exists and has no report yet is an empty answer; one that does not exist is an error.
            if error.status == 404 and self.job(job_id):
                return []
            raise
        return reports

    def events(self, job_id: str) -> Iterator[JobEvent]:
        """Every event of the job, as it happens, until it has ended; a broken connection is taken up where it was left.

        Raises:
            ClientError: refused, or no new event came over 20 connections in a row.
        """
        last, breaks, reason = 0, 0, "the stream ended before the job did"
        while breaks < _RECONNECTS:
            if breaks:
                time.sleep(self._reconnect_seconds)
            breaks += 1
            try:
                for event in self._stream(job_id, last):
                    last, breaks = event.sequence, 1
                    yield event
                    if event.name == "finished":
                        return
            except httpx.TransportError as error:
                reason = str(error)
        raise ClientError(f"lost job {job_id} on {self.url}: {reason}; the job itself goes on")

    def _stream(self, job_id: str, after: int) -> Iterator[JobEvent]:
        """One connection's worth of server-sent events."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after else {})
        # The server sends a comment now and then, so silence this long means that it is gone.
        timeout = httpx.Timeout(30.0, read=90.0)
        with self._http.stream("GET", f"/api/v1/jobs/{job_id}/events", headers=headers, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                raise self._refusal(answer)
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line.startswith(":"):
                    continue
                if line:
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
                elif fields:
                    if "event" in fields and "id" in fields:
                        yield JobEvent(int(fields["id"]), fields["event"], json.loads(fields.get("data", "{}")))
                    fields = {}

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise ClientError(
                f"no answer from {self.url} ({error}); is the server running there? Start one with `weighbridge serve`, "
                f"or name another with --server or {URL_VARIABLE}"
            ) from error
        if answer.is_error:
            raise self._refusal(answer)
        content: dict[str, Any] = answer.json()
        return content

    def _refusal(self, answer: httpx.Response) -> ClientError:
        """A refusal in the server's words where it gave any; where it asks for a token, in those of who has to give it."""
        problems: tuple[Mapping[str, Any], ...] = ()
        try:
            problem = answer.json()
            message = problem.get("detail") or problem.get("title") or f"HTTP {answer.status_code}"
            problems = tuple(problem.get("problems") or ())
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
            message = f"HTTP {answer.status_code} from {answer.request.url}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            given = "does not know the one that was sent" if "Authorization" in self._http.headers else "was sent none"
            message = f"{self.url} takes requests with a token, and {given}; put the right one in {TOKEN_VARIABLE}"
        return ClientError(message, status=answer.status_code, problems=problems)
