"""The embedded models as a user runs them: loaded once, a fresh engine for each test, pictures made on the fly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import PIL.Image

from foreglance import Engine, Message, Request, Result, SamplingParams, Settings, Speculation, Token
from foreglance.bench.scenes import HELD_OUT_SEED, scene_from_seed
from foreglance.models.weights import find_assistant

SEEING = ("tiny-qwen", "tiny-step", "tiny-gemma")  # one for each kind of draft: own cache, chain, the target's cache
RED, GREEN, BLUE = (230, 30, 30), (30, 160, 60), (40, 70, 230)


@cache
def loaded(name: str, draft: str | None = None) -> Engine:
    return Engine.load(name, Settings(try_drafts=False), draft_model=draft or find_assistant(name))


def engine_of(name: str = "tiny-qwen", draft: str | None = None, **settings) -> Engine:
    """A fresh engine on shared weights. No prefix is reused unless asked for."""
    one = loaded(name, draft)
    made = Settings(**{"prefix_cache_bytes": 0, "slots": 4, **settings})
    return Engine(one.target, one._prompter, made, one.self_test, one._draft_model)


def picture(width: int, height: int, colour=RED) -> PIL.Image.Image:
    return PIL.Image.new("RGB", (width, height), colour)


def scene(number: int) -> PIL.Image.Image:
    """A picture that no embedded model was trained on."""
    return scene_from_seed(HELD_OUT_SEED + 1000 + number)[1]


def ask(text: str, images: Sequence = (), **options) -> Request:
    return talk([Message.of("user", text, images)], **options)


def talk(messages: Sequence[Message], draft="auto", depth=3, policy="see", grammar=None, **sampling) -> Request:
    params = SamplingParams(**{"max_tokens": 48, **sampling})
    return Request(tuple(messages), params, Speculation(draft, depth, policy), grammar=grammar)


def run(engine: Engine, *requests: Request) -> list[Result]:
    """Together, to the end; nothing fails and nothing stays."""
    results = engine.generate(requests)
    assert all(result.error is None for result in results)
    engine.check()
    return results


def plain(request: Request, name: str = "tiny-qwen", draft: str | None = None, **settings) -> Result:
    """The same request alone, drafts off."""
    off = replace(request, speculation=Speculation("none"), id=f"{request.id} alone")
    return run(engine_of(name, draft, **settings), off)[0]


def tokens_of(engine: Engine, request: Request) -> list[Token]:
    """As they come."""
    return [token for event in engine.stream(request) for token in event.tokens]


def same(one: Result, other: Result) -> None:
    assert one.token_ids == other.token_ids
    assert one.text == other.text and one.finish_reason == other.finish_reason
