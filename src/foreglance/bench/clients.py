"""Clients of a server under load: what they ask, how they behave, and what became of each request.

Every draw is from a seeded generator. One request is one call of `ask`, which never raises for what a server does.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import httpcore2 as httpcore
import PIL.Image

from foreglance.bench.prompts import TALK, image_cases, talk_before, text_cases
from foreglance.request import Message, Text

POOL = 24  # conversations of each kind: few enough that some come again and find their rows kept
PAST_TURNS = 12  # of a long conversation
LEAVES_WITHIN = 0.4  # seconds: in the queue, in the prompt or in the answer
SLOW_PAUSE = 0.02  # seconds between two reads of a slow reader
SLOW_BUFFER = 4096  # bytes that its socket takes meanwhile
PATIENCE = 120.0  # seconds without a byte until a client gives up
TIMEOUTS = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), PATIENCE)}

Kind = Literal["text", "short", "image", "two images", "chat", "long", "leaving", "slow"]
SHARES: dict[Kind, int] = {
    "text": 4,
    "short": 3,
    "image": 4,
    "two images": 1,
    "chat": 2,
    "long": 2,
    "leaving": 3,
    "slow": 1,
}
End = Literal["finished", "left", "refused", "failed"]


@dataclass(frozen=True)
class Wish:
    """A request and how its client behaves: it leaves after `patience` seconds, and reads slowly if `slow`."""

    kind: Kind
    body: dict[str, Any]
    patience: float | None = None
    slow: bool = False

    @property
    def streams(self) -> bool:
        return self.body["stream"]

    @property
    def drafts(self) -> bool:
        return "speculative" not in self.body


@dataclass
class Outcome:
    """What became of a request. Times in seconds: `at` since the beginning of the run, the others since it was sent.
    `first` is known of streams alone. `why` tells of a failure."""

    kind: Kind
    drafts: bool
    at: float
    end: End = "failed"
    first: float | None = None
    whole: float | None = None
    tokens: int = 0
    why: str | None = None

    @property
    def is_timed(self) -> bool:
        """Read to its end by a client that would have waited and that does not dawdle."""
        return self.end == "finished" and self.kind not in ("leaving", "slow")


class Broken(Exception):
    """An answer that is not what was promised."""


LOST = (Broken, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError)
UNREADABLE = (ValueError, LookupError, TypeError)  # what reading an answer of another shape raises


@cache
def conversations(kind: Kind) -> list[list[dict[str, Any]]]:
    """`POOL` lists of messages as the API takes them."""
    texts, pictures = text_cases(POOL), image_cases(POOL)
    if kind == "short":
        return [[as_json(Message.of("user", words))] for words in TALK]
    if kind == "two images":
        pictures = image_cases(POOL, images_each=2)
    made = {
        "chat": [(*talk_before(1, [seen]), *said.messages) for seen, said in zip(pictures, texts, strict=True)],
        "long": [(*talk_before(PAST_TURNS, texts[i:] + texts[:i]), *texts[i].messages) for i in range(POOL)],
        "image": [case.messages for case in pictures],
        "two images": [case.messages for case in pictures],
        "text": [case.messages for case in texts],
    }
    return [[as_json(message) for message in messages] for messages in made[kind]]


def as_json(message: Message) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "image_url", "image_url": {"url": _data_url(part.source)}}
        for part in message.parts
    ]
    return {"role": message.role, "content": parts}


def _data_url(picture: PIL.Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def draw(rng: random.Random, model: str, takes_images: bool = True) -> Wish:
    """Any kind of request, with drafts or without with equal chance, whatever else is drawn."""
    kinds = [kind for kind in SHARES if takes_images or kind not in ("image", "two images", "chat")]
    (kind,) = rng.choices(kinds, [SHARES[kind] for kind in kinds])
    like: Kind = kind
    if kind in ("leaving", "slow"):
        like = rng.choice(("text", "image", "long")) if takes_images else rng.choice(("text", "long"))
    body = {
        "model": model,
        "messages": rng.choice(conversations(like)),
        "max_tokens": rng.randint(1, 4) if kind == "short" else rng.randint(16, 96),
        "temperature": rng.choice((0.0, 0.8)),
        "seed": rng.randrange(2**31),
        "stream": kind == "slow" or rng.random() < 0.6,
    }
    if rng.random() < 0.5:
        body["speculative"] = {"depth": 0}
    return Wish(kind, body, rng.uniform(0, LEAVES_WITHIN) if kind == "leaving" else None, kind == "slow")


def connections(slow: bool = False) -> httpcore.AsyncConnectionPool:
    """A client's connections; those of a slow reader take little at a time."""
    narrow = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)] if slow else None
    return httpcore.AsyncConnectionPool(max_connections=None, socket_options=narrow)


async def ask(pool: httpcore.AsyncConnectionPool, url: str, wish: Wish, began: float) -> Outcome:
    """Send one request and read its answer, or leave before its end."""
    sent = time.perf_counter()
    outcome = Outcome(wish.kind, wish.drafts, sent - began)
    try:
        async with asyncio.timeout(wish.patience):
            outcome.end = await _answer(pool, url, wish, outcome, sent)
        outcome.whole = time.perf_counter() - sent
    except TimeoutError:
        outcome.end = "left"
    except LOST as error:
        outcome.why = str(error) or type(error).__name__
    except UNREADABLE as error:
        outcome.why = f"an answer of another shape: {error!r}"
    return outcome


async def _answer(pool: httpcore.AsyncConnectionPool, url: str, wish: Wish, outcome: Outcome, sent: float) -> End:
    async with pool.stream(
        "POST",
        f"{url}/v1/chat/completions",
        headers={"Content-Type": "application/json"},
        content=json.dumps(wish.body).encode(),
        extensions=TIMEOUTS,
    ) as response:
        if response.status == 200 and wish.streams:
            await _stream(response, wish, outcome, sent)
            return "finished"
        said = await response.aread()
    if response.status == 429:
        return "refused"
    if response.status != 200:
        raise Broken(f"status {response.status}: {said[:200].decode(errors='replace')}")
    _whole(said, outcome)
    return "finished"


def _whole(said: bytes, outcome: Outcome) -> None:
    answer = json.loads(said)
    outcome.tokens = answer["usage"]["completion_tokens"]
    ended = answer["choices"][0]["finish_reason"]
    if ended not in ("stop", "length"):
        raise Broken(f"the answer ended with {ended!r}")


async def _stream(response: httpcore.Response, wish: Wish, outcome: Outcome, sent: float) -> None:
    """Read to the end. Raises `Broken` unless there was an end of the answer and then one of the stream."""
    ended = None
    async for data in _events(response, SLOW_PAUSE if wish.slow else 0.0):
        if data == "[DONE]":
            if ended not in ("stop", "length"):
                raise Broken(f"a stream whose answer ended with {ended!r}")
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise Broken(f"an error in the stream: {chunk['error'].get('message')}")
        for choice in chunk["choices"]:
            ended = choice["finish_reason"] or ended
            if choice["delta"].get("content"):
                outcome.first = outcome.first or time.perf_counter() - sent
        outcome.tokens = (chunk.get("timings") or {}).get("predicted_n", outcome.tokens)
    raise Broken("the stream stopped before its end")


async def _events(response: httpcore.Response, pause: float) -> AsyncIterator[str]:
    """The data of server-sent events, one line each."""
    rest = b""
    async for piece in response.aiter_stream():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode()
        await asyncio.sleep(pause)


def counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """How many requests of each kind ended how."""
    found: dict[str, dict[str, int]] = {}
    for kind in SHARES:
        mine = [one.end for one in outcomes if one.kind == kind]
        if mine:
            found[kind] = {end: mine.count(end) for end in ("finished", "left", "refused", "failed")}
    return found
