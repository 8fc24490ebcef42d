"""Who runs; and how deep: never more than pays, on simulated machines."""

import math
import random
from collections import Counter

import pytest

from foreglance.prompt import OneAxis, make_rows
from foreglance.request import MAX_DEPTH, Request
from foreglance.scheduler import AUTO_DEEPEST, Costs, DepthControl, Scheduler
from foreglance.sequence import Sequence
from foreglance.stats import CostCurve

CHEAP, LARGE, CHAIN, DEAR = (0.13, 0.12, 0.2), (0.09, 0.16, 0.0), (0.28, 0.26, 0.1), (1.0, 0.3, 0.0)  # see `Machine`


class Machine:
    """Costs in plain steps: one more row, a guess, what guessing begins with. What is counted is exact; what is
    measured comes with noise and stalls, the first two times of a shape are slow, and the pace doubles and halves."""

    def __init__(self, row=0.0, guess=0.1, base=0.0, is_calibrated=True, is_noisy=True, seed=0):
        self.costs, self.depths, self._random = Costs(), [], random.Random(seed)
        self._row, self._guess, self._base, self._is_noisy = row, guess, base, is_noisy
        self._met, self._steps, self._pace = Counter(), 0, 1.0
        if is_calibrated:
            self.costs.tour.extend((8, 8, 5, 3, 2, 1, 0) * 12)
            while self.costs.tour:
                self.answer(0.7, 40)
            self.costs.toured()
        self.depths.clear()

    def step(self, depth):
        return 1 + self._row * depth

    def draft(self, depth):
        return self._base + self._guess * depth if depth else 0.0

    def answer(self, stands, num_tokens, depth="auto"):
        """Plain steps that an answer took. `stands`: how often a guess does, by itself or by the tokens so far."""
        control, tokens, before, depth, spent = DepthControl(depth, "mtp", MAX_DEPTH, self.costs), 0, 0, 0, 0.0
        while tokens < num_tokens:
            chance, accepted = stands(tokens) if callable(stands) else stands, 0
            while accepted < min(depth, num_tokens - tokens - 1) and self._random.random() < chance:
                accepted += 1
            self.costs.add_step(1 + depth, self._measured("step", depth, self.step(depth)))
            control.learn(depth, accepted)
            tokens += 1 + accepted
            spent += self.step(depth) + self.draft(depth)
            self.depths.append(depth)
            before, depth = depth, control.next(1, num_tokens - tokens)
            if depth:
                seconds = self._measured("draft", depth, self.draft(depth))
                self.costs.add_draft("mtp", 1, depth, seconds, is_steady=before >= depth)
        self.control = control
        return spent

    def _measured(self, what, depth, seconds):
        self._met[what, depth] += 1
        self._steps += 1
        self._pace = 2.0 if self._steps % 1500 > 700 else 1.0
        slow = 8 if self._met[what, depth] < 3 else 1
        if not self._is_noisy:
            return seconds * slow
        stall = self._random.choice((1, 5, 50)) if self._random.random() < 0.02 * seconds else 0
        return self._pace * (seconds * slow * math.exp(self._random.gauss(0, 0.04)) + stall)


def fixed(stands, num_tokens, machine):
    """What the same text costs at every fixed depth, 0 first: plain steps for a round, and the tokens it is worth."""
    one = Machine(*machine, is_calibrated=False)
    tokens = [sum(stands**k for k in range(depth + 1)) for depth in range(AUTO_DEEPEST + 1)]
    return [num_tokens * (one.step(depth) + one.draft(depth)) / worth for depth, worth in enumerate(tokens)]


@pytest.mark.parametrize("depth", (1, 3, 15))
def test_a_fixed_depth_stays_and_ends_with_the_answer(depth):
    control = DepthControl(depth, "mtp", MAX_DEPTH, Costs())
    for _ in range(50):
        control.learn(depth, 0)
    assert control.next(1, 100) == depth
    assert [control.next(1, wanted) for wanted in (3, 2, 1, 0)] == [min(depth, 2), 1, 0, 0]
    assert not control.is_off


