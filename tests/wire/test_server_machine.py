"""A server under random use against a plain engine: requests of every kind come alone and together, are streamed, read
slowly, left in the middle or refused, and slots are saved, forgotten and brought back, with little memory.

Whatever happens, a finished answer is the one that a plain engine gives (drafts off, one slot, no reuse, nobody else),
a stream that was left is a beginning of it, and a refusal says what is wrong. At the end nothing is held, the counts of
/metrics add up, and the next request is served. FOREGLANCE_TRIES=N runs N times as many, and
HYPOTHESIS_PROFILE=at-random draws others every time.
"""

import io
import itertools
import json
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import PIL.Image
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from prometheus_client.parser import text_string_to_metric_families
from support.embedded import scene
from support.served import MODEL, PATIENCE, TRIES, data_url, raw_request, serving, until

from foreglance import Engine, Message, Request, SamplingParams, Settings, Speculation
from foreglance.request import Grammar
from foreglance.serve.openai import choice_seed
from foreglance.serve.settings import ServerSettings

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}
QUEUE = 3


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


PICTURES = [
    *(png(scene(number)) for number in range(3)),
    *(png(PIL.Image.new("RGB", (96, 64), colour)) for colour in ("red", "blue")),  # two of one size
]
DIALOGUES = (  # of turns: who, what, and which pictures
    [("user", "Hello!", ())],
    [("system", "Be brief.", ()), ("user", "Hello!", ())],
    [("user", "Describe the image.", (0,))],
    [("user", "Describe the image.", (1,))],
    [("user", "Describe the image.", (3,))],
    [("user", "Describe the image.", (4,))],
    [("user", "What is different?", (0, 2))],
    [("user", "Describe the image.", (0,)), ("assistant", "A red circle.", ()), ("user", "And this?", (1,))],
    [("user", "Where is the red circle, and what is next to it? " * 12, (2,))],  # more than one chunk of the prompt
)
PROMPTS = ("The picture shows", (40, 99, 130, 400, 170), "A red circle lies at the top left. " * 40)
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True, "repetition_penalty": 1.3},
    {"temperature": 0.0, "stop": (" the", "sh")},
    {"temperature": 0.0, "presence_penalty": 0.7, "logit_bias": {20: 4.0, 300: -50.0}},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "seed": 2**63 + 11, "top_p": 0.9, "stop": ("e a",)},
    {"temperature": 1.0, "seed": 5, "top_k": 7, "min_p": 0.02, "frequency_penalty": 0.5},
)
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "number": {"type": "integer"}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}
BAD = (  # path, body, status, code
    ("/v1/chat/completions", {"messages": []}, 400, "invalid_value"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "temprature": 0},
        400,
        "unknown_parameter",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "b"}, 404, "model_not_found"),
    ("/v1/chat/completions", b"{", 400, "invalid_json"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "long " * 9000}]},
        400,
        "context_length_exceeded",
    ),
    ("/v1/completions", {"prompt": [1 << 20]}, 400, "invalid_value"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"999999": 1}}, 400, "invalid_value"),
    ("/v1/completions", {"prompt": "a", "n": 17}, 400, "invalid_value"),
    ("/v1/completions", {"prompt": "a", "speculative": {"draft": "model"}}, 400, "draft_unavailable"),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 8, "stream": True}, 400, "invalid_value"),
    ("/v1/responses", {"input": "a", "previous_response_id": "b"}, 400, "unsupported_parameter"),
    ("/v1/nothing", {}, 404, "http_error"),
)


def looking_at(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]}


BAD_PICTURES = (
    ("data:image/png;base64,@@@", "invalid_image_url"),
    (data_url(PICTURES[0][:200]), "image_broken"),
    ("http://127.0.0.1:9/x.png", "remote_images_off"),
)
BAD += tuple((PATHS["chat"], looking_at(data_url(PICTURES[1]), url), 400, code) for url, code in BAD_PICTURES)
BAD += ((PATHS["chat"], looking_at(*[data_url(PICTURES[3])] * 5), 400, "too_many_images"),)


