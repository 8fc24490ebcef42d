"""What every request passes first: the host that it is addressed to, its key, the size of its body.

Also the headers that every answer gets. ASGI middleware, so that streams and disconnects pass through untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreglance.serve.errors import ApiError
from foreglance.serve.settings import ServerSettings
from foreglance.serve.stream import Json

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Refuses before the application sees anything. `open_paths` need no key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, open_paths: Collection[str]):
        self._app, self._settings, self._open_paths = app, settings, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        send = _with_headers(send)
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_origin(scope, headers)
            self._check_key(scope, headers)
            limited = self._limited(headers, receive)
        except ApiError as error:
            return await Json(error.body(), error.status, error.headers)(scope, receive, send)
        await self._app(scope, limited, send)

    def _check_host(self, headers: Headers) -> None:
        hosts = self._settings.hosts
        if hosts and host_name(headers.get("host", "")) not in hosts:
            raise ApiError(403, "this server is not known by that name; see --allow-host", code="host_refused")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A web page of another origin changes nothing here, not even by a request that needs no preflight."""
        origin, allowed = headers.get("origin"), self._settings.cors_origins
        if origin is None or scope["method"] in ("GET", "HEAD") or "*" in allowed or origin in allowed:
            return
        if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise ApiError(403, f"pages of {origin} may not ask here; see --cors-origin", code="origin_refused")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._settings.api_keys or scope["path"] in self._open_paths:
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not self._settings.knows(key.strip().encode("latin-1")):
            raise ApiError(
                401,
                "a key is needed, sent as Authorization: Bearer KEY" if not key else "the key is not known here",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """`receive`, counting what comes: the declared length of a body is not trusted."""
        limit, timeout = self._settings.max_body, self._settings.body_timeout
        words = f"the body is larger than the {limit} bytes that are taken"
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise ApiError(413, words, code="body_too_large")
        received, complete = 0, False

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # from here on it waits for the client to leave
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), timeout)
            except TimeoutError:
                raise HTTPException(408, f"no more of the body came for {timeout:g} s") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > limit:
                raise HTTPException(413, words)
            return message

        return counted


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
