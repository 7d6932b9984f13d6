"""Puts the service's HTTP side together: routes, error shape, guard, and the store behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.api import catalog, events, health, jobs, pages
from service.api.errors import PROBLEM_RESPONSE, install_error_handlers
from service.api.guard import Guard
from service.api.head import HeadAsGet
from service.settings import Settings
from service.storage.interface import Store
from service.storage.store import open_store

API_PREFIX = "/api/v1"

DESCRIPTION = """
Post a spec of a model, its parallelism and a TPU topology; the real TPU compiler says whether the train step fits, what its peak HBM is,
and what stands at that peak. Bytes are integers per device unless a name says `total_`; null means unknown.
What answers GET answers HEAD too.
"""


def create_app(settings: Settings, *, store: Store | None = None) -> FastAPI:
    """The application. Without a `store`, the one that the settings name is opened, and migrated, when the application starts.

    Raises:
        SettingsError: the settings ask for tokens and have none.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if store is not None:
            yield
            return
        opened = open_store(settings)
        app.state.store = opened
        yield
        opened.close()

    app = FastAPI(
        title="Weighbridge",
        description=DESCRIPTION,
        version=version("weighbridge"),
        lifespan=lifespan,
        openapi_url=f"{API_PREFIX}/openapi.json",
        # The interactive pages load their scripts from elsewhere, which nothing here does.
        docs_url=None,
        redoc_url=None,
        responses={"4XX": PROBLEM_RESPONSE, "5XX": PROBLEM_RESPONSE},
    )
    app.state.settings = settings
    if store is not None:
        app.state.store = store
    # What is added last stands first: the guard sees every request as it came.
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, token_hashes=settings.token_hashes, max_body_bytes=settings.max_body_bytes)
    install_error_handlers(app)
    for router in (jobs.router, events.router, catalog.router):
        app.include_router(router, prefix=API_PREFIX)
    app.include_router(health.router)
    pages.install_pages(app)
    return app
