"""Several requests at once, requests that leave, drafts that do not engage (cases C)."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.embedded import SEEING, ask, engine_of, plain, run, same, scene, talk
from typer.testing import CliRunner

from foreglance import Message
from foreglance.bench.prompts import text_cases
from foreglance.cli import app
from foreglance.models.weights import find_model


@pytest.mark.case("C1")
@pytest.mark.parametrize("name", SEEING)
def test_guesses_stand_as_often_on_every_slot(name):
    """Identical prompts side by side: the same text, and the same guesses accepted at the same depths."""
    one, two, three = run(engine_of(name), *(ask("Describe the image.", [scene(50)], max_tokens=32) for _ in range(3)))
    assert sum(one.timings.accepted) > 5
    for other in (two, three):
        same(other, one)
        assert (other.timings.drafted, other.timings.accepted) == (one.timings.drafted, one.timings.accepted)


@pytest.mark.case("C3", "C6")
@pytest.mark.parametrize("name", SEEING)
def test_requests_of_all_lengths_progress_together_and_get_their_own_text(name):
    """Every request gains in every step once its prompt is done, and the short one ends while the long one runs."""
    engine = engine_of(name, slots=3)
    long = ask("Tell me a story.", max_tokens=60, ignore_eos=True)
    short = ask("Hello!", max_tokens=4)
    seeing = ask("Describe the image.", [scene(51)], max_tokens=20)
    for request in (long, short, seeing):
        engine.add(request)
    results, ended = {}, []
    while not engine.is_idle:
        decoding = {s.request.id for s in engine._scheduler.running if not s.in_prefill}
        events = engine.step()
        assert decoding <= {event.request_id for event in events if event.tokens}
        for event in events:
            if event.result:
                results[event.request_id] = event.result
                ended.append(event.request_id)
    assert ended[0] == short.id and ended[-1] == long.id
    for request in (long, short, seeing):
        same(results[request.id], plain(request, name))


@pytest.mark.case("C4")
@pytest.mark.parametrize(("name", "times"), [("tiny-qwen", 20), ("tiny-step", 5), ("tiny-gemma", 5)])
def test_many_who_leave_after_some_tokens_leave_nothing(name, times):
    engine = engine_of(name, slots=2)
    for number in range(times):
        stream = engine.stream(ask("Describe the image.", [scene(52)], max_tokens=200, ignore_eos=True))
        for _ in range(1 + number % 4):
            next(stream)
        stream.close()
        assert not engine._running and not len(engine._store)
    engine.step()
    engine.check()
    request = ask("Describe the image.", [scene(52)], max_tokens=12)
    same(run(engine, request)[0], plain(request, name))


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """tiny-qwen as a conversion leaves it that forgets the head: the config still promises one."""
    folder = tmp_path_factory.mktemp("headless") / "headless-qwen"
    shutil.copytree(find_model("tiny-qwen"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("mtp.")}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.case("C7", "E2")
def test_a_head_that_is_not_there_is_said_and_cannot_be_asked_for(headless):
    run_cli = CliRunner().invoke
    done = run_cli(app, ["generate", "--model", headless, "--prompt", "Hello!", "--max-tokens", "2", "--json"])
    report = json.loads(done.stdout.strip().splitlines()[-1])["draft"]
    assert done.exit_code == 0 and report["kind"] == "none" and "no draft head" in report["off_because"]
    refused = run_cli(app, ["generate", "--model", headless, "--prompt", "Hello!", "--draft", "mtp"])
    assert refused.exit_code == 2 and "has no such head" in refused.output + str(refused.exception)


@pytest.mark.case("C9", "D12")
@pytest.mark.parametrize("name", SEEING)
def test_guesses_stand_as_often_late_in_the_context_as_early(name):
    """Behind a prompt of seven tenths of the context the same questions draft about as well as alone, and exactly."""
    noted, rates = Message.of("assistant", "I see."), []
    engine = engine_of(name)
    for turns in (0, 34):
        past = [message for case in text_cases(turns) for message in (*case.messages, noted)]
        questions = ("Tell me a story.", "Hello!", "How are you?", "What can you do?", "Tell me a joke.")
        requests = [
            talk([*past, Message.of("user", question)], max_tokens=32, ignore_eos=True) for question in questions
        ]
        results = [run(engine, request)[0] for request in requests]
        accepted, drafted = (sum(sum(getattr(r.timings, what)) for r in results) for what in ("accepted", "drafted"))
        rates.append(accepted / drafted)
    assert results[0].timings.prompt_tokens > 0.6 * engine.context
    assert min(rates) > 0.5 * max(rates)
    same(results[0], plain(requests[0], name))


@pytest.mark.case("C9")
@pytest.mark.parametrize("name", SEEING)
def test_an_answer_may_fill_the_context_to_its_last_row(name):
    """Draft rows that would not fit any more are not asked for; the last token that fits is the target's."""
    request = ask("Hello!", depth=8, max_tokens=500, ignore_eos=True)
    (on,) = run(engine_of(name, context=70), request)
    same(on, plain(request, name, context=70))
    assert on.timings.prompt_tokens + on.timings.num_tokens == 70 and on.draft.off_because is None


@pytest.mark.case("C11")
@pytest.mark.parametrize("name", SEEING)
def test_each_request_has_the_depth_that_it_asked_for(name):
    requests = [ask("Describe the image.", [scene(53)], depth=depth, max_tokens=24) for depth in (0, 1, 2, 4)]
    for depth, result in zip((0, 1, 2, 4), run(engine_of(name), *requests), strict=True):
        assert len(result.timings.drafted) == depth
        same(result, plain(requests[0], name))
    assert run(engine_of(name), requests[0])[0].timings.steps == result.timings.num_tokens - 1, "one token a step"
