"""How a model writes reasoning and tool calls, read off its chat template. Pure text; no tokenizer and no model.

The words are those of the published templates: Qwen3.5 and Step-3.7 ("xml"), Qwen3 and others after Hermes ("json"),
Gemma-4 ("gemma").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ReasoningState = Literal["none", "open", "done"]


@dataclass(frozen=True)
class Tags:
    """The words around a block."""

    start: str
    end: str


THINK = Tags("<think>", "</think>")
CHANNEL = Tags("<|channel>thought", "<channel|>")
CALL = Tags("<tool_call>", "</tool_call>")
GEMMA_CALL = Tags("<|tool_call>", "<tool_call|>")
GEMMA_QUOTE = '<|"|>'
_REASONING = {"think": THINK, "channel": CHANNEL}
_WORDS = {
    "xml": (CALL.start, CALL.end),
    "json": (CALL.start, CALL.end),
    "gemma": (*vars(GEMMA_CALL).values(), GEMMA_QUOTE),
}


@dataclass(frozen=True)
class ChatFormat:
    """The formats that a model's answers are in.

    tools      syntax of its tool calls, one of `settings.TOOL_FORMATS`; None: unknown, or it makes none
    reasoning  the words around its reasoning; None: it does not reason
    template   the chat template itself, to see which variables it reads; None: not known
    """

    tools: str | None = None
    reasoning: Tags | None = None
    template: str | None = None

    @classmethod
    def of_template(cls, template: str, tools: str = "auto", reasoning: str = "auto") -> ChatFormat:
        """What a template's text says; `tools` and `reasoning` are the syntaxes by name, "none", or "auto"."""
        if tools == "auto":
            tools = _tool_syntax(template)
        if reasoning == "auto":
            reasoning = next((name for name, tags in _REASONING.items() if tags.end in template), "none")
        return cls(None if tools == "none" else tools, _REASONING.get(reasoning), template)

    @property
    def words(self) -> tuple[str, ...]:
        """What a text must keep so that its tool calls and its reasoning can be told apart, though the tokenizer may
        hold these words for special ones."""
        reasoning = () if self.reasoning is None else ("<|channel>", *vars(self.reasoning).values())
        return (*reasoning, *_WORDS.get(self.tools or "", ()))

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable; a template that is not known may."""
        return self.template is None or re.search(rf"\b{re.escape(variable)}\b", self.template) is not None

    def state_after(self, prompt: str) -> ReasoningState:
        """Where a rendered prompt leaves the model: inside a block of reasoning, behind any, or neither."""
        if self.reasoning is None:
            return "done"
        tail = prompt.rstrip()
        if tail.endswith(self.reasoning.start):
            return "open"
        return "done" if tail.endswith(self.reasoning.end) else "none"


def _tool_syntax(template: str) -> str:
    if GEMMA_CALL.start in template:
        return "gemma"
    if CALL.start not in template:
        return "none"
    return "xml" if "<function=" in template else "json"
