"""The text itself: the same with drafts as without, drawn as it should be, reported as it was (cases D)."""

from dataclasses import replace

import numpy as np
import pytest
from support.embedded import SEEING, ask, engine_of, run, same, scene, tokens_of
from support.toy import ask as toy_ask
from support.toy import run as run_toy
from support.toy import toy_engine, toy_target

from foreglance import Engine, RequestError, Settings, Speculation
from foreglance.bench import exactness
from foreglance.chat_format import THINK, ChatFormat
from foreglance.models.weights import find_assistant
from foreglance.ops.formats import FORMATS


@pytest.mark.case("D1")
@pytest.mark.parametrize("name", SEEING)
def test_random_requests_have_the_tokens_that_they_have_without_drafts(name):
    """Whatever the weights of target and draft head are stored in."""
    report = exactness.run(exactness.Plan((name,), slots=2, max_tokens=16), 400, seed=11)
    assert report.tokens >= 400 and report.accepted > 5 and not report.differing, report.reproduction
    assert set(report.by_weights) == set(FORMATS)


@pytest.mark.case("D2")
@pytest.mark.parametrize("weights", ("fp32", "fp16"))
@pytest.mark.parametrize("name", SEEING)
def test_logits_of_a_row_have_the_same_bits_whatever_is_verified_with_it(name, weights, monkeypatch):
    """Every scored row's whole logits, by its number: drafts off, and with 1, 2, 4 and 7 guesses beside it."""
    engine = Engine.load(
        name, Settings(weights=weights, prefix_cache_bytes=0, try_drafts=False), draft_model=find_assistant(name)
    )
    rows: dict[tuple[int, ...], set[bytes]] = {}
    pick = engine._runner._pick

    def watched(batch, works, hidden):
        scored = hidden[batch.scored]
        logits = engine.target.logits(scored).numpy() if len(scored) else scored
        (part,) = batch.parts
        sequence = works[part.sequence].sequence
        known = sequence.generated
        for i, row in enumerate(logits):
            rows.setdefault((*known, *part.drafts[:i]), set()).add(row.tobytes())
        return pick(batch, works, hidden)

    monkeypatch.setattr(engine._runner, "_pick", watched)
    monkeypatch.setattr(engine._runner, "steps", None)  # whose logits nobody sees
    for depth in (0, 1, 2, 4, 7):
        run(engine, ask("Describe the image.", [scene(60)], depth=depth, max_tokens=14))
    assert len(rows) >= 14 and all(len(bits) == 1 for bits in rows.values())


@pytest.mark.case("D3")
@pytest.mark.parametrize("name", SEEING)
def test_sampled_guesses_stand_about_as_often_as_greedy_ones(name):
    def first_guesses(temperature):
        requests = [
            ask("Describe the image.", [scene(n)], temperature=temperature, seed=n, max_tokens=24)
            for n in range(61, 64)
        ]
        timings = [result.timings for result in run(engine_of(name), *requests)]
        return sum(t.accepted[0] for t in timings) / sum(t.drafted[0] for t in timings)

    greedy = first_guesses(0.0)
    assert greedy > 0.5 and first_guesses(1.0) > 0.7 * greedy


@pytest.mark.case("D3", "D4")
def test_drawn_tokens_are_distributed_as_the_target_says_with_drafts_on():
    """500 seeds of one prompt at temperature 1, two tokens each: the second comes from a verified draft. Its counts
    over the pairs fit the target's own probabilities (chi square), and are those of drafts off, token by token."""
    engine = toy_engine(slots=200)
    texts = {}
    for draft in ("mtp", "none"):
        requests = [toy_ask("abc", draft=draft, depth=1, temperature=1.0, seed=n, max_tokens=2) for n in range(500)]
        texts[draft] = [result.token_ids for result in engine.generate(requests)]
    assert texts["mtp"] == texts["none"]
    logits, target = {}, toy_target()
    forward = target.logits
    first = np.array([text[0] for text in texts["mtp"]])
    seen = []
    target.logits = lambda hidden: seen.append(forward(hidden)) or seen[-1]
    try:
        run_toy(toy_engine(), [toy_ask("abc", max_tokens=1)])
    finally:
        del target.logits
    logits = seen[0][0].numpy().astype(np.float64)
    chance = np.exp(logits - logits.max())
    want = 500 * chance / chance.sum()
    got = np.bincount(first, minlength=len(want))
    common = want >= 5
    got, want = [*got[common], got[~common].sum()], [*want[common], want[~common].sum()]
    chi = sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True))
    assert chi < len(want) + 4 * (2 * len(want)) ** 0.5


@pytest.mark.case("D7")
@pytest.mark.parametrize("name", SEEING)
def test_log_probabilities_are_those_without_drafts(name):
    request = ask("Describe the image.", [scene(66)], logprobs=5, max_tokens=20, temperature=0.7, seed=3)
    off = replace(request, speculation=Speculation("none"), id="off")
    mine, other = tokens_of(engine_of(name), request), tokens_of(engine_of(name), off)
    assert any(token.depth for token in mine)
    assert [replace(token, depth=0) for token in mine] == other
    assert all(token.logprob < 0 and len(token.top_logprobs) == 5 for token in mine)


@pytest.mark.case("D10")
@pytest.mark.parametrize("depth", (1, 4, 7))
def test_a_budget_of_reasoning_ends_it_at_its_last_token(depth):
    """The words that end it are forced at just that token, wherever it lies among the guesses, and drafting goes on."""
    texts = []
    for speculation in (Speculation("none"), Speculation("mtp", depth)):
        engine = engine_of("tiny-qwen")
        engine._prompter = replace(engine._prompter, format=ChatFormat(reasoning=THINK))
        request = replace(ask("Tell me a story.", reasoning_budget=10, max_tokens=32), speculation=speculation)
        engine.add_rows(request, replace(engine.prepare(request), reasoning="open"))
        while not engine.is_idle:
            events = engine.step()
        texts.append(events[-1].result)
    off, on = texts
    same(on, off)
    end = tuple(engine.encode(THINK.end, special=False))
    assert on.token_ids[10 : 10 + len(end)] == end and len(on.token_ids) > 10 + len(end)
    assert sum(on.timings.accepted) > 0


@pytest.mark.case("D16")
@pytest.mark.parametrize("name", SEEING)
def test_a_seed_with_a_picture_gives_its_text_again(name):
    request = ask("Describe the image.", [scene(68)], temperature=1.0, seed=1, max_tokens=24)
    texts = [run(engine_of(name), request)[0].token_ids for _ in range(2)]
    other = ask("Describe the image.", [scene(68)], temperature=1.0, seed=2, max_tokens=24)
    assert texts[0] == texts[1] != run(engine_of(name), other)[0].token_ids


@pytest.mark.case("D14")
def test_half_precision_drafts_see_pictures_too():
    """Weights of 16 bits for target and draft together; formats that are not there are refused at start."""
    engine = Engine.load("tiny-qwen", Settings(weights="fp16", prefix_cache_bytes=0))
    request = ask("Describe the image.", [scene(69)], max_tokens=32)
    (on,) = run(engine, request)
    (off,) = run(engine, ask("Describe the image.", [scene(69)], draft="none", max_tokens=32))
    same(on, off)
    assert on.timings.accepted[0] > 0.5 * on.timings.drafted[0] and not engine.warnings
    with pytest.raises((ValueError, RequestError), match="weights"):
        Settings(weights="q3")
