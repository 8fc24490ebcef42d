"""What cannot be served is refused in OpenAI's shape, with the field named, before any work."""

import io
import json
import socket
import time
import zlib
from dataclasses import replace

import openai
import pytest
from PIL import Image
from support.served import MODEL, PATIENCE, data_url, raw_request, serving, until, user

from foreglance.serve.settings import LOOPBACK_NAMES, ServerSettings, digest

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4},
    TEXT: {"model": MODEL, "prompt": "Hello!", "max_tokens": 4},
    RESPONSES: {"model": MODEL, "input": "Hello!", "max_output_tokens": 4},
}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def turn(*parts, **more):
    return {"messages": [{"role": "user", "content": list(parts), **more}]}


def url(text, **more):
    return turn({"type": "image_url", "image_url": {"url": text, **more}})


CASES = [
    (CHAT, {"temprature": 1}, "temprature"),
    (CHAT, {"user": "me"}, "user"),
    (CHAT, {"functions": []}, "functions"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 9}, "max_completion_tokens"),
    (CHAT, {"max_tokens": "4"}, "max_tokens"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_k": -1}, "top_k"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"seed": 1.5}, "seed"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ["a"] * 17}, "stop"),
    (CHAT, {"stop": {"a": 1}}, "stop"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias.1"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    (CHAT, {"return_tokens": True, "n": 2}, "return_tokens"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"speculative": {"depth": 16}}, "speculative.depth"),
    (CHAT, {"speculative": {"depth": "deep"}}, "speculative.depth"),
    (CHAT, {"speculative": {"draft": "magic"}}, "speculative.draft"),
    (CHAT, {"speculative": {"draft": "model"}}, "speculative.draft"),
    (CHAT, {"speculative": {"images": "gap"}}, "speculative.images"),
    (CHAT, {"speculative": {"n_max": 3}}, "speculative.n_max"),
    (CHAT, {"speculative": 3}, "speculative"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "system", "content": [PART]}]}, "messages[0].content[0].type"),
    (CHAT, turn({"type": "input_audio"}), "messages[0].content[0].type"),
    (CHAT, turn({"type": "text"}), "messages[0].content[0].text"),
    (CHAT, url("data:image/png;base64,****"), "messages[0].content[0].image_url.url"),
    (CHAT, url("data:image/png,abc"), "messages[0].content[0].image_url.url"),
    (CHAT, url("data:text/plain;base64,AAAA"), "messages[0].content[0].image_url.url"),
    (CHAT, url("file:///etc/passwd"), "messages[0].content[0].image_url.url"),
    (CHAT, url("/etc/passwd"), "messages[0].content[0].image_url.url"),
    (CHAT, url("http://example.org/a.png"), "messages[0].content[0].image_url.url"),
    (CHAT, url(data_url(), detail="low"), "messages[0].content[0].image_url.detail"),
    (CHAT, url("data:image/png;base64,AAAA"), "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "messages"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [1, -1]}, "prompt"),
    (TEXT, {"prompt": [99999]}, "prompt"),
    (TEXT, {"prompt": ["a"] * 9, "n": 2}, "prompt"),
    (TEXT, {"prompt": "<|image_pad|>"}, "prompt"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x/y"}]}]},
        "input[0].content[0].image_url",
    ),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"n": 2}, "n"),
]


@pytest.mark.parametrize(("path", "change", "param"), CASES, ids=[f"{c[2]}-{i}" for i, c in enumerate(CASES)])
def test_a_field_that_cannot_be_served_is_named(served, path, change, param):
    body = {
        name: value
        for name, value in {**BODIES[path], **change}.items()
        if value is not None or name in ("messages", "prompt")
    }
    with served.http() as http:
        for stream in (False, True) if "stream" not in body else (True,):
            options = {} if "stream_options" in change else {"stream": stream}
            response = http.post(path, json={**body, **options})
            error = response.json()["error"]
            assert response.status_code == 400 and error["type"] == "invalid_request_error"
            assert error["param"] == param and param in error["message"] and error["code"]
    assert served.host.dispatch.num_open == 0


def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**BODIES[CHAT], temperature=-1)
    assert error.value.param == "temperature" and error.value.code == "invalid_value"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b'"text"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"a": "\\ud800", "\\ud800": 1}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "application/json"),
        (json.dumps(BODIES[CHAT]).encode(), "text/plain"),
        (json.dumps(BODIES[CHAT]).encode(), "application/x-www-form-urlencoded"),
    ],
)
def test_what_is_no_json_object_is_refused(served, body, kind):
    with served.http() as http:
        response = http.post(CHAT, content=body, headers={"Content-Type": kind})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there_are_errors_of_the_same_shape(served):
    with served.http() as http:
        for method, path, status, words in (
            ("GET", "/v1/nothing", 404, "there is no /v1/nothing here"),
            ("POST", "/v1/embeddings", 404, "there is no /v1/embeddings here"),
            ("GET", CHAT, 405, f"{CHAT} takes POST"),
            ("POST", "/health", 405, "/health takes GET"),
            ("GET", "/nothing.js", 404, "Not Found"),
        ):
            response = http.request(method, path)
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (status, "invalid_request_error") and words in error[
                "message"
            ]
            if words.startswith(path):
                assert response.headers["Allow"] == words.rpartition(" ")[2]


