"""`/v1/chat/completions`: a body to a job, events to chunks and to a whole answer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreglance.detokenize import REPLACEMENT
from foreglance.request import Event, Request, Result, Token
from foreglance.serve.errors import ApiError, refused
from foreglance.serve.openai import (
    Job,
    Json,
    Surroundings,
    check_together,
    message_of,
    num_choices,
    requests_of,
    sampling_of,
    speculation_of,
    timings_of,
    usage_of,
)
from foreglance.serve.schema import ChatBody


def chat_job(body: ChatBody, around: Surroundings) -> Job:
    """Raises `RequestError` or `ApiError` for values that cannot be served."""
    n = num_choices(body, around)
    return Job(requests_of([request_of(body, around)], n), n, bool(body.stream), ChatReply(body, around, n))


def chat_names(body: ChatBody) -> dict[str, str]:
    """What fields of `request` are called in this body."""
    return {"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {}


def request_of(body: ChatBody, around: Surroundings) -> Request:
    _check_together(body)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Request(
        tuple(message_of(message, f"messages[{i}]", around.images) for i, message in enumerate(body.messages)),
        sampling_of(body, around, max_tokens, logprobs),
        speculation_of(body.speculative, around.speculation),
    )


def _check_together(body: ChatBody) -> None:
    check_together(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "has no meaning without logprobs: true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refused("max_completion_tokens", "is the same as max_tokens; give one of them")


@dataclass
class Choice:
    """One choice as it grows. A whole answer is the sum of the chunks' pieces."""

    content: str = ""
    tokens: list[Token] = field(default_factory=list)
    result: Result | None = None

    def take(self, event: Event) -> str:
        self.content += event.text
        self.tokens += event.tokens
        self.result = event.result
        return event.text

    @property
    def finish_reason(self) -> str | None:
        return None if self.result is None else self.result.finish_reason


class ChatReply:
    ends_with_done = True

    def __init__(self, body: ChatBody, around: Surroundings, n: int):
        self._around = around
        self._logprobs, self._tokens = bool(body.logprobs), bool(body.return_tokens)
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._choices = [Choice() for _ in range(n)]

    def start(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, None) for index in range(len(self._choices))]

    def take(self, index: int, event: Event) -> list[Json]:
        choice = self._choices[index]
        text = choice.take(event)
        chunks = []
        if text or (event.tokens and (self._tokens or self._logprobs)):
            chunks.append(self._chunk(index, {"content": text}, None, event))
        if choice.result is not None:
            last = self._chunk(index, {}, choice.finish_reason)
            chunks.append(last | {"timings": timings_of([choice.result])})
        return chunks

    def end(self) -> list[Json]:
        if not self._usage:
            return []
        head = self._head("chat.completion.chunk") | {"choices": []}
        return [head | {"usage": usage_of(self._results, len(self._choices)), "timings": timings_of(self._results)}]

    def failed(self, error: ApiError) -> list[Json]:
        return [error.body()]

    def whole(self) -> Json:
        answer = self._head("chat.completion") | {"choices": [self._whole_choice(i) for i in range(len(self._choices))]}
        answer |= {"usage": usage_of(self._results, len(self._choices)), "timings": timings_of(self._results)}
        return answer | ({"tokens": token_list(self._choices[0].tokens)} if self._tokens else {})

    @property
    def _results(self) -> list[Result]:
        return [choice.result for choice in self._choices]

    def _whole_choice(self, index: int) -> Json:
        choice = self._choices[index]
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.content, "refusal": None},
            "logprobs": self._logprobs_of(choice.tokens),
            "finish_reason": choice.finish_reason,
        }

    def _head(self, kind: str) -> Json:
        around = self._around
        return {"id": f"chatcmpl-{around.id}", "object": kind, "created": around.now, "model": around.model}

    def _chunk(self, index: int, delta: Json, finish: str | None, event: Event | None = None) -> Json:
        logprobs = self._logprobs_of(event.tokens) if event is not None else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._head("chat.completion.chunk") | {"choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return chunk | (step_of(event) if self._tokens and event is not None else {})

    def _logprobs_of(self, tokens: Sequence[Token]) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": [logprob_of(token, self._around.piece) for token in tokens], "refusal": None}


def logprob_of(token: Token, piece: Callable[[int], str]) -> Json:
    top = [_logprob(id, value, piece) for id, value in token.top_logprobs]
    return _logprob(token.id, token.logprob, piece) | {"top_logprobs": top}


def _logprob(token: int, value: float | None, piece: Callable[[int], str]) -> Json:
    """Part of a character has no text; its `bytes` are null."""
    text = piece(token)
    return {"token": text, "logprob": value, "bytes": None if REPLACEMENT in text else list(text.encode())}


def step_of(event: Event) -> Json:
    """What `return_tokens` adds to a chunk: the tokens of a step, and how many guesses it put to the test."""
    return {"tokens": token_list(event.tokens), "drafted": event.drafted}


def token_list(tokens: Sequence[Token]) -> list[Json]:
    """What `return_tokens` asks for: depth 0 is the target's own pick, d >= 1 an accepted draft at depth d."""
    return [{"id": token.id, "text": token.text, "depth": token.depth} for token in tokens]
