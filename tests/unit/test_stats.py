"""Running measurements: costs and acceptance."""

from hypothesis import given
from hypothesis import strategies as st

from foreglance.stats import Acceptance, CostCurve


def test_a_cost_is_measured_or_on_a_line():
    curve = CostCurve()
    assert not curve and curve.at(3) == 0.0
    for _ in range(CostCurve.ENOUGH):
        curve.add(1, 1.0)
        curve.add(5, 3.0)
    assert curve
    assert [curve.at(n) for n in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    assert curve.at(50) == 25.5


def test_a_stall_hardly_moves_a_cost_and_a_fast_sample_does():
    slow, fast = CostCurve(), CostCurve()
    for curve, seconds in ((slow, 2.0), (fast, 0.5)):
        for _ in range(CostCurve.ENOUGH):
            curve.add(1, 1.0)
        curve.add(1, seconds)
    assert 1.0 < slow.at(1) < 1.1
    assert 0.5 < fast.at(1) < 0.9


def test_a_stall_of_any_length_counts_as_a_short_one():
    """A stall of a hundred steps once made a depth six times as dear as it was."""
    curve = CostCurve()
    for seconds in (1.0, 1.0, 1.0, 100.0):
        curve.add(1, seconds)
    assert 1.0 < curve.at(1) < 1.1
    for _ in range(200):  # but steps that have become dearer are followed
        curve.add(1, 4.0)
    assert curve.at(1) > 3.9


def test_one_measured_count_is_flat_or_proportional():
    flat, proportional = CostCurve(), CostCurve(proportional=True)
    for _ in range(CostCurve.ENOUGH):
        flat.add(2, 1.0)
        proportional.add(2, 1.0)
    assert [flat.at(n) for n in (1, 2, 8)] == [1.0, 1.0, 1.0]
    assert [proportional.at(n) for n in (1, 2, 8)] == [0.5, 1.0, 4.0]


def test_a_count_is_believed_after_some_samples_and_begins_with_the_fastest():
    """One stalled sample of a depth kept it from ever being tried again."""
    curve = CostCurve()
    for _ in range(CostCurve.ENOUGH):
        curve.add(2, 1.0)
    assert curve.knows_up_to(2) and not curve.knows_up_to(1)
    curve.add(3, 50.0)
    assert curve.at(3) == 1.0
    curve.add(3, 1.2)
    curve.add(3, 1.3)
    assert curve.at(3) == 1.2


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
