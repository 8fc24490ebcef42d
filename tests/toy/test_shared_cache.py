"""A draft that reads the target's cache never changes a token: tiny random Gemma-4 with its assistant."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.gemma import FULL_HEAD, ODD, PAIR, TALL, WIDE, write_assistant, write_gemma4

from foreglance import Engine, Message, Request, SamplingParams, Settings, Speculation
from foreglance.drafters.shared_cache import SharedCacheDrafter
from foreglance.images import open_picture
from foreglance.models import gemma4_assistant
from foreglance.models.registry import auto_config, load_model
from foreglance.prompt import Prompter, make_rows

NUM_TOKENS = 16
CHATS = {
    "text": lambda salt: [Message.of("user", f"where is the {salt} square next to the blue circle?")],
    "one image": lambda salt: [Message.of("user", f"what is {salt} here?", [WIDE])],
    "two images": lambda salt: [Message.of("user", f"compare {salt}", [TALL, ODD])],
    "image in turn 2": lambda salt: [
        Message.of("user", f"hello {salt}"),
        Message.of("assistant", "hello, hello"),
        Message.of("user", "and this?", [TALL]),
    ],
}
AT_THE_END = "image at the very end"  # the first guess starts from an image row
SHAPES = (*CHATS, AT_THE_END)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(loaded target, assistant)."""
    checkpoint = write_gemma4(tmp_path_factory.mktemp("gemma"), PAIR)
    made = write_assistant(tmp_path_factory.mktemp("assistant"), FULL_HEAD, checkpoint)
    loaded = load_model(str(checkpoint.folder), Settings(weights="fp32"))
    return loaded, gemma4_assistant.load("the assistant", made.folder, auto_config(made.folder), loaded.target)


def engine_of(pair, **settings) -> Engine:
    loaded, reader = pair
    target = loaded.target
    prompter = Prompter(loaded.tokenizer, target.spec.image_token, target.spec.rule, target.prepare)
    made = Settings(**{"grid": 16, "slots": 4, **settings})
    return Engine(target, prompter, made, None, lambda around: SharedCacheDrafter(reader, around.target_store))


def request_of(shape: str, salt: str, depth: int, temperature: float, seed: int) -> Request:
    messages = CHATS[shape](salt) if shape in CHATS else [Message.of("user", salt)]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=temperature, seed=seed)
    return Request(messages, sampling, Speculation("assistant" if depth else "none", depth or 1))


def rows_of(pair, engine: Engine, request: Request, shape: str):
    if shape in CHATS:
        return engine.prepare(request)
    loaded, _ = pair
    spec, text = loaded.target.spec, request.messages[0].parts[0].text
    image = replace(loaded.target.prepare(open_picture(TALL, 10**6)), layout=None)
    rows = make_rows([*loaded.tokenizer.encode(text), spec.image_token], spec.image_token, [image], spec.rule)
    assert rows.is_image[-1]
    return rows


def run(pair, engine: Engine, shape: str, requests: list[Request]):
    """Results, in order; nothing is left behind."""
    names = [engine.add_rows(request, rows_of(pair, engine, request, shape)) for request in requests]
    results = {}
    while not engine.is_idle:
        results |= {event.request_id: event.result for event in engine.step() if event.result is not None}
        engine.check()
    assert all(result.error is None for result in results.values())
    return [results[name] for name in names]


@pytest.fixture(scope="module")
def alone(pair):
    """Tokens with drafts off and nobody else in the engine."""

    @cache
    def get(shape: str, salt: str, temperature: float, seed: int):
        return run(pair, engine_of(pair), shape, [request_of(shape, salt, 0, temperature, seed)])[0].token_ids

    return get


@pytest.mark.case("A16", "A18", "A22")
@pytest.mark.parametrize("num_sequences", (1, 3))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("depth", (1, 3, 7))
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_never_change_a_token(pair, alone, shape, depth, temperature, num_sequences):
    """Cases A16, A18, A22."""
    salts = ["red", "green, or not", "a very long name of something blue"][:num_sequences]
    requests = [request_of(shape, salt, depth, temperature, seed) for seed, salt in enumerate(salts)]
    results = run(pair, engine_of(pair), shape, requests)
    for seed, (salt, result) in enumerate(zip(salts, results, strict=True)):
        assert result.draft.kind == "assistant" and result.draft.off_because is None
        assert sum(result.timings.drafted) > 0
        assert result.token_ids == alone(shape, salt, temperature, seed)


