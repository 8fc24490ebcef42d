"""A conversation that goes on: what is reused is what a cold run computes, drafts included."""

from dataclasses import replace

import pytest
import torch
from support.toy import ask, picture, run, toy_engine, toy_rows, toy_target
from support.toy_chain import chained_target

from foreglance.images import open_picture
from foreglance.prompt import MRope, OneAxis

GRID = 16
SEEN = [picture(3, 6, 80)]


def question(draft="mtp", images=SEEN, text="what is it, and where? " * 2, **options):
    return ask(text, images, draft=draft, **{"depth": 3, "max_tokens": 24, **options})


@pytest.mark.case("B1", "B14")
@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_the_same_prompt_again_computes_its_last_row_alone(draft):
    """Cases B1, B14: its hidden state is needed."""
    engine = toy_engine()
    (cold,), (warm,), (third,) = (run(engine, [question(draft)]) for _ in range(3))
    assert cold.token_ids == warm.token_ids == third.token_ids
    assert cold.timings.cached_rows == 0
    assert warm.timings.cached_rows == third.timings.cached_rows == cold.timings.prompt_tokens - 1


@pytest.mark.case("B5")
@pytest.mark.parametrize("policy", ("see", "skip", "placeholder"))
def test_a_reused_prefix_drafts_exactly_as_a_cold_one(policy):
    """Cases B5, B6: counts of tried and accepted guesses, depth by depth, and not only the text."""
    engine = toy_engine()
    (cold,), (warm,) = (run(engine, [question(policy=policy, max_tokens=60)]) for _ in range(2))
    assert warm.timings.cached_rows and sum(cold.timings.accepted)
    assert (warm.timings.drafted, warm.timings.accepted) == (cold.timings.drafted, cold.timings.accepted)


def second_turn(draft, stop=(), eos=(), depth=3):
    """A turn, then the same conversation with its answer and more text behind it, as rows."""
    target = toy_target(eos=eos)
    engine = toy_engine(target)
    inputs = [target.prepare(open_picture(SEEN[0], 10**6))]
    ids = [5, 6, 1, *range(7, 40)]
    options = {"draft": draft, "depth": depth, "max_tokens": 21}
    (first,) = run(engine, [ask("-", stop=stop, **options)], [toy_rows(target, ids, inputs)])
    longer = toy_rows(target, [*ids, *first.token_ids, 20, 21, 22], inputs)
    (second,) = run(engine, [ask("-", **{**options, "max_tokens": 60})], [longer])
    return first, second, longer, target


@pytest.mark.case("B3")
@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_a_second_turn_goes_on_where_the_first_one_ended(draft):
    """Case B3: everything but the last token of the answer is there already."""
    first, second, longer, _ = second_turn(draft)
    assert second.timings.cached_rows == len(longer) - 4 == first.timings.prompt_tokens + len(first.token_ids) - 1


@pytest.mark.case("B10")
@pytest.mark.parametrize("depth", (1, 3, 7))
@pytest.mark.parametrize("draft", ("mtp", "ngram"))
def test_a_second_turn_is_the_same_with_drafts_and_without(draft, depth):
    """Also if the first one ended by end of text or by a stop string inside a draft: what it left for reuse once had
    rows that only drafts had computed."""
    plain = second_turn("none")[0]
    for end in ({}, *({"eos": (token,)} for token in plain.token_ids[4:8]), *({"stop": (c,)} for c in plain.text[4:8])):
        off, on = second_turn("none", **end), second_turn(draft, depth=depth, **end)
        assert on[0].token_ids == off[0].token_ids
        assert on[1].token_ids == off[1].token_ids
        assert on[1].timings.cached_rows == off[1].timings.cached_rows > off[0].timings.prompt_tokens


@pytest.mark.case("B5")
def test_a_second_turn_drafts_as_well_as_a_cold_one():
    """Case B5. The states of the first turn's last step once never reached the draft, whose rows were then shifted."""
    _, warm, longer, target = second_turn("mtp")
    (cold,) = run(toy_engine(target), [ask("-", draft="mtp", max_tokens=60)], [longer])
    assert warm.timings.cached_rows and not cold.timings.cached_rows
    assert abs(warm.timings.acceptance - cold.timings.acceptance) < 0.05
    if warm.token_ids == cold.token_ids:
        assert warm.timings.accepted == cold.timings.accepted


