"""A server process: its socket, its signals, and an end that leaves nobody without an answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from foreglance.request import RequestError

LAST_WORDS = 5  # seconds, after the grace, for the error answers to go out
KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than clients keep one, so that none is closed here
# in the moment in which a client sends its next request on it


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises `RequestError` if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise RequestError(
            f"cannot listen at {host} port {port}: {error.strerror or error}", param="port", code="address_unavailable"
        ) from error
    return bound


class Server(uvicorn.Server):
    """Says when it is there. Told to stop, it takes no more requests, lets the open ones finish for a time, then ends
    them with an error that says so."""

    def __init__(self, app: FastAPI, grace: float, ready: Callable[[], None], access_log: bool = False):
        super().__init__(
            uvicorn.Config(
                app,
                log_level="info" if access_log else "warning",
                access_log=access_log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(grace) + LAST_WORDS,
            )
        )
        self._host, self._grace, self._ready = app.state.host, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        dispatch = self._host.dispatch
        dispatch.stop_taking()
        last_call = asyncio.get_running_loop().call_later(
            self._grace, dispatch.lose_all, "the server was stopped before this answer was finished"
        )
        try:
            await super().shutdown(sockets)
        finally:
            last_call.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server in order, and the process then ends as if by itself."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(app: FastAPI, bound: socket.socket, grace: float, ready: Callable[[], None], access_log: bool = False) -> None:
    """Serve until a signal."""
    server = Server(app, grace, ready, access_log)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the access log alone is wanted
    server.run([bound])
