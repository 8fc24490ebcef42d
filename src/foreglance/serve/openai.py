"""What OpenAI's endpoints have in common: fields to requests, results to usage and timings. Pure.

A body becomes a `Job`: the requests that answer it. Choice i of n draws with a seed of its own that follows from the
request's, and choice 0 with the request's own, so that it is the answer that `n` = 1 would have given.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from foreglance.chat_format import ChatFormat, ReasoningState
from foreglance.request import Event, Grammar, Image, Message, Request, Result, SamplingParams, Speculation, Text
from foreglance.serve.errors import ApiError, refused
from foreglance.serve.schema import (
    CallItem,
    CallOutputItem,
    ChatBody,
    ChoicesBody,
    Function,
    ImagePart,
    InputImage,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseBody,
    SamplingBody,
    Speculative,
)

DATA_URL = re.compile(r"data:(?P<kind>[^;,]*)(?P<options>(;[^;,]*)*),", re.ASCII)
Json = dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What an answer needs besides the body. `seed` and `speculation` are for a body that names none; `images` are the
    bytes of remote images by their address; `context` is the longest answer; `piece` tells a token's text and `format`
    how the model writes reasoning and calls."""

    model: str
    speculation: Speculation
    context: int
    choices: int
    seed: int
    now: int
    id: str
    piece: Callable[[int], str]
    format: ChatFormat
    images: Mapping[str, bytes]


class Reply(Protocol):
    """Builds an answer from events, whole or in chunks; both are made of the same pieces. `ends_with_done`: whether the
    word [DONE] ends a stream."""

    ends_with_done: bool

    def prepared(self, states: Sequence[ReasoningState]) -> None:
        """Where each request's prompt left the model; comes before all else."""
        ...

    def start(self) -> list[Json]:
        """Chunks before the first event."""
        ...

    def take(self, index: int, event: Event) -> list[Json]:
        """Chunks for an event of request `index` of the job."""
        ...

    def end(self) -> list[Json]:
        """Chunks after the last event."""
        ...

    def whole(self) -> Json:
        """The answer, after the last event."""
        ...

    def failed(self, error: ApiError) -> list[Json]:
        """Chunks that end a stream which cannot go on."""
        ...


@dataclass(frozen=True)
class Job:
    """The requests that answer a body: for each prompt in turn, `n` choices of it."""

    requests: tuple[Request, ...]
    n: int
    reply: Reply


def requests_of(requests: Sequence[Request], n: int) -> tuple[Request, ...]:
    """`n` choices of each request, with seeds that follow from its own."""
    return tuple(_choice(request, index) for request in requests for index in range(n))


