"""A conversation that goes on: what is reused is what a cold run computes, drafts included."""

from dataclasses import replace

import pytest
from support.toy import ask, picture, run, toy_engine, toy_rows, toy_target

from foreglance.images import open_picture

GRID = 16
SEEN = [picture(3, 6, 80)]


def question(draft="mtp", images=SEEN, text="what is it, and where? " * 2, **options):
    return ask(text, images, draft=draft, **{"depth": 3, "max_tokens": 24, **options})


@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_the_same_prompt_again_computes_only_what_lies_behind_the_last_point(draft):
    """Cases B1, B14: a whole hit still computes the last row, whose hidden state is needed."""
    engine = toy_engine()
    (cold,), (warm,), (third,) = (run(engine, [question(draft)]) for _ in range(3))
    assert cold.token_ids == warm.token_ids == third.token_ids
    assert cold.timings.cached_rows == 0
    assert warm.timings.cached_rows == third.timings.cached_rows == (cold.timings.prompt_tokens - 1) // GRID * GRID > 0


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


@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_a_second_turn_goes_on_where_the_first_one_ended(draft):
    """Case B3: everything but the last token of the answer is there already."""
    first, second, longer, _ = second_turn(draft)
    assert second.timings.cached_rows == len(longer) - 4 == first.timings.prompt_tokens + len(first.token_ids) - 1


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


def test_a_second_turn_drafts_as_well_as_a_cold_one():
    """Case B5. The states of the first turn's last step once never reached the draft, whose rows were then shifted."""
    _, warm, longer, target = second_turn("mtp")
    (cold,) = run(toy_engine(target), [ask("-", draft="mtp", max_tokens=60)], [longer])
    assert warm.timings.cached_rows and not cold.timings.cached_rows
    assert abs(warm.timings.acceptance - cold.timings.acceptance) < 0.05
    if warm.token_ids == cold.token_ids:
        assert warm.timings.accepted == cold.timings.accepted


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


def test_conversations_in_turn_do_not_disturb_each_other():
    """Case B8: A, B, A, B."""
    engine = toy_engine()
    texts = ("the first of two conversations", "the second of two conversations")
    fresh = [run(toy_engine(), [question(text=text)])[0] for text in texts]
    for turn in range(3):
        for text, cold in zip(texts, fresh, strict=True):
            (result,) = run(engine, [question(text=text)])
            assert result.token_ids == cold.token_ids
            assert (result.timings.cached_rows > GRID) == (turn > 0), "at first they share no more than the image"


def test_two_sequences_may_resume_one_prefix_at_once():
    engine = toy_engine()
    (cold,) = run(engine, [question()])
    for result in run(engine, [question(), question(), question("none")]):
        assert result.token_ids == cold.token_ids and result.timings.cached_rows > 0


@pytest.mark.parametrize("slots", (0, 1, 2))
def test_what_is_kept_is_bounded(slots):
    """Case B13: least recently used goes first."""
    engine = toy_engine(prefix_slots=slots)
    for number in range(5):
        run(engine, [question(images=[], text=f"{number} is the number of this one", max_tokens=3)])
        assert len(engine._prefixes) <= slots
    hits = [
        run(toy, [question(images=[], text=f"{number} is the number of this one", max_tokens=3)])[0].timings.cached_rows
        > 0
        for toy, number in ((engine, 4), (engine, 0))
    ]
    assert hits == [slots > 0, False]


def test_a_cancelled_request_leaves_nothing_to_reuse():
    engine = toy_engine()
    request = question()
    engine.add(request)
    for _ in range(4):
        engine.step()
    engine.cancel(request.id)
    engine.step()
    assert len(engine._prefixes) == 0
    assert run(engine, [question()])[0].token_ids == run(toy_engine(), [question()])[0].token_ids


def test_image_embeddings_are_kept_within_their_budget(monkeypatch):
    target, calls = toy_target(), []
    embed = target.embed_image
    monkeypatch.setattr(target, "embed_image", lambda image: calls.append(image.digest) or embed(image))
    for limit, want in ((1 << 20, 1), (0, 2)):
        calls.clear()
        engine = toy_engine(image_cache_bytes=limit, prefix_slots=0)
        for _ in range(2):
            run(engine, [question(max_tokens=2)])
        assert len(calls) == want


def test_what_was_reused_can_be_reused_again_from_the_only_slot():
    """The points of the conversation that is replaced go over to the one that replaces it."""
    engine = toy_engine(prefix_slots=1)
    reused = [run(engine, [question()])[0].timings.cached_rows for _ in range(4)]
    assert reused[0] == 0 < reused[1] == reused[2] == reused[3]
