"""Token ids to text, as it streams. Owns incomplete characters; touches no model and no stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"


def overlap(text: str, word: str) -> int:
    """Length of the longest proper beginning of `word` that `text` ends with."""
    longest = min(len(word) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


class Detokenizer:
    """Turns tokens into text deltas whose concatenation equals decoding all tokens at once.

    A character may be spread over several tokens, and a tokenizer may join neighbours, so each delta is the difference
    of two decodings of a short window. While the window ends in an incomplete character nothing is given out; `flush`
    gives what is left.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._window: list[int] = []  # tokens that are decoded together
        self._done = 0  # those of them whose text was given out,
        self._before = ""  # and that text

    def copy(self) -> Detokenizer:
        """The same state, to look ahead with."""
        twin = Detokenizer(self._decode)
        twin._window, twin._done, twin._before = self._window[:], self._done, self._before
        return twin

    def push(self, token: int) -> str:
        """Add one token; the text it completes."""
        window, before = self._window, self._before
        window.append(token)
        after = self._decode(window)
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        if self._done:
            del window[: self._done]
        self._done, self._before = len(window), self._decode(window)
        return after[len(before) :]

    def flush(self) -> str:
        """The text of tokens that never became whole, with replacement characters."""
        after, before = self._decode(self._window), self._before
        self._done, self._before = len(self._window), after
        return after[len(before) :]
