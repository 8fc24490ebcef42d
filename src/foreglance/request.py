"""What a user asks for and what comes back: requests, their options, events and results.

Owns the words of the interface and the checks that need no model. Knows nothing of torch, of models or of HTTP.
First station of the line: a `Request` becomes rows in `prompt`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
Depth = int | Literal["auto"]

DRAFT_KINDS = ("auto", "none", "mtp", "ngram", "model", "assistant")
IMAGE_POLICIES = ("see", "skip", "placeholder", "gap")
MAX_DEPTH = 15
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


@dataclass(frozen=True)
class SamplingParams:
    """How a token is picked from the target's logits, and when to stop.

    temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties follow the field's usual definitions:
    `repetition_penalty` divides (multiplies, if negative) the logits of every token seen in prompt or output;
    `presence_penalty` and `frequency_penalty` act on generated tokens only.
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
class Message:
    """One turn: who speaks, and text and pictures in order."""

    role: str
    parts: tuple[Text | Image, ...]

    def __post_init__(self) -> None:
        _require(
            self.role in ("system", "user", "assistant"),
            "messages",
            f'role must be "system", "user" or "assistant", got {self.role!r}',
        )
        _require(
            all(isinstance(part, (Text, Image)) for part in self.parts),
            "messages",
            "content must be text and images",
        )

    @classmethod
    def of(cls, role: str, text: str, images: Sequence[ImageSource] = ()) -> Message:
        """Pictures first, then the text: the order that vision-language chat templates are trained on."""
        return cls(role, (*(Image(source) for source in images), *((Text(text),) if text else ())))


@dataclass(frozen=True)
class Request:
    """One generation: a conversation, how to sample, how to speculate. Immutable; `id` is unique in the process."""

    messages: tuple[Message, ...]
    sampling: SamplingParams = SamplingParams()
    speculation: Speculation = Speculation()
    id: str = field(default_factory=lambda: f"req-{next(_ids)}")

    def __post_init__(self) -> None:
        _require(len(self.messages) > 0, "messages", "must hold at least one message")
        _require(
            all(isinstance(m, Message) for m in self.messages),
            "messages",
            "must be a tuple of foreglance.Message",
        )

    @classmethod
    def from_prompt(
        cls,
        prompt: str,
        images: Sequence[ImageSource] = (),
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> Request:
        """The common case: one user message, its pictures before its text, and perhaps a system message."""
        head = (Message.of("system", system),) if system else ()
        return cls(
            (*head, Message.of("user", prompt, images)),
            sampling or SamplingParams(),
            speculation or Speculation(),
        )


@dataclass(frozen=True)
class Token:
    """One generated token. `depth` 0 was the target's own pick, d >= 1 an accepted draft at depth d.

    `text` is what this token adds to the answer: empty while a character or a possible stop string is incomplete.
    """

    id: int
    depth: int
    text: str


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
    """Counts and times of one request. Times in milliseconds; acceptance lists start at depth 1."""

    prompt_tokens: int
    image_rows: int
    cached_rows: int
    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    ttft_ms: float
    decode_ms: float
    num_tokens: int

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
    """What a step gained for one request. The last event of a request carries its `result`; there is exactly one."""

    request_id: str
    tokens: tuple[Token, ...] = ()
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)
