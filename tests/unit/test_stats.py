"""Running measurements: costs and acceptance."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreglance.stats import Acceptance, CostCurve, Pace


def curve_of(costs, pace=None, proportional=False):
    curve = CostCurve(pace, proportional)
    for _ in range(CostCurve.ENOUGH):
        for count, seconds in costs.items():
            curve.add(count, seconds)
    return curve


def test_a_cost_is_measured_or_on_a_line():
    assert not CostCurve() and CostCurve().at(3) == 0.0
    curve = curve_of({1: 1.0, 5: 3.0})
    assert curve
    assert [curve.at(n) for n in (1, 2, 3, 5)] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert curve.at(50) == pytest.approx(25.5)


def test_one_measured_count_is_flat_or_proportional():
    flat, proportional = curve_of({2: 1.0}), curve_of({2: 1.0}, proportional=True)
    assert [flat.at(n) for n in (1, 2, 8)] == pytest.approx([1.0, 1.0, 1.0])
    assert [proportional.at(n) for n in (1, 2, 8)] == pytest.approx([0.5, 1.0, 4.0])


def test_a_count_is_believed_after_some_samples_and_begins_with_the_fastest():
    """One stalled sample of a depth kept it from ever being tried again."""
    curve = curve_of({2: 1.0})
    assert curve.knows_up_to(2) and not curve.knows_up_to(1)
    for seconds in (50.0, 20.0, 1.2):
        curve.add(3, seconds)
        assert curve.at(3) == pytest.approx(1.0)
    curve.add(3, 1.3)
    assert curve.at(3) == pytest.approx(1.2)


def test_a_stall_hardly_moves_a_cost_however_long_it_was():
    """A stall of a hundred steps once made a depth six times as dear as it was."""
    curve = curve_of({1: 1.0, 4: 2.0})
    for seconds in (2.0, 100.0, 1000.0):
        curve.add(1, seconds)
    assert 0.5 < curve.at(1) / curve.at(4) < 0.55


def test_a_machine_that_becomes_slower_or_faster_changes_no_cost_against_another():
    """The costs of depths that were not measured lately were stale, and plain steps that had become slower made drafts
    look cheap: only what is measured at the same pace may be compared."""
    for factor in (3.0, 1 / 3):
        pace = Pace()
        curve = curve_of({1: 1.0, 4: 2.0}, pace)
        for _ in range(300):  # as long as costs are new, both are measured
            curve.add(1, 1.0)
            curve.add(4, 2.0)
        for _ in range(1500):
            curve.add(1, factor)
        assert curve.at(1) / curve.at(4) == pytest.approx(0.5, rel=0.12)
        assert curve.at(1) * math.exp(pace.log) == pytest.approx(factor, rel=0.1)


def test_a_cost_that_changes_by_itself_is_followed():
    """Attention over a longer context makes four rows dearer than one."""
    curve = curve_of({1: 1.0, 4: 2.0})
    for _ in range(1000):
        curve.add(1, 1.0)
        curve.add(4, 3.0)
    assert curve.at(4) / curve.at(1) == pytest.approx(3.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30), st.integers(1, 12))
def test_acceptance_is_a_probability_and_more_depth_never_expects_less(rounds, depth):
    acceptance = Acceptance()
    for drafted, accepted in rounds:
        acceptance.add(drafted, min(drafted, accepted))
    assert all(0 <= acceptance.at(d) <= 1 for d in range(1, depth + 1))
    tokens = [acceptance.expected_tokens(d) for d in range(depth + 1)]
    assert tokens[0] == 1 and tokens == sorted(tokens) and tokens[-1] <= 1 + depth


def test_acceptance_goes_to_what_is_seen():
    always, never, alternating = Acceptance(), Acceptance(), Acceptance()
    for i in range(200):
        always.add(3, 3)
        never.add(3, 0)
        alternating.add(1, i % 2)
    assert always.at(1) > 0.94 and always.at(3) > 0.94
    assert never.at(1) < 0.15
    assert 0.4 < alternating.at(1) < 0.6


def test_one_unlucky_guess_decides_nothing():
    """A single rejected first guess sent whole sequences into a pause."""
    engine_wide = Acceptance(fade=0.99)
    sequence = Acceptance(engine_wide)
    before = sequence.at(1)
    for acceptance in (engine_wide, sequence):
        acceptance.add(1, 0)
    assert before * 0.6 < sequence.at(1) < before


def test_a_depth_counts_as_tried_only_if_those_before_it_stood():
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.add(3, 1)
    assert acceptance.at(1) > 0.9 and acceptance.at(2) < 0.2
    before = acceptance.at(3)
    acceptance.add(3, 0)
    assert acceptance.at(3) <= before


def test_a_new_sequence_begins_with_what_earlier_ones_showed():
    prior = Acceptance(fade=0.99)
    for _ in range(100):
        prior.add(2, 0)
    assert Acceptance(prior).at(1) < 0.1 < 0.5 < Acceptance().at(1)
