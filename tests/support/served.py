"""A real server on loopback in a thread, with its engine in reach, and clients for it."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai

import foreglance
from foreglance import Engine
from foreglance.serve.app import create_app
from foreglance.serve.host import Host
from foreglance.serve.run import Server, bind
from foreglance.serve.settings import ServerSettings

SCENE = Path(foreglance.__file__).parent / "assets" / "scene.png"
MODEL = "tiny-qwen"
TRIES = int(os.environ.get("FOREGLANCE_TRIES", "1"))  # how much more than usual is drawn at random
PATIENCE = 120.0  # seconds until a test gives up; a busy machine is slow


class Gate:
    """Steps pass while it is open; while it is closed, as many as are let through."""

    def __init__(self):
        self.num_passed = 0
        self._is_open, self._extra = True, 0
        self._changed = threading.Condition()

    def passed(self, step):
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_open or self._extra, PATIENCE)
            self._extra -= not self._is_open
            self.num_passed += 1
        return step()

    def open(self):
        with self._changed:
            self._is_open, self._extra = True, 0
            self._changed.notify_all()

    def close(self):
        with self._changed:
            self._is_open = False

    def let_through(self, steps: int) -> None:
        """Wait until that many more have passed."""
        with self._changed:
            self._extra += steps
            self._changed.notify_all()
        until(lambda: not self._extra, "the steps are made")


@dataclass
class Served:
    """A running server. Its engine steps through a gate."""

    engine: Engine
    url: str
    host: Host
    server: Server
    gate: Gate

    def openai(self, **options) -> openai.OpenAI:
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": PATIENCE, **options}
        )

    def http(self, **options) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE, **options)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step is made meanwhile."""
        self.gate.close()
        try:
            yield
        finally:
            self.gate.open()

    def settle(self) -> None:
        """Wait until nothing runs; then no store may hold a row."""
        until(lambda: self.engine.is_idle and self.host.dispatch.num_open == 0, "the engine is idle")
        self.host.worker.ask(lambda engine: engine.check()).result(PATIENCE)


@contextmanager
def serving(engine: Engine, settings: ServerSettings | None = None, grace: float = 1.0) -> Iterator[Served]:
    """A server over an engine that no other server uses meanwhile; several may exist."""
    gate, step = Gate(), engine.step
    engine.step = lambda: gate.passed(step)
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    app = create_app(engine, settings)
    server = Server(app, grace, ready.set)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE), "the server did not start"
    try:
        yield Served(engine, f"http://127.0.0.1:{bound.getsockname()[1]}", app.state.host, server, gate)
    finally:
        gate.open()
        server.should_exit = True
        thread.join(PATIENCE)
        engine.step = step


def until(condition, words: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {words}"
        time.sleep(0.005)


def data_url(picture: bytes | Path = SCENE, kind: str = "image/png") -> str:
    encoded = picture if isinstance(picture, bytes) else picture.read_bytes()
    return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


def user(text: str, images: Sequence[str] = ()) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def raw_request(url: str, body: bytes, path: str = "/v1/chat/completions") -> socket.socket:
    """A request on a socket of its own, so that a test can leave whenever it likes."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), PATIENCE)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection
