"""Serves the API and the pages, with one worker beside them unless told otherwise."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence

import uvicorn

from service.api.app import create_app
from service.errors import ServiceError
from service.logs import log_to_stderr
from service.settings import Settings, SettingsError
from service.starter import when_starter_ends
from service.storage.store import open_store
from service.worker.keeper import WORKER_COMMAND, WorkerKeeper

GRACE_SECONDS = 3
"""What open requests get when the server stops; streams of events never end by themselves."""
MAX_CONNECTIONS = 512
"""Beyond these, requests are answered with 503."""


def run_server(
    settings: Settings, *, with_worker: bool = True, stop_on_eof: bool = False, worker_command: Sequence[str] = WORKER_COMMAND
) -> int:
    """Serve until SIGTERM or SIGINT, or, with `stop_on_eof`, until stdin closes.

    Returns the exit code: 0 after an orderly stop, 2 where it could not start.

    Prints `Weighbridge is at URL` on stdout once connections are taken.
    """
    log_to_stderr("server")
    try:
        # Before the port is taken and the worker started: what is wrong with the database is said once, and here.
        store = open_store(settings)
        app = create_app(settings, store=store)
        listener = _listen(settings.host, settings.port)
    except (ServiceError, SettingsError, OSError) as error:
        print(f"weighbridge: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)

    def stop(*_: object) -> None:
        server.should_exit = True

    # Before anyone can know that the server is there. Later too: it ends itself by the signal it was stopped with, once it is done, and
    # the worker is still to be stopped then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if stop_on_eof:
        when_starter_ends(stop)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"Weighbridge is at http://{host}:{listener.getsockname()[1]}", flush=True)
    keeper = WorkerKeeper(settings.as_environment(), command=worker_command) if with_worker else None
    if keeper is not None:
        keeper.start()
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        if keeper is not None:
            keeper.stop()
        store.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError, with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; free it, or choose another with WEIGHBRIDGE_PORT or `serve --port`"
        ) from error
