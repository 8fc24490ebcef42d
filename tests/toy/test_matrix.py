"""Drafts never change a token: every drafter, prompt, depth, temperature and batch against drafts off, alone."""

from functools import lru_cache

import pytest
from support.toy import ByteTokenizer, ask, picture, run, talk, toy_engine, toy_rows, toy_target

from foreglance import Message
from foreglance.images import open_picture
from foreglance.prompt import MRope, OneAxis

DRAFTERS = ("mtp", "ngram")  # a new drafter is one word here
RULES = (MRope(), OneAxis())
WIDE, TALL, DOT = picture(2, 9, 40), picture(5, 3, 90), picture(1, 1, 200)

CHATS = {  # grids with H != W, and more rows than one prompt chunk has
    "text": lambda salt: [Message.of("user", f"say {salt} or say {salt} again")],
    "one image": lambda salt: [Message.of("user", f"what is {salt} here?", [WIDE])],
    "two images": lambda salt: [Message.of("user", f"compare {salt}", [TALL, WIDE])],
    "image in turn 2": lambda salt: [
        Message.of("user", f"hello {salt}"),
        Message.of("assistant", "hello, hello"),
        Message.of("user", "and this?", [TALL, DOT]),
    ],
}
BARE = {  # no chat template around them
    "image at the very end": ("{salt}, see <image>", [TALL]),
    "image at the very start": ("<image>{salt}", [WIDE]),
    "nothing but an image": ("<image>", [TALL]),
    "one row": ("s", []),
}
SHAPES = (*CHATS, *BARE)


def prompt(shape: str, salt: str, target, **options):
    """The request and its rows."""
    if shape in CHATS:
        request = talk(*CHATS[shape](salt), **options)
        return request, toy_engine(target).prepare(request)
    text, images = BARE[shape]
    inputs = [target.prepare(open_picture(image, 10**6)) for image in images]
    return ask(text, **options), toy_rows(target, ByteTokenizer().encode(text.format(salt=salt)), inputs)


@lru_cache
def alone(rule, shape: str, salt: str, temperature: float, seed: int):
    """Tokens with drafts off and nobody else in the engine."""
    request, rows = prompt(shape, salt, toy_target(rule=rule), temperature=temperature, seed=seed)
    return run(toy_engine(toy_target(rule=rule)), [request], [rows])[0].token_ids


@pytest.mark.case("A1", "A2", "A3", "A9", "A11", "A13", "A14", "A19", "C3", "D1", "D2", "D16")
@pytest.mark.parametrize("rule", RULES, ids=["mrope", "one-axis"])
@pytest.mark.parametrize("num_sequences", (1, 3))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("depth", (1, 3, 7))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", DRAFTERS)
def test_drafts_never_change_a_token(draft, shape, depth, temperature, num_sequences, rule):
    """Cases A1, A2, A3, A9, A11, A13, A14, A19, C3, D1, D2, D16."""
    target = toy_target(rule=rule)
    salts = ["red", "green, or not", "a very long name of something blue"][:num_sequences]
    pairs = [
        prompt(shape, salt, target, draft=draft, depth=depth, temperature=temperature, seed=seed)
        for seed, salt in enumerate(salts)
    ]
    results = run(toy_engine(target), *map(list, zip(*pairs, strict=True)))
    for seed, (salt, result) in enumerate(zip(salts, results, strict=True)):
        assert result.finish_reason == "length" and result.error is None
        assert result.draft.kind == draft and result.draft.off_because is None
        assert result.token_ids == alone(rule, shape, salt, temperature, seed)


@pytest.mark.case("A1", "A2")
@pytest.mark.parametrize("rule", RULES, ids=["mrope", "one-axis"])
@pytest.mark.parametrize("position_of", ("input", "hidden"))
@pytest.mark.parametrize("policy", ("see", "skip", "placeholder", "gap"))
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_draft_gets_for_an_image_never_changes_a_token(policy, shape, position_of, rule):
    """And no policy switches drafts off: `placeholder` once broke the position rule on three axes."""
    target = toy_target(rule=rule, position_of=position_of)
    request, rows = prompt(shape, "red", target, draft="mtp", policy=policy)
    (result,) = run(toy_engine(target), [request], [rows])
    assert result.draft.off_because is None and result.timings.drafted
    assert result.token_ids == alone(rule, shape, "red", 0.0, 0)


@pytest.mark.parametrize("rule", RULES, ids=["mrope", "one-axis"])
@pytest.mark.parametrize("head_kinds", (("sliding",), ("recurrent",), ("full", "sliding", "recurrent")), ids="+".join)
@pytest.mark.parametrize("shape", ("text", "two images"))
def test_a_head_of_any_kind_of_layer_never_changes_a_token(head_kinds, shape, rule):
    target = toy_target(rule=rule, head_kinds=head_kinds)
    request, rows = prompt(shape, "red", target, draft="mtp", depth=4)
    (result,) = run(toy_engine(target), [request], [rows])
    assert result.draft.off_because is None and sum(result.timings.accepted) > 0
    assert result.token_ids == alone(rule, shape, "red", 0.0, 0)


@pytest.mark.case("A8", "A22", "C6", "C11")
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_one_batch_may_hold_every_kind_of_request(temperature):
    """Images and text, drafts and none, three drafters, different depths and policies, more requests than slots
    (cases A8, A22, C6, C11)."""
    target, kinds = toy_target(), []
    for number, shape in enumerate(SHAPES):
        kinds += [(shape, number, {"draft": "mtp", "depth": 1 + number})]
        kinds += [(shape, number, {"draft": ("none", "ngram")[number % 2], "depth": 5})]
        kinds += [(shape, number, {"draft": "mtp", "depth": 2, "policy": ("skip", "placeholder")[number % 2]})]
    pairs = [prompt(shape, "x", target, seed=n, temperature=temperature, **options) for shape, n, options in kinds]
    results = run(toy_engine(target, slots=5), *map(list, zip(*pairs, strict=True)))
    for (shape, number, _), result in zip(kinds, results, strict=True):
        assert result.token_ids == alone(MRope(), shape, "x", temperature, number)


def test_the_toy_family_would_notice_a_fault():
    """Otherwise the tests above prove nothing: image and history decide the text, guesses are right and wrong."""
    red, blue, turned = picture(3, 4, 10), picture(3, 4, 250), picture(4, 3, 10)
    texts = [run(toy_engine(), [ask("what?", [image])])[0].token_ids for image in (red, blue, turned)]
    assert len(set(texts)) == 3
    far = run(toy_engine(), [ask("a" + "b" * 40), ask("c" + "b" * 40)])
    assert far[0].token_ids != far[1].token_ids
    for rule in RULES:
        for shape in CHATS:
            target = toy_target(rule=rule)
            many = [prompt(shape, salt, target, draft="mtp", max_tokens=40)[0] for salt in ("red", "green", "grey")]
            timings = [result.timings for result in run(toy_engine(target), many)]
            acceptance = sum(sum(t.accepted) for t in timings) / sum(sum(t.drafted) for t in timings)
            assert 0.3 < acceptance < 0.9, (rule, shape, acceptance)


def test_ngram_guesses_are_right_and_wrong_too():
    many = [ask("abcabc" * 3 + "d" * seed, draft="ngram", max_tokens=60) for seed in range(6)]
    timings = [result.timings for result in run(toy_engine(), many)]
    assert 0 < sum(sum(t.accepted) for t in timings) < sum(sum(t.drafted) for t in timings)
