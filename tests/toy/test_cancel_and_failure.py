"""Whatever ends a request, it ends once, gives everything back, and the others do not notice."""

from dataclasses import replace

import pytest
from support.toy import ask, picture, run, toy_engine, toy_target

from foreglance import Event
from foreglance.drafters.mtp import MtpDrafter
from foreglance.prompt import Positions


def requests(draft="mtp"):
    """Longer than a prompt chunk, with an image, alive for several steps of every kind."""
    image = picture(3, 5, 70)
    return [
        ask("the one that ends early", [image], draft=draft, depth=3, max_tokens=12),
        ask("another one that stays", [image], draft=draft, depth=3, max_tokens=12),
    ]


def solo(request):
    return run(toy_engine(), [request])[0].token_ids


def drain(engine) -> list[Event]:
    events = []
    while not engine.is_idle:
        events += engine.step()
        engine.check()
    return events


def num_steps(draft):
    engine = toy_engine()
    for request in requests(draft):
        engine.add(request)
    count = 0
    while not engine.is_idle:
        engine.step()
        count += 1
    return count


@pytest.mark.case("C4")
@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_cancel_between_any_two_steps_is_as_if_the_request_had_never_been(draft):
    """Cases C4, B15: in the queue, in prefill, inside an image, between draft and verify, in its last step."""
    other, fresh = solo(requests(draft)[1]), solo(requests(draft)[0])
    for step in range(num_steps(draft) + 1):
        engine = toy_engine(prefix_cache_bytes=0)
        gone, stays = requests(draft)
        engine.add(gone)
        engine.add(stays)
        events = [event for _ in range(step) for event in engine.step()]
        ended = any(event.result for event in events if event.request_id == gone.id)
        assert engine.cancel(gone.id) is not ended
        assert engine.cancel(gone.id) is False, "a second cancel finds nothing"
        events += drain(engine)
        (final,) = finals(events, gone)
        assert final.finish_reason == ("length" if ended else "cancelled")
        assert final.token_ids == fresh[: len(final.token_ids)]
        assert finals(events, stays)[0].token_ids == other
        (again,) = run(engine, [requests(draft)[0]])
        assert again.token_ids == fresh


def test_leaving_a_stream_cancels_it():
    engine = toy_engine()
    stream = engine.stream(requests()[0])
    next(stream)
    stream.close()
    (event,) = engine.step()
    assert event.result.finish_reason == "cancelled"
    engine.check()
    assert engine.is_idle


def test_a_stream_adds_up_to_the_whole_result():
    events = list(toy_engine().stream(requests()[0]))
    assert "".join(event.text for event in events) == events[-1].result.text
    assert sum(event.result is not None for event in events) == 1
    assert events[-1].result.token_ids == solo(requests()[0])


def test_cancelling_what_is_not_there_says_so():
    assert toy_engine().cancel("nobody") is False


def finals(events, request):
    return [event.result for event in events if event.result and event.request_id == request.id]


@pytest.mark.parametrize("bad_step", range(1, 7))
def test_a_request_that_breaks_a_batch_rule_ends_alone(monkeypatch, bad_step):
    """A position that goes astray is refused before any forward; the batch is packed again without that sequence."""
    engine = toy_engine(prefix_cache_bytes=0)
    bad, good = requests()
    for request in (bad, good):
        engine.add(request)
    whole, steps = engine._runner._part, []

    def part_of(work):
        part = whole(work)
        if len(steps) < bad_step or work.sequence.request.id != bad.id:
            return part
        return replace(part, positions=Positions(part.positions.coords - 1))

    monkeypatch.setattr(engine._runner, "_part", part_of)
    events = []
    while not engine.is_idle:
        steps.append(len(steps))
        events += engine.step()
        engine.check()
    (failed,), (fine,) = finals(events, bad), finals(events, good)
    assert failed.finish_reason == "error"
    assert "sequence 0: the cache" in failed.error and "the batch starts at" in failed.error
    assert fine.token_ids == solo(good)
    monkeypatch.undo()
    assert run(engine, [requests()[0]])[0].token_ids == solo(requests()[0])


@pytest.mark.parametrize("failing_call", range(7))
def test_a_drafter_that_fails_costs_drafts_and_no_text(monkeypatch, failing_call):
    engine, calls = toy_engine(), []
    head = toy_target(seed=5).head
    monkeypatch.setattr(engine, "_drafters", engine._drafters | {"mtp": MtpDrafter(head)})
    forward = head.forward

    def failing(batch, caches):
        calls.append(1)
        if len(calls) == failing_call + 1:
            raise RuntimeError("no more memory")
        return forward(batch, caches)

    monkeypatch.setattr(head, "forward", failing)
    results = run(engine, requests())
    assert [result.token_ids for result in results] == [solo(request) for request in requests()]
    assert any("no more memory" in (result.draft.off_because or "") for result in results)


def test_a_target_that_fails_ends_the_requests_of_that_step_and_the_engine_goes_on(monkeypatch):
    engine, target = toy_engine(), toy_target()
    waiting = ask("later", max_tokens=4)
    many = [*requests(), *requests(), *requests()]  # more than slots
    for request in (*many, waiting):
        engine.add(request)
    events = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", lambda batch, caches: 1 / 0)
        events += engine.step()
    events += drain(engine)
    failed = [request for request in many if finals(events, request)[0].finish_reason == "error"]
    assert failed and all("ZeroDivisionError" in finals(events, request)[0].error for request in failed)
    assert all(len(finals(events, request)) == 1 for request in (*many, waiting))
    assert finals(events, waiting)[0].token_ids == solo(ask("later", max_tokens=4))


def test_an_image_that_cannot_be_embedded_ends_its_request_alone(monkeypatch):
    engine, target = toy_engine(), toy_target()
    with monkeypatch.context() as patch:
        patch.setattr(target, "embed_image", lambda image: 1 / 0)
        bad, fine = run(engine, [requests()[0], ask("text only", draft="mtp")])
    assert bad.finish_reason == "error" and "ZeroDivisionError" in bad.error
    assert fine.token_ids == solo(ask("text only"))


def test_a_failure_after_the_last_token_gives_no_second_final_event(monkeypatch):
    engine = toy_engine()
    settle = engine._settle
    monkeypatch.setattr(engine, "_settle", lambda work: 1 / 0 if work.sequence.finish else settle(work))
    (result,) = run(engine, [ask("x", max_tokens=3)])
    assert result.finish_reason == "length"


def test_a_cache_that_has_no_memory_costs_what_is_kept_and_no_text(monkeypatch):
    engine, (one, other) = toy_engine(), requests()
    run(engine, [one])
    with monkeypatch.context() as patch:
        patch.setattr(engine._prefixes, "_add", lambda *given: 1 / 0)
        (result,) = run(engine, [other])
    assert (result.finish_reason, result.token_ids) == ("length", solo(requests()[1]))
    assert (len(engine._prefixes), engine._prefixes.bytes_held) == (0, 0)
    assert run(engine, [requests()[0]])[0].token_ids == solo(requests()[0])


def test_events_of_other_requests_wait_for_whoever_steps_next():
    engine = toy_engine()
    other = ask("somebody else's question", max_tokens=4)
    engine.add(other)
    (mine,) = engine.generate([ask("my question", max_tokens=20)])
    assert mine.finish_reason == "length"
    events = [event for event in engine.step() if event.request_id == other.id]
    assert sum(len(event.tokens) for event in events) == 4
    assert [event.result is not None for event in events].count(True) == 1
