"""Requests to replicas: who gets one, what happens if that one dies, and how many there are.

Lives on the event loop of the process that clients talk to. What a request needs is kept until its answer has begun, so
that another replica can write it. Owns no knowledge of Ray: replicas are `Remote`s that a `Cluster` starts and ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from foreglance.serve.errors import ApiError
from foreglance.serve.placement import Placement, prefix_of
from foreglance.serve.stream import ClientGone, while_connected

log = logging.getLogger(__name__)

HEADER = "x-foreglance-replica"  # who answered; in a request: who shall answer
NOT_PASSED_ON = (b"authorization", b"origin", HEADER.encode())  # these have been dealt with
ATTEMPTS = 5  # replicas that may die over one request
LOOK_EVERY, PATIENCE = (
    1.0,
    5.0,
)  # seconds between looks at a replica, and until one that is silent gets no more requests
NONE_THERE = 120.0  # seconds that a request waits while there is no replica
LARGE = 1 << 20  # bytes of a body that is parsed off the loop


class Died(Exception):
    """The process that worked on a request is gone."""


class Remote(Protocol):
    """A replica in its own process. A process that dies is replaced by another one under the same name."""

    async def about(self) -> dict[str, Any]:
        """Its `pid`, and what it serves. Waits for a process that is there."""
        ...

    def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages of an answer. Closing the iterator tells the replica that the client has left; raises
        `Died`."""
        ...

    async def metrics(self) -> str: ...


class Cluster(Protocol):
    """Starts and ends replicas; all of it blocks."""

    def add(self, name: str) -> Remote: ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None: ...


@dataclass
class Member:
    """A replica as the balancer knows it. `lost` is set while it is silent or dead."""

    name: str
    remote: Remote
    pid: int
    open: int = 0
    leaving: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def takes(self) -> bool:
        return not self.leaving and not self.lost.is_set()

    def report(self) -> dict[str, Any]:
        return {"name": self.name, "pid": self.pid, "open": self.open, "up": not self.lost.is_set()}


