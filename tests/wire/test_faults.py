"""Clients that leave, requests that fail, an engine that breaks, a server that is told to stop.

Nobody else notices, and nothing is left behind.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import openai
import pytest
from support.served import MODEL, PATIENCE, TRIES, data_url, raw_request, serving, until, user

from foreglance.serve.chat import ChatReply
from foreglance.serve.completions import CompletionReply
from foreglance.serve.responses import ResponseReply

CHAT = "/v1/chat/completions"
QUESTIONS = (
    {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0},
    {"messages": [user("Describe the image.", [data_url()])], "temperature": 0.8, "seed": 5},
    {"messages": [user("Describe the image.", [data_url()] * 3), user("How many shapes?")], "temperature": 0},
)


def body_of(question=QUESTIONS[1], **more) -> bytes:
    return json.dumps({**question, "max_tokens": 200, "ignore_eos": True, **more}).encode()


def answers_to(client, question):
    extra = {"return_tokens": True}
    return [
        t["id"] for t in client.chat.completions.create(model=MODEL, max_tokens=16, extra_body=extra, **question).tokens
    ]


def answers(served) -> list[list[int]]:
    with served.openai() as client:
        return [answers_to(client, question) for question in QUESTIONS]


@pytest.mark.case("C4")
@pytest.mark.parametrize("stream", (False, True), ids=("whole", "stream"))
@pytest.mark.parametrize("steps_before", (0, 1, 4), ids=("waiting", "prefill", "decoding"))
def test_a_client_that_leaves_is_forgotten_within_one_step(served, monkeypatch, stream, steps_before):
    served.settle()
    step, calls = served.engine._step, []
    monkeypatch.setattr(served.engine, "_step", lambda works: calls.append(1) or step(works))
    with served.held():
        connection = raw_request(served.url, body_of(stream=stream))
        until(lambda: served.engine.num_running + served.engine.num_waiting == 1, "the request is in the engine")
        served.gate.let_through(steps_before)
        connection.close()
        until(lambda: served.host.dispatch.num_open == 0, "the server has noticed")
    served.settle()
    assert steps_before <= len(calls) <= steps_before + 1  # one may have been on its way
    assert served.engine.num_running == served.engine.num_waiting == 0


@pytest.mark.case("C4")
def test_after_many_cancels_at_any_moment_nothing_is_held_and_answers_are_the_same(served):
    served.settle()
    expected, draw, number_of_clients = answers(served), random.Random(7), 60 * TRIES

    def leave(number: int) -> None:
        connection = raw_request(served.url, body_of(QUESTIONS[number % 3], stream=bool(number % 2), n=1 + number % 2))
        with connection:
            time.sleep(delays[number])
            if number % 5 == 0:
                connection.recv(300)

    delays = [draw.choice((0, 0.002, 0.01, 0.05, 0.2)) * draw.random() for _ in range(number_of_clients)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(leave, range(number_of_clients)))
    served.settle()
    assert served.engine.num_running == served.engine.num_waiting == 0
    assert answers(served) == expected


def test_a_request_that_fails_fails_alone(served, monkeypatch):
    expected, target = answers(served)[0], served.engine.target
    embed = target.embed_image
    monkeypatch.setattr(target, "embed_image", lambda image: 1 / 0)
    fresh = data_url(_picture((1, 2, 3)))
    bad = {"messages": [user("Describe the image.", [fresh])]}
    with served.openai() as client, ThreadPoolExecutor(2) as pool:
        with served.held():
            fine = pool.submit(lambda: answers_to(client, QUESTIONS[0]))
            failing = pool.submit(lambda: client.chat.completions.create(model=MODEL, **bad))
            until(lambda: served.host.dispatch.num_open == 2, "both are taken")
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            failing.result(PATIENCE)
        assert fine.result(PATIENCE) == expected
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(client.chat.completions.create(model=MODEL, stream=True, **bad))
        monkeypatch.setattr(target, "embed_image", embed)
        assert client.chat.completions.create(model=MODEL, max_tokens=2, **bad).choices
    served.settle()


def _picture(colour) -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(out, "PNG")
    return out.getvalue()


RUNNER = ("_part", "_reserve", "_pick")
STATIONS = ("_open", "_embed", *RUNNER, "_verify", "_commit", "_take", "_draft", "_settle")


@pytest.fixture(scope="module")
def expected(served):
    return answers(served)


def failing_once(work, at: int):
    """`work`, but for call number `at`, which finds no memory."""
    calls = itertools.count()

    def broken(*given):
        if next(calls) == at:
            raise MemoryError("no more memory")
        return work(*given)

    return broken


def outcomes(served, client, *, failing: Callable[[], None]) -> list[list[int] | str]:
    """What becomes of three requests side by side, of which the second is streamed: its tokens, or its error."""

    def ask(number: int) -> list[int] | str:
        try:
            if number != 1:
                return answers_to(client, QUESTIONS[number])
            chunks = client.chat.completions.create(
                model=MODEL, max_tokens=16, stream=True, extra_body={"return_tokens": True}, **QUESTIONS[1]
            )
            return [token["id"] for chunk in chunks for token in chunk.model_extra.get("tokens", ())]
        except openai.APIError as error:
            return error.message

    with ThreadPoolExecutor(3) as pool:
        with served.held():
            asked = [pool.submit(ask, number) for number in range(3)]
            until(lambda: served.host.dispatch.num_open == 3, "all are taken")
            failing()
        return [one.result(PATIENCE) for one in asked]


def count_of(http, finish_reason: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    name = f'foreglance_answers_total{{finish_reason="{finish_reason}"}} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.parametrize("at", (0, 3))
@pytest.mark.parametrize("station", STATIONS)
def test_an_error_at_any_station_is_told_to_the_requests_of_its_step(served, monkeypatch, expected, station, at):
    served.host.worker.ask(lambda engine: engine.forget()).result(PATIENCE)  # so that every prompt has rows to compute
    with served.openai() as client, served.http() as http, monkeypatch.context() as patch:
        before = count_of(http, "error")
        owner = served.engine._runner if station in RUNNER else served.engine
        broken = failing_once(getattr(owner, station), at)
        told = outcomes(served, client, failing=lambda: patch.setattr(owner, station, broken))
        failed = [one for one in told if isinstance(one, str)]
        assert all("MemoryError: no more memory" in one for one in failed)
        assert all(one == want for one, want in zip(told, expected, strict=True) if one not in failed)
        assert failed or (station, at) in (("_open", 3), ("_embed", 3))  # of three there is no fourth
        assert len(failed) <= (1 if station in ("_open", "_embed", "_part") else 3)
        assert count_of(http, "error") == before + len(failed)
        assert http.get("/health").status_code == 200
    served.settle()
    assert answers(served) == expected


@pytest.mark.parametrize("what", ("the drafter", "what is kept"))
def test_what_only_makes_answers_faster_may_fail_without_a_word_lost(served, monkeypatch, expected, what):
    drafter, prefixes = served.engine._drafters[served.engine.best_draft], served.engine._prefixes
    owner, name = (drafter, "propose") if what == "the drafter" else (prefixes, "put")
    with served.openai() as client, monkeypatch.context() as patch:
        broken = failing_once(getattr(owner, name), 1)
        assert outcomes(served, client, failing=lambda: patch.setattr(owner, name, broken)) == expected
    served.settle()
    assert answers(served) == expected


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "stream"))
@pytest.mark.parametrize("endpoint", ("chat", "completions", "responses"))
def test_code_of_the_server_that_breaks_costs_one_answer(served, monkeypatch, expected, endpoint, stream):
    """Not the engine's: what turns events into an answer. A stream ends with the error, and not in the middle."""
    reply = {"chat": ChatReply, "completions": CompletionReply, "responses": ResponseReply}[endpoint]
    with served.openai() as client, monkeypatch.context() as patch:
        patch.setattr(reply, "take", failing_once(reply.take, 1))
        with pytest.raises(openai.APIError) if endpoint != "responses" or not stream else nullcontext() as raised:
            events = ask_at(client, endpoint, stream)
        if raised is None:
            assert events[-1].type == "response.failed" and "MemoryError" in events[-1].response.error.message
        else:
            assert "the server failed (MemoryError)" in raised.value.message
    served.settle()
    assert answers(served) == expected


