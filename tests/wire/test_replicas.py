"""Two replicas on Ray Serve on this machine: requests find their replica, and a killed one loses none."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import httpx2
import pytest
from support.served import PATIENCE, data_url, until, user

from foreglance import Engine, Settings
from foreglance.serve.balancer import HEADER, Balancer
from foreglance.serve.replicas import Cluster, create_balanced_app
from foreglance.serve.run import Server, bind
from foreglance.serve.settings import ServerSettings

LOAD = partial(Engine.load, "tiny-qwen", Settings(weights="fp32", slots=4, try_drafts=False))
LONG = {"max_tokens": 120, "ignore_eos": True}
ABOUT_SCENE = user("Describe the image.", [data_url()])
pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="replicas need Ray Serve: pip install 'foreglance[ray]'"
)  # not imported here: what Ray reads from the environment, it reads then


class Replicas:
    def __init__(self, url):
        self.http = httpx2.Client(base_url=url, timeout=4 * PATIENCE)

    def ask(self, message=ABOUT_SCENE, headers=None, **more):
        body = {"messages": [message], "temperature": 0, "return_tokens": True, "speculative": {"depth": 3}, **more}
        answer = self.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.headers[HEADER], answer.json()

    def stream(self, **more):
        body = {"messages": [ABOUT_SCENE], "temperature": 0, "stream": True, **more}
        return self.http.stream("POST", "/v1/chat/completions", json=body)

    @property
    def members(self):
        return {one["name"]: one for one in self.http.get("/replicas").json()}

    def until_all_are_up(self):
        """A new process imports and loads everything again."""
        until(lambda: all(one["up"] for one in self.members.values()), "other processes are there", 5 * PATIENCE)

    def kill(self, name):
        os.kill(self.members[name]["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def replicas():
    settings = ServerSettings()
    cluster = Cluster(LOAD, settings)
    try:
        balancer = Balancer(cluster, cluster.add_all(["replica-0", "replica-1"]), slots=4)
        bound, ready = bind("127.0.0.1", 0), threading.Event()
        server = Server(create_balanced_app(balancer, settings), 1.0, ready.set)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE)
        yield Replicas(f"http://127.0.0.1:{bound.getsockname()[1]}")
        server.should_exit = True
        thread.join(PATIENCE)
    finally:
        cluster.close()


def ids(answer):
    return [token["id"] for token in answer["tokens"]]


def test_questions_about_one_image_go_where_its_rows_are(replicas):
    home, first = replicas.ask()
    assert first["timings"]["cache_n"] == 0
    for question in ("How many shapes are there?", "Describe the image."):
        name, answer = replicas.ask(user(question, [data_url()]))
        assert name == home and answer["timings"]["cache_n"] > 16  # the image's rows
    (other,) = set(replicas.members) - {home}
    _, elsewhere = replicas.ask(headers={HEADER: other})
    assert elsewhere["timings"]["cache_n"] == 0 and ids(elsewhere) == ids(first)


def test_a_client_that_leaves_frees_its_replica(replicas):
    with replicas.stream(**LONG) as answer:
        name = answer.headers[HEADER]
        for line in answer.iter_lines():
            if line:
                break

    def is_free():
        running = f'foreglance_requests_running{{replica="{name}"}} 0.0'
        return replicas.members[name]["open"] == 0 and running in replicas.http.get("/metrics").text

    until(is_free, "nothing runs there")


def test_a_killed_replica_loses_no_request(replicas):
    home, _ = replicas.ask()
    _, expected = replicas.ask(**LONG)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(replicas.ask, **LONG) for _ in range(4)]
        until(lambda: replicas.members[home]["open"] >= 2, "the replica is at work")
        replicas.kill(home)
        answers = [one.result() for one in asked]
    assert all(ids(answer) == ids(expected) for _, answer in answers)
    assert home not in {name for name, _ in answers}
    replicas.until_all_are_up()
    assert replicas.ask(headers={HEADER: home})[0] == home


def test_a_stream_that_has_begun_ends_cleanly_when_its_replica_is_killed(replicas):
    with replicas.stream(**LONG) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(3):
            next(lines)
        replicas.kill(answer.headers[HEADER])
        *_, error, done = lines
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_died"
    assert done == "data: [DONE]"
    assert replicas.ask()[1]["choices"][0]["finish_reason"] == "stop"
    replicas.until_all_are_up()


def test_the_number_changes_while_requests_run(replicas):
    _, expected = replicas.ask(**LONG)
    with ThreadPoolExecutor(4) as pool:
        for count in (3, 1):
            asked = [pool.submit(replicas.ask, **LONG) for _ in range(4)]
            resized = replicas.http.post("/replicas", json={"count": count})
            assert len(resized.json()) == count == len(replicas.members)
            assert all(ids(one.result()[1]) == ids(expected) for one in asked)
