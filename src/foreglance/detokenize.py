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
        self._tokens: list[int] = []
        self._window = 0  # first token of the window that is decoded
        self._done = 0  # tokens whose text was given out

    def copy(self) -> Detokenizer:
        """The same state, to look ahead with."""
        twin = Detokenizer(self._decode)
        twin._tokens, twin._done = self._tokens[self._window :], self._done - self._window
        return twin

    def push(self, token: int) -> str:
        """Add one token; the text it completes."""
        self._tokens.append(token)
        before, after = self._texts()
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._window, self._done = self._done, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """The text of tokens that never became whole, with replacement characters."""
        before, after = self._texts()
        self._done = len(self._tokens)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        window = self._tokens[self._window :]
        return self._decode(window[: self._done - self._window]), self._decode(window)
