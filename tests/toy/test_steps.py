"""Steps in one native call: the tokens of the way station by station, in any company; an error ends the requests of its
step."""

from collections import Counter

import pytest
from support.embedded import SEEING, ask, engine_of, plain, run, scene

from foreglance.models.steps import StepPlan
from foreglance.ops.numerics import kernels_are_native
from foreglance.runner import TargetRunner

pytestmark = pytest.mark.skipif(not kernels_are_native(), reason="native kernels are missing or switched off")


def requests():
    """Some pick plainly, some do not, so that both ways take turns with the same sequences."""
    return [
        ask("Describe the image.", [scene(1)], depth=3, max_tokens=40),
        ask("Describe the image.", [scene(2)], depth=2, max_tokens=24, temperature=0.8, seed=5),
        ask("What is this?", [scene(1), scene(3)], draft="none", max_tokens=32, temperature=1.2, seed=(1 << 64) - 1),
        ask("Hello!", depth=5, max_tokens=9, repetition_penalty=1.3),
        ask("Describe the image.", [scene(4)], draft="ngram", depth=4, max_tokens=16, logprobs=2),
    ]


def station_by_station(engine):
    engine._runner.steps = None
    return engine


@pytest.mark.parametrize("slots", (1, 2, 5))
@pytest.mark.parametrize("name", SEEING)
def test_steps_at_once_pick_what_the_stations_pick(name, slots, monkeypatch):
    ways = Counter()
    for way in ("_at_once", "_by_stations"):
        whole = getattr(TargetRunner, way)

        def counted(runner, works, *refuse, way=way, whole=whole):
            done = whole(runner, works, *refuse)
            ways[way] += done is not None
            return done

        monkeypatch.setattr(TargetRunner, way, counted)
    engine = engine_of(name, slots=slots)
    at_once = run(engine, *requests())
    assert min(ways.values()) >= 5, "both ways were gone"
    by_stations = run(station_by_station(engine_of(name, slots=slots)), *requests())
    assert [result.token_ids for result in at_once] == [result.token_ids for result in by_stations]
    assert [result.timings.accepted for result in at_once] == [result.timings.accepted for result in by_stations]


@pytest.mark.parametrize("small", (0, 1 << 30), ids=("repeated", "written"))
def test_states_of_every_size_give_the_same_tokens(small, monkeypatch):
    """Whether a recurrent state is repeated from an older one or written with every forward, drafts on and off."""
    monkeypatch.setattr("foreglance.cache.recurrent.SMALL", small)
    many = [
        ask(
            "Describe the image.", [scene(n)], depth=2 + n, max_tokens=120, temperature=0.6 * n, seed=n, ignore_eos=True
        )
        for n in range(3)
    ]
    drafted = run(engine_of("tiny-qwen", slots=2), *many)
    monkeypatch.undo()
    assert [result.token_ids for result in drafted] == [plain(request).token_ids for request in many]
    assert all(0.1 < result.timings.acceptance < 0.95 for result in drafted), "some guesses stand, some do not"


@pytest.mark.parametrize("late", (False, True), ids=("before", "after"))
@pytest.mark.parametrize("name", SEEING)
def test_an_error_in_a_step_at_once_ends_the_requests_of_that_step(name, late, monkeypatch):
    engine, many, calls = engine_of(name, slots=2), requests()[:4], []
    want = [result.token_ids for result in run(engine_of(name, slots=2), *many)]
    whole = StepPlan.run

    def broken(plan, rows):
        calls.append(len(rows))
        if len(calls) == 3 and not late:
            raise MemoryError("no more memory")
        picks = whole(plan, rows)
        if len(calls) == 3:
            raise MemoryError("no more memory")
        return picks

    monkeypatch.setattr(StepPlan, "run", broken)
    results = engine.generate(many)
    engine.check()
    assert sum(result.error is not None for result in results) == calls[2]
    for result, tokens in zip(results, want, strict=True):
        assert result.token_ids == tokens[: len(result.token_ids)]
        assert result.error is not None or result.token_ids == tokens
    assert [result.token_ids for result in run(engine, *requests()[:4])] == want
