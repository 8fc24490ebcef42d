"""A server that is killed at any moment, and one whose disk is full: files of slots are whole or not there, what was
acknowledged is there, and the next server, at the same port, serves as if nothing had been."""

import itertools
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from support.disks import fill
from support.mortal import MODEL, PHASES, SLOTS, Aim, Mortal, launching
from support.served import PATIENCE, TRIES, data_url, user

QUESTIONS = (
    {"messages": [user("Hello!")], "temperature": 0},
    {"messages": [user("Describe the image.", [data_url()])], "temperature": 0.8, "seed": 5},
    {"messages": [user("Describe the image.", [data_url()]), user("How many shapes?")], "temperature": 0},
)
NAMES = "abc"


@pytest.fixture(scope="module")
def launcher():
    with launching() as process:
        yield process


def connected(server):
    return httpx2.Client(base_url=server.url, timeout=PATIENCE)


def body_of(number, **more):
    return {"model": MODEL, "max_tokens": 24, "speculative": {"depth": 3}, **QUESTIONS[number], **more}


def answer(http, number):
    """-> (its text, how many rows were reused)."""
    said = http.post("/v1/chat/completions", json=body_of(number))
    assert said.status_code == 200, said.text
    return said.json()["choices"][0]["message"]["content"], said.json()["timings"]["cache_n"]


def answers(http):
    return [answer(http, number)[0] for number in range(len(QUESTIONS))]


def act(http, slot, action, name=None):
    return http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name} if name else {})


class Busy:
    """Clients that ask, save, forget and restore until their server is gone. What they hear is right as far as it
    goes."""

    def __init__(self, server, want, seed):
        self.acknowledged, self.heard = set(), threading.Event()
        self._server, self._want, self._seed = server, want, seed

    def run(self, number):
        draw = random.Random(f"{self._seed} {number}")
        with connected(self._server) as http:
            try:
                while True:
                    (self._ask, self._ask, self._save, self._restore)[number](http, draw)
            except httpx2.TransportError:
                return

    def _ask(self, http, draw):
        number, text = draw.randrange(len(QUESTIONS)), ""
        if draw.random() < 0.5:
            assert answer(http, number)[0] == self._want[number]
        else:
            with http.stream("POST", "/v1/chat/completions", json=body_of(number, stream=True)) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            text += choice["delta"].get("content", "")
                    assert self._want[number].startswith(text)
        self.heard.set()

    def _save(self, http, draw):
        name = draw.choice(NAMES)
        if self._did(act(http, draw.randrange(SLOTS), "save", name), "slot_empty"):
            self.acknowledged.add(name)

    def _restore(self, http, draw):
        slot = draw.randrange(SLOTS)
        if draw.random() < 0.5:
            self._did(act(http, slot, "erase"))
        elif self.acknowledged:
            self._did(act(http, slot, "restore", draw.choice(sorted(self.acknowledged))))

    def _did(self, said, *refusals):
        if said.status_code != 200:
            assert said.json()["error"]["code"] in ("slot_busy", *refusals), said.text
            time.sleep(0.005)
        return said.status_code == 200


@pytest.fixture(scope="module")
def tally():
    """How many kills met which phase; printed by `pytest -s`."""
    met = Counter()
    yield met
    print(f"{met.pop('lives', 0)} kills, within: " + ", ".join(f"{phase} {n}" for phase, n in sorted(met.items())))