@pytest.mark.parametrize("draft", ("none", "mtp"))
def test_an_answer_that_comes_back_changed_costs_its_turn_and_at_most_one_grid_step(draft):
    """As by templates that leave out what a model thought."""
    target = toy_target()
    engine, ids, options = toy_engine(target), list(range(7, 60)), {"draft": draft, "max_tokens": 21}
    (first,) = run(engine, [ask("-", **options)], [toy_rows(target, ids)])
    changed = toy_rows(target, [*ids, *first.token_ids[9:], 20, 21, 22])
    (second,) = run(engine, [ask("-", **options)], [changed])
    assert len(ids) - GRID < second.timings.cached_rows <= len(ids)
    (cold,) = run(toy_engine(target), [ask("-", **options)], [changed])
    assert (second.token_ids, second.timings.accepted) == (cold.token_ids, cold.timings.accepted)


def test_rows_behind_an_answer_are_marked_as_what_a_cold_run_would_compute_otherwise():
    target = toy_target()
    engine, ids, options = toy_engine(target), list(range(7, 40)), {"draft": "mtp", "max_tokens": 21}
    (first,) = run(engine, [ask("-", **options)], [toy_rows(target, ids)])
    run(engine, [ask("-", **options)], [toy_rows(target, [*ids, *first.token_ids, *ids])])
    borders = [(node.rows, node.point.border) for node in engine._prefixes.nodes()]
    assert {rows for rows, border in borders if border.cold} == {16, 32}
    assert {border.kind for rows, border in borders if not border.cold} == {"turn", "chunk", "prompt"}


def test_another_image_of_the_same_size_is_not_reused():
    """What a row is, is its pixels; the placeholder and the size are the same."""
    engine = toy_engine()
    run(engine, [question()])
    other = question(images=[picture(3, 6, 81)])
    (result,) = run(engine, [other])
    assert result.timings.cached_rows == 0, "the image lies in the first chunk"
    assert result.token_ids == run(toy_engine(), [replace(other, id="fresh")])[0].token_ids
    (again,) = run(engine, [question()])
    assert again.timings.cached_rows > 0


def test_a_prefix_without_the_draft_memory_that_is_needed_is_computed_again():
    """Another policy's draft rows are other rows; drafts off can resume any prefix."""
    engine = toy_engine()
    run(engine, [question(policy="see")])
    assert run(engine, [question(policy="skip")])[0].timings.cached_rows == 0
    assert run(engine, [question("none")])[0].timings.cached_rows > 0
    engine = toy_engine()
    run(engine, [question("none")])
    assert run(engine, [question(policy="see")])[0].timings.cached_rows == 0


@pytest.mark.case("B8")
def test_conversations_in_turn_do_not_disturb_each_other():
    """Case B8: A, B, A, B."""
    engine = toy_engine()
    texts = ("the first of two conversations", "the second of two conversations")
    fresh = [run(toy_engine(), [question(text=text)])[0] for text in texts]
    for turn in range(3):
        for text, cold in zip(texts, fresh, strict=True):
            (result,) = run(engine, [question(text=text)])
            assert result.token_ids == cold.token_ids
            same = result.timings.cached_rows == result.timings.prompt_tokens - 1
            assert same == (turn > 0), "at first they share no more than the image"


def test_two_sequences_may_resume_one_prefix_at_once():
    engine = toy_engine()
    (cold,) = run(engine, [question()])
    for result in run(engine, [question(), question(), question("none")]):
        assert result.token_ids == cold.token_ids and result.timings.cached_rows > 0


def numbered(number):
    return question(images=[], text=f"{number} is the number of this one", max_tokens=3)


@pytest.mark.case("B13")
@pytest.mark.parametrize("conversations", (0, 1, 2))
def test_what_is_kept_is_bounded_in_bytes(conversations):
    """Case B13: least recently used goes first."""
    engine = toy_engine()
    run(engine, [numbered(0)])
    budget = conversations * engine._prefixes.bytes_held
    engine = toy_engine(prefix_cache_bytes=budget)
    for number in range(5):
        run(engine, [numbered(number)])
        assert engine._prefixes.bytes_held <= budget
    cached = [run(engine, [numbered(number)])[0].timings.cached_rows for number in (4, 0)]
    assert (cached[0] > GRID) == (conversations > 0) and cached[1] <= GRID


@pytest.mark.case("B15")
@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("draft", ("none", "mtp"))
def test_a_cancelled_request_leaves_its_whole_prompt_chunks(draft, num_steps):
    """They are what a cold run computes; nothing of its answer stays."""
    engine, request = toy_engine(), question(draft)
    engine.add(request)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(request.id)
    engine.step()
    assert all(node.point.border.cold for node in engine._prefixes.nodes())
    (again,), (cold,) = run(engine, [question(draft)]), run(toy_engine(), [question(draft)])
    assert again.timings.cached_rows > 0
    assert (again.token_ids, again.timings.accepted) == (cold.token_ids, cold.timings.accepted)