@dataclass(frozen=True)
class Wish:
    """What is asked: the same answer, however it is asked for."""

    kind: str
    prompt: int
    sampling: int
    max_tokens: int
    n: int = 1
    form: bool = False

    @property
    def options(self):
        given = dict(SAMPLINGS[self.sampling])
        if self.form:
            given.pop("ignore_eos", None)
        return given

    def requests(self):
        """As a plain engine takes them."""
        return [self._request(index) for index in range(self.n)]

    def _request(self, index):
        given = self.options
        if "seed" in given:
            given["seed"] = choice_seed(given["seed"], index)
        sampling, off = SamplingParams(max_tokens=self.max_tokens, **given), Speculation("none")
        if self.kind == "completions":
            return Request.raw(PROMPTS[self.prompt], sampling=sampling, speculation=off)
        turns = [Message.of(who, text, [PICTURES[i] for i in seen]) for who, text, seen in DIALOGUES[self.prompt]]
        grammar = Grammar("json_schema", json.dumps(SCHEMA)) if self.form else None
        return Request(tuple(turns), sampling, off, grammar=grammar)

    def body(self):
        body = {"model": MODEL, **self.options}
        if "stop" in body:
            body["stop"] = list(body["stop"])
        if self.kind == "responses":
            body |= {"input": list(self._turns("input_")), "max_output_tokens": self.max_tokens}
            return body | ({"text": {"format": _format()}} if self.form else {})
        body |= {"max_tokens": self.max_tokens, "return_tokens": self.n == 1, "n": self.n}
        if self.kind == "completions":
            return body | {"prompt": PROMPTS[self.prompt]}
        format = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
        return body | {"messages": list(self._turns(""))} | ({"response_format": format} if self.form else {})

    def _turns(self, lead):
        for who, text, seen in DIALOGUES[self.prompt]:
            urls = [data_url(PICTURES[i]) for i in seen]
            images = [{"type": f"{lead}image", "image_url": url} if lead else _image(url) for url in urls]
            words = {"type": f"{lead or ''}text", "text": text}
            yield {"role": who, "content": [*images, words] if who == "user" else text}


def _image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def _format():
    return {"type": "json_schema", "name": "shape", "schema": SCHEMA}


@dataclass(frozen=True)
class Manner:
    """How it is asked for. `leaves` after that many pieces of a stream; 0: before a byte is read."""

    draft: str = "auto"
    depth: int | str = "auto"
    images: str = "see"
    stream: bool = False
    slow: bool = False
    leaves: int | None = None


@dataclass
class Heard:
    """What came of it. `ends` are finish reasons by choice, empty strings where none came; `ids` of one choice."""

    status: int
    said: object = None  # the whole body of an answer that is not streamed
    texts: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    ids: list | None = None
    timings: dict | None = None


@cache
def plain_engine():
    return Engine.load(
        MODEL, Settings(weights="fp32", slots=1, prefix_cache_bytes=0, image_cache_bytes=0, try_drafts=False)
    )


@cache
def served_weights():
    """Another copy of the weights: two engines in two threads share nothing."""
    return Engine.load(MODEL, Settings(weights="fp32", try_drafts=False))


@cache
def alone(wish):
    """What a plain engine answers: (token ids, text, finish reason) of each choice."""
    results = [plain_engine().generate([request])[0] for request in wish.requests()]
    assert not any(result.error for result in results)
    return [(list(result.token_ids), result.text, result.finish_reason) for result in results]


def ask(http, wish, manner):
    body = wish.body() | {"stream": manner.stream}
    body["speculative"] = {"draft": manner.draft, "depth": manner.depth, "images": manner.images}
    if manner.leaves == 0:
        with raw_request(str(http.base_url).rstrip("/"), json.dumps(body).encode(), PATHS[wish.kind]):
            time.sleep(0.002 * wish.max_tokens / 10)
        return Heard(0)
    if not manner.stream:
        answer = http.post(PATHS[wish.kind], json=body)
        return whole(wish, answer.json()) if answer.status_code == 200 else Heard(answer.status_code, answer.json())
    with http.stream("POST", PATHS[wish.kind], json=body) as answer:
        if answer.status_code != 200:
            return Heard(answer.status_code, json.loads(answer.read()))
        return streamed(wish, manner, answer.iter_lines())


def whole(wish, answer):
    heard = Heard(200, answer, timings=answer["timings"])
    if wish.kind == "responses":
        heard.texts = ["".join(part["text"] for item in answer["output"] for part in item["content"])]
        heard.ends = [_end_of(answer)]
        return heard
    for choice in answer["choices"]:
        heard.texts.append(choice["text"] if wish.kind == "completions" else choice["message"]["content"])
        heard.ends.append(choice["finish_reason"])
    if wish.n == 1:
        heard.ids = [token["id"] for token in answer["tokens"]]
    return heard


def _end_of(response):
    return "length" if response["status"] == "incomplete" else "stop"


def streamed(wish, manner, lines):
    heard = Heard(200, texts=[""] * wish.n, ends=[""] * wish.n, ids=[] if wish.n == 1 else None)
    pieces = itertools.count(1)
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            break
        piece = json.loads(line.removeprefix("data: "))
        assert "error" not in piece or piece.get("type", "").startswith("response"), piece
        heard.timings = piece.get("timings", heard.timings)
        if wish.kind == "responses":
            heard.texts[0] += piece["delta"] if piece["type"] == "response.output_text.delta" else ""
            if piece["type"] in ("response.completed", "response.incomplete"):
                heard.ends[0], heard.timings = _end_of(piece["response"]), piece["response"]["timings"]
            heard.ids = None
        else:
            _add(wish, heard, piece)
        if next(pieces) == manner.leaves:
            return heard
        if manner.slow:
            time.sleep(0.004)
    return heard