@pytest.mark.parametrize("fails", (False, True), ids=("whole", "broken"))
@pytest.mark.parametrize("endpoint", ("chat", "completions", "responses"))
def test_a_stream_says_its_end_also_if_it_broke(served, monkeypatch, endpoint, fails):
    """`[DONE]` behind all else where OpenAI says it; `/v1/responses` has events of its own. Nothing stays open."""
    reply, path, body = {
        "chat": (ChatReply, CHAT, {"messages": [{"role": "user", "content": "Hello!"}]}),
        "completions": (CompletionReply, "/v1/completions", {"prompt": "Hello!"}),
        "responses": (ResponseReply, "/v1/responses", {"input": "Hello!"}),
    }[endpoint]
    with served.http() as http, monkeypatch.context() as patch:
        if fails:
            patch.setattr(reply, "take", failing_once(reply.take, 1))
        said = http.post(path, json=body | {"stream": True})
    events = said.text.removesuffix("\n\n").split("\n\n")
    assert said.status_code == 200 and events.count("data: [DONE]") == (endpoint != "responses")
    if endpoint != "responses":
        assert events.pop() == "data: [DONE]"
    assert ("MemoryError" in events[-1]) == fails and sum("MemoryError" in event for event in events) == fails
    until(lambda: served.host.dispatch.num_open == 0, "the stream is closed")
    served.settle()


