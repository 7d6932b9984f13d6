"""What the server sends under /static: the files of web/static and Plotly's script from its Python package, compressed once and kept."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.errors import NotFoundError
from service.resources import resource_directory

router = APIRouter(include_in_schema=False)

PLOTLY = "plotly.min.js"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_YEAR = 365 * 24 * 3600


@dataclass(frozen=True)
class StaticFile:
    """One file, ready to be sent in either form."""

    plain: bytes
    compressed: bytes
    media_type: str
    digest: str


def _path(name: str) -> Path | None:
    """Where a static file lies. Only names found in the folder are known, so that no name can lead out of it."""
    if name == PLOTLY:
        # Found without importing plotly, which takes a second and is not needed.
        spec = importlib.util.find_spec("plotly")
        locations = spec.submodule_search_locations if spec else None
        return Path(next(iter(locations))) / "package_data" / PLOTLY if locations else None
    return next((path for path in (resource_directory("web") / "static").iterdir() if path.name == name and path.suffix in _TYPES), None)


@cache
def load(name: str) -> StaticFile:
    """The file of this name, read and compressed at its first use; a changed file is seen when the server starts again.

    Raises:
        NotFoundError: no such file.
    """
    path = _path(name)
    if path is None:
        raise NotFoundError(f"no static file {name!r}")
    plain = path.read_bytes()
    return StaticFile(plain, gzip.compress(plain, 6, mtime=0), _TYPES[path.suffix], hashlib.sha256(plain).hexdigest()[:20])


def static_url(name: str) -> str:
    """The address of a static file with its content's hash: a changed file has another address, so it can be cached for a year."""
    return f"/static/{name}?v={load(name).digest}"


@router.get("/static/{name}")
def static_file(request: Request, name: str, v: str = "") -> Response:
    """A static file: compressed where the browser takes it, not at all where it has it."""
    file = load(name)
    etag = f'"{file.digest}"'
    lasting = f"public, max-age={_YEAR}, immutable" if v == file.digest else "no-cache"
    headers = {"ETag": etag, "Cache-Control": lasting, "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, media_type=file.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(file.plain, media_type=file.media_type, headers=headers)
