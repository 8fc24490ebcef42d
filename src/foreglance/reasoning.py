"""Reasoning and answer told apart, in text as it streams and in tokens as they are picked.

A block of reasoning may stand at the beginning of an answer and nowhere else. Whether the prompt opened it already is
said by `ChatFormat.state_after`. Pure; the text half is what a server shows, the token half is what a budget counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreglance.chat_format import ReasoningState, Tags
from foreglance.detokenize import Decode, Detokenizer, overlap


class ReasoningSplitter:
    """Splits an answer into reasoning and the rest, the same whatever pieces it comes in.

    The tags and the white space around the reasoning belong to neither.
    """

    def __init__(self, tags: Tags | None, state: ReasoningState):
        self._tags = tags
        self._held = ""
        self.phase = "rest" if tags is None or state == "done" else "inside" if state == "open" else "before"
        self._strip = self.phase != "rest"  # while there is nothing but white space behind a tag

    def push(self, text: str) -> tuple[str, str]:
        """-> (reasoning, rest) that this piece completes."""
        self._held += text
        reasoning = rest = ""
        if self.phase == "before":
            self._leave_before()
        if self.phase == "inside":
            reasoning = self._inside()
        if self.phase == "rest":
            rest, self._held = self._stripped(self._held), ""
        return reasoning, rest

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        if self.phase == "inside":
            return self._stripped(held).rstrip(), ""
        return "", held

    def _leave_before(self) -> None:
        assert self._tags is not None
        begun = self._held.lstrip()
        if begun.startswith(self._tags.start):
            self.phase, self._held = "inside", begun[len(self._tags.start) :]
        elif not self._tags.start.startswith(begun):
            self.phase, self._strip = "rest", False

    def _inside(self) -> str:
        assert self._tags is not None
        at = self._held.find(self._tags.end)
        if at >= 0:
            reasoning = self._stripped(self._held[:at]).rstrip()
            self.phase, self._strip, self._held = "rest", True, self._held[at + len(self._tags.end) :]
            return reasoning
        safe = len(self._held) - overlap(self._held, self._tags.end)
        safe = len(self._held[:safe].rstrip())
        reasoning, self._held = self._stripped(self._held[:safe]), self._held[safe:]
        return reasoning

    def _stripped(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text


@dataclass(frozen=True)
class _At:
    """Where a run of tokens has got to. `text` is the end of what was decoded, as far as a tag may begin in it; `count`
    are the tokens of reasoning."""

    phase: str
    count: int
    text: str
    detokenizer: Detokenizer


class ReasoningBudget:
    """Which token must come next so that a block of reasoning has at most `limit` tokens.

    At the limit the token ids of the end tag are forced, one by one; a beginning of them that the model wrote itself is
    not repeated. A function of the tokens alone, so it says the same of a draft as of what was picked.
    """

    def __init__(self, limit: int, tags: Tags, state: ReasoningState, end: Sequence[int], decode: Decode):
        self._limit, self._tags, self._end = limit, tags, tuple(end)
        phase = "inside" if state == "open" else "before" if state == "none" else "rest"
        self._path: list[int] = []
        self._states = [_At(phase, 0, "", Detokenizer(decode))]

    def forced(self, tokens: Sequence[int]) -> int | None:
        """The token that must follow generated `tokens`; None: any may."""
        at = self._state(tokens)
        if at.phase != "inside" or at.count < self._limit:
            return None
        longest = min(len(self._end), at.count)
        begun = next((n for n in range(longest, 0, -1) if tuple(tokens[-n:]) == self._end[:n]), 0)
        return self._end[begun] if begun < len(self._end) else None

    def _state(self, tokens: Sequence[int]) -> _At:
        known = num_shared(self._path, tokens)
        del self._path[known:], self._states[known + 1 :]
        for token in tokens[known:]:
            self._states.append(self._after(self._states[-1], token))
            self._path.append(token)
        return self._states[-1]

    def _after(self, at: _At, token: int) -> _At:
        if at.phase == "rest":
            return at
        detokenizer = at.detokenizer.copy()
        text = at.text + detokenizer.push(token)
        if at.phase == "before":
            begun = text.lstrip()
            if not begun.startswith(self._tags.start):
                return _At("before" if self._tags.start.startswith(begun) else "rest", 0, text, detokenizer)
            text = begun[len(self._tags.start) :]
            if self._tags.end not in text:
                return _At("inside", 0, text, detokenizer)
        if self._tags.end in text:
            return _At("rest", at.count, "", detokenizer)
        return _At("inside", at.count + 1, text[-len(self._tags.end) :], detokenizer)


def num_shared(path: Sequence[int], tokens: Sequence[int]) -> int:
    """How many first tokens two runs have in common."""
    longest = min(len(path), len(tokens))
    if tuple(path[:longest]) == tuple(tokens[:longest]):
        return longest
    return next(i for i in range(longest) if path[i] != tokens[i])
