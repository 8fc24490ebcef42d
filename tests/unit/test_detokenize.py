"""Text deltas add up to decoding everything at once, however characters are spread over tokens."""

from hypothesis import given
from hypothesis import strategies as st

from foreglance.detokenize import Detokenizer


def decode(token_ids):
    """A byte-level tokenizer: a token is a byte, ids from 256 on are special and decode to nothing."""
    return bytes(t for t in token_ids if t < 256).decode("utf-8", errors="replace")


def stream(token_ids, decoder=decode):
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


@given(st.text(max_size=40))
def test_deltas_of_a_text_add_up_to_it(text):
    deltas = stream(list(text.encode()))
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.integers(0, 258), max_size=40))
def test_deltas_of_any_bytes_add_up_to_decoding_them_all(token_ids):
    assert "".join(stream(token_ids)) == decode(token_ids)


@given(st.lists(st.sampled_from("ab é€🙂"), max_size=20), st.data())
def test_a_copy_looks_ahead_and_changes_nothing(letters, data):
    tokens = list("".join(letters).encode())
    cut = data.draw(st.integers(0, len(tokens)))
    detokenizer = Detokenizer(decode)
    before = [detokenizer.push(token) for token in tokens[:cut]]
    twin = detokenizer.copy()
    ahead = [twin.push(token) for token in tokens[cut:]]
    assert [detokenizer.push(token) for token in tokens[cut:]] == ahead
    assert "".join([*before, *ahead]) == "".join(letters)


def test_a_character_in_pieces_comes_out_once_it_is_whole():
    assert stream(list("a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_a_character_that_never_becomes_whole_comes_out_at_the_end():
    assert stream(list("a€".encode())[:-1]) == ["a", "", "", "\ufffd"]


def test_a_tokenizer_that_drops_a_leading_space_loses_none_in_the_middle():
    """Word-piece tokenizers decode a first word without its space."""

    def words(token_ids):
        return "".join(f" {'abcdefgh'[t]}" for t in token_ids).removeprefix(" ")

    assert "".join(stream([0, 1, 2, 3], words)) == "a b c d"
