"""The models that ship, over what earlier requests left: few rows are computed, and answers are those of cold runs."""

import pytest

from foreglance import Engine, Message, Settings
from foreglance.bench.prefix import TURNS, ask, chat, first_tokens, five_turns, new_rows, saved
from foreglance.bench.scenes import scene_from_seed
from foreglance.models.weights import find_assistant

FAMILIES = ("tiny-qwen", "tiny-step", "tiny-gemma")
GRID = 256


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    settings = Settings(weights="fp32", slots=2, try_drafts=False)
    return Engine.load(request.param, settings, draft_model=find_assistant(request.param))


def told(one):
    timings = one.result.timings
    return one.result.token_ids, timings.drafted, timings.accepted


def test_a_chat_with_images_computes_only_its_new_rows(engine):
    engine.forget()
    talk = chat(engine, max_tokens=20)
    assert [one.result.timings.image_rows > 0 for _, one in talk] == [True] * 5
    for at, (_, one) in enumerate(talk):
        timings = one.result.timings
        computed = timings.prompt_tokens - timings.cached_rows
        assert 0 < computed <= new_rows(talk, at) + GRID, f"turn {at + 1}"
        assert computed < timings.prompt_tokens or at == 0
    assert talk[-1][1].result.timings.prompt_tokens > 3 * new_rows(talk, 4)


def test_another_question_about_an_image_computes_no_row_of_the_image(engine):
    """And the same question one row alone. Token ids and guesses are those of a cold run."""
    picture = scene_from_seed(1)[1]
    questions = [[Message.of("user", text, [picture])] for text in ("Describe the image.", "What do you see here?")]
    cold = []
    for messages in questions:
        engine.forget()
        cold.append(ask(engine, messages, 12))
    image_rows, prompt_rows = (getattr(cold[1].result.timings, name) for name in ("image_rows", "prompt_tokens"))
    engine.forget()
    warm = [ask(engine, messages, 12) for messages in (*questions, questions[1])]
    assert told(warm[0]) == told(cold[0]) and told(warm[1]) == told(warm[2]) == told(cold[1])
    other, same = (prompt_rows - one.result.timings.cached_rows for one in warm[1:])
    assert (same, 1 < other < prompt_rows - image_rows) == (1, True)


def test_the_bench_counts_what_the_engine_says(engine):
    other, same = first_tokens(engine, 2)
    assert (same.case, same.rows, same.differing, other.differing) == ("the same prompt", 1, 0, 0)
    assert 1 < other.rows < other.prompt_rows and 0 < same.engine.median < other.engine.median
    turns = five_turns(engine, 1, 8)
    assert len(turns) == len(TURNS) and all(turn.computed_rows <= turn.new_rows + GRID for turn in turns)
    file = saved(engine, 8)
    assert file.cached_bytes < file.file_bytes < file.cached_bytes + 100_000 and file.rows > turns[-1].prompt_rows