def _add(wish, heard, piece):
    for choice in piece["choices"]:
        text = choice["text"] if wish.kind == "completions" else choice["delta"].get("content", "")
        heard.texts[choice["index"]] += text
        heard.ends[choice["index"]] = choice["finish_reason"] or heard.ends[choice["index"]]
    if heard.ids is not None:
        heard.ids += [token["id"] for token in piece.get("tokens", ())]


wishes = st.one_of(
    st.builds(
        Wish,
        st.sampled_from(("chat", "chat", "responses")),
        st.integers(0, len(DIALOGUES) - 1),
        st.integers(0, len(SAMPLINGS) - 1),
        st.sampled_from((1, 7, 24)),
        form=st.booleans(),
    ),
    st.builds(
        Wish,
        st.sampled_from(("chat", "completions")),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, len(SAMPLINGS) - 1),
        st.sampled_from((1, 7, 24)),
        n=st.integers(1, 3),
    ),
)
manners = st.builds(
    Manner,
    st.sampled_from(("auto", "mtp", "mtp", "ngram", "none")),
    st.sampled_from((0, 1, 3, 7, "auto")),
    st.sampled_from(("see", "skip", "placeholder")),
    st.booleans(),
    st.booleans(),
    st.sampled_from((None, None, 0, 1, 4)),
).map(lambda manner: manner if manner.stream or not manner.leaves else Manner(stream=True, leaves=manner.leaves))
asks = st.tuples(wishes, manners)