def test_the_pair_would_notice_a_fault(pair, alone):
    """Prompts decide the text, guesses are right and wrong, also beyond the first depth."""
    assert len({alone(shape, "red", 0.0, 0) for shape in SHAPES}) >= len(SHAPES) - 1
    results = [run(pair, engine_of(pair), shape, [request_of(shape, "red", 3, 0.0, 0)])[0] for shape in SHAPES]
    drafted = [sum(result.timings.drafted) for result in results]
    accepted = [sum(result.timings.accepted) for result in results]
    assert 0.2 < sum(accepted) / sum(drafted) < 1.0
    assert any(len(result.timings.accepted) > 1 and result.timings.accepted[1] for result in results)


@pytest.mark.case("A22")
def test_eight_requests_half_of_them_with_images_all_finish(pair, alone):
    """Case A22: more requests than slots, text and images, several depths."""
    engine = engine_of(pair, slots=3)
    kinds = [(("text", "two images")[n % 2], f"salt {n}", (1, 2, 5)[n % 3], n) for n in range(8)]
    names, results = [], {}
    for shape, salt, depth, seed in kinds:
        request = request_of(shape, salt, depth, 0.8, seed)
        names.append(engine.add_rows(request, engine.prepare(request)))
    while not engine.is_idle:
        results |= {event.request_id: event.result for event in engine.step() if event.result is not None}
    for name, (shape, salt, _, seed) in zip(names, kinds, strict=True):
        assert results[name].token_ids == alone(shape, salt, 0.8, seed)
    engine.check()


@pytest.mark.parametrize("shape", ("text", "one image"))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_a_reused_prefix_drafts_on_without_memory(pair, shape, temperature):
    """The second turn goes on where the first ended, with drafts as without, and drafts at once."""
    turns = {}
    for depth in (0, 3):
        engine, history = engine_of(pair), CHATS[shape]("red")
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=temperature, seed=5)
        speculation = Speculation("assistant" if depth else "none", depth or 1)
        first = engine.generate(Request(history, sampling, speculation))[0]
        again = engine.generate(Request(history, sampling, speculation))[0]
        longer = [*history, Message.of("assistant", first.text), Message.of("user", "and now?", [TALL])]
        second = engine.generate(Request(longer, sampling, speculation))[0]
        turns[depth] = first.token_ids, again.token_ids, second.token_ids
        assert again.timings.cached_rows >= 16 and second.timings.cached_rows >= 16
        assert again.token_ids == first.token_ids
        assert not depth or (sum(again.timings.drafted) and sum(second.timings.drafted))
        engine.check()
    assert turns[0] == turns[3]


def test_rows_that_are_not_verified_are_never_lent(pair):
    """A row more than the target has committed, or one that it may still forget, is a fault and no guess."""
    engine = engine_of(pair)
    request = request_of("text", "red", 3, 0.0, 0)
    engine.add_rows(request, rows_of(pair, engine, request, "text"))
    while not any(event.tokens for event in engine.step()):
        pass
    (running,) = engine._running.values()
    drafter, sequence = engine._drafters["assistant"], running.sequence
    assert drafter._lent(sequence)
    engine._store.reserve(sequence.id, 1)
    with pytest.raises(RuntimeError, match="are verified"):
        drafter._lent(sequence)


@pytest.mark.parametrize("after", (1, 3, 6))
def test_a_cancelled_request_leaves_nothing_behind(pair, alone, after):
    engine = engine_of(pair, slots=2)
    gone, stays = request_of("one image", "red", 3, 0.8, 0), request_of("two images", "red", 3, 0.8, 1)
    results = {}
    for request, shape in ((gone, "one image"), (stays, "two images")):
        engine.add_rows(request, rows_of(pair, engine, request, shape))
    for _ in range(after):
        results |= {event.request_id: event.result for event in engine.step() if event.result is not None}
    engine.cancel(gone.id)
    more = request_of("text", "blue", 3, 0.8, 2)
    engine.add_rows(more, engine.prepare(more))
    while not engine.is_idle:
        results |= {event.request_id: event.result for event in engine.step() if event.result is not None}
        engine.check()
    assert results[gone.id].finish_reason == "cancelled"
    assert results[stays.id].token_ids == alone("two images", "red", 0.8, 1)
    assert results[more.id].token_ids == alone("text", "blue", 0.8, 2)
