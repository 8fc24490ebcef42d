"""Requests to replicas that die, fall silent, come and go. The replicas are fakes; test_replicas has real ones."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import pytest

from foreglance.serve import balancer as module
from foreglance.serve.balancer import Balancer, Died
from foreglance.serve.metrics import merged
from foreglance.serve.replicas import create_balanced_app
from foreglance.serve.settings import ServerSettings, digest

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class FakeReplica:
    """Answers in `pieces` pieces, each when `go` allows it; dies before piece `dies_at`."""

    def __init__(self, name):
        self.name, self.pid, self.pieces, self.dies_at = name, 1, 1, None
        self.kind = "application/json"
        self.go, self.speaks = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.speaks.set()
        self.asked, self.left = [], 0

    async def about(self):
        await self.speaks.wait()
        return {"pid": self.pid, "model": "fake", "context": 100}

    async def metrics(self):
        return "# TYPE foreglance_tokens_total counter\nforeglance_tokens_total 3.0\n"

    async def answer(self, scope, body):
        self.asked.append((scope, body))
        whole = False
        try:
            for piece in range(self.pieces):
                await self.go.wait()
                if self.dies_at == piece:
                    raise Died
                if piece == 0:
                    headers = [(b"content-type", self.kind.encode())]
                    yield {"type": "http.response.start", "status": 200, "headers": headers}
                text = f"{self.name}{piece} ".encode()
                yield {"type": "http.response.body", "body": text, "more_body": piece + 1 < self.pieces}
            whole = True
        finally:
            self.left += not whole


class FakeCluster:
    def __init__(self):
        self.replicas, self.removed = {}, []

    def add(self, name):
        self.replicas[name] = FakeReplica(name)
        return self.replicas[name]

    def remove(self, name):
        self.removed.append(name)


class Scene:
    def __init__(self, count, slots, settings):
        self.cluster = FakeCluster()
        started = {f"replica-{i}": self.cluster.add(f"replica-{i}") for i in range(count)}
        self.balancer = Balancer(self.cluster, started, slots)
        self.app = create_balanced_app(self.balancer, settings)
        self.replicas = list(started.values())

    async def ask(self, body=HELLO, **options):
        return await self.client.post("/v1/chat/completions", json=body, **options)


@asynccontextmanager
async def scene(count=2, slots=2, settings=None):
    it = Scene(count, slots, settings or ServerSettings())
    transport = httpx2.ASGITransport(app=it.app)
    async with (
        it.balancer.lifespan(None),
        httpx2.AsyncClient(transport=transport, base_url="http://test") as it.client,
        asyncio.timeout(20),
    ):
        yield it


async def until(condition):
    """The loop has come to where that holds; `scene` limits the time."""
    while not condition():
        await asyncio.sleep(0.001)


def asked(it):
    return [len(one.asked) for one in it.replicas]


def run(test):
    """Tests are coroutines; this runs one as a function."""

    def sync(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    sync.__name__, sync.__doc__ = test.__name__, test.__doc__
    return sync


@run
async def test_a_conversation_stays_with_one_replica():
    async with scene() as it:
        answers = [await it.ask() for _ in range(4)]
        (home,) = {answer.headers["x-foreglance-replica"] for answer in answers}
        assert asked(it) == ([4, 0] if home == "replica-0" else [0, 4])
        other = "replica-1" if home == "replica-0" else "replica-0"
        told = await it.ask(headers={"x-foreglance-replica": other})
        assert told.headers["x-foreglance-replica"] == other
        missing = await it.ask(headers={"x-foreglance-replica": "replica-9"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "unknown_replica"


@run
async def test_a_request_whose_replica_dies_is_answered_by_another():
    async with scene() as it:
        first = (await it.ask()).headers["x-foreglance-replica"]
        it.cluster.replicas[first].dies_at = 0
        again = await it.ask()
        assert again.status_code == 200 and again.headers["x-foreglance-replica"] != first
        assert (
            it.replicas[0].asked[-1][1]
            == it.replicas[1].asked[-1][1]
            == json.dumps(HELLO, separators=(",", ":")).encode()
        )


@run
async def test_a_stream_that_was_only_greeted_is_written_by_another():
    async with scene() as it:
        for one in it.replicas:
            one.pieces, one.kind = 3, "text/event-stream"
        first = (await it.ask()).headers["x-foreglance-replica"]
        it.cluster.replicas[first].dies_at = 1
        again = await it.ask()
        assert first not in again.text and again.text.split()[-1].endswith("2")


@run
async def test_a_stream_that_has_begun_ends_with_an_error():
    async with scene() as it:
        for one in it.replicas:
            one.pieces, one.kind, one.dies_at = 4, "text/event-stream", 2
        told = (await it.ask()).text
        error, done = told[told.index("data:") :].strip().split("\n\n")
        assert json.loads(error[6:])["error"]["code"] == "replica_died" and done == "data: [DONE]"
        assert sum(len(one.asked) for one in it.replicas) == 1
        for one in it.replicas:
            one.dies_at = 2
        told = (await it.client.post("/v1/responses", json={"input": "hello"})).text
        assert told.count("event: error\ndata:") == 1


@run
async def test_requests_are_not_sent_round_for_ever():
    async with scene(count=1) as it:
        it.replicas[0].dies_at = 0
        answer = await it.ask()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "replicas_died"
        assert len(it.replicas[0].asked) == module.ATTEMPTS


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(module, "PATIENCE", 0.05)


def test_a_silent_replica_is_given_up_and_taken_back(hasty):
    @run
    async def tell():
        async with scene() as it:
            first = (await it.ask()).headers["x-foreglance-replica"]
            silent = it.cluster.replicas[first]
            silent.go.clear()
            waiting = asyncio.ensure_future(it.ask())
            await until(lambda: len(silent.asked) == 2)
            silent.speaks.clear()
            assert (await waiting).headers["x-foreglance-replica"] != first
            assert [m["up"] for m in (await it.client.get("/replicas")).json() if m["name"] == first] == [False]
            silent.pid = 2
            silent.go.set()
            silent.speaks.set()
            answer = await it.ask(headers={"x-foreglance-replica": first})
            assert answer.headers["x-foreglance-replica"] == first
            assert [m["pid"] for m in (await it.client.get("/replicas")).json() if m["name"] == first] == [2]

    tell()


@run
async def test_the_number_changes_while_requests_run():
    async with scene(count=1, slots=1) as it:
        it.replicas[0].go.clear()
        waiting = asyncio.ensure_future(it.ask())
        await until(lambda: asked(it) == [1])
        grown = (await it.client.post("/replicas", json={"count": 3})).json()
        assert [one["name"] for one in grown] == ["replica-0", "replica-1", "replica-2"]
        assert (await it.ask()).headers["x-foreglance-replica"] != "replica-0"  # which has its slot taken
        shrunk = asyncio.ensure_future(it.client.post("/replicas", json={"count": 1}))
        await until(lambda: sum(one.leaving for one in it.balancer.members.values()) == 2 or it.cluster.removed)
        it.replicas[0].go.set()
        assert (await waiting).status_code == 200
        assert [one["name"] for one in (await shrunk).json()] == ["replica-0"]
        assert sorted(it.cluster.removed) == ["replica-1", "replica-2"]
        assert (await it.client.post("/replicas", json={"count": 0})).status_code == 400


@run
async def test_a_replica_that_leaves_finishes_what_it_has():
    async with scene(slots=1) as it:
        for one in it.replicas:
            one.go.clear()
        waiting = [asyncio.ensure_future(it.ask()) for _ in range(2)]  # one for each
        await until(lambda: asked(it) == [1, 1])
        shrunk = asyncio.ensure_future(it.balancer.resize(1))
        await asyncio.sleep(0)
        waiting += [asyncio.ensure_future(it.ask({"prompt": f"prompt {i}"})) for i in range(8)]
        await until(lambda: sum(asked(it)) == 10)
        assert asked(it) == [9, 1] and it.cluster.removed == []
        it.replicas[1].go.set()
        await shrunk
        assert it.cluster.removed == ["replica-1"]
        it.replicas[0].go.set()
        assert [(await one).status_code for one in waiting] == [200] * 10


@run
async def test_the_end_refuses_new_requests_and_ends_open_ones():
    async with scene() as it:
        for one in it.replicas:
            one.go.clear()
        waiting = asyncio.ensure_future(it.ask())
        await until(lambda: sum(asked(it)) == 1)
        it.balancer.stop_taking()
        refused = await it.ask()
        assert refused.status_code == 503 and refused.headers["retry-after"]
        it.balancer.lose_all("no more time")
        lost = await waiting
        assert lost.status_code == 503 and lost.json()["error"]["message"] == "no more time"
        assert it.balancer.num_open == 0 and sum(one.left for one in it.replicas) == 1


@pytest.mark.parametrize("when", ("before", "while it is sent"))
def test_a_client_that_leaves_is_told_to_the_replica(when):
    @run
    async def tell():
        async with scene(count=1) as it:
            replica, left = it.replicas[0], asyncio.Event()
            replica.pieces = 9
            if when == "before":
                replica.go.clear()
            coming = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

            async def receive():
                if (message := next(coming, None)) is None:
                    await left.wait()
                    return {"type": "http.disconnect"}
                return message

            sending = asyncio.Event()

            async def send(message):
                sending.set()
                await asyncio.Event().wait()

            scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
            relaying = asyncio.ensure_future(it.balancer.relay(scope, receive, send))
            await until(lambda: asked(it) == [1] and (when == "before" or sending.is_set()))
            assert it.balancer.num_open == 1 and replica.left == 0
            left.set()
            await relaying
            assert it.balancer.num_open == 0 and replica.left == 1

    tell()


@run
async def test_the_guard_stands_before_the_replicas():
    async with scene(settings=ServerSettings(api_keys=(digest("key"),), cors_origins=("http://page",))) as it:
        assert (await it.ask()).status_code == (await it.client.get("/replicas")).status_code == 401
        headers = {"Authorization": "Bearer key", "Origin": "http://page", "X-Other": "1"}
        answer = await it.ask(headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page"
        (scope, _) = next(one.asked[0] for one in it.replicas if one.asked)
        assert (
            not {b"authorization", b"origin"} & {name for name, _ in scope["headers"]}
            and (b"x-other", b"1") in scope["headers"]
        )


@run
async def test_metrics_are_those_of_all_replicas():
    async with scene() as it:
        lines = (await it.client.get("/metrics")).text.splitlines()
        assert lines[-2:] == [f'foreglance_tokens_total{{replica="replica-{i}"}} 3.0' for i in range(2)]


def test_merged_metrics_say_each_kind_once():
    text = (
        '# HELP a_total A\n# TYPE a_total counter\na_total{depth="1"} 2.0\n'
        '# HELP b B\n# TYPE b histogram\nb_bucket{le="+Inf"} 1.0\nb_count 1.0\nb_sum 0.5\n'
    )
    whole = merged([("x", text), ("y", text)]).decode()
    assert whole.count("# TYPE a_total counter") == whole.count("# TYPE b histogram") == 1
    for replica in "xy":
        assert f'a_total{{depth="1",replica="{replica}"}} 2.0' in whole
        assert f'b_sum{{replica="{replica}"}} 0.5' in whole
