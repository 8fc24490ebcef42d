"""Drafts against picks: what is kept is what the target alone would have said."""

from hypothesis import given
from hypothesis import strategies as st

from foreglance.verify import verify

ids = st.integers(0, 2)


@given(st.lists(ids, max_size=8), st.data())
def test_what_is_emitted_is_the_targets_own_text(drafts, data):
    """Whatever the drafts were: tokens are the picks, one more than the drafts that stood."""
    picks = data.draw(st.lists(ids, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    verdict = verify(drafts, picks)
    assert verdict.tokens == tuple(picks[: verdict.keep])
    assert len(verdict.tokens) == verdict.keep == verdict.accepted + 1
    assert list(verdict.tokens[:-1]) == drafts[: verdict.accepted]
    assert verdict.accepted == len(drafts) or picks[verdict.accepted] != drafts[verdict.accepted]
    assert verdict.drafted == len(drafts)


@given(st.lists(ids, min_size=1, max_size=8), st.data())
def test_picks_behind_the_first_refuted_draft_are_not_needed(drafts, data):
    picks = data.draw(st.lists(ids, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    whole = verify(drafts, picks)
    assert verify(drafts, picks[: whole.keep]) == whole


@given(st.lists(ids, max_size=8), ids, st.integers(1, 9))
def test_a_cut_verdict_keeps_no_row_behind_the_end(drafts, token, num_tokens):
    whole = verify(drafts, [*drafts, token])
    cut = whole.cut(num_tokens)
    assert cut.tokens == whole.tokens[:num_tokens]
    assert cut.keep == len(cut.tokens)
    assert cut.accepted == min(len(drafts), num_tokens), "a last token that was an accepted draft still counts"
    assert cut.drafted == (num_tokens if num_tokens < len(whole.tokens) else len(drafts))


def test_a_verdict_that_is_cut_where_it_ends_is_the_same():
    verdict = verify([1, 2, 0], [1, 0])
    assert verdict.cut(2) == verdict and (verdict.drafted, verdict.accepted) == (3, 1)


def test_without_drafts_a_step_keeps_one_row_and_gains_one_token():
    verdict = verify([], [7])
    assert (verdict.keep, verdict.tokens, verdict.drafted, verdict.accepted) == (1, (7,), 0, 0)
