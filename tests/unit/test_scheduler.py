"""Who runs; and how deep: never more than pays, by a simulated clock."""

import pytest

from foreglance.prompt import OneAxis, make_rows
from foreglance.request import MAX_DEPTH, Request
from foreglance.scheduler import AUTO_DEEPEST, Costs, DepthControl, Scheduler
from foreglance.sequence import Sequence


class Clock:
    """A machine whose step costs `row` more per row, and whose draft costs `guess` per depth; guesses stand by plan."""

    def __init__(self, stands, row=0.0, guess=0.1):
        self.costs, self.seconds, self.depths = Costs(), 0.0, []
        self._stands, self._row, self._guess = stands, row, guess

    def run(self, control, num_tokens):
        tokens, depth = 0, 0
        while tokens < num_tokens:
            target = 1 + self._row * depth
            self.costs.target.add(1 + depth, target)
            accepted = self._stands(len(self.depths), depth)
            control.learn(depth, accepted)
            tokens += 1 + accepted
            depth = control.next(1, num_tokens - tokens)
            if depth:
                self.costs.of("mtp").add(depth, self._guess * depth)
            self.seconds += target + self._guess * depth
            self.depths.append(depth)
        return self.seconds


def auto(clock):
    return DepthControl("auto", "mtp", MAX_DEPTH, clock.costs)


@pytest.mark.parametrize("depth", (1, 3, 15))
def test_a_fixed_depth_stays_and_ends_with_the_answer(depth):
    control = DepthControl(depth, "mtp", MAX_DEPTH, Costs())
    for _ in range(50):
        control.learn(depth, 0)
    assert control.next(1, 100) == depth
    assert [control.next(1, wanted) for wanted in (3, 2, 1, 0)] == [min(depth, 2), 1, 0, 0]
    assert not control.is_off


@pytest.mark.case("C8")
@pytest.mark.parametrize(("row", "guess"), ((0.0, 0.1), (0.2, 0.05), (0.5, 0.3)))
def test_text_that_never_drafts_costs_under_three_percent(row, guess):
    """Case C8. 2,000 tokens: the first guesses, then probes after pauses that double."""
    clock = Clock(lambda step, depth: 0, row, guess)
    control = auto(clock)
    assert clock.run(control, 2000) < 2000 * 1.03
    assert control.is_off
    assert set(clock.depths[-200:]) <= {0, 1}


def test_drafts_that_always_stand_go_deep():
    clock = Clock(lambda step, depth: depth, row=0.02, guess=0.02)
    control = auto(clock)
    assert clock.run(control, 600) < 600 / 4
    assert max(clock.depths) == AUTO_DEEPEST and not control.is_off


def test_a_sequence_learns_what_a_plain_step_costs_before_it_drafts():
    clock = Clock(lambda step, depth: depth, row=0.02, guess=0.02)
    clock.run(auto(clock), 40)
    assert clock.depths[:3] == [0, 0, 1]  # the first step is plain anyway
    second = auto(clock)
    assert second.next(1, 100) > 0
    alone = auto(Clock(lambda step, depth: depth))
    assert any(alone.next(1, 100) for _ in range(20)), "and does not wait for it forever"


@pytest.mark.case("D12")
def test_drafting_comes_back_when_the_text_changes():
    clock = Clock(lambda step, depth: depth if step > 300 else 0, row=0.02, guess=0.02)
    control = auto(clock)
    clock.run(control, 3000)
    assert not control.is_off and max(clock.depths[-50:]) > 2


def test_rows_that_cost_as_much_as_steps_are_not_worth_a_poor_guess():
    """Where every row costs a whole step, a guess that stands half of the time does not pay."""
    clock = Clock(lambda step, depth: min(depth, step % 2), row=1.0, guess=0.2)
    control = auto(clock)
    assert clock.run(control, 2000) < 2000 * 1.05


def sequence(number, num_prompt=20):
    rows = make_rows([5] * num_prompt, 9, [], OneAxis())
    return Sequence(number, Request.from_prompt("-"), rows, OneAxis(), frozenset(), str, 1000)


def test_first_come_first_served_over_the_slots():
    scheduler, many = Scheduler(2, 16, False), [sequence(i) for i in range(4)]
    for one in many:
        scheduler.add(one)
    assert scheduler.admit() == many[:2] and scheduler.admit() == []
    assert scheduler.running == tuple(many[:2]) and scheduler.waiting == tuple(many[2:])
    scheduler.remove([many[0]])
    assert scheduler.admit() == [many[2]]
    scheduler.remove([many[3]])
    assert scheduler.waiting == ()
    scheduler.remove(many)
    assert scheduler.is_idle


def test_a_step_takes_every_decoding_sequence_and_one_prompt_chunk():
    scheduler, many = Scheduler(4, 16, False), [sequence(i) for i in range(4)]
    for one in many:
        scheduler.add(one)
    scheduler.admit()
    for one in many[:2]:
        one.advance(20)
        one.generated += [7]
    many[1].draft = (8, 9)
    works = [(work.sequence.id, work.start, work.stop, work.chunk) for work in scheduler.pick()]
    assert works == [(0, 20, 21, False), (1, 20, 23, False), (2, 0, 16, True)]


def test_a_request_is_found_while_it_runs_or_waits():
    scheduler, one = Scheduler(1, 16, False), sequence(0)
    scheduler.add(one)
    assert scheduler.find(one.request.id) is one
    scheduler.admit()
    assert scheduler.find(one.request.id) is one
    scheduler.remove([one])
    assert scheduler.find(one.request.id) is None
