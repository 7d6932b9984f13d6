"""Answers HEAD wherever GET is answered, with the same status and headers and without the content."""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware. As routes of their own, HEAD would stand in the API's description once more for every path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        async with anyio.create_task_group() as tasks:

            async def send_head(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await send(message)
                    await send({"type": "http.response.body", "body": b""})
                    # The content is not made to be thrown away: a stream of events would last as long as its job.
                    tasks.cancel_scope.cancel()

            await self._app({**scope, "method": "GET"}, receive, send_head)
