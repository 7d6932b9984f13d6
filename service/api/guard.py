"""Stands before every route: who may ask, from where, how much, and what a browser may do with the answer."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import MACHINE_PATHS, problem_response
from service.errors import TooLargeError
from service.settings import LOOPBACK_HOSTS

SECURITY_HEADERS = {
    # Plotly adds style elements while it draws, hence 'unsafe-inline' for styles; scripts come from files of our own only.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Asked by supervisors, which hold no token; they tell nothing but whether the service is up."""

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware. `token_hashes` empty means that no token is asked for, and then only loopback names are answered."""

    def __init__(self, app: ASGIApp, *, token_hashes: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._token_hashes = tuple(token_hashes)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith(MACHINE_PATHS):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refuse(scope, headers)
        if refusal is not None:
            status, title, detail, extra = refusal
            await problem_response(scope["path"], status, title, detail, headers=extra)(scope, receive, send_with_headers)
            return

        num_bytes = 0

        async def receive_at_most() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise TooLargeError(self._too_large(f"more than {num_bytes - 1:,}"))
            return message

        await self._app(scope, receive_at_most, send_with_headers)

    def _refuse(self, scope: Scope, headers: Headers) -> tuple[int, str, str, dict[str, str]] | None:
        """Status, title, detail and further headers of a refusal; None lets the request pass."""
        host = headers.get("host", "")
        if not self._token_hashes and _name_of(host) not in LOOPBACK_HOSTS:
            # A page elsewhere can point a name of its own at 127.0.0.1 and would then be taken for this one.
            names = ", ".join(sorted(LOOPBACK_HOSTS))
            return 421, "Misdirected request", f"this server answers to {names}, and was asked as {host!r}", {}
        if scope["method"] not in _SAFE_METHODS and not _is_same_origin(headers, host):
            return 403, "Foreign origin", "changes are taken from this server's own pages and from programs, not from pages elsewhere", {}
        if self._token_hashes and scope["path"] not in OPEN_PATHS and not self._knows_token(headers):
            detail = "send a token: `Authorization: Bearer TOKEN`, or the token as the password where a browser asks for one"
            return 401, "Token needed", detail, {"WWW-Authenticate": 'Basic realm="weighbridge"'}
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            return TooLargeError.status, TooLargeError.title, self._too_large(f"{int(declared):,}"), {}
        return None

    def _too_large(self, given: str) -> str:
        return f"the body has {given} bytes; at most {self._max_body_bytes:,} are taken (WEIGHBRIDGE_MAX_BODY_BYTES)"

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        token = credentials.strip()
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return False
        elif scheme.lower() != "bearer":
            return False
        given = hashlib.sha256(token.encode()).hexdigest()
        return any(hmac.compare_digest(given, known) for known in self._token_hashes)


def _name_of(host: str) -> str:
    """The host's name without its port; brackets of an IPv6 address are taken off."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_same_origin(headers: Headers, host: str) -> bool:
    """Whether a request comes from this server's own pages, or from something that is no browser and so sends no origin."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == host
