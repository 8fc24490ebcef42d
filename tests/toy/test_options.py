"""Drafts never change a token, whatever else a request asks for; automatic depth; ends and borders in a draft."""

import math
from dataclasses import replace

import pytest
from support.toy import CONTEXT, ask, picture, run, toy_engine, toy_rows, toy_target

from foreglance import RequestError
from foreglance.images import open_picture

OPTIONS = {
    "top-k": {"temperature": 0.9, "top_k": 5},
    "top-p": {"temperature": 1.2, "top_p": 0.7},
    "min-p": {"temperature": 1.2, "min_p": 0.1},
    "all three": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "hot": {"temperature": 3.0},
    "repetition penalty": {"repetition_penalty": 1.5},
    "presence penalty": {"presence_penalty": 1.5, "temperature": 0.6},
    "frequency penalty": {"frequency_penalty": 0.9},
    "logit bias": {"logit_bias": {10: 4.0, 11: -math.inf, 12: -2.5}},
    "everything": {
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {20: 3.0},
    },
}


@pytest.mark.case("D1")
@pytest.mark.parametrize("draft", ("mtp", "ngram"))
@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_options_see_the_same_history_with_drafts(name, draft):
    """A draft row is picked with the drafts before it as its history."""
    image, options = picture(2, 5, 30), {"max_tokens": 40, "seed": 3, **OPTIONS[name]}
    (off,) = run(toy_engine(), [ask("abab what?", [image], **options)])
    for depth in (1, 5):
        (on,) = run(toy_engine(), [ask("abab what?", [image], draft=draft, depth=depth, **options)])
        assert on.token_ids == off.token_ids
    (plain,) = run(toy_engine(), [ask("abab what?", [image], max_tokens=40, seed=3)])
    assert off.token_ids != plain.token_ids, "the option did nothing here, so this proved nothing"


def test_automatic_depth_never_changes_a_token():
    texts = ("hello", "what is it?", "abcabcabc")
    off = run(toy_engine(), [ask(text, [picture(2, 3)], max_tokens=120) for text in texts])
    for draft in ("mtp", "ngram"):
        many = [ask(text, [picture(2, 3)], max_tokens=120, draft=draft, depth="auto") for text in texts]
        on = run(toy_engine(), many)
        assert [r.token_ids for r in on] == [r.token_ids for r in off]


@pytest.mark.case("C7")
def test_automatic_depth_that_ends_at_no_drafts_says_why(monkeypatch):
    """Case C7: drafts that never engage must show a reason."""
    engine = toy_engine(toy_target(head_kinds=("full",), seed=1))
    monkeypatch.setattr(engine.target.head, "logits", lambda hidden: -toy_target(seed=1).logits(hidden))
    request = ask("hello", draft="mtp", depth="auto", max_tokens=200)
    (result,) = run(engine, [request])
    assert result.timings.acceptance < 0.1
    assert "did not pay" in result.draft.off_because
    (off,) = run(toy_engine(toy_target(seed=1)), [ask("hello", max_tokens=200)])
    assert result.token_ids == off.token_ids


@pytest.mark.parametrize("depth", (1, 4))
def test_end_of_text_inside_a_draft_ends_there(depth):
    """Every third token of the text becomes the end-of-text token once, so it falls on any place of a draft."""
    (off,) = run(toy_engine(), [ask("hello there", max_tokens=30)])
    accepted_end = 0
    for token in sorted(set(off.token_ids))[::3]:
        target = toy_target(eos=(token,))
        (on,) = run(toy_engine(target), [ask("hello there", max_tokens=30, draft="mtp", depth=depth)])
        end = off.token_ids.index(token) + 1
        assert on.token_ids == off.token_ids[:end]
        assert on.finish_reason == "stop"
        (ignoring,) = run(toy_engine(target), [ask("hello there", max_tokens=30, ignore_eos=True, draft="mtp")])
        assert ignoring.token_ids == off.token_ids and ignoring.finish_reason == "length"
        accepted_end += sum(on.timings.accepted)
    assert accepted_end


@pytest.mark.parametrize("depth", (1, 4))
def test_max_tokens_inside_a_draft_is_exact(depth):
    (off,) = run(toy_engine(), [ask("hello there", max_tokens=30)])
    for limit in (1, 2, 3, 5, 6, 11, 16, 17, 23, 30):
        (on,) = run(toy_engine(), [ask("hello there", max_tokens=limit, draft="mtp", depth=depth)])
        assert on.token_ids == off.token_ids[:limit]
        assert on.finish_reason == "length"


@pytest.mark.parametrize("depth", (1, 4))
def test_stop_strings_are_found_across_step_borders(depth):
    """Two and three letters from many places of the text become the stop string once."""
    (off,) = run(toy_engine(), [ask("hello there", max_tokens=30)])
    for size in (2, 3):
        for at in range(0, len(off.text) - size, 5):
            stop = off.text[at : at + size]
            if "\ufffd" in stop:
                continue
            want, tokens = off.text[: off.text.find(stop)], []
            for draft in ("none", "mtp"):
                request = ask("hello there", max_tokens=30, stop=(stop, "never there"), draft=draft, depth=depth)
                (result,) = run(toy_engine(), [request])
                assert result.text == want
                assert result.finish_reason == "stop"
                tokens.append(result.token_ids)
            assert tokens[0] == tokens[1]


