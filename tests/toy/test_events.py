"""Events tell what each step did; together they are what the result says at the end."""

import pytest
from support.toy import ask, picture, toy_engine


def run(engine, request):
    engine.add(request)
    events = []
    while not engine.is_idle:
        events += engine.step()
    return events


@pytest.mark.parametrize("sampling", ({}, {"temperature": 0.7, "stop": ("e",)}), ids=("greedy", "stopped"))
@pytest.mark.parametrize("depth", (1, 4))
def test_counts_of_the_events_add_up_to_those_of_the_result(depth, sampling):
    """What a page shows while the answer comes must not jump when it has ended."""
    request = ask("what is red here?", [picture(2, 9, 40)], draft="mtp", depth=depth, max_tokens=60, **sampling)
    events = run(toy_engine(), request)
    tried, stood = [0] * depth, [0] * depth
    for event in events[1:]:
        accepted = sum(token.depth > 0 for token in event.tokens)
        for i in range(min(event.drafted, accepted + 1)):
            tried[i] += 1
            stood[i] += i < accepted
    timings = events[-1].result.timings
    assert events[0].drafted == 0 and len(events) - 1 == timings.steps
    assert (tried, stood) == (list(timings.drafted), list(timings.accepted)) and sum(stood) > 0
