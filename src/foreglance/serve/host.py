"""What the routes share: the engine's worker, the dispatch, and the way from a body to its answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from foreglance.cache.whole import sweep
from foreglance.request import RequestError
from foreglance.serve.dispatch import Dispatch, Opened
from foreglance.serve.errors import ApiError, from_request_error, refused
from foreglance.serve.metrics import Metrics
from foreglance.serve.openai import Job, Surroundings, check_model, remote_urls
from foreglance.serve.remote import Remote
from foreglance.serve.settings import ServerSettings
from foreglance.serve.stream import EventStream, Json, while_connected, whole_answer
from foreglance.serve.worker import Worker

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foreglance.engine import Engine

log = logging.getLogger(__name__)
Messages = tuple[str, Sequence[Any]]
MakeJob = Callable[[Any, Surroundings], Job]


class Host:
    """One engine and who talks to it. `worker` and `dispatch` exist while the application runs."""

    worker: Worker
    dispatch: Dispatch

    def __init__(self, engine: Engine, settings: ServerSettings):
        self.engine, self.settings = engine, settings
        self.model = engine.target.spec.name
        self.names = (self.model, *settings.aliases)
        self.metrics = Metrics(
            self.model, lambda: engine.num_running, lambda: engine.num_waiting, lambda: engine.cached_bytes
        )
        self.remote = Remote(settings.max_body)
        self.started = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        if self.settings.slot_save_path is not None and (swept := sweep(self.settings.slot_save_path)):
            log.warning("removed what %d saves that were cut short had left: %s", len(swept), ", ".join(swept))
        self.worker = Worker(self.engine, asyncio.get_running_loop().call_soon_threadsafe)
        self.dispatch = Dispatch(self.engine, self.worker, self.settings, self.metrics)
        self.worker.start()
        try:
            yield
        finally:
            self.dispatch.shutdown()
            await asyncio.to_thread(self.worker.stop)

    async def answer(
        self, http: HttpRequest, body: Any, make_job: MakeJob, names: Mapping[str, str], messages: Messages = ("", ())
    ) -> Response:
        """A body's answer, streamed or whole. `names` are the endpoint's names for fields of `request`;
        `messages` are where pictures may be, with the name of their field."""
        check_model(body.model, self.names)
        try:
            opening = partial(self._open, body, make_job, messages)
            if not body.stream:
                return Json(await whole_answer(http.receive, opening))
            return EventStream(await while_connected(http.receive, opening()))
        except RequestError as error:
            raise from_request_error(error, names) from None

    async def _open(self, body: Any, make_job: MakeJob, messages: Messages) -> Opened:
        return await self.dispatch.open(make_job(body, await self.surroundings(body.model, messages)))

    async def surroundings(self, model: str | None, messages: Messages) -> Surroundings:
        return Surroundings(
            model=model or self.model,
            speculation=self.settings.speculation,
            context=self.engine.context,
            choices=self.settings.choices,
            seed=secrets.randbits(53),  # told to clients, some of which read numbers as doubles
            now=int(time.time()),
            id=uuid.uuid4().hex,
            piece=self.engine.piece,
            format=self.engine.format,
            images=await self._fetched(list(remote_urls(*messages))),
        )

    async def _fetched(self, wanted: list[tuple[str, str]]) -> dict[str, bytes]:
        """The bytes behind the remote images of a body: (path of the field, address) each."""
        if not wanted:
            return {}
        if not self.settings.remote_images:
            path = wanted[0][0]
            raise ApiError(
                400,
                f"{path}: remote images are not fetched by this server; send a data URL, or start it with "
                "--allow-remote-images",
                param=path,
                code="remote_images_off",
            )
        if len(wanted) > self.engine.settings.max_images:
            raise refused(
                wanted[0][0], f"at most {self.engine.settings.max_images} images are taken", "too_many_images"
            )
        return await self.remote.fetch(wanted)
