"""What routes ask for by type: the store, the settings."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from service.settings import Settings
from service.storage.interface import Store


def get_store(request: Request) -> Store:
    return cast(Store, request.app.state.store)


def get_settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


StoreDep = Annotated[Store, Depends(get_store)]
SettingsDep = Annotated[Settings, Depends(get_settings)]
