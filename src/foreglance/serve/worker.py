"""The one thread that owns the engine. The only place where threads meet; knows no wire format.

Others talk to it through a queue that is read between two steps, so an order takes effect within one step. What the
engine gains goes out by `post`, one call a step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from foreglance.request import Event, Request

if TYPE_CHECKING:
    from foreglance.engine import Engine
    from foreglance.prompt import Rows

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Lost:
    """A request ended without the engine's word: why, said so that a client can act on it."""

    request_id: str
    reason: str


class WorkerStopped(RuntimeError):
    """The engine serves no more; the message says why."""


Order = tuple[Future, Callable[["Engine"], object]]
Deliver = Callable[[Event | Lost], None]
Post = Callable[[Callable[[], None]], object]


class Worker:
    """Runs an engine until `stop`. All methods may be called from any thread; `deliver` is called through `post`."""

    def __init__(self, engine: Engine, post: Post):
        self._engine = engine
        self._post = post
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._open: dict[str, Deliver] = {}  # touched by the thread alone
        self._closed: str | None = None
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine serves no more; None while it does."""
        return self._closed

    def submit(self, prepared: Sequence[tuple[Request, Rows]], deliver: Deliver) -> Future[None]:
        """Queue requests, all or none: the future raises `RequestError` if one cannot be served."""
        return self.ask(lambda engine: self._add(engine, prepared, deliver))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; nothing of theirs is delivered after that."""
        names = list(request_ids)

        def order(engine: Engine) -> None:
            for name in names:
                if self._open.pop(name, None) is not None:
                    engine.cancel(name)

        with suppress(WorkerStopped):  # then nothing is open
            self.ask(order)

    def ask(self, question: Callable[[Engine], Answer]) -> Future[Answer]:
        """Have the thread call `question` between two steps. Raises `WorkerStopped` if it runs no more."""
        answer: Future[Answer] = Future()
        with self._closing:
            if self._closed is not None:
                raise WorkerStopped(self._closed)
            self._orders.put((answer, question))
        return answer

    def stop(self, timeout: float = 10.0) -> None:
        """End what is open and the thread."""
        with suppress(WorkerStopped):
            self.ask(lambda engine: self._close(engine, "the server has stopped"))
        if self._thread.is_alive():
            self._thread.join(timeout)

    # What follows runs in the thread.

    def _run(self) -> None:
        while self._closed is None:
            self._obey_all()
            if self._closed is None and not self._engine.is_idle:
                self._step()
        while not self._orders.empty():  # given before the end was known
            answer, _ = self._orders.get_nowait()
            answer.set_exception(WorkerStopped(self._closed))

    def _obey_all(self) -> None:
        """Carry out the orders that are there; an idle engine waits for one."""
        if self._engine.is_idle:
            self._obey(self._orders.get())
        while self._closed is None and not self._orders.empty():
            self._obey(self._orders.get_nowait())

    def _obey(self, order: Order) -> None:
        answer, question = order
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question(self._engine))
        except Exception as error:
            answer.set_exception(error)

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:
            log.exception("the engine failed outside of a forward")
            self._recover(error)
            return
        pairs = []
        for event in events:
            deliver = self._open.get(event.request_id)
            if event.result is not None:
                self._open.pop(event.request_id, None)
            if deliver is not None:
                pairs.append((deliver, event))
        self._send(pairs)

    def _recover(self, error: Exception) -> None:
        """Every open request ends; the engine goes on if its stores are whole, else the worker ends."""
        reason = f"the engine failed ({type(error).__name__}: {error})"
        had_requests = bool(self._open)
        try:
            self._lose(self._engine, reason)
            self._engine.check()
        except Exception:
            log.exception("the engine cannot go on")
            had_requests = False
        if not had_requests:
            self._close(self._engine, reason)

    def _add(self, engine: Engine, prepared: Sequence[tuple[Request, Rows]], deliver: Deliver) -> None:
        added = []
        try:
            for request, rows in prepared:
                added.append(engine.add_rows(request, rows))
        except Exception:
            for name in added:
                engine.cancel(name)
            raise
        self._open |= dict.fromkeys(added, deliver)

    def _lose(self, engine: Engine, reason: str) -> None:
        gone, self._open = self._open, {}
        self._send([(deliver, Lost(name, reason)) for name, deliver in gone.items()])
        for name in gone:
            engine.cancel(name)

    def _close(self, engine: Engine, reason: str) -> None:
        with self._closing:
            self._closed = reason
        try:
            self._lose(engine, reason)
        except Exception:
            log.exception("the engine could not give everything back")

    def _send(self, pairs: Sequence[tuple[Deliver, Event | Lost]]) -> None:
        if not pairs:
            return

        def deliver_all() -> None:
            for deliver, item in pairs:
                deliver(item)

        try:
            self._post(deliver_all)
        except RuntimeError:  # the loop is closed: nobody waits
            log.debug("nobody is left to hear of %d events", len(pairs))
