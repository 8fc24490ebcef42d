"""Conversations that go on, prompts that come again (cases B): what is reused, what it saves, and that it changes
nothing."""

import pytest
from support.embedded import SEEING, engine_of, picture, plain, run, same, scene, talk

from foreglance import Engine, Message, Settings
from foreglance.bench.prompts import text_cases
from foreglance.models.weights import find_assistant

GRID = 256


def reusing(name, **settings):
    return engine_of(name, **{"prefix_cache_bytes": 1 << 28, **settings})


def long_past(num_turns):
    noted = Message.of("assistant", "I will keep that in mind and answer when you ask me about it.")
    return [message for case in text_cases(num_turns) for message in (*case.messages, noted)]


@pytest.mark.case("B1", "B14")
@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-step"))
def test_the_same_long_prompt_is_computed_once(name):
    """With drafts on: the second and third time all is there but the last row, which is computed for its state."""
    engine = reusing(name)
    first, second, third = (
        run(engine, talk([*long_past(20), Message.of("user", "Hello!", [scene(40)])], max_tokens=8))[0]
        for _ in range(3)
    )
    rows = first.timings.prompt_tokens
    assert rows > 3 * GRID and first.timings.cached_rows == 0
    for again in (second, third):
        assert again.timings.cached_rows == rows - 1
        assert again.timings.ttft_ms < 0.5 * first.timings.ttft_ms
        assert again.timings.accepted == first.timings.accepted, "drafts are as good as in a cold run"
        same(again, first)


@pytest.mark.case("B3")
@pytest.mark.parametrize("name", SEEING)
def test_a_turn_computes_its_new_rows_and_no_more_than_one_stride_of_old_ones(name):
    engine, messages, known = reusing(name), long_past(8), 0
    for turn, text in enumerate(("Hello!", "Tell me a story.", "What can you do?", "Who are you?", "Goodbye!")):
        messages.append(Message.of("user", text, [scene(41)] if turn == 2 else []))
        (result,) = run(engine, talk(messages, max_tokens=24))
        timings = result.timings
        computed, new = timings.prompt_tokens - timings.cached_rows, timings.prompt_tokens - known
        assert computed <= new + (GRID if turn else 0)
        messages.append(Message.of("assistant", result.text))
        known = timings.prompt_tokens + timings.num_tokens


@pytest.mark.case("B8")
@pytest.mark.parametrize("name", SEEING)
def test_two_conversations_in_turn_on_one_slot(name):
    engine = reusing(name, slots=1)
    pair = [talk([*long_past(7), Message.of("user", text, [scene(42)])], max_tokens=12) for text in ("A?", "And B?")]
    fresh = [plain(request, name) for request in pair]
    for _ in range(2):
        for request, cold in zip(pair, fresh, strict=True):
            same(run(engine, request)[0], cold)


@pytest.mark.case("B10", "B12")
@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-step"))
def test_a_shared_system_prompt_changes_no_answer_and_drafts_cost_no_hit(name):
    """Many short questions behind one system prompt of more than a chunk: with reuse and without, drafts on and off."""
    system = Message.of(
        "system", "Answer shortly. " + " ".join(case.messages[0].parts[0].text for case in text_cases(14))
    )
    cached, engine = {}, {draft: reusing(name) for draft in ("mtp", "none")}
    for number in range(6):
        images = [scene(number)] if number % 2 else []
        messages = [system, Message.of("user", f"Question {number}: what do you see?", images)]
        cold = plain(talk(messages, max_tokens=10), name)
        for draft, one in engine.items():
            (result,) = run(one, talk(messages, draft=draft, max_tokens=10))
            same(result, cold)
            cached.setdefault(draft, []).append(result.timings.cached_rows)
    assert cached["mtp"] == cached["none"] and min(cached["none"][1:]) >= GRID


@pytest.mark.case("B13")
def test_twenty_turns_with_pictures_keep_within_their_settings():
    engine = reusing("tiny-qwen", prefix_cache_bytes=2_000_000, image_cache_bytes=40_000, grid=64)
    messages = []
    for turn in range(20):
        messages.append(Message.of("user", "And this?", [picture(60 + turn, 60)]))
        (result,) = run(engine, talk(messages, max_tokens=3, ignore_eos=True))
        messages.append(Message.of("assistant", result.text or "."))
        assert 0 < engine._prefixes.bytes_held <= 2_000_000 and engine._embeddings.bytes_held <= 40_000
        assert engine._store.pages_held == 0
    same(result, plain(talk(messages[:-1], max_tokens=3, ignore_eos=True), grid=64))


@pytest.mark.case("B15")
@pytest.mark.parametrize("name", SEEING)
def test_a_prompt_that_was_given_up_half_way_is_taken_up_there(name):
    engine = reusing(name, grid=64)
    ask_again = lambda: talk([*long_past(7), Message.of("user", "Hello!", [scene(43)])], max_tokens=12)  # noqa: E731
    gone = ask_again()
    engine.add(gone)
    for _ in range(2):
        engine.step()
    assert engine.cancel(gone.id)
    (again,) = run(engine, ask_again())
    assert again.timings.cached_rows == 128
    same(again, plain(ask_again(), name, grid=64))


@pytest.mark.case("B4", "B5")
@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-step"))
def test_a_resumed_conversation_still_knows_its_picture_and_drafts_as_before(name):
    """Turn 2 reuses turn 1: it answers about the picture as a cold run does, and guesses stand as often."""
    shown = Message.of("user", "Describe the image.", [scene(44)])
    engine = reusing(name, grid=16)
    (first,) = run(engine, talk([shown], max_tokens=40))
    longer = [shown, Message.of("assistant", first.text), Message.of("user", "Say it again.")]
    (warm,) = run(engine, talk(longer, max_tokens=40))
    (cold,) = run(engine_of(name, grid=16), talk(longer, max_tokens=40))
    assert warm.timings.cached_rows >= first.timings.prompt_tokens - 16
    assert (
        abs(warm.timings.accepted[0] / warm.timings.drafted[0] - cold.timings.accepted[0] / cold.timings.drafted[0])
        < 0.2
    )
    (off,) = run(reusing(name, grid=16), talk([shown], draft="none", max_tokens=40))
    same(off, first)


@pytest.mark.case("B4", "B5", "B6")
@pytest.mark.parametrize("name", SEEING)
def test_a_conversation_comes_back_from_a_file_with_its_picture_and_its_draft(name, tmp_path):
    """Saved, the engine gone, restored into another one: rows are reused, the answer about the picture and the guesses
    accepted on the way are those of the conversation that simply went on."""

    def engine():
        return Engine.load(name, Settings(slots=1, try_drafts=False), draft_model=find_assistant(name))

    shown, before = Message.of("user", "Describe the image.", [scene(45)]), engine()
    (first,) = run(before, talk([shown], max_tokens=24))
    before.save_slot(0, tmp_path / "slot")
    longer = [shown, Message.of("assistant", first.text), Message.of("user", "Say it again.")]
    (went_on,) = run(before, talk(longer, max_tokens=24))
    after = engine()
    after.restore_slot(0, tmp_path / "slot")
    (restored,) = run(after, talk(longer, max_tokens=24))
    assert restored.timings.cached_rows == went_on.timings.cached_rows > first.timings.image_rows
    same(restored, went_on)
    assert restored.timings.accepted == went_on.timings.accepted and sum(restored.timings.accepted)
