"""One request's state: stop strings, ends, and what is derived from its rows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreglance.prompt import ImageInput, MRope, make_rows
from foreglance.request import LogProb, Request, SamplingParams
from foreglance.sequence import Sequence, StopStrings
from foreglance.verify import Verdict, verify

words = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)
END, PAUSE = 99, 98
ENDS = frozenset({END, PAUSE})


def through(stop_strings, pieces):
    stops, out = StopStrings(stop_strings), ""
    for piece in pieces:
        text, found = stops.push(piece)
        out += text
        if found:
            return out, True
    return out + stops.flush(), False


@given(words, stops, st.data())
def test_the_text_before_a_stop_string_does_not_depend_on_how_it_arrives(text, stop_strings, data):
    """Of two stop strings the one that is complete first counts: in one piece it once was the one that began first."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    singly = through(stop_strings, text)
    assert through(stop_strings, pieces) == singly
    ends = [text.find(stop) + len(stop) for stop in stop_strings if stop in text]
    assert singly[1] == bool(ends)
    if ends:
        longest = max((s for s in stop_strings if s in text and text.find(s) + len(s) == min(ends)), key=len)
        assert singly[0] == text[: min(ends) - len(longest)]
    else:
        assert singly[0] == text


def test_text_that_may_begin_a_stop_string_is_held_back():
    stops = StopStrings(("END",))
    assert stops.push("the E") == ("the ", False)
    assert stops.push("N") == ("", False)
    assert stops.push("E") == ("EN", False)
    assert stops.flush() == "E"


def sequence_of(ids=(1, 2, 3), images=(), context=100, **sampling):
    request = Request.from_prompt("-", sampling=SamplingParams(**sampling))
    rows = make_rows(ids, 9, images, MRope())
    return Sequence(0, request, rows, MRope(), ENDS, decode, context)


def end_of(picks, ignore_eos, stop, limit):
    """How many of these tokens are the answer, and why it ends there, by the letter; None: it goes on."""
    for n in range(1, len(picks) + 1):
        if picks[n - 1] in ENDS and not ignore_eos:
            return n, "stop"
        text = decode(token for token in picks[:n] if ignore_eos or token not in ENDS)
        if any(one in text for one in stop):
            return n, "stop"
        if n == limit:
            return n, "length"
    return len(picks), None


