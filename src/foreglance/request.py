"""What a user asks for and what comes back: requests, their options, events and results.

Owns the words of the interface and the checks that need no model. Knows nothing of torch, of models or of HTTP.
First station of the line: a `Request` becomes rows in `prompt`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
Depth = int | Literal["auto"]

DRAFT_KINDS = ("auto", "none", "mtp", "ngram", "model", "assistant")
IMAGE_POLICIES = ("see", "skip", "placeholder", "gap")
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "lark")
MAX_DEPTH = 15
MAX_LOGPROBS = 20
ROLES = ("system", "user", "assistant", "tool")
TOOL_CHOICES = ("auto", "none", "required")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OWN_OPTIONS = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize")
)
_ids = itertools.count()


class RequestError(ValueError):
    """A request that cannot be served, refused before any work.

    `param` names the offending field and `code` is a short stable word, so that a server can answer with both.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise RequestError(f"{param}: {message}", param=param)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class SamplingParams:
    """How a token is picked from the target's logits, and when to stop.

    temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties follow the field's usual definitions:
    `repetition_penalty` divides (multiplies, if negative) the logits of every token seen in prompt or output;
    `presence_penalty` and `frequency_penalty` act on generated tokens only.

    `logprobs` None is off; else each token carries its log-probability and those of this many likeliest tokens (0 to
    20), of the model's own distribution: before bias, penalties, temperature, filters and grammar.
    `reasoning_budget` ends a block of reasoning after that many tokens, by picking the words that end it; None: no
    limit. `markup` keeps the special words in the text that tool calls and reasoning are written with, for parsers.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    reasoning_budget: int | None = None
    markup: bool = False

    def __post_init__(self) -> None:
        _require(
            isinstance(self.max_tokens, int) and self.max_tokens >= 1,
            "max_tokens",
            f"must be an integer >= 1, got {self.max_tokens!r}",
        )
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1e-3, 1e3),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            value = self.__dict__[name]
            _require(
                _is_number(value) and low <= value <= high,
                name,
                f"must lie between {low:g} and {high:g}, got {value!r}",
            )
        _require(self.top_p > 0, "top_p", "must be above 0")
        _require(
            isinstance(self.top_k, int) and self.top_k >= 0,
            "top_k",
            f"must be an integer >= 0, got {self.top_k!r}",
        )
        _require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**64,
            "seed",
            f"must be an integer of 64 bits, got {self.seed!r}",
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            "must be a tuple of non-empty strings",
        )
        _require(
            self.logprobs is None or (_is_count(self.logprobs) and self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            f"must be None or an integer from 0 to {MAX_LOGPROBS}, got {self.logprobs!r}",
        )
        _require(
            self.reasoning_budget is None or _is_count(self.reasoning_budget),
            "reasoning_budget",
            f"must be None or an integer >= 0, got {self.reasoning_budget!r}",
        )
        for token, bias in self.logit_bias.items():
            _require(
                isinstance(token, int) and token >= 0 and (_is_number(bias) or bias == -math.inf),
                "logit_bias",
                f"maps token ids to finite numbers, got {token!r}: {bias!r}",
            )


@dataclass(frozen=True)
class Speculation:
    """Which drafter guesses ahead, how deep, and what it gets for an image row.

    `draft` "auto" takes the second model that the engine was given, else the target's own MTP head. A second model is
    the "assistant" of a target whose cache it reads, images included, or any other "model", which sees no images.
    `depth` "auto" goes as deep as pays. `images` is the policy of `drafters.rows`; "gap" exists for measurements only.
    """

    draft: str = "auto"
    depth: Depth = "auto"
    images: str = "see"

    def __post_init__(self) -> None:
        _require(self.draft in DRAFT_KINDS, "draft", f"must be one of {', '.join(DRAFT_KINDS)}, got {self.draft!r}")
        _require(
            self.images in IMAGE_POLICIES,
            "draft_images",
            f"must be one of {', '.join(IMAGE_POLICIES)}, got {self.images!r}",
        )
        ok = self.depth == "auto" or (
            isinstance(self.depth, int) and not isinstance(self.depth, bool) and 0 <= self.depth <= MAX_DEPTH
        )
        _require(ok, "depth", f'must be "auto" or an integer from 0 to {MAX_DEPTH}, got {self.depth!r}')


ImageSource = str | Path | bytes | Any  # a path, encoded bytes, or a PIL image


@dataclass(frozen=True)
class Text:
    """A piece of text inside a message."""

    text: str


@dataclass(frozen=True)
class Image:
    """A picture inside a message: a path, encoded bytes, or a PIL image. Decoded and checked in `images`."""

    source: ImageSource


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made: `arguments` are the text of a JSON object, `id` is what the answer refers to."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        _require(bool(self.name), "messages", "a tool call needs the name of a function")
        try:
            self.values()
        except ValueError as error:
            raise RequestError(
                f"messages: the arguments of the call of {self.name!r} must be a JSON object ({error})",
                param="messages",
            ) from error

    def values(self) -> dict[str, Any]:
        """The arguments, parsed. Raises `ValueError` unless they are a JSON object."""
        values = json.loads(self.arguments)
        if not isinstance(values, dict):
            raise ValueError(f"got {type(values).__name__}")
        return values


@dataclass(frozen=True)
class Message:
    """One turn: who speaks, and text and pictures in order.

    An assistant's turn may hold `tool_calls` and the `reasoning` before its answer. A turn of role "tool" is the answer
    to one call: of `tool_call_id`, by the function `name`.
    """

    role: str
    parts: tuple[Text | Image, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.role in ROLES,
            "messages",
            f"role must be one of {', '.join(ROLES)}, got {self.role!r}",
        )
        _require(
            all(isinstance(part, (Text, Image)) for part in self.parts),
            "messages",
            "content must be text and images",
        )
        _require(
            self.role == "assistant" or not (self.tool_calls or self.reasoning),
            "messages",
            f"tool calls and reasoning belong to an assistant's turn, not to role {self.role!r}",
        )
        _require(
            self.role == "tool" or self.tool_call_id is None,
            "messages",
            f"tool_call_id belongs to a turn of role 'tool', not to {self.role!r}",
        )

    @classmethod
    def of(cls, role: str, text: str, images: Sequence[ImageSource] = ()) -> Message:
        """Pictures first, then the text: the order that vision-language chat templates are trained on."""
        return cls(role, (*(Image(source) for source in images), *((Text(text),) if text else ())))


@dataclass(frozen=True)
class Grammar:
    """What the answer must be: a JSON object, JSON of a schema, text of a regular expression, or of a Lark grammar.

    `text` is the schema, the expression or the grammar; "json_object" needs none. The answer after a block of reasoning
    is meant, not the reasoning. An answer that `max_tokens` or a stop string cuts is a beginning of such a text.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        _require(self.kind in GRAMMAR_KINDS, "grammar", f"must be one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}")
        _require(isinstance(self.text, str), "grammar", f"text must be a string, got {type(self.text).__name__}")
        _require(
            bool(self.text) != (self.kind == "json_object"),
            "grammar",
            "json_object takes no text" if self.text else f"{self.kind} needs a text",
        )


