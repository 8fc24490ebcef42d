"""From a job to its events: admission, preparation off the loop, and the end of everything when a client leaves.

Lives on the event loop. Pictures are decoded and text is tokenized in one thread of their own, so that neither the loop
nor the engine's steps wait for them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from foreglance.request import Event, Request
from foreglance.serve.errors import ApiError
from foreglance.serve.metrics import Metrics
from foreglance.serve.openai import Job
from foreglance.serve.settings import ServerSettings
from foreglance.serve.worker import Lost, Worker, WorkerStopped

if TYPE_CHECKING:
    from foreglance.engine import Engine
    from foreglance.prompt import Rows

Answer = TypeVar("Answer")
FIRST_GUESS = 2.0  # seconds an answer takes, before one was seen


class Opened:
    """A job on its way. Iterate over `events` once it runs, and always `close`."""

    def __init__(self, dispatch: Dispatch, job: Job):
        self.job = job
        self._dispatch = dispatch
        self._index = {request.id: index for index, request in enumerate(job.requests)}
        self._left = set(self._index)
        self.runs = False
        self._arrived: asyncio.Queue[Event | Lost] = asyncio.Queue()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._began = asyncio.get_running_loop().time()

    def deliver(self, item: Event | Lost) -> None:
        self._arrived.put_nowait(item)

    def lose(self, reason: str) -> None:
        """End it wherever it is."""
        if not self._lost.done():
            self._lost.set_result(reason)
            self.deliver(Lost("", reason))

    async def unless_lost(self, work: Awaitable[Answer]) -> Answer:
        """Work that leads to the first event. Raises `ApiError` if the job is lost meanwhile."""
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait((doing, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise stopped(self._lost.result())
            return doing.result()
        finally:
            doing.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(index of the request, event) until all have ended. Raises `ApiError` if one cannot go on."""
        while self._left:
            item = await self._arrived.get()
            if isinstance(item, Lost):
                raise stopped(item.reason)
            if item.result is not None:
                self._left.discard(item.request_id)
                self._dispatch.metrics.ended(item.result)
                if item.result.finish_reason == "error":
                    raise ApiError(500, f"the request failed: {item.result.error}", code="engine_error")
            yield self._index[item.request_id], item

    def close(self) -> None:
        """Cancel what still runs and make room."""
        count, self._index = len(self._index), {}
        if not count:
            return
        self._dispatch.release(self, count, self._left)
        if self.runs and self._left:
            self._dispatch.metrics.lost(len(self._left))
        elif self.runs:
            self._dispatch.took(asyncio.get_running_loop().time() - self._began)


def stopped(reason: str) -> ApiError:
    return ApiError(503, reason, code="engine_stopped")


@dataclass
class Load:
    """How much is open, and how long an answer takes (a moving mean in seconds)."""

    open: int = 0
    seconds: float = FIRST_GUESS


class Dispatch:
    def __init__(self, engine: Engine, worker: Worker, settings: ServerSettings, metrics: Metrics):
        self.metrics = metrics
        self._engine, self._worker, self._settings = engine, worker, settings
        self._slots = engine.settings.slots
        self._load = Load()
        self._opened: set[Opened] = set()
        self._stopping = False
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    async def open(self, job: Job) -> Opened:
        """Queue a job's requests. Raises `ApiError` or `RequestError` before any of them runs."""
        opened = Opened(self, job)
        self._admit(len(job.requests))
        self._opened.add(opened)
        try:
            await opened.unless_lost(self._enter(opened))
            opened.runs = True
        except WorkerStopped as error:
            opened.close()
            raise stopped(str(error)) from None
        except BaseException:
            opened.close()
            raise
        return opened

    async def _enter(self, opened: Opened) -> None:
        prepared = await self.prepare(opened.job.requests, opened.job.n)
        opened.job.reply.prepared([rows.reasoning for _, rows in prepared])
        await asyncio.wrap_future(self._worker.submit(prepared, opened.deliver))

    async def prepare(self, requests: Sequence[Request], n: int = 1) -> list[tuple[Request, Rows]]:
        """Rows of each prompt; `n` requests in a row share one."""
        rows = [await self.off_loop(partial(self._engine.prepare, request)) for request in requests[::n]]
        return [(request, rows[index // n]) for index, request in enumerate(requests)]

    async def off_loop(self, work: Callable[[], Answer]) -> Answer:
        """Do something with text or pictures in the one thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work)

    def release(self, opened: Opened, count: int, left: Collection[str]) -> None:
        """Room for `count` more; what is left of them is cancelled, also if it is only on its way into the engine."""
        self._opened.discard(opened)
        self._load.open -= count
        if left:
            self._worker.cancel(left)

    def took(self, seconds: float) -> None:
        self._load.seconds += (seconds - self._load.seconds) / 8

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended, wherever they are."""
        return self._load.open

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def stop_taking(self) -> None:
        """Refuse new requests: the server is told to stop."""
        self._stopping = True

    def lose_all(self, reason: str) -> None:
        """End every open request with that reason, now: the engine hears of it after its step."""
        for opened in list(self._opened):
            opened.lose(reason)

    def shutdown(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _admit(self, count: int) -> None:
        if self._stopping:
            raise ApiError(503, "the server is stopping", code="stopping", headers={"Retry-After": "5"})
        room = self._slots + self._settings.queue
        if count > room:
            raise ApiError(
                400, f"n: {count} answers are more than the {room} that have room here", param="n", code="invalid_value"
            )
        if self._load.open + count > room:
            wait = max(1, min(60, math.ceil(self._load.seconds * self._load.open / self._slots / 2)))
            raise ApiError(
                429,
                f"{self._load.open} requests are open and the queue holds {self._settings.queue} beyond the "
                f"{self._slots} slots; try again in about {wait} s",
                code="queue_full",
                headers={"Retry-After": str(wait)},
            )
        self._load.open += count
