"""Pictures from other servers: public addresses only, whatever names and redirects say, and within limits."""

import asyncio
import ipaddress
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpcore2
import openai
import pytest
from support.served import MODEL, SCENE, data_url, serving, user

from foreglance.serve.errors import ApiError
from foreglance.serve.remote import Remote, is_public
from foreglance.serve.settings import ServerSettings

PICTURE = SCENE.read_bytes()
PUBLIC = ("93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "2002:0101:0101::1", "64:ff9b::101:101")
PRIVATE = (
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1", "203.0.113.5"),
    *("::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2001:db8::1"),
    *("2002:7f00:1::", "2002:0a00:0001::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:0:53aa:64c::1"),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_public(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PRIVATE)
def test_all_other_addresses_are_not(address):
    assert not is_public(ipaddress.ip_address(address))


class Pages(BaseHTTPRequestHandler):
    """A picture and what may be wrong with one."""

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        status, headers, pieces = self.server.pages[self.path.partition("?")[0]]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in pieces():
                self.wfile.write(piece)
        except OSError:
            pass  # the client had enough

    def log_message(self, *_):
        pass


def slow():
    for _ in range(100):
        time.sleep(0.05)
        yield b"x"


def endless():
    while True:
        yield b"x" * 65536


@contextmanager
def pages():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    url = f"http://127.0.0.1:{server.server_port}"
    server.asked = []
    server.pages = {
        "/picture.png": (200, {}, lambda: [PICTURE]),
        "/moved": (302, {"Location": "/picture.png?again"}, lambda: []),
        "/elsewhere": (302, {"Location": f"http://localhost:{server.server_port}/picture.png"}, lambda: []),
        "/round": (302, {"Location": "/round"}, lambda: []),
        "/file": (302, {"Location": "file:///etc/passwd"}, lambda: []),
        "/none": (404, {}, lambda: [b"no"]),
        "/slow": (200, {}, slow),
        "/endless": (200, {}, endless),
    }
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield url, server.asked
    finally:
        server.shutdown()
        server.server_close()


def fetch(url, **options):
    async def go():
        return await Remote(**{"max_bytes": 1 << 20, "seconds": 0.5, **options}).fetch([("field", url)])

    return asyncio.run(go())[url]


def anywhere(address):
    return True


def refusal(url, **options) -> str:
    with pytest.raises(ApiError) as error:
        fetch(url, **options)
    assert error.value.status == 400 and error.value.param == "field" and error.value.code == "image_fetch_failed"
    return error.value.message


def test_a_picture_is_fetched_through_redirects_without_compression_or_secrets():
    with pages() as (url, asked):
        for path in ("/picture.png", "/moved", "/elsewhere"):
            assert fetch(url + path, allowed=anywhere) == PICTURE
        for _, headers in asked:
            assert headers["Accept-Encoding"] == "identity"
            assert not {"Cookie", "Authorization", "Referer"} & set(headers)


def test_what_is_not_public_is_never_asked_by_name_number_or_redirect():
    with pages() as (url, asked):
        port = url.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "[::1]", "127.1", "2130706433", "0x7f.1", "0"):
            assert "not" in refusal(f"http://{host}:{port}/picture.png")
        assert asked == []
        only_numbers = iter([True, False])  # the redirect's address is another one, and is not allowed
        assert "not a public one" in refusal(f"{url}/elsewhere", allowed=lambda address: next(only_numbers))
        assert len(asked) == 1


def test_a_name_is_resolved_once_and_what_was_checked_is_connected_to(monkeypatch):
    """A name that points to a public address first and to loopback afterwards (DNS rebinding)."""
    answers = iter(["93.184.215.14", "127.0.0.1"])
    connected = []

    async def resolve(self, host, port, **_):
        return [(None, None, None, "", (next(answers), port))]

    async def connect(self, host, *_, **__):
        connected.append(host)
        raise httpcore2.ConnectError("no network here")

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect)
    assert "connection failed" in refusal("http://rebinding.example/a.png")
    assert connected == ["93.184.215.14"]


@pytest.mark.parametrize(
    ("path", "words"),
    (
        ("/none", "answered 404"),
        ("/slow", "did not come within 0.5 s"),
        ("/endless", "larger than"),
        ("/round", "redirected more than 3 times"),
        ("/file", "only http and https"),
    ),
)
def test_what_cannot_be_had_is_said(path, words):
    with pages() as (url, _):
        assert words in refusal(url + path, allowed=anywhere)


@pytest.mark.parametrize(
    "url",
    (
        "http://user:secret@example.org/a.png",
        "http:///a.png",
        "http://exa mple.org/",
        "http://example.org:99999/",
        "http://example.org\\@evil.example/",
        "http://ex\u00e4mple.org/",
        "http://[::1/",
        "http://example.org/\r\nHost: evil",
        "https://",
    ),
)
def test_malformed_addresses_are_refused(url):
    assert "malformed" in refusal(url, allowed=anywhere)


def test_a_server_fetches_only_when_it_is_told_to(engine):
    with pages() as (url, asked), serving(engine, ServerSettings(remote_images=True)) as served:
        served.host.remote = Remote(1 << 20, allowed=anywhere)
        with served.openai() as client:

            def look(address):
                messages = [user("Describe the image.", [address, address])]
                return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)

            remote, local = look(f"{url}/picture.png"), look(data_url())
            assert remote.choices[0].message.content == local.choices[0].message.content and len(asked) == 1
            with pytest.raises(openai.BadRequestError) as error:
                look(f"{url}/none")
            assert error.value.param == "messages[0].content[0].image_url.url"
            served.settle()
            served.host.remote = Remote(1 << 20)
            with pytest.raises(openai.BadRequestError, match="not a public one"):
                look(f"{url}/picture.png")