@pytest.mark.case("C8")
@pytest.mark.parametrize("machine", (CHEAP, LARGE, CHAIN, DEAR))
def test_text_that_never_drafts_costs_under_three_percent(machine):
    """Case C8. One long answer, and as many tokens in short ones that begin anew each time."""
    one = Machine(*machine)
    assert one.answer(0.0, 2000) < 2000 * 1.03
    assert one.control.is_off and set(one.depths[-200:]) <= {0, 1}
    many = Machine(*machine)
    assert sum(many.answer(0.0, 50) for _ in range(40)) < 2000 * 1.03


@pytest.mark.parametrize("stands", (0.3, 0.6, 0.9))
@pytest.mark.parametrize("machine", (CHEAP, LARGE, CHAIN, DEAR))
def test_no_fixed_depth_is_much_better(machine, stands):
    """2,000 tokens on a busy machine whose pace doubles and halves. It rested for whole answers where depth 3 pays 1.4
    times, since costs were measured on shapes that were not recorded yet, on stalls, or before the pace changed."""
    best = min(fixed(stands, 2000, machine))
    spent = sum(Machine(*machine, seed=seed).answer(stands, 2000) for seed in range(4)) / 4
    assert spent < best * 1.04
    assert spent < 2000 * 1.03


@pytest.mark.parametrize("stands", (0.6, 0.9))
def test_short_answers_begin_with_what_earlier_ones_showed(stands):
    machine, best = Machine(*CHEAP), min(fixed(stands, 60, CHEAP))
    machine.answer(stands, 60)
    assert sum(machine.answer(stands, 60) for _ in range(40)) / 40 < best * 1.08  # the end cuts guesses at any depth


def test_a_text_that_drafts_is_found_soon_after_many_that_did_not():
    machine = Machine(*CHEAP)
    for _ in range(40):
        machine.answer(0.0, 50)
    assert sum(machine.answer(0.9, 200) for _ in range(2)) < 400 * 0.8


def test_drafts_that_always_stand_go_deep():
    machine = Machine(row=0.02, guess=0.02)
    assert machine.answer(1.0, 600) < 600 / 4
    assert max(machine.depths) == AUTO_DEEPEST and not machine.control.is_off


def test_a_sequence_learns_what_a_plain_step_costs_before_it_drafts():
    """Where nothing was measured at load."""
    machine = Machine(row=0.02, guess=0.02, is_calibrated=False, is_noisy=False)
    machine.answer(1.0, 60)
    assert machine.depths[:5] == [0, 0, 0, 0, 1]
    assert DepthControl("auto", "mtp", MAX_DEPTH, machine.costs).next(1, 100) > 0
    alone = DepthControl("auto", "mtp", MAX_DEPTH, Costs())
    assert any(alone.next(1, 100) for _ in range(20)), "and does not wait for it forever"


@pytest.mark.case("D12")
def test_drafting_comes_back_when_the_text_changes():
    machine = Machine(*CHEAP)
    machine.answer(lambda tokens: float(tokens > 400), 3000)
    assert not machine.control.is_off and max(machine.depths[-50:]) > 2


def test_a_tour_goes_through_its_depths_and_is_over():
    control = DepthControl("auto", "mtp", MAX_DEPTH, Costs())
    control.costs.tour.extend((8, 3, 0))
    assert [control.next(1, 100), control.next(1, 3), control.next(1, 100)] == [8, 2, 0]
    assert not control.costs.tour


def test_guesses_for_several_sequences_cost_what_they_cost_together():
    costs = Costs()
    for _ in range(CostCurve.ENOUGH):
        costs.add_step(1, 1.0)
        costs.add_draft("mtp", 1, 2, 0.5, is_steady=True)
    assert costs.round("mtp", 3, 2) == pytest.approx(1.0 + 3 * 0.5)  # until it was measured
    for _ in range(CostCurve.ENOUGH):
        costs.add_draft("mtp", 3, 2, 0.8, is_steady=True)
    assert costs.round("mtp", 3, 2) == pytest.approx(1.8)
    assert costs.round("mtp", 1, 2) == pytest.approx(1.5)


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
