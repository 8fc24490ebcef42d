"""Clients that leave, requests that fail, an engine that breaks, a server that is told to stop.

Nobody else notices, and nothing is left behind.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
from support.served import MODEL, PATIENCE, TRIES, data_url, raw_request, serving, until, user

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
    forward, calls = served.engine.target.forward, []
    monkeypatch.setattr(served.engine.target, "forward", lambda *given: calls.append(1) or forward(*given))
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
