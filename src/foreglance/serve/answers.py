"""The text of an answer to what a client sees: reasoning, content and tool calls, as it streams or whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreglance.chat_format import ChatFormat, ReasoningState
from foreglance.reasoning import ReasoningSplitter
from foreglance.serve.tools import CallDelta, ToolCallParser


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(frozen=True)
class Call:
    """A tool call: the name of a function, and the text of a JSON object. The text of a call that was cut is a
    beginning of one."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


class AnswerParser:
    """Takes the text of an answer in any pieces, with its markup (`SamplingParams.markup`).

    `state` is where the prompt left the model (`Rows.reasoning`); without `tools` nothing is a call.
    """

    def __init__(self, format: ChatFormat, state: ReasoningState, tools: Sequence[Mapping[str, Any]] = ()):
        self._splitter = ReasoningSplitter(format.reasoning, state)
        self._calls = ToolCallParser(format.tools, tools) if tools and format.tools is not None else None

    def push(self, text: str) -> Delta:
        reasoning, rest = self._splitter.push(text)
        return self._delta(reasoning, rest)

    def finish(self) -> Delta:
        """What was held back, at the end of the text."""
        reasoning, rest = self._splitter.flush()
        last = self._delta(reasoning, rest)
        if self._calls is None:
            return last
        return Delta(last.reasoning, last.content + self._calls.flush(), last.calls)

    def _delta(self, reasoning: str, rest: str) -> Delta:
        if self._calls is None:
            return Delta(reasoning, rest)
        content, calls = self._calls.push(rest)
        return Delta(reasoning, content, tuple(calls))


def fold(deltas: Iterable[Delta]) -> Answer:
    """The answer that pieces add up to."""
    reasoning = content = ""
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    return Answer(reasoning, content, tuple(map(Call, names, arguments)))
