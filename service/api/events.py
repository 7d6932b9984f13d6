"""A job's events, as a page of JSON or as a stream of server-sent events that can be resumed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from service.api.dependencies import SettingsDep, StoreDep
from service.records import TERMINAL, Event, Record
from service.storage.interface import Store

router = APIRouter(tags=["jobs"])

KEEP_ALIVE_SECONDS = 15.0
"""A comment is sent after this long without an event, so that proxies keep the connection and a dead reader is noticed."""
_RETRY_MILLISECONDS = 1000
_PAGE = 500


class EventList(Record):
    events: tuple[Event, ...]


@router.get(
    "/jobs/{job_id}/events",
    summary="Follow a job",
    response_model=EventList,
    responses={
        200: {"content": {"text/event-stream": {"example": 'id: 3\nevent: progress\ndata: {"program": "candidate", "name": "lower"}\n\n'}}},
        204: {"description": "The job ended and every event was seen: do not reconnect"},
    },
)
async def get_events(
    request: Request,
    store: StoreDep,
    settings: SettingsDep,
    job_id: str,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="sequence of the last event seen; Last-Event-ID wins over it")] = 0,
    limit: Annotated[int, Query(ge=1, le=_PAGE, description="for a page of JSON")] = _PAGE,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """With `Accept: application/json`, the events there are. Otherwise a stream that gives them as they come and ends after `finished`.

    An event's `id` is its sequence: a reader that reconnects with `Last-Event-ID` misses none and sees none twice.
    """
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 10:
        after = int(last_event_id)
    if "application/json" in request.headers.get("accept", ""):
        events = await run_in_threadpool(store.list_events, job_id, after=after, limit=limit)
        return JSONResponse(EventList(events=events).model_dump(mode="json"))
    # Asked before the stream begins: after a `finished` nothing comes, and 204 is what keeps a browser from asking again for ever. The
    # state before the events: of a job that ends in between, the reader has not seen the end.
    has_ended = (await run_in_threadpool(store.get_job, job_id)).status in TERMINAL
    if has_ended and not await run_in_threadpool(store.list_events, job_id, after=after, limit=1):
        return Response(status_code=204)
    stream = _follow(store, job_id, after=after, poll_seconds=settings.poll_seconds)
    # Buffering by a proxy would hold events back until the end.
    return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _follow(store: Store, job_id: str, *, after: int, poll_seconds: float) -> AsyncIterator[str]:
    """Events above `after` as they come. Each look is one read by primary key; a reader that goes away ends it by cancellation."""
    yield f"retry: {_RETRY_MILLISECONDS}\n\n"
    spoke_at = time.monotonic()
    while True:
        events = await run_in_threadpool(store.list_events, job_id, after=after, limit=_PAGE)
        for event in events:
            yield _encode(event)
            after = event.sequence
            if event.name == "finished":
                return
        if events:
            spoke_at = time.monotonic()
            continue
        if time.monotonic() - spoke_at > KEEP_ALIVE_SECONDS:
            yield ": still here\n\n"
            spoke_at = time.monotonic()
        await asyncio.sleep(poll_seconds)


def _encode(event: Event) -> str:
    data = json.dumps({**event.data, "created_at": event.created_at.isoformat()}, separators=(",", ":"))
    return f"id: {event.sequence}\nevent: {event.name}\ndata: {data}\n\n"