class Balancer:
    """`slots` is how many requests a replica answers at once, `started` the replicas that are there. `serves` is the
    model that they serve and the rows of its context."""

    serves: tuple[str, int]

    def __init__(self, cluster: Cluster, started: Mapping[str, Remote], slots: int):
        self.members: dict[str, Member] = {}
        self._cluster, self._started = cluster, started
        self._placement = Placement(slots)
        self._names = (name for name in map(name_of, itertools.count()) if name not in started)
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._resizing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._stopping: ApiError | None = None
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        await asyncio.gather(*(self._admit(name, remote) for name, remote in self._started.items()))
        try:
            yield
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()

    # How many there are

    async def resize(self, count: int) -> None:
        """Start or end replicas until there are `count`; those that end finish what they have."""
        async with self._resizing:
            members = [member for member in self.members.values() if not member.leaving]
            await asyncio.gather(*(self._add(next(self._names)) for _ in range(count - len(members))))
            for member in members[count:]:
                member.leaving = True
            await asyncio.gather(*(self._remove(member) for member in members[count:]))

    async def _add(self, name: str) -> None:
        await self._admit(name, await asyncio.to_thread(self._cluster.add, name))

    async def _admit(self, name: str, remote: Remote) -> None:
        about = await remote.about()
        self.serves = about["model"], about["context"]
        self.members[name] = Member(name, remote, about["pid"])
        self._watchers[name] = asyncio.create_task(self._watch(self.members[name]))
        self._tell()

    async def _remove(self, member: Member) -> None:
        while member.open and not self._ended.is_set():
            await self._change()
        self._watchers.pop(member.name).cancel()
        del self.members[member.name]
        self._placement.forget(member.name)
        await asyncio.to_thread(self._cluster.remove, member.name)

    async def _watch(self, member: Member) -> None:
        """A replica that is silent gets no requests until it speaks again."""
        while True:
            look = asyncio.ensure_future(self._look(member))
            done, _ = await asyncio.wait((look,), timeout=PATIENCE)
            if not done:
                self._lose(member)
            if await look:
                member.lost.clear()
                self._tell()
            else:
                self._lose(member)
            await asyncio.sleep(LOOK_EVERY)

    async def _look(self, member: Member) -> bool:
        """Whether a replica answers. A new process under its name holds nothing of what the old one held."""
        try:
            pid = (await member.remote.about())["pid"]
        except Exception as error:
            log.warning("%s does not answer: %s", member.name, error)
            return False
        if pid != member.pid:
            self._placement.forget(member.name)
            member.pid = pid
        return True

    def _lose(self, member: Member) -> None:
        member.lost.set()
        self._placement.forget(member.name)

    def _tell(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    # Requests

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application: have a request answered by a replica."""
        if self._stopping is not None:
            raise self._stopping
        body = await _whole(receive)
        prefix = await asyncio.to_thread(prefix_of, body) if len(body) > LARGE else prefix_of(body)
        with suppress(ClientGone):
            await while_connected(receive, self._answer(scope, body, prefix, send))

    async def _answer(self, scope: Scope, body: bytes, prefix: str | None, send: Send) -> None:
        wanted = next((value.decode() for name, value in scope["headers"] if name == HEADER.encode()), None)
        for _ in range(ATTEMPTS):
            member = await self._member(prefix, wanted)
            outlet = Outlet(send, member.name, scope["path"])
            member.open += 1
            try:
                return await self._pass_on(member, _bare(scope), body, outlet)
            except Died:
                log.warning("%s died over %s %s", member.name, scope["method"], scope["path"])
                if outlet.has_begun:
                    error = ApiError(503, "the replica that wrote this answer has died; ask again", code="replica_died")
                    return await outlet.break_off(error)
            finally:
                member.open -= 1
                self._tell()
        raise ApiError(503, f"{ATTEMPTS} replicas died over this request", code="replicas_died")

    async def _member(self, prefix: str | None, wanted: str | None) -> Member:
        """Whom to send a request to; waits while there is nobody."""
        if wanted is not None and wanted not in self.members:
            raise ApiError(404, f"there is no replica {wanted!r}", param=HEADER, code="unknown_replica")
        try:
            async with asyncio.timeout(NONE_THERE):
                while True:
                    there = {m.name: m.open for m in self.members.values() if m.takes and wanted in (None, m.name)}
                    if there:
                        return self.members[self._placement.choose(prefix, there)]
                    await self._change()
        except TimeoutError:
            raise ApiError(503, "no replica is there", code="no_replica", headers={"Retry-After": "10"}) from None

    async def _pass_on(self, member: Member, scope: dict[str, Any], body: bytes, outlet: Outlet) -> None:
        messages = member.remote.answer(scope, body)
        try:
            while (message := await self._next(member, messages, outlet)) is not None:
                await outlet.send(message)
        except Died:
            self._lose(member)
            raise
        except ApiError as error:
            if not outlet.has_begun:
                raise
            await outlet.break_off(error)
        finally:
            await messages.aclose()

    async def _next(self, member: Member, messages: AsyncIterator[Message], outlet: Outlet) -> Message | None:
        """The next message. Before the answer has begun a silent replica is given up; when all must end, all is."""
        coming = asyncio.ensure_future(anext(messages, None))
        ended, lost = asyncio.ensure_future(self._ended.wait()), asyncio.ensure_future(member.lost.wait())
        tasks = (coming, ended) if outlet.has_begun else (coming, ended, lost)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            raise self._stopping if ended.done() else Died
        finally:
            for task in (coming, ended, lost):
                task.cancel()
            await asyncio.gather(coming, ended, lost, return_exceptions=True)

    # The end

    @property
    def num_open(self) -> int:
        return sum(member.open for member in self.members.values())

    def stop_taking(self) -> None:
        """Refuse new requests: the server is told to stop."""
        self._stopping = ApiError(503, "the server is stopping", code="stopping", headers={"Retry-After": "5"})

    def lose_all(self, reason: str) -> None:
        self._stopping = ApiError(503, reason, code="stopping")
        self._ended.set()
        self._tell()


class Outlet:
    """Where an answer goes. It begins with its second piece: the greeting of a stream may still be followed by another
    replica's words."""

    def __init__(self, send: Send, replica: str, path: str):
        self._send, self._replica, self._path = send, replica, path
        self._held: list[Message] = []
        self._is_stream = False
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            headers[HEADER] = self._replica
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self._held.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self.has_begun or len(self._held) > 2 or is_last:
            self.has_begun = True
            held, self._held = self._held, []
            for one in held:
                await self._send(one)

    async def break_off(self, error: ApiError) -> None:
        """End an answer that has begun. Only a stream of events has a way to say why; else the connection breaks."""
        if not self._is_stream:
            raise error
        if self._path.endswith("/responses"):
            last = f"event: error\ndata: {json.dumps({'type': 'error', **error.body()['error']})}\n\n"
        else:
            last = f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": last.encode(), "more_body": False})


def name_of(number: int) -> str:
    return f"replica-{number}"


async def _whole(receive: Receive) -> bytes:
    pieces, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def _bare(scope: Scope) -> dict[str, Any]:
    """What of a scope can travel and is the replica's business."""
    headers = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
    return {name: scope[name] for name in names if name in scope} | {"headers": headers, "root_path": ""}
