"""Every rule of a batch: breaking it is an error that names the sequence and the rule, and changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreglance.batch import BatchError, Held, InputSpec, Part, pack
from foreglance.prompt import MRope, OneAxis, Positions

WIDTH = 8
SPEC = InputSpec(100, WIDTH, None, OneAxis())
HELD = {1: Held(4, (3,)), 2: Held(0, None), 7: Held(9, (8,))}


def tokens(sequence, start, ids, **more):
    ids = np.array(ids, np.int64)
    whole = {"num_scored": 1, "chunk": False, "positions": Positions.run(start, len(ids), 1), **more}
    return Part(sequence, ids, np.zeros(len(ids), bool), **whole)


GOOD = tokens(7, 9, [5, 6])
FINE = tokens(1, 4, [10, 11])
IMAGE = replace(FINE, image=np.array([True, False]), embeds=torch.ones(1, WIDTH))

BROKEN = {
    "unknown sequence": (replace(FINE, sequence=3), "sequence 3: is not known to the cache"),
    "no rows": (tokens(1, 4, []), "has no rows"),
    "lengths differ": (replace(FINE, image=np.zeros(3, bool)), "2 token ids, 3 input kinds and 2 positions"),
    "too many scored": (replace(FINE, num_scored=3), "asks for 3 scored rows of 2"),
    "token too high": (replace(FINE, token_ids=np.array([5, 100])), "token id 100 is outside the vocabulary of 100"),
    "token negative": (replace(FINE, token_ids=np.array([-1, 5])), "token id -1 is outside"),
    "image without embedding": (replace(IMAGE, embeds=None), "1 image rows but 0 image embeddings"),
    "embedding without image": (replace(FINE, embeds=torch.ones(1, WIDTH)), "0 image rows but 1 image embeddings"),
    "embedding width": (replace(IMAGE, embeds=torch.ones(1, 5)), "embeddings are 5 wide, the model takes 8"),
    "hidden not taken": (replace(FINE, hidden=torch.ones(2, WIDTH)), "carries target hidden states"),
    "axes": (replace(FINE, positions=Positions.run(4, 2, 3)), "positions on 3 axes, the model numbers on 1"),
    "hole": (
        replace(FINE, positions=Positions.run(6, 2, 1)),
        "at position 3, so the first new row must be at position 4",
    ),
    "going back": (replace(FINE, positions=Positions.run(3, 2, 1)), "the batch starts at 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_names_the_sequence_and_the_rule(name):
    part, says = BROKEN[name]
    for parts in ([part], [GOOD, part], [part, GOOD]):
        with pytest.raises(BatchError) as refused:
            pack(parts, SPEC, HELD)
        assert refused.value.sequence == part.sequence
        assert f"sequence {part.sequence}: " in str(refused.value) and says in str(refused.value)
    assert len(pack([GOOD], SPEC, HELD).parts) == 1, "a parallel sequence is untouched"
    assert list(HELD.values()) == [Held(4, (3,)), Held(0, None), Held(9, (8,))]


def test_a_hole_says_what_the_cache_holds_where_the_batch_starts_and_the_rule():
    with pytest.raises(BatchError) as refused:
        pack([replace(FINE, positions=Positions.run(6, 2, 1))], SPEC, HELD)
    for words in ("sequence 1", "position 3", "starts at 6", "without holes", "4 rows held"):
        assert words in str(refused.value)


def test_the_rule_of_three_axes_is_told_in_words_too():
    spec = replace(SPEC, rule=MRope())
    part = replace(FINE, positions=Positions(np.array([[3, 4], [3, 4], [3, 4]])))
    with pytest.raises(BatchError) as refused:
        pack([part], spec, {1: Held(4, (3, 3, 3))})
    for words in ("sequence 1", "(3, 3, 3)", "row 0 (token)", "strictly forward", "4 rows held"):
        assert words in str(refused.value)


def test_a_sequence_twice_in_one_batch_is_refused():
    with pytest.raises(BatchError, match="sequence 1: appears twice"):
        pack([FINE, GOOD, FINE], SPEC, HELD)


@pytest.mark.parametrize("hidden", (None, torch.ones(1, WIDTH), torch.ones(2, 3)))
def test_a_head_must_be_given_a_hidden_state_for_each_row(hidden):
    spec = replace(SPEC, hidden_width=WIDTH)
    with pytest.raises(BatchError, match=r"sequence 1: must carry target hidden states of shape \(2, 8\)"):
        pack([replace(FINE, hidden=hidden)], spec, HELD)


def test_holes_are_allowed_only_where_they_are_measured():
    part = replace(FINE, positions=Positions.run(60, 2, 1))
    assert pack([part], replace(SPEC, strict_positions=False), HELD).positions.tolist() == [[60, 61]]


def test_a_row_may_carry_an_image_embedding_and_a_hidden_state_at_once():
    """What an MTP head needs for an image row, and what batches of one purpose cannot express."""
    spec, hidden = replace(SPEC, hidden_width=WIDTH), torch.arange(16.0).view(2, WIDTH)
    batch = pack([replace(IMAGE, hidden=hidden)], spec, HELD)
    assert batch.image_rows.tolist() == [0]
    assert batch.token_ids.tolist() == [0, 11]
    assert torch.equal(batch.hidden, hidden) and torch.equal(batch.embeds, torch.ones(1, WIDTH))


def test_few_rows_come_first_and_every_chunk_is_a_block_of_its_own():
    chunk = tokens(2, 0, range(20), chunk=True, num_scored=0)
    few = tokens(1, 4, range(17), num_scored=17)
    batch = pack([chunk, few, GOOD], SPEC, HELD)
    assert [part.sequence for part in batch.parts] == [1, 7, 2]
    assert batch.blocks == ((0, 16), (16, 19), (19, 39))
    assert batch.num_few == 19 and batch.num_rows == 39
    assert [batch.rows_of(i) for i in range(3)] == [slice(0, 17), slice(17, 19), slice(19, 39)]
    assert batch.scored.tolist() == [*range(17), 18]


def test_drafts_are_rows_behind_the_last_token():
    part = replace(tokens(1, 4, [10]), positions=Positions.run(4, 3, 1)).with_drafts((20, 21))
    batch = pack([replace(part, num_scored=3)], SPEC, HELD)
    assert batch.token_ids.tolist() == [10, 20, 21] and batch.parts[0].drafts == (20, 21)
