"""What a draft model's token ids must have in common with the target's, and what the rest of the vocabulary may be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreglance.drafters.base import check_vocabulary
from foreglance.drafters.chains import fit
from foreglance.models.base import ModelError

WORDS = {"<end>": 0, "a": 1, "b": 2, "ab": 3}


def refusal(theirs: dict[str, int]) -> str:
    with pytest.raises(ModelError) as error:
        check_vocabulary("big-model", WORDS, "small-model", theirs)
    return str(error.value)


def test_equal_words_with_equal_ids_may_draft_in_whatever_order_they_are_listed():
    check_vocabulary("big-model", WORDS, "small-model", dict(reversed(WORDS.items())))


@pytest.mark.parametrize(
    ("theirs", "at", "words"),
    [
        ({"<end>": 0, "a": 2, "b": 1, "ab": 3}, "id 1", ("'b'", "'a'")),  # the same size, the same words
        ({"<end>": 0, "a": 1, "b": 2}, "id 3", ("no token", "'ab'")),
        ({**WORDS, "<more>": 4}, "id 4", ("'<more>'", "no token")),
        ({"<end>": 0, "a": 1, "c": 2, "ab": 3}, "id 2", ("'c'", "'b'")),
        ({"a": 0, "b": 1}, "id 0", ("'a'", "'<end>'")),
    ],
)
def test_other_words_are_refused_in_one_sentence_that_names_both_sides(theirs, at, words):
    """Case E: an equal size of vocabulary is no proof."""
    text = refusal(theirs)
    assert "small-model" in text and "big-model" in text and at in text
    assert all(word in text for word in words)
    assert f"({len(theirs)} tokens" in text and f"({len(WORDS)} tokens" in text
    assert "\n" not in text and ". " not in text


def test_two_words_for_one_id_are_no_crash():
    assert "small-model" in refusal({**WORDS, "alias": 3})
    assert "small-model" in refusal({"alias": 3, **WORDS}), "the words by id are the same"


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_logits_are_cut_or_filled_to_the_targets_vocabulary(have, want, num_rows):
    logits = np.arange(num_rows * have, dtype=np.float32).reshape(num_rows, have)
    got = fit(logits, want)
    common = min(have, want)
    assert got.shape == (num_rows, want) and got.dtype == np.float32
    np.testing.assert_array_equal(got[:, :common], logits[:, :common])
    assert (got[:, common:] == -np.inf).all()