@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_another_question_about_an_image_does_not_compute_the_image_again(draft):
    engine, end = toy_engine(grid=256), 5 + 18  # <turn> u : and the image, which ends within the first chunk
    run(engine, [question(draft)])
    for text in ("how many are there?", "what is it? " * 3, "x"):
        (warm,) = run(engine, [question(draft, text=text)])
        (cold,) = run(toy_engine(grid=256), [question(draft, text=text)])
        assert end - 2 <= warm.timings.cached_rows < end + 3
        assert warm.token_ids == cold.token_ids
        assert warm.timings.accepted == cold.timings.accepted


@pytest.mark.parametrize("draft", ("none", "mtp"))
def test_requests_that_come_at_once_share_what_the_first_one_computes(draft):
    engine = toy_engine()
    same, other = question(draft), question(draft, text="and what about another question?")
    requests = [question(draft), same, other]
    alone = [run(toy_engine(), [replace(request, id=f"{request.id} alone")])[0] for request in requests]
    results = run(engine, requests)
    for one, cold in zip(results, alone, strict=True):
        assert (one.token_ids, one.timings.accepted) == (cold.token_ids, cold.timings.accepted)
    first, second, third = (one.timings.cached_rows for one in results)
    assert (first, second) == (0, results[1].timings.prompt_tokens - 1) and third >= GRID


FAMILIES = {
    "hybrid": lambda: toy_target(),
    "whole images, one axis": lambda: toy_target(rule=OneAxis(), whole_images=True),
    "chained modules": lambda: chained_target(MRope()),
    "no draft head": lambda: toy_target(head_kinds=()),
}


@pytest.mark.case("B10", "B12")
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_reused_the_answer_is_that_of_a_cold_run_bit_for_bit(family, monkeypatch):
    """Prompts that share beginnings of every length, with images, in an order that leaves all kinds of checkpoints."""
    target, states = FAMILIES[family](), []
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: states.append(hidden.clone()) or logits(hidden))
    engine, draft = toy_engine(target, slots=2), "mtp" if target.head else "none"
    wide, tall = ([target.prepare(open_picture(picture(*size), 10**6))] for size in ((2, 9), (5, 4)))
    text = [3 + (7 * i) % 40 for i in range(60)]
    prompts = [
        *((text[:n], []) for n in (40, 33, 34, 48, 49, 17, 41)),
        *(([*text[:6], 1, *text[:n]], wide) for n in (20, 3, 12, 33)),
        *(([*text[:6], 1, *text[:n]], tall) for n in (4, 11)),
        *(([*text[:6], 1, *text[:9], 1, *text[:n]], wide + tall) for n in (1, 9, 30)),
        ([*text[:6], 1], wide),
    ]
    reused = 0
    for number, (ids, images) in enumerate([*prompts, *prompts]):
        options = {"draft": draft, "depth": 2, "temperature": 0.7, "seed": number, "max_tokens": 3}
        rows = toy_rows(target, ids, images)
        seen = []
        for one in (engine, toy_engine(target, prefix_cache_bytes=0)):
            states.clear()
            (result,) = run(one, [ask("-", **options)], [rows])
            seen.append((result.token_ids, result.timings.accepted, torch.cat(states)))
            reused += result.timings.cached_rows
        assert seen[0][:2] == seen[1][:2] and torch.equal(seen[0][2], seen[1][2]), (ids, number)
    assert reused > 20 * len(prompts)


def test_image_embeddings_are_kept_within_their_budget(monkeypatch):
    target, calls = toy_target(), []
    embed = target.embed_image
    monkeypatch.setattr(target, "embed_image", lambda image: calls.append(image.digest) or embed(image))
    for limit, want in ((1 << 20, 1), (0, 2)):
        calls.clear()
        engine = toy_engine(image_cache_bytes=limit, prefix_cache_bytes=0)
        for _ in range(2):
            run(engine, [question(max_tokens=2)])
        assert len(calls) == want


def test_what_was_reused_can_be_reused_again():
    engine = toy_engine()
    reused = [run(engine, [question()])[0].timings.cached_rows for _ in range(4)]
    assert reused[0] == 0 < reused[1] == reused[2] == reused[3]