@given(
    st.lists(st.lists(st.sampled_from([4, 5, *ENDS]), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(4, 12),
    st.booleans(),
    st.sampled_from([(), ("ff",), ("fef", "ee")]),
)
def test_a_limited_verdict_is_what_is_taken(steps, max_tokens, context, ignore_eos, stop):
    """`limit` decides what is committed and `take` what is said: they must agree, in every step, and the answer ends
    where its tokens alone say."""
    sequence, taken = sequence_of(max_tokens=max_tokens, context=context, stop=stop, ignore_eos=ignore_eos), []
    sequence.advance(3)
    for picks in steps:
        verdict = sequence.limit(verify(picks[:-1], picks))
        event = sequence.take(verdict)
        taken += verdict.tokens
        assert tuple(token.id for token in event.tokens) == verdict.tokens
        assert verdict.keep == len(verdict.tokens) and sequence.committed == 3 + len(taken) - 1
        assert (event.result is not None) == (sequence.finish is not None)
        if sequence.finish is not None:
            break
    said = [token for picks in steps for token in picks]
    count, finish = end_of(said, ignore_eos, stop, min(max_tokens, context - 3))
    assert (taken, sequence.finish) == (said[:count], finish)


def decode(tokens):
    return "".join(chr(97 + i % 26) for i in tokens)


def as_bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def answer(picks, cuts, stop, max_tokens):
    """What comes of `picks`, of which a step gains as many as `cuts` say, all but the last one drafts that stood."""
    request = Request.from_prompt("-", sampling=SamplingParams(stop=stop, max_tokens=max_tokens, logprobs=0))
    rows = make_rows((1, 2, 3), 9, (), MRope())
    sequence = Sequence(0, request, rows, MRope(), frozenset({END}), as_bytes, 100)
    sequence.advance(3)
    tokens, picks = [], list(picks)
    for size in [*cuts, *[1] * len(picks)]:
        if sequence.finish is not None or not picks:
            break
        gained, picks = picks[:size], picks[size:]
        logprobs = [LogProb(-float(token)) for token in gained]
        verdict = sequence.limit(verify(gained[:-1], gained, logprobs))
        taken = sequence.take(verdict).tokens
        assert verdict.keep == len(verdict.logprobs) == len(taken)
        tokens += taken
        assert sequence.committed == 3 + len(tokens) - 1
    ids = tuple((token.id, token.logprob, token.text) for token in tokens)
    return ids, sequence.finish, "".join(token.text for token in tokens), sequence._text


pieces = st.lists(st.sampled_from([b"a", b"b", "é".encode(), "🙂".encode(), b"\xf0", bytes([END])]), max_size=9)


@example(["é".encode(), b"a", b"b", b"a"], [1, 4], ["éa"], 20)  # a stop string that begins with half a character
@example([b"a", b"b", b"b", b"a"], [1, 4], ["ab"], 20)  # and one that begins in the step before
@given(
    pieces,
    st.lists(st.integers(1, 8), max_size=9),
    st.lists(st.sampled_from(["ab", "éa", "🙂", "bba"]), max_size=2),
    st.integers(1, 20),
)
def test_how_tokens_fall_into_steps_does_not_matter(pieces, cuts, stops, max_tokens):
    """Characters of several tokens, stop strings and ends of text may lie across the borders of steps: every token has
    the same text and number, and the answer is the same."""
    picks = b"".join(pieces)
    singly = answer(picks, [], tuple(stops), max_tokens)
    assert answer(picks, cuts, tuple(stops), max_tokens) == singly
    assert singly[2] == singly[3]
    if not stops and singly[1] is not None:
        assert singly[2] == as_bytes(token for token, _, _ in singly[0] if token != END)


def test_what_is_held_back_at_the_end_is_given_out_unless_it_completes_a_stop_string():
    """A text that may begin a stop string, and bytes that are no whole character."""
    assert answer(b"da", [], ("ab",), 2)[1:3] == ("length", "da")
    assert answer(bytes([*b"da", END]), [], ("ab",), 9)[1:3] == ("stop", "da")
    assert answer(b"a\xf0", [], (), 2)[1:3] == ("length", "a\ufffd")
    assert answer(b"a\xf0", [], ("a\ufffd",), 2)[1:3] == ("stop", "")


def test_tokens_behind_an_end_are_not_taken_and_no_guess_outlives_its_step():
    sequence = sequence_of(max_tokens=9)
    sequence.advance(3)
    sequence.draft = (4, 5)
    sequence.take(Verdict(3, (4,)))
    assert sequence.draft == ()
    assert [token.id for token in sequence.take(verify([5, END, 6], [5, END, 6, 7])).tokens] == [5, END]


def test_a_text_whose_guide_failed_is_an_error():
    class Guide:
        def allowed(self, tokens):
            return None

        def failure(self, tokens):
            return "lost" if len(tokens) > 1 else None

    sequence = sequence_of(max_tokens=9)
    sequence.guide = Guide()
    sequence.advance(3)
    assert sequence.take(Verdict(3, (4,))).result is None
    result = sequence.take(verify([], [5])).result
    assert (result.finish_reason, result.error, result.text) == ("error", "lost", "ef")


def test_an_end_of_text_behind_accepted_drafts_is_the_last_row():
    sequence = sequence_of(max_tokens=9)
    sequence.advance(3)
    verdict = sequence.limit(verify([4, END, 5, 6], [4, END, 5, 6, 7]))
    assert (verdict.keep, verdict.tokens, verdict.accepted) == (2, (4, END), 2)
    event = sequence.take(verdict)
    assert event.result.finish_reason == "stop"
    assert event.result.text == "e"


def test_a_stop_string_cuts_what_is_committed():
    """Rows behind it were once committed if drafts had reached them."""
    sequence = sequence_of(max_tokens=9, stop=("fg",))
    sequence.advance(3)
    verdict = sequence.limit(verify([4, 5, 6, 7], [4, 5, 6, 7, 8]))
    assert verdict.tokens == (4, 5, 6)
    event = sequence.take(verdict)
    assert (event.result.text, event.result.finish_reason) == ("e", "stop")


def test_the_first_token_is_the_targets_own_whatever_the_prompt_was():
    sequence = sequence_of()
    sequence.advance(3)
    event = sequence.take(Verdict(3, (4,)))
    assert event.tokens[0].depth == 0
    assert [t.depth for t in sequence.take(verify([5, 6], [5, 6, 7])).tokens] == [1, 2, 0]
    assert [t.depth for t in sequence.take(verify([5, 6], [5, 7])).tokens] == [1, 0]
    assert sequence.counters.drafted[:3] == [2, 2, 0] and sequence.counters.accepted[:3] == [2, 1, 0]
    sequence.take(verify([5, 6], [4]))
    assert sequence.counters.drafted[:3] == [3, 2, 0] and sequence.counters.accepted[:3] == [2, 1, 0]
    assert sequence.counters.steps == 3 and sequence.counters.first_token < sequence.counters.last_token


def test_length_is_the_requests_or_what_the_context_leaves():
    for max_tokens, context, want in ((5, 100, 5), (50, 10, 7)):
        sequence = sequence_of(max_tokens=max_tokens, context=context)
        sequence.advance(3)
        assert sequence.wanted == want
        sequence.take(sequence.limit(verify([4] * 20, [4] * 21)))
        assert (len(sequence.generated), sequence.finish) == (want, "length")


def borders_of(sequence, grid, whole_images=False):
    borders, end = [], sequence.chunks_end(whole_images)
    while sequence.prefilled < end:
        borders.append(min(sequence.next_border(grid, whole_images), end))
        sequence.advance(borders[-1] - sequence.prefilled)
    return borders


@given(st.integers(1, 9), st.integers(1, 12))
def test_prompt_chunks_end_on_the_absolute_grid_and_before_the_last_row(grid, num_rows):
    borders = borders_of(sequence_of(range(10, 10 + num_rows)), grid)
    assert borders == [*range(grid, num_rows - 1, grid), *([num_rows - 1] if num_rows > 1 else [])]


def test_a_chunk_of_a_family_with_whole_images_never_ends_inside_one():
    images = (ImageInput("a", (2, 3)), ImageInput("b", (2, 2)))
    assert borders_of(sequence_of((1, 2, 9, 9, 3), images), 4, True) == [8, 12]
    assert borders_of(sequence_of((1, 2, 9, 9), images), 4, True) == [8, 12], "the last row belongs to an image"
    assert borders_of(sequence_of((1, 2, 9, 9), images), 4, False) == [4, 8, 11]


@pytest.mark.parametrize("whole_images", (False, True))
def test_a_chunk_ends_where_an_image_of_some_size_does_whatever_follows_it(whole_images):
    images = (ImageInput("a", (4, 4)), ImageInput("b", (3, 5)), ImageInput("c", (2, 9)))
    sequence = sequence_of((1, 9, 2, 2, 9, 9, *range(20, 60)), images)
    assert borders_of(sequence, 64, whole_images) == [17, 52, 64, 91], "15 rows are too few"
    for num_more in range(1, 12):
        sequence = sequence_of((1, 9, 2, 2, 9, *range(20, 20 + num_more)), images[:2])
        assert borders_of(sequence, 64, whole_images) == [17, 33 + num_more]


@given(st.integers(0, 12), st.integers(0, 12))
def test_inputs_and_positions_run_on_from_prompt_to_answer(a, b):
    sequence = sequence_of((1, 9, 3), (ImageInput("a", (2, 3)),))
    sequence.advance(8)
    sequence.generated += [30, 31, 32, 33]
    start, stop = min(a, b), max(a, b)
    ids = [1, *[9] * 6, 3, 30, 31, 32, 33]
    tokens, image, offset = sequence.inputs(start, stop)
    assert tokens.tolist() == ids[start:stop]
    assert image.tolist() == [0 if 1 <= i <= 6 else -1 for i in range(start, stop)]
    assert offset.tolist() == [i - 1 if 1 <= i <= 6 else 0 for i in range(start, stop)]
    coords = [0, *[1] * 6, 4, 5, 6, 7, 8]
    if stop > start:
        assert sequence.positions(start, stop).coords[0].tolist() == coords[start:stop]


def test_identities_cover_prompt_and_answer():
    sequence = sequence_of((1, 9, 3), (ImageInput("a", (1, 2)),))
    sequence.generated += [30, 31]
    assert sequence.identities(5).tolist()[:1] == [1] and sequence.identities(5).tolist()[3:] == [3, 30]
    assert (sequence.identities(5)[1:3] < 0).all() and np.array_equal(
        sequence.identities(3), sequence.identities(5)[:3]
    )


def test_the_one_final_event_of_a_request_that_was_ended_from_outside():
    event = sequence_of().end("error", "why")
    assert event.tokens == () and event.result.finish_reason == "error" and event.result.error == "why"
    with pytest.raises(AssertionError):
        sequence_of().result()
