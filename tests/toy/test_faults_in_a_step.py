"""An error at any station of any step reaches the requests of that step, each once; nothing else is lost."""

import itertools

import pytest
from support.toy import ask, picture, run, toy_engine

STATIONS = ("_part", "_reserve", "_pick", "_verify", "_commit", "_take", "_draft", "_settle")


def requests():
    return [
        ask("the first one of three", [picture(3, 5, 70)], draft="mtp", depth=3, max_tokens=8),
        ask("the second one", draft="mtp", depth=2, max_tokens=8),
        ask("the third one waits for a slot", [picture(2, 2, 90)], draft="ngram", depth=4, max_tokens=8),
    ]


@pytest.fixture(scope="module")
def alone():
    return [run(toy_engine(), [request])[0].token_ids for request in requests()]


@pytest.mark.parametrize("failing", (0, 1, 3, 7, 12))
@pytest.mark.parametrize("late", (False, True), ids=("before", "after"))
@pytest.mark.parametrize("station", STATIONS)
def test_an_error_at_a_station_ends_the_requests_of_its_step_and_nothing_else(
    station, late, failing, alone, monkeypatch
):
    """Before the station did its work or behind it, when it is passed for the n-th time."""
    engine, calls = toy_engine(slots=2), itertools.count()
    owner = engine if hasattr(engine, station) else engine._runner
    whole = getattr(owner, station)

    def broken(*arguments):
        here = next(calls) == failing
        if here and not late:
            raise MemoryError("no more memory")
        done = whole(*arguments)
        if here:
            raise MemoryError("no more memory")
        return done

    many = requests()
    with monkeypatch.context() as patch:
        patch.setattr(owner, station, broken)
        for request in many:
            engine.add(request)
        events = []
        while not engine.is_idle:
            events += engine.step()
            engine.check()
    assert next(calls) > failing, "the station was passed that often"
    for request, want in zip(many, alone, strict=True):
        (final,) = [event.result for event in events if event.request_id == request.id and event.result]
        assert final.token_ids == want[: len(final.token_ids)]
        assert (final.finish_reason == "error") == (final.error is not None)
        assert final.error is not None or final.token_ids == want
    assert not engine._running
    assert [result.token_ids for result in run(engine, requests())] == alone
