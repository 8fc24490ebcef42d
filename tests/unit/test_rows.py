"""Target rows to draft rows: the table of the policies, and a plain reference."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreglance.drafters.rows import RowMap
from foreglance.prompt import ImageInput, MRope, OneAxis, make_rows, spans_of
from foreglance.request import Request
from foreglance.sequence import Sequence

PLACE = 9


def sequence_of(ids, grids, rule, generated=()):
    rows = make_rows(ids, PLACE, [ImageInput(str(i), grid) for i, grid in enumerate(grids)], rule)
    sequence = Sequence(0, Request.from_prompt("-"), rows, rule, frozenset(), str, 1000)
    sequence.advance(len(rows))
    sequence.generated += generated
    return sequence


def map_of(sequence, policy, rule, position_of="input"):
    return RowMap(sequence, policy, rule, position_of, PLACE)


WORKED = {  # the worked example of the module: one image of 2 x 2 after three tokens, first axis
    "see": [0, 1, 2, 2, 2, 2, 4, 5, 6],
    "placeholder": [0, 1, 2, 2, 2, 2, 4, 5, 6],
    "skip": [0, 1, 2, 3, 4],
    "gap": [1, 2, 5, 6, 7],
}


@pytest.mark.parametrize("policy", WORKED)
def test_the_worked_example(policy):
    sequence = sequence_of([1, 2, 3, PLACE, 4, 5], [(2, 2)], MRope(), generated=[6, 7])
    assert sequence.positions(0, 10).coords[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 5, 6, 7]
    rows = map_of(sequence, policy, MRope()).rows(0, 9)
    assert rows.positions.coords[0].tolist() == WORKED[policy]
    dropped = policy in ("skip", "gap")
    assert rows.target_row.tolist() == ([0, 1, 6, 7, 8] if dropped else [*range(9)])
    tokens = [2, 3, 4, 5, 6] if dropped else [2, 3, PLACE, PLACE, PLACE, PLACE, 4, 5, 6]
    assert rows.token_ids.tolist()[: len(tokens)] == tokens
    sees = policy == "see"
    assert rows.is_image.tolist() == ([False] * 5 if dropped else [sees and 2 <= i < 6 for i in range(9)])
    if sees:
        assert rows.offset[2:6].tolist() == [0, 1, 2, 3]
        assert rows.positions.coords[:, 2:6].tolist() == [[2] * 4, [2, 2, 3, 3], [2, 3, 2, 3]]


prompts = st.lists(st.one_of(st.just(None), st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=6)
rules = st.sampled_from([MRope(), OneAxis()])


def build(shape, rule, generated=(20, 21, 22)):
    ids = [1 + i if grid is None else PLACE for i, grid in enumerate(shape)]
    return sequence_of(ids, [grid for grid in shape if grid], rule, generated)


@pytest.mark.case("A2")
@given(prompts, rules)
def test_see_is_the_familys_rule_over_the_drafts_own_spans(shape, rule):
    """Case A2, and a prompt that begins with an image: on one axis its draft once started at position 1."""
    sequence = build(shape, rule)
    rows = map_of(sequence, "see", rule).rows(0, sequence.known - 1)
    prompt = sequence.rows
    image = np.concatenate([prompt.image[1:], [-1] * len(sequence.generated)])
    if not prompt.is_image[0] or prompt.images[0].num_rows == 1:
        want = rule.place(spans_of(image, prompt.images)).coords
    else:  # the first image's remaining rows keep their places in it
        want = rule.place(spans_of(np.concatenate([prompt.image[:1], image]), prompt.images)).coords[:, 1:]
        want = want - want[:1, :1]
    assert rows.positions.coords.tolist() == want.tolist()


@given(prompts, rules)
def test_skip_is_text_alone(shape, rule):
    sequence = build(shape, rule)
    rows = map_of(sequence, "skip", rule).rows(0, sequence.known - 1)
    tokens = [int(t) for t, i in zip(sequence.rows.token_ids[1:], sequence.rows.image[1:], strict=True) if i < 0]
    assert rows.token_ids.tolist() == [*tokens, *sequence.generated]
    assert rows.positions.coords.tolist() == [list(range(len(rows)))] * rule.axes


@given(prompts, rules)
def test_gap_keeps_the_targets_positions(shape, rule):
    sequence = build(shape, rule)
    rows = map_of(sequence, "gap", rule).rows(0, sequence.known - 1)
    inputs = sequence.positions(1, sequence.known).coords
    assert rows.positions.coords.tolist() == inputs[:, rows.target_row].tolist()


@given(prompts, rules)
def test_a_head_numbered_by_its_hidden_state_has_the_targets_positions(shape, rule):
    sequence = build(shape, rule)
    rows = map_of(sequence, "see", rule, "hidden").rows(0, sequence.known - 1)
    assert rows.positions.coords.tolist() == sequence.positions(0, sequence.known - 1).coords.tolist()


policies = st.sampled_from(["see", "skip", "placeholder", "gap"])


@pytest.mark.case("A6")
@given(prompts, rules, policies, st.sampled_from(["input", "hidden"]), st.data())
def test_rows_in_pieces_are_the_rows_at_once(shape, rule, policy, position_of, data):
    sequence = build(shape, rule)
    mapping, end = map_of(sequence, policy, rule, position_of), sequence.known - 1
    whole = mapping.rows(0, end)
    cuts = sorted(data.draw(st.sets(st.integers(0, end), max_size=5)) | {0, end})
    pieces = [mapping.rows(a, b) for a, b in pairwise(cuts)]
    for name in ("target_row", "token_ids", "image", "offset", "in_image"):
        joined = np.concatenate([getattr(piece, name) for piece in pieces]) if pieces else []
        assert list(joined) == getattr(whole, name).tolist()
    if pieces:
        joined = np.concatenate([piece.positions.coords for piece in pieces], axis=1)
        assert joined.tolist() == whole.positions.coords.tolist()
    assert [mapping.count(cut) for cut in cuts] == [int((whole.target_row < cut).sum()) for cut in cuts]


@given(prompts, rules, st.sampled_from(["see", "skip", "placeholder"]), st.sampled_from(["input", "hidden"]))
def test_a_drafts_positions_obey_the_familys_rule(shape, rule, policy, position_of):
    sequence = build(shape, rule)
    rows = map_of(sequence, policy, rule, position_of).rows(0, sequence.known - 1)
    rule.check(None, rows.positions, rows.in_image)


def test_guesses_behind_the_last_known_row_follow_on():
    sequence = build([None, (2, 4), None], MRope())
    mapping = map_of(sequence, "see", MRope())
    last = mapping.positions(0, sequence.known - 1).at(-1)
    guesses = mapping.positions(sequence.known - 1, sequence.known + 2)
    assert guesses.coords.tolist() == [[last[0] + i for i in (1, 2, 3)]] * 3


def test_a_placeholder_stands_in_for_each_image_row():
    sequence = build([None, (2, 2), None], MRope())
    rows = map_of(sequence, "placeholder", MRope()).rows(0, 5)
    assert rows.token_ids.tolist()[:4] == [PLACE] * 4
    assert not rows.is_image.any()
    assert rows.in_image.tolist() == [True] * 4 + [False]