def test_a_stop_string_that_begins_but_never_ends_is_given_out():
    (off,) = run(toy_engine(), [ask("hello there", max_tokens=30)])
    (on,) = run(toy_engine(), [ask("hello there", max_tokens=30, draft="mtp", stop=(off.text[-2:] + "~",))])
    assert on.text == off.text and on.finish_reason == "length"


@pytest.mark.case("C9")
def test_the_context_limit_ends_an_answer_like_max_tokens():
    """The last row that fits is used, and not one more (case C9)."""
    for extra in range(3):
        rows = toy_rows(toy_target(), [5 + i % 40 for i in range(CONTEXT - 20 + extra)])
        results = []
        for draft in ("none", "mtp", "ngram"):
            request = ask("-", max_tokens=100, draft=draft, depth=7)
            results += run(toy_engine(), [request], [rows])
        assert len({result.token_ids for result in results}) == 1
        assert {len(result.token_ids) for result in results} == {20 - extra}
        assert {result.finish_reason for result in results} == {"length"}


def test_a_prompt_that_fills_the_context_is_refused_before_any_work():
    engine = toy_engine()
    rows = toy_rows(toy_target(), [5] * CONTEXT)
    with pytest.raises(RequestError, match="at least one must be left") as refused:
        engine.add_rows(ask("-"), rows)
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    assert engine.is_idle
    engine.check()


def test_a_smaller_context_setting_is_kept():
    engine = toy_engine(context=40)
    (result,) = run(engine, [ask("a" * 20, max_tokens=100, draft="mtp")])
    assert result.timings.prompt_tokens + len(result.token_ids) == 40


@pytest.mark.case("A20")
@pytest.mark.parametrize("grid", (3, 16, 64))
@pytest.mark.parametrize("draft", ("none", "mtp"))
def test_prompt_chunks_may_end_anywhere_also_inside_an_image(draft, grid):
    """A20. The bits of a prompt depend on its grid, so each grid is compared with itself, drafts off."""
    text, images = "a long text of more than sixteen rows, " * 2, [picture(7, 4, 60), picture(2, 3, 61)]
    (off,) = run(toy_engine(grid=grid), [ask(text, images)])
    (on,) = run(toy_engine(grid=grid), [ask(text, images, draft=draft, depth=4, temperature=0)])
    assert on.token_ids == off.token_ids
    assert on.timings.image_rows == 34


@pytest.mark.case("A18")
def test_an_image_that_is_never_cut_ends_its_chunk_behind_it():
    """Families whose image rows see each other: a border inside an image moves behind it."""
    target = toy_target(whole_images=True)
    request = ask("where is the dog? " * 3, [picture(5, 6, 60), picture(4, 4, 61)], draft="mtp")
    engine, borders = toy_engine(target), []
    engine.add(request)
    while not engine.is_idle:
        for sequence in engine._scheduler.running:
            if sequence.in_prefill and sequence.prefilled:
                borders.append((sequence.prefilled, sequence.rows.image[sequence.prefilled - 1 :][:2].tolist()))
        engine.step()
    assert len(borders) > 2
    assert all(before < 0 or before != after for _, (before, after) in borders)
    assert any(rows % 16 for rows, _ in borders)
    on = run(toy_engine(target), [replace(request, id="again")])
    off = run(toy_engine(target), [ask("where is the dog? " * 3, [picture(5, 6, 60), picture(4, 4, 61)])])
    assert on[0].token_ids == off[0].token_ids


def test_a_bad_request_is_refused_and_leaves_nothing():
    engine = toy_engine(max_images=1, max_pixels=10_000)
    for code, request in {
        "too_many_images": ask("x", [picture(1, 1), picture(1, 1)]),
        "image_too_large": ask("x", [picture(20, 20)]),
        "image_count_mismatch": ask("a text with <image> in it"),
        "invalid_value": ask("x", logit_bias={10_000: 1.0}),
    }.items():
        with pytest.raises(RequestError) as refused:
            engine.add(request)
        assert refused.value.code == code
    headless = toy_engine(toy_target(head_kinds=()))
    with pytest.raises(RequestError) as refused:
        headless.add(ask("x", draft="mtp"))
    assert refused.value.code == "draft_unavailable"
    for one in (engine, headless):
        assert one.is_idle
        one.check()


@pytest.mark.case("C7")
def test_a_request_without_a_head_says_why_nothing_drafts():
    request = ask("x", draft="auto", depth="auto")
    (result,) = run(toy_engine(toy_target(head_kinds=())), [request])
    assert result.draft.kind == "none" and "no draft head" in result.draft.off_because


def test_generate_refuses_all_requests_if_one_cannot_be_served():
    """It once left the requests before the bad one in the queue."""
    engine = toy_engine()
    with pytest.raises(RequestError):
        engine.generate([ask("fine"), ask("not fine", logit_bias={10_000: 1.0})])
    assert engine.is_idle


def test_two_requests_of_one_id_are_refused():
    """`generate` once waited for ever for the second result of the same id."""
    request = ask("x", max_tokens=2)
    engine = toy_engine()
    with pytest.raises(RequestError) as refused:
        engine.generate([request, replace(request)])
    assert refused.value.code == "duplicate_id"
    assert engine.is_idle
    assert len(engine.generate(request)[0].token_ids) == 2
    assert len(engine.generate(request)[0].token_ids) == 2, "an id may be used again once its request has ended"


def test_pictures_of_any_kind_reach_the_toy():
    target = toy_target()
    grid = target.prepare(open_picture(picture(2, 9), 10**6)).grid
    assert grid == (2, 9)
