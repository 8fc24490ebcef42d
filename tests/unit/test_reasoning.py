"""Budgets of reasoning: what is forced follows from the tokens alone, and ends a block in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreglance.chat_format import Tags
from foreglance.reasoning import ReasoningBudget, ReasoningSplitter, num_shared

TAGS = Tags("<t>", "</t>")
PIECES = ("<", "t", ">", "<t>", "</", "/", "</t", "</t>", "a", " ", "\n", "></t>b", "é")
END = tuple(PIECES.index(piece) for piece in ("</", "t", ">"))
tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
states = st.sampled_from(("none", "open", "done"))


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def budget(limit, state):
    return ReasoningBudget(limit, TAGS, state, END, decode)


@given(states, st.integers(0, 5), tokens, st.data())
def test_questions_about_drafts_that_fell_leave_no_trace(state, limit, ids, data):
    asked = budget(limit, state)
    for _ in range(6):
        start = data.draw(st.integers(0, len(ids)))
        question = ids[:start] + data.draw(st.lists(st.sampled_from(range(len(PIECES))), max_size=3))
        assert asked.forced(question) == budget(limit, state).forced(question)


@given(states, st.integers(0, 5), tokens)
def test_no_block_of_reasoning_is_longer_than_its_budget(state, limit, wishes):
    """Whatever the model would write; and where nothing is forced, it writes it."""
    asked, written = budget(limit, state), []
    for wish in [*wishes, *[PIECES.index("a")] * (limit + 9)]:
        forced = asked.forced(written)
        written.append(wish if forced is None else forced)
    splitter = ReasoningSplitter(TAGS, state)
    inside, longest = 0, 0
    for token in written:
        splitter.push(PIECES[token])
        inside = inside + 1 if splitter.phase == "inside" else 0
        longest = max(longest, inside)
    assert splitter.phase == "rest"
    begins_inside = state == "none"  # its first token is the one that ends the tag of the beginning
    assert longest <= limit + begins_inside + len(END) - 1


@pytest.mark.parametrize(
    ("written", "forced"),
    [
        (["a"], None),
        (["a", "a"], "</"),
        (["a", "a", "</"], "t"),
        (["a", "a", "</", "t"], ">"),
        (["a", "a", "</", "t", ">"], None),
        (["a", "</"], "t"),  # a beginning that the model wrote itself
        (["a", "</t>"], None),
        (["</t>", "a", "a"], None),
        (["a", "</t"], "</"),  # the same text in other tokens is not taken up
    ],
)
def test_the_end_is_forced_at_the_limit_token_by_token(written, forced):
    ids = [PIECES.index(piece) for piece in written]
    assert budget(2, "open").forced(ids) == (None if forced is None else PIECES.index(forced))
    opened = [PIECES.index("<t>"), *ids]
    assert budget(2, "none").forced(opened) == (None if forced is None else PIECES.index(forced))
    assert budget(2, "none").forced(ids) is None and budget(2, "done").forced(ids) is None


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_how_much_two_runs_share(a, b):
    n = num_shared(a, tuple(b))
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