class Servers(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 3),
        reuse=st.sampled_from((0, 300_000, 2_000_000, 1 << 26)),
        images=st.sampled_from((0, 20_000, 1 << 20)),
    )
    def begin(self, slots, reuse, images):
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        loaded = served_weights()
        layout = {"slots": slots, "prefix_cache_bytes": reuse, "image_cache_bytes": images, "max_images": 4}
        self.engine = loaded.with_target(loaded.target, Settings(weights="fp32", **layout))
        self.served = self.stack.enter_context(
            serving(self.engine, ServerSettings(slot_save_path=self.folder, queue=QUEUE))
        )
        self.http = self.stack.enter_context(self.served.http())
        self.pool = self.stack.enter_context(ThreadPoolExecutor(12))
        self.open: list[tuple[Wish, Manner, Future]] = []
        self.saved: set[str] = set()
        self.refusals, self.ended = Counter(), 0  # answers that came whole
        self.late = 0  # of clients that left at once: the server may take them when all others are served
        self.cut = self.unknown = 0  # answers that were left in the middle; of which nobody knows whether they began

    def send(self, wish, manner):
        self.open.append((wish, manner, self.pool.submit(ask, self.http, wish, manner)))

    @rule(one=asks)
    def ask_one(self, one):
        self.send(*one)

    @rule(many=st.lists(asks, min_size=2, max_size=4))
    def ask_together(self, many):
        """All are there before the first step of any."""
        self.hear()
        with self.served.held():
            for wish, manner in many:
                self.send(wish, manner)
            staying = [future for _, manner, future in self.open if manner.leaves != 0]
            until(lambda: self.served.host.dispatch.num_open or all(map(Future.done, staying)), "one is in")
            time.sleep(0.01)

    @rule()
    def hear(self):
        """All that are open come to their end, and then no store may hold a row."""
        crowd = self.late + sum(wish.n for wish, _, _ in self.open)
        self.late = sum(wish.n for wish, manner, _ in self.open if manner.leaves == 0)
        for wish, manner, future in self.open:
            heard = future.result(PATIENCE)
            if heard.status == 0:
                self.unknown += wish.n
            elif heard.status == 200:
                self.compare(wish, manner, heard)
            else:
                assert crowd > self.engine.settings.slots + QUEUE, heard.said
                assert (heard.status, heard.said["error"]["code"]) == (429, "queue_full"), heard.said
                self.refusals[429] += 1
        self.open.clear()
        self.served.settle()

    def compare(self, wish, manner, heard):
        whole = True
        for index, (ids, text, end) in enumerate(alone(wish)):
            said, ended = heard.texts[index], heard.ends[index]
            whole = whole and bool(ended)
            if ended:
                assert (said, ended) == (text, end)
            else:
                assert manner.leaves and text.startswith(said)
            if heard.ids is not None:
                assert heard.ids == (ids if ended else ids[: len(heard.ids)])
        if whole:
            self.ended += wish.n
            assert "failed" not in (heard.timings["off_because"] or "")
        else:
            self.cut += wish.n

    @rule(number=st.integers(0, len(BAD) - 1))
    def ask_badly(self, number):
        path, body, status, code = BAD[number]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.http.post(path, content=content, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        self.refusals[answer.status_code] += 1
        assert (answer.status_code, error["code"]) in {(status, code), (429, "queue_full")} and error["message"], error

    def act(self, slot, action, name=None):
        answer = self.http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name} if name else {})
        if answer.status_code != 200:
            self.refusals[answer.status_code] += 1
        return answer.status_code, answer.json()

    @rule(slot=st.integers(0, 3), name=st.sampled_from(("a", "b", "c", "../a", "d e")))
    def save(self, slot, name):
        status, said = self.act(slot, "save", name)
        if status == 200:
            assert (self.folder / name).stat().st_size == said["n_written"] and said["n_saved"]
            self.saved.add(name)
        else:
            self.refused(slot, name, status, said, "slot_empty")
        assert {path.name for path in self.folder.iterdir()} == self.saved

    @rule(slot=st.integers(0, 3), name=st.sampled_from(("a", "b", "c", "gone", ".a")))
    def restore(self, slot, name):
        status, said = self.act(slot, "restore", name)
        if status == 200:
            assert name in self.saved and said["n_restored"]
        else:
            may_fail = name not in self.saved or self.engine.settings.prefix_cache_bytes < 1 << 26
            self.refused(slot, name, status, said, "slot_file" if may_fail else None)

    @rule(slot=st.integers(0, 3))
    def erase(self, slot):
        status, said = self.act(slot, "erase")
        if status != 200:
            self.refused(slot, "a", status, said, None)

    def refused(self, slot, name, status, said, code):
        expected = {(409, "slot_busy"), (400, code)}
        if slot >= self.engine.settings.slots:
            expected = {(404, "slot_unknown")}
        if not name.isalnum():
            expected = {(400, "invalid_value")}
        assert (status, said["error"]["code"]) in expected, said

    @rule()
    def look(self):
        for path in ("/health", "/slots", "/props", "/v1/models"):
            assert self.http.get(path).status_code == 200
        assert self.engine.cached_bytes <= self.engine.settings.prefix_cache_bytes

    @precondition(lambda self: not self.open)
    @rule(wish=wishes, manner=manners, name=st.sampled_from("ab"))
    def save_and_go_on(self, wish, manner, name):
        """A conversation goes to a file, is forgotten, comes back elsewhere, and serves the same question."""
        self.send(wish, manner)
        self.hear()
        filled = [slot["id"] for slot in self.http.get("/slots").json() if slot["n_past"]]
        if not filled:
            return
        self.save(filled[0], name)
        for slot in filled:
            self.erase(slot)
        self.restore(self.engine.settings.slots - 1, name)
        self.send(wish, manner)
        self.hear()

    def teardown(self):
        if not hasattr(self, "stack"):
            return
        with self.stack:
            self.hear()
            assert [slot["state"] for slot in self.http.get("/slots").json()] == ["idle"] * self.engine.settings.slots
            self.count()
            hello = Wish("chat", 0, 0, 7)
            self.compare(hello, Manner(), ask(self.http, hello, Manner()))
            self.served.host.worker.ask(lambda engine: engine.forget()).result(PATIENCE)
            assert self.engine.cached_bytes == 0
            assert all(path.name in self.saved for path in self.folder.iterdir())

    def count(self):
        """What /metrics tells is what the clients saw."""
        text = self.http.get("/metrics").text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        totals: dict[tuple, float] = {(one.name, *sorted(one.labels.values())): one.value for one in samples}
        answers = {name[1]: int(n) for name, n in totals.items() if name[0] == "foreglance_answers_total"}
        refusals = {int(name[1]): int(n) for name, n in totals.items() if name[0] == "foreglance_refusals_total"}
        assert set(answers) <= {"stop", "length", "lost"}
        assert self.ended <= answers.get("stop", 0) + answers.get("length", 0)
        known = self.ended + self.cut
        assert known <= sum(answers.values()) <= known + self.unknown
        assert answers.get("lost", 0) <= self.cut + self.unknown
        extra = refusals.pop(429, 0) - self.refusals.pop(429, 0)
        assert 0 <= extra <= self.unknown and refusals == self.refusals
        for gauge in ("running", "waiting"):
            assert totals[(f"foreglance_requests_{gauge}",)] == 0


TestServers = Servers.TestCase
TestServers.settings = settings(
    max_examples=8 * TRIES,
    stateful_step_count=20,
    phases=(Phase.generate,),  # threads: no smaller case comes of it
)
