"""Answers that end with their client: server-sent events, and work that is given up when nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreglance.serve.dispatch import Opened
from foreglance.serve.errors import ApiError, broken
from foreglance.serve.openai import Json as JsonObject

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
QUIET = 15.0  # seconds without an event before a comment keeps the connection open


class ClientGone(Exception):
    """The client left before its answer."""


async def while_connected(receive: Receive, work: Awaitable[Answer]) -> Answer:
    """Do the work, unless the client leaves: then it is cancelled and `ClientGone` raised."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(receive: Receive, open_job: Callable[[], Awaitable[Opened]]) -> JsonObject:
    """Run a job to its end."""

    async def work() -> JsonObject:
        opened = await open_job()
        reply = opened.job.reply
        try:
            reply.start()
            async for index, event in opened.events():
                reply.take(index, event)
            reply.end()
            return reply.whole()
        finally:
            opened.close()

    return await while_connected(receive, work())


class EventStream(Response):
    """A job's chunks as server-sent events."""

    def __init__(self, opened: Opened):
        super().__init__(media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._opened.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in _with_comments(self._pieces()):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        reply = self._opened.job.reply
        try:
            yield _join(reply.start())
            async for index, event in self._opened.events():
                yield _join(reply.take(index, event))
            yield _join(reply.end())
        except ApiError as error:
            yield _join(reply.failed(error))
        except Exception as error:
            log.exception("a stream broke the server's own code")
            yield _join(reply.failed(broken(error)))
        if reply.ends_with_done:
            yield b"data: [DONE]\n\n"


async def _with_comments(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces that are not empty, and a comment whenever there was none for a while."""
    waiting = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=QUIET)
            if not done:
                yield b": still at work\n\n"
                continue
            piece = waiting.result()
            if piece is None:
                return
            waiting = asyncio.ensure_future(anext(pieces, None))
            if piece:
                yield piece
    finally:
        waiting.cancel()


def _join(chunks: list[JsonObject]) -> bytes:
    return b"".join(map(_event, chunks))


def _event(chunk: JsonObject) -> bytes:
    """One server-sent event; one that has a type of its own (`/v1/responses`) is named by it."""
    kind = chunk.get("type")
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + as_json(chunk) + b"\n\n"


def as_json(value: Any) -> bytes:
    """UTF-8; half a surrogate pair, which a client may have sent, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)
