"""States that wait for their input come out in order, whatever the next steps write over what was lent."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreglance.drafters.lanes import Lane

WIDTH = 3


def lane_of(known: int = 0, shift: int = 1) -> Lane:
    sequence = SimpleNamespace(in_prefill=False, committed=0, known=known)
    return Lane(sequence, SimpleNamespace(shift=shift), WIDTH)


def states_of(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1).repeat(1, WIDTH)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 100), st.booleans()), max_size=12), st.integers(0, 20))
def test_states_come_out_once_and_in_order(rounds, resumed):
    """In each round some rows are lent, up to some are known, and those are taken or not."""
    lane, lent, taken = lane_of(), 0, 0
    if resumed:
        lane.resume(0, states_of(0, resumed))
        lent = resumed
    for count, known, takes in rounds:
        buffer = states_of(lent, count)
        lane.receive(lent, buffer)
        lent += count
        lane.sequence.known = max(lane.sequence.known, min(lent + 1, taken + known))
        assert lane.num_waiting == lent - taken and torch.equal(lane.rest(), states_of(taken, lent - taken))
        if takes:
            ready = lane.ready
            states = lane.due()
            assert torch.equal(states, states_of(taken, max(0, ready - taken)))
            taken += len(states)
        lane.hold()
        buffer.fill_(-1)  # the next step
        assert (lane.first, lane.num_waiting) == (taken, lent - taken)
        assert torch.equal(lane.rest(), states_of(taken, lent - taken))


def test_states_of_another_row_are_refused():
    lane = lane_of()
    lane.receive(0, states_of(0, 2))
    with pytest.raises(RuntimeError, match="states of rows from 3 on, but row 2 is next"):
        lane.receive(3, states_of(3, 1))