# Sizes


def test_a_body_above_the_limit_is_refused_before_it_is_read(engine):
    def pieces():
        for _ in range(64):
            yield b"x" * 1024

    with serving(engine, ServerSettings(max_body=4096)) as served, served.http() as http:
        declared = http.post(CHAT, json={"messages": [user("x" * 5000)]})
        streamed = http.post(CHAT, content=pieces(), headers={"Content-Type": "application/json"})
        for response in (declared, streamed):
            assert response.status_code == 413 and "4096" in response.json()["error"]["message"]
        assert http.post(CHAT, json=BODIES[CHAT]).status_code == 200


def test_a_body_that_stands_still_is_not_waited_for(engine):
    with serving(engine, ServerSettings(body_timeout=0.2)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as slow:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n".encode() + b'{"mess')
            assert slow.recv(65536).startswith(b"HTTP/1.1 408")


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels in few bytes: its header is true, its pixels need not even be there."""
    png = io.BytesIO()
    Image.new("1", (8, 8)).save(png, "PNG")
    data = bytearray(png.getvalue())
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def test_pictures_too_large_or_too_many_are_refused(served, engine, monkeypatch):
    monkeypatch.setattr(engine, "settings", replace(engine.settings, max_images=2))
    with served.http() as http:
        for images, code in (([bomb(30_000)], "image_too_large"), ([bomb(4)] * 3, "too_many_images")):
            body = {**BODIES[CHAT], "messages": [user("?", [data_url(image) for image in images])]}
            began = time.monotonic()
            error = http.post(CHAT, json=body).json()["error"]
            assert error["code"] == code and error["param"] == "messages"
            assert time.monotonic() - began < PATIENCE / 4


def test_a_prompt_longer_than_the_context_is_refused(served, engine):
    with served.http() as http:
        error = http.post(TEXT, json={**BODIES[TEXT], "prompt": [300] * engine.context}).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert str(engine.context) in error["message"]


def test_beyond_the_queue_requests_are_told_when_to_come_again(engine):
    with serving(engine, ServerSettings(queue=1)) as served, served.openai() as client:
        with served.held():
            waiting = [raw_request(served.url, json.dumps(BODIES[CHAT]).encode()) for _ in range(5)]
            until(lambda: served.host.dispatch.num_open == 5, "slots and queue are full")
            with pytest.raises(openai.RateLimitError) as error:
                client.chat.completions.create(**BODIES[CHAT])
            assert 1 <= int(error.value.response.headers["Retry-After"]) <= 60
            assert error.value.code == "queue_full"
        for connection in waiting:
            with connection:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        served.settle()
        assert client.chat.completions.create(**BODIES[CHAT]).usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**BODIES[CHAT], n=6)
        assert error.value.param == "n"


# Who may ask


def test_a_key_is_asked_for_everywhere_but_at_the_door(engine):
    settings = ServerSettings(api_keys=(digest("one"), digest("two"), digest("drei\u00df")))
    with serving(engine, settings) as served:
        for key in ("one", "two"):
            with served.openai(api_key=key) as client:
                assert client.models.list().data
        with served.http(headers={"Authorization": "Bearer drei\u00df".encode()}) as http:
            assert http.get("/v1/models").status_code == 200
        for key in ("three", "on", "\u00e9"):
            with served.http(headers={"Authorization": f"Bearer {key}".encode()}) as http:
                assert http.get("/v1/models").status_code == 401
        with served.http() as http:
            for path in ("/v1/models", "/metrics", "/props", "/openapi.json", "/nothing"):
                response = http.get(path)
                assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
            assert http.post(CHAT, json=BODIES[CHAT]).status_code == 401
            assert http.get("/health").status_code == 200 and http.get("/").status_code == 200
        with served.http(headers={"Authorization": "Basic one"}) as http:
            assert http.get("/v1/models").status_code == 401


def test_a_server_on_loopback_answers_to_its_own_names_only(engine):
    with serving(engine, ServerSettings(hosts=LOOPBACK_NAMES)) as served, served.http() as http:
        for name, status in (("127.0.0.1", 200), ("localhost:1", 200), ("[::1]:1", 200), ("evil.example", 403)):
            assert http.get("/v1/models", headers={"Host": name}).status_code == status


def test_web_pages_of_other_origins_are_refused_unless_allowed(engine):
    page, other = "https://page.example", "https://evil.example"
    with serving(engine, ServerSettings(cors_origins=(page,))) as served, served.http() as http:

        def post(origin):
            return http.post("/tokenize", json={"content": "a"}, headers={"Origin": origin})

        assert post(page).headers["Access-Control-Allow-Origin"] == page
        assert post(served.url).status_code == 200
        for origin in (other, "null"):
            assert post(origin).status_code == 403 and "Access-Control-Allow-Origin" not in post(origin).headers
        preflight = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert http.options(CHAT, headers=preflight).status_code == 200
        assert http.options(CHAT, headers={**preflight, "Origin": other}).status_code == 400


def test_cors_is_closed_by_default_and_answers_are_not_stored_or_sniffed(served):
    with served.http() as http:
        response = http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert "Access-Control-Allow-Origin" not in response.headers
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    assert "server" not in response.headers