def test_a_kill_at_any_moment_leaves_whole_files_and_a_free_port(launcher, tmp_path, tally):
    """Each phase of a busy server in turn, and one that has nothing to do. FOREGLANCE_TRIES=7 kills 56 times."""
    draw, acknowledged = random.Random(TRIES), set()
    server = Mortal(launcher, tmp_path)
    try:
        with connected(server) as http:
            want = answers(http)
        for life, phase in itertools.product(range(TRIES), (*PHASES, "save", "idle")):
            if phase == "idle":
                time.sleep(0.1 * draw.random())
                server.kill()
                met = ["idle"]
            else:
                busy = Busy(server, want, f"{TRIES} {life} {phase}")
                with ThreadPoolExecutor(4) as pool:
                    clients = [pool.submit(busy.run, number) for number in range(4)]
                    met = server.shoot(Aim(phase, draw.randint(1, 6), draw.random())) or ["between"]
                for client in clients:
                    client.result()
                acknowledged |= busy.acknowledged
            tally.update(["lives", *met])
            (tmp_path / ".a.k1ll_3d0.part").write_bytes(b"cut short")
            server = Mortal(launcher, tmp_path, server.port)
            check(server, tmp_path, acknowledged, want)
        assert acknowledged
    finally:
        server.kill()


def check(server, folder, acknowledged, want):
    """Every file is whole and serves, and nothing else lies there."""
    names = {path.name for path in folder.iterdir()}
    assert acknowledged <= names <= set(NAMES)
    with connected(server) as http:
        for name in sorted(names):
            for slot in range(SLOTS):
                act(http, slot, "erase")
            restored = act(http, 1, "restore", name)
            assert restored.status_code == 200, restored.text
            told = [answer(http, number) for number in range(len(QUESTIONS))]
            assert [text for text, _ in told] == want and any(reused for _, reused in told)
        assert answers(http) == want


def test_a_full_disk_is_said_and_costs_nothing_else(launcher, tmp_path):
    """The file system takes no more bytes in the middle of a file."""
    server = Mortal(launcher, tmp_path)
    try:
        with connected(server) as http:
            want = answer(http, 1)[0]
            size = act(http, 0, "save", "kept").json()["n_written"]
        server.kill()
        whole = (tmp_path / "kept").read_bytes()
        server = Mortal(launcher, tmp_path, limit=size // 2)
        with connected(server) as http:
            assert answer(http, 1) == (want, 0)
            for name in ("kept", "new"):
                refused = act(http, 0, "save", name)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["param"]) == (507, "slot_not_written", "filename")
                assert f"{name} cannot be written" in error["message"] and "File too large" in error["message"]
                assert error["type"] == "server_error"
            assert [path.name for path in tmp_path.iterdir()] == ["kept"]
            assert (tmp_path / "kept").read_bytes() == whole
            text, reused = answer(http, 1)  # the conversation is still there, and the next request is served
            assert text == want and reused > 0
            act(http, 0, "erase")
            assert act(http, 0, "restore", "kept").status_code == 200 and answer(http, 1)[1] > 0
    finally:
        server.kill()


def test_a_disk_that_is_really_full_is_said_and_costs_nothing_else(launcher, disk):
    """It is another one than a limit: a write may end in its midst, and clients are there meanwhile."""
    server = Mortal(launcher, disk)
    try:
        with connected(server) as http, ThreadPoolExecutor(3) as pool:
            want = answer(http, 1)[0]
            size = act(http, 0, "save", "kept").json()["n_written"]
            whole = (disk / "kept").read_bytes()
            filler = fill(disk, leave=size // 2)
            others = [pool.submit(answer, http, 1) for _ in range(6)]
            for name in ("kept", "new") * 3:
                while (refused := act(http, 0, "save", name)).status_code == 409:
                    pass  # it runs one of the others
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["param"]) == (507, "slot_not_written", "filename")
                assert f"{name} cannot be written" in error["message"] and "No space left on device" in error["message"]
                assert {path.name for path in disk.iterdir()} == {"filler", "kept"}
                assert (disk / "kept").read_bytes() == whole
            assert all(one.result()[0] == want for one in others)
            filler.unlink()
            assert act(http, 0, "save", "new").status_code == 200
            assert {path.name for path in disk.iterdir()} == {"kept", "new"}
            act(http, 0, "erase")
            assert act(http, 0, "restore", "kept").status_code == 200 and answer(http, 1)[1] > 0
    finally:
        server.kill()