def ask_at(client, endpoint: str, stream: bool):
    if endpoint == "responses":
        answer = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=8, stream=stream)
    elif endpoint == "completions":
        answer = client.completions.create(model=MODEL, prompt="Hello!", max_tokens=8, stream=stream)
    else:
        answer = client.chat.completions.create(model=MODEL, max_tokens=8, stream=stream, **QUESTIONS[0])
    return list(answer) if stream else answer


def test_an_idle_connection_outlives_the_pools_of_clients(served):
    """Closed by both at the same time, it once was closed under a request that had just been sent on it."""
    assert 2 * openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry < served.server.config.timeout_keep_alive


@contextmanager
def breaking(engine, monkeypatch, *, for_good: bool):
    """Armed, the next step fails outside of any forward; `for_good`: and what it leaves is not whole."""
    with monkeypatch.context() as patch:
        admit = engine._admit

        def fail_once():
            patch.setattr(engine, "_admit", admit)
            raise RuntimeError("a bug in the scheduler")

        if for_good:
            patch.setattr(engine, "check", lambda: 1 / 0)
        yield lambda: patch.setattr(engine, "_admit", fail_once)


def test_an_engine_that_breaks_reaches_every_open_request_and_goes_on(served, monkeypatch):
    expected = answers(served)
    with served.openai() as client, ThreadPoolExecutor(3) as pool:
        with breaking(served.engine, monkeypatch, for_good=False) as arm:
            with served.held():
                open_ones = [pool.submit(answers_to, client, QUESTIONS[0]) for _ in range(3)]
                until(lambda: served.host.dispatch.num_open == 3, "all are taken")
                until(lambda: served.gate.let_through(1) or served.engine.num_running == 3, "all are in the engine")
                arm()
            for one in open_ones:
                with pytest.raises(openai.InternalServerError, match="a bug in the scheduler"):
                    one.result(PATIENCE)
        with served.http() as http:
            assert http.get("/health").json() == {"status": "ok"}
    served.settle()
    assert answers(served) == expected


def test_an_engine_that_cannot_go_on_is_said_to_be_dead(engine, monkeypatch):
    with serving(engine) as served, served.openai() as client, served.http() as http:
        with breaking(engine, monkeypatch, for_good=True) as arm:
            arm()
            with pytest.raises(openai.APIError, match="a bug"):
                list(client.chat.completions.create(model=MODEL, stream=True, **QUESTIONS[0]))
            until(lambda: http.get("/health").status_code == 503, "the server says so")
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as error:
                client.chat.completions.create(model=MODEL, stream=stream, **QUESTIONS[0])
            assert error.value.status_code == 503 and "a bug in the scheduler" in error.value.message
    engine.check()


@pytest.mark.parametrize("grace", (PATIENCE, 0), ids=("finishes", "runs out"))
def test_a_server_told_to_stop_ends_every_request_cleanly(engine, grace):
    with serving(engine, grace=grace) as served, served.openai() as client, ThreadPoolExecutor(2) as pool:

        def stream():
            chunks = client.chat.completions.create(
                model=MODEL, max_tokens=60, stream=True, extra_body={"ignore_eos": True}, **QUESTIONS[1]
            )
            return [chunk.choices[0].finish_reason for chunk in chunks][-1]

        with served.held():
            streamed, whole = pool.submit(stream), pool.submit(answers_to, client, QUESTIONS[0])
            until(lambda: served.host.dispatch.num_open == 2, "both are taken")
            served.server.should_exit = True
            until(lambda: served.host.dispatch.is_stopping, "the server knows")
            if not grace:  # the engine is in the middle of a step that takes long
                until(lambda: served.host.dispatch.num_open == 0, "the grace is over")
        if grace:
            assert streamed.result(PATIENCE) == "length" and len(whole.result(PATIENCE)) == 16
        else:
            for one in (streamed, whole):
                with pytest.raises(openai.APIError, match="stopped before this answer was finished"):
                    one.result(PATIENCE)
    engine.check()
    assert engine.num_running == engine.num_waiting == 0


def test_sigterm_finishes_what_is_open_and_the_process_ends_well():
    command = [
        sys.executable,
        "-c",
        "from foreglance.cli import main; main()",
        "serve",
        "--port",
        "0",
        "--json",
        "--weights",
        "fp32",
        "--slots",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        url = json.loads(line)["url"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            chunks = client.chat.completions.create(
                model=MODEL, stream=True, max_tokens=300, extra_body={"ignore_eos": True}, **QUESTIONS[0]
            )
            next(iter(chunks))
            process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        out, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and out == "" and "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
