"""Several copies of the server on Ray Serve, behind one address.

    client -> guard -> Balancer -> (Ray Serve) -> Replica: the application as it is without replicas, in its own process

Each replica is an application of Ray Serve with one copy, so that a request can be sent to the one that holds its
conversation. Ray Serve starts them, watches them and replaces those that die.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Message

from foreglance.request import RequestError
from foreglance.serve.app import answer_errors, create_app, guard
from foreglance.serve.balancer import Balancer, Died
from foreglance.serve.metrics import Metrics, merged
from foreglance.serve.settings import ServerSettings
from foreglance.serve.stream import Json

if TYPE_CHECKING:
    from foreglance.engine import Engine

MOST = 64  # replicas
OBJECTS = 256 << 20  # bytes of shared memory for requests that travel
UNLIMITED = 1 << 20  # requests that Ray Serve lets through at once: the queue of each server is the limit
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # whatever the system: Ray listens on loopback alone
    "RAY_AUTH_MODE": "token",
}


class Replica:
    """What runs in a process of its own: an engine and the application over it."""

    async def __init__(self, load: Callable[[], Engine], settings: ServerSettings):
        self._app = create_app(load(), settings)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages of an answer. Whoever stops listening is a client that has left."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left, asked = asyncio.Event(), iter(({"type": "http.request", "body": body, "more_body": False},))

        async def receive() -> Message:
            if (message := next(asked, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.ensure_future(self._app(scope, receive, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await answering
        finally:
            left.set()
            await asyncio.gather(answering, return_exceptions=True)

    async def about(self) -> dict[str, Any]:
        host = self._app.state.host
        return {"pid": os.getpid(), "model": host.model, "context": host.engine.context}

    async def metrics(self) -> str:
        return self._app.state.host.metrics.text().decode()

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises."""
        if (failure := self._app.state.host.worker.failure) is not None:
            raise RuntimeError(failure)


@dataclass(frozen=True)
class Handle:
    """A replica as seen from here. `died` is what Ray raises when the process is gone."""

    deployment: Any
    died: type[Exception]

    async def about(self) -> dict[str, Any]:
        return await self.deployment.about.remote()

    async def metrics(self) -> str:
        return await self.deployment.metrics.remote()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
        messages = self.deployment.options(stream=True).answer.remote(scope, body)
        try:
            async for message in messages:
                yield message
        except self.died as error:
            raise Died from error
        finally:
            messages.cancel()


class Cluster:
    """The Ray of this process: on loopback, with a token drawn at start, without telemetry and dashboard."""

    def __init__(self, load: Callable[[], Engine], settings: ServerSettings):
        os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))  # before Ray is imported, which reads it
        try:
            import ray
            from ray import serve
        except ImportError as error:
            raise RequestError(
                f"--replicas needs Ray Serve, which cannot be imported ({error}); pip install 'foreglance[ray]'",
                param="replicas",
                code="ray_missing",
            ) from error
        self._ray, self._serve = ray, serve
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=OBJECTS)
            serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False, "log_level": "ERROR"})
        except Exception as error:  # Ray has no class for what can go wrong here
            ray.shutdown()
            raise RequestError(f"Ray did not start: {error}", param="replicas", code="ray_failed") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        inner = replace(settings, api_keys=(), cors_origins=(), hosts=frozenset())  # the guard stands outside
        deployment = serve.deployment(max_ongoing_requests=UNLIMITED, ray_actor_options={"num_cpus": 0})(Replica)
        self._replica = deployment.bind(load, inner)

    def add(self, name: str) -> Handle:
        """Start a replica and wait until it is there."""
        try:
            deployment = self._serve.run(self._replica, name=name, route_prefix=None)
        except RuntimeError as error:
            raise RequestError(
                f"a replica could not start: {error}", param="replicas", code="replica_failed"
            ) from error
        return Handle(deployment, self._ray.exceptions.RayActorError)

    def add_all(self, names: Iterable[str]) -> dict[str, Handle]:
        """Start several at once."""
        names = list(names)
        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(self.add, names), strict=True))

    def remove(self, name: str) -> None:
        self._serve.delete(name)

    def close(self) -> None:
        self._ray.shutdown()


class Count(BaseModel):
    count: Annotated[int, Field(ge=1, le=MOST)]


@dataclass(frozen=True)
class Front:
    """What an orderly end expects of an application's host."""

    dispatch: Balancer


def create_balanced_app(balancer: Balancer, settings: ServerSettings) -> FastAPI:
    """The replicas as one application, and routes to look at them and to change their number."""
    app = FastAPI(title="foreglance", openapi_url=None, docs_url=None, redoc_url=None, lifespan=balancer.lifespan)
    app.state.host = Front(balancer)
    answer_errors(app, lambda status: None)

    @app.get("/replicas")
    async def replicas() -> Response:
        return Json([member.report() for member in balancer.members.values()])

    @app.post("/replicas")
    async def resize(count: Count) -> Response:
        await balancer.resize(count.count)
        return await replicas()

    @app.get("/metrics")
    async def metrics() -> Response:
        """The metrics of all replicas, with a label that says whose."""
        there = [member for member in balancer.members.values() if member.takes]
        texts = await asyncio.gather(*(member.remote.metrics() for member in there))
        return Response(
            merged(zip([member.name for member in there], texts, strict=True)), media_type=Metrics.content_type
        )

    app.mount("/", balancer.relay)
    guard(app, settings)
    return app