def _choice(request: Request, index: int) -> Request:
    if index == 0:
        return request
    sampling = replace(request.sampling, seed=choice_seed(request.sampling.seed, index))
    return replace(request, sampling=sampling, id=f"{request.id}-{index}")


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`; that of choice 0 is the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "little")


def num_choices(body: ChoicesBody, around: Surroundings) -> int:
    n = 1 if body.n is None else body.n
    if n > around.choices:
        raise refused("n", f"at most {around.choices} choices are made here, got {n}")
    return n


def check_together(body: ChoicesBody) -> None:
    """Fields that have a meaning only beside others."""
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "has no meaning without stream: true")
    if body.return_tokens and (body.n or 1) > 1:
        raise refused("return_tokens", "works with n = 1 only")


def check_model(name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ApiError(
            404, f"the model {name!r} is not served here; this is {known[0]!r}", param="model", code="model_not_found"
        )


def sampling_of(body: SamplingBody, around: Surroundings, max_tokens: int | None, **more: Any) -> SamplingParams:
    """Raises `RequestError` for values out of range."""
    given = {
        name: vars(body)[name]
        for name in (
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "ignore_eos",
        )
        if vars(body)[name] is not None
    }
    return SamplingParams(
        max_tokens=around.context if max_tokens is None else max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=seed_of(body, around),
        stop=_stops(body.stop),
        logit_bias=_bias(body.logit_bias or {}),
        **given,
        **more,
    )


def seed_of(body: SamplingBody, around: Surroundings) -> int:
    """The body's, or the one that was drawn for it."""
    return around.seed if body.seed is None else body.seed % 2**64


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise refused("logit_bias", f"maps token ids to numbers, got {token!r}")
    return {int(token): value for token, value in bias.items()}


def grammar_of(format: Any) -> Grammar | None:
    """What a format asks of the answer. Chat completions put a schema one level deeper than responses."""
    if isinstance(format, JsonObjectFormat):
        return Grammar("json_object")
    if isinstance(format, JsonSchemaFormat):
        format = format.json_schema
    return Grammar("json_schema", json.dumps(format.schema_)) if isinstance(format, JsonSchema) else None


def check_tools(body: ChatBody | ResponseBody, functions: Sequence[tuple[str, Function]]) -> None:
    """(path of the field, function) of each tool."""
    if body.tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if vars(body)[name] not in (None, "none", "auto"):
                raise refused(name, "has no meaning without tools")
    held = body.parallel_tool_calls is False or body.tool_choice not in (None, "auto")
    for path, function in functions:
        if function.strict and not held:
            raise refused(
                f"{path}.strict",
                "is kept to only where tool_choice forces or forbids a call, or with parallel_tool_calls: false",
            )


def tool_object(function: Function) -> Json:
    """A tool as chat templates read it."""
    told = function.model_dump(exclude_none=True, include={"name", "description", "parameters"})
    return {"type": "function", "function": told}


def speculation_of(body: Speculative | None, default: Speculation) -> Speculation:
    given = {} if body is None else body.model_dump(exclude_none=True)
    return replace(default, **given)


# Messages


def message_of(message: Any, path: str, images: Mapping[str, bytes], **more: Any) -> Message:
    role = "system" if message.role == "developer" else message.role
    return Message(role, content_parts(message.content, f"{path}.content", images), **more)


def content_parts(content: Any, path: str, images: Mapping[str, bytes]) -> tuple[Text | Image, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_part(part, f"{path}[{i}]", images) for i, part in enumerate(content))


def _part(part: Any, path: str, images: Mapping[str, bytes]) -> Text | Image:
    address = image_address(part, path)
    if address is None:
        return Text(part.text)
    field, url = address
    return Image(images[url] if is_remote(url) else data_url_bytes(url, field))


def image_address(part: Any, path: str) -> tuple[str, str] | None:
    """(path of the field, address) of a part that is an image."""
    if isinstance(part, ImagePart):
        return f"{path}.image_url.url", part.image_url.url
    return (f"{path}.image_url", part.image_url) if isinstance(part, InputImage) else None


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def remote_urls(name: str, messages: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """(path of the field, address) of each image that must be fetched for the messages in field `name`."""
    for i, message in enumerate(messages):
        content = None if isinstance(message, CallItem | CallOutputItem) else message.content
        for j, part in enumerate(content if isinstance(content, list) else ()):
            address = image_address(part, f"{name}[{i}].content[{j}]")
            if address is not None and is_remote(address[1]):
                yield address


def data_url_bytes(url: str, path: str) -> bytes:
    head = DATA_URL.match(url)
    if head is None:
        raise refused(path, "an image is a data URL (data:image/png;base64,...) or http(s)", "invalid_image_url")
    if "base64" not in head["options"].split(";"):
        raise refused(path, "a data URL must be base64", "invalid_image_url")
    if not head["kind"].startswith("image/"):
        raise refused(path, f"a data URL must hold an image, got {head['kind']!r}", "invalid_image_url")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(path, f"broken base64 ({error})", "invalid_image_url") from None


# Results


def usage_of(results: Sequence[Result], n: int) -> Json:
    """Prompts are counted once however many choices they have."""
    prompt = sum(result.timings.prompt_tokens for result in results[::n])
    cached = sum(result.timings.cached_rows for result in results[::n])
    completion = sum(result.timings.num_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_of(results: Sequence[Result], body: SamplingBody, around: Surroundings) -> Json:
    """What llama-server's users know, then acceptance by depth. Counts and times are sums over the choices. `seed`
    gives the same answer again; null where nothing was drawn."""
    all_timings = [result.timings for result in results]
    cached = sum(t.cached_rows for t in all_timings)
    prompt = sum(t.prompt_tokens for t in all_timings) - cached
    prompt_ms = sum(max(0.0, t.ttft_ms - t.queued_ms) for t in all_timings)
    decode_ms = sum(t.decode_ms for t in all_timings)
    predicted = sum(t.num_tokens for t in all_timings)
    decoded = sum(max(0, t.num_tokens - 1) for t in all_timings)  # the first token belongs to the prompt
    drafted, accepted = _by_depth([t.drafted for t in all_timings]), _by_depth([t.accepted for t in all_timings])
    steps = sum(t.steps for t in all_timings)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": prompt / prompt_ms * 1e3 if prompt_ms else 0.0,
        "queued_ms": sum(t.queued_ms for t in all_timings),
        "predicted_n": predicted,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / decoded if decoded else 0.0,
        "predicted_per_second": decoded / decode_ms * 1e3 if decode_ms else 0.0,
        "draft_n": sum(drafted),
        "draft_n_accepted": sum(accepted),
        "drafted_by_depth": drafted,
        "accepted_by_depth": accepted,
        "acceptance_by_depth": [a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        "tokens_per_step": decoded / steps if steps else None,
        "seed": None if body.temperature == 0 else seed_of(body, around),
        "image_n": sum(t.image_rows for t in all_timings),
        "draft": results[0].draft.kind,
        "draft_depth": results[0].draft.depth,
        "draft_images": results[0].draft.images,
        "off_because": results[0].draft.off_because,
    }


def _by_depth(counts: Sequence[Sequence[int]]) -> list[int]:
    deepest = max(map(len, counts))
    return [sum(one[depth] for one in counts if depth < len(one)) for depth in range(deepest)]