@dataclass(frozen=True)
class Request:
    """One generation: a conversation, how to sample, how to speculate. Immutable; `id` is unique in the process.

    `tools` are functions that the answer may call, as {"type": "function", "function": {"name", "description",
    "parameters"}} with a JSON schema of the parameters. `tool_choice` "auto" leaves it to the model, "none" shows it
    no tools, "required" and the name of a tool force a call. `template_options` are further variables of the chat
    template, such as enable_thinking. In place of messages there may be a `prompt` that no template touches: text, or
    token ids.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams = SamplingParams()
    speculation: Speculation = Speculation()
    id: str = field(default_factory=lambda: f"req-{next(_ids)}")
    grammar: Grammar | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._check_prompt()
        _require(
            all(isinstance(m, Message) for m in self.messages),
            "messages",
            "must be a tuple of foreglance.Message",
        )
        names = [_tool_name(tool) for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        _require(twice is None, "tools", f"two tools are named {twice!r}")
        _require(
            self.tool_choice in (*TOOL_CHOICES, *names),
            "tool_choice",
            f"must be one of {', '.join(TOOL_CHOICES)} or the name of a tool, got {self.tool_choice!r}",
        )
        _require(
            bool(names) or self.tool_choice != "required", "tool_choice", "a call is required, but there are no tools"
        )
        _require(
            self.grammar is None or not self.forces_tool,
            "tool_choice",
            f"{self.tool_choice!r} forces a tool call, which a grammar for the answer excludes",
        )
        _require(
            not (self.sampling.ignore_eos and (self.grammar is not None or self.forces_tool)),
            "ignore_eos",
            "an answer of a given form ends where the form ends",
        )
        own = sorted(OWN_OPTIONS & self.template_options.keys())
        _require(not own, "template_options", f"{', '.join(own)} cannot be set there")

    def _check_prompt(self) -> None:
        if self.prompt is None:
            _require(len(self.messages) > 0, "messages", "must hold at least one message")
            return
        ids = isinstance(self.prompt, tuple) and all(_is_count(token) for token in self.prompt)
        _require(isinstance(self.prompt, str) or ids, "prompt", "must be text or a tuple of token ids")
        _require(not (self.messages or self.tools), "prompt", "takes no messages and no tools beside it")

    @property
    def forces_tool(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice not in ("auto", "none")

    @classmethod
    def from_prompt(
        cls,
        prompt: str,
        images: Sequence[ImageSource] = (),
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        speculation: Speculation | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """The common case: one user message, its pictures before its text, and perhaps a system message."""
        head = (Message.of("system", system),) if system else ()
        return cls(
            (*head, Message.of("user", prompt, images)),
            sampling or SamplingParams(),
            speculation or Speculation(),
            grammar=grammar,
        )

    @classmethod
    def raw(
        cls,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> Request:
        """Text or token ids to go on from, without a chat template."""
        whole = prompt if isinstance(prompt, str) else tuple(prompt)
        return cls((), sampling or SamplingParams(), speculation or Speculation(), prompt=whole)


def _tool_name(tool: object) -> str:
    """The name of a tool. Raises `RequestError` unless it is a function in the usual form."""
    shape = isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("function"), Mapping)
    _require(shape, "tools", f'each must be {{"type": "function", "function": {{...}}}}, got {tool!r}')
    name, parameters = tool["function"].get("name"), tool["function"].get("parameters", {})
    _require(
        isinstance(name, str) and TOOL_NAME.fullmatch(name) is not None,
        "tools",
        f"a name has 1 to 64 letters, digits, underscores, dots and dashes, got {name!r}",
    )
    _require(name not in TOOL_CHOICES, "tools", f"{name!r} means something else as a tool_choice; name it otherwise")
    _require(isinstance(parameters, Mapping), "tools", f"the parameters of {name!r} must be a JSON schema")
    return name


@dataclass(frozen=True)
class LogProb:
    """The log-probability of a picked token, and of the likeliest tokens as (token id, log-probability), best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Token:
    """One generated token. `depth` 0 was the target's own pick, d >= 1 an accepted draft at depth d.

    `text` is what this token adds to the answer: empty while a character or a possible stop string is incomplete.
    `logprob` and `top_logprobs`, pairs of a token id and its log-probability from the likeliest on, are there if
    `SamplingParams.logprobs` asked for them.
    """

    id: int
    depth: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class DraftReport:
    """What drafted for a request. `off_because` says in words why nothing did, else None; `model` names the second
    model, if one drafted."""

    kind: str
    depth: Depth
    images: str
    off_because: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Timings:
    """Counts and times of one request. Times in milliseconds; acceptance lists start at depth 1.

    `ttft_ms` is from the request's arrival to its first token, `queued_ms` the part of it before its prompt was begun.
    """

    prompt_tokens: int
    image_rows: int
    cached_rows: int
    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    ttft_ms: float
    decode_ms: float
    num_tokens: int
    queued_ms: float = 0.0

    @property
    def acceptance_by_depth(self) -> list[float | None]:
        """Accepted over tried at each depth; a depth is tried only if the depths before it were accepted."""
        return [a / d if d else None for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def acceptance(self) -> float | None:
        """Accepted over tried, over all depths."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens gained per target step after the first token."""
        return (self.num_tokens - 1) / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed: tokens after the first over the time since the first."""
        return (self.num_tokens - 1) / self.decode_ms * 1e3 if self.decode_ms and self.num_tokens > 1 else None


@dataclass(frozen=True)
class Result:
    """A finished request, whole."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    draft: DraftReport
    error: str | None = None


@dataclass(frozen=True)
class Event:
    """What a step gained for one request. The last event of a request carries its `result`; there is exactly one.

    `drafted` is how many guesses the step put to the test; the tokens of depth >= 1 are those that stood.
    """

    request_id: str
    tokens: tuple[Token, ...] = ()
    result: Result | None = None
    drafted: int = 0

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)
