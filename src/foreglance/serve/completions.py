"""`/v1/completions`: prompts that no template touches, text or token ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreglance.chat_format import ReasoningState
from foreglance.request import Event, Request, Result, Token
from foreglance.serve.chat import step_of, token_list
from foreglance.serve.errors import ApiError, refused
from foreglance.serve.openai import (
    Job,
    Json,
    Surroundings,
    check_together,
    num_choices,
    requests_of,
    sampling_of,
    speculation_of,
    timings_of,
    usage_of,
)
from foreglance.serve.schema import CompletionBody

DEFAULT_TOKENS = 16  # what OpenAI's endpoint gives when max_tokens is left out


def completion_job(body: CompletionBody, around: Surroundings) -> Job:
    """Raises `RequestError` or `ApiError` for values that cannot be served."""
    check_together(body)
    n, prompts = num_choices(body, around), _prompts(body.prompt)
    if len(prompts) * n > around.choices:
        raise refused(
            "prompt", f"{len(prompts)} prompts of {n} choices each; at most {around.choices} answers are made"
        )
    if body.return_tokens and len(prompts) > 1:
        raise refused("return_tokens", "works with one prompt only")
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    sampling, speculation = (
        sampling_of(body, around, max_tokens, logprobs=body.logprobs),
        speculation_of(body.speculative, around.speculation),
    )
    requests = [Request.raw(prompt, sampling=sampling, speculation=speculation) for prompt in prompts]
    every = requests_of(requests, n)
    return Job(every, n, CompletionReply(body, around, len(every), n))


def _prompts(prompt: str | list) -> list:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused("prompt", "must not be empty")
    return [prompt] if isinstance(prompt[0], int) else prompt


@dataclass
class Text:
    """One answer as it grows."""

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


class CompletionReply:
    """Chunks of all answers, and the whole, which is their sum."""

    ends_with_done = True

    def __init__(self, body: CompletionBody, around: Surroundings, num_answers: int, n: int):
        self._body, self._around, self._n = body, around, n
        self._logprobs, self._tokens = body.logprobs is not None, bool(body.return_tokens)
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._choices = [Text() for _ in range(num_answers)]

    def prepared(self, states: Sequence[ReasoningState]) -> None:
        """A prompt that no template touches is gone on with as it is."""

    def start(self) -> list[Json]:
        return []

    def take(self, index: int, event: Event) -> list[Json]:
        choice = self._choices[index]
        offset = len(choice.content)
        text = choice.take(event)
        if not (text or event.tokens or choice.result):
            return []
        chunk = self._head | {"choices": [self._choice(index, text, event.tokens, offset, choice.finish_reason)]}
        if self._usage:
            chunk["usage"] = None
        if self._tokens:
            chunk |= step_of(event)
        return [chunk | ({"timings": self._timings([choice.result])} if choice.result is not None else {})]

    def end(self) -> list[Json]:
        return [self._head | {"choices": []} | self._sums] if self._usage else []

    def failed(self, error: ApiError) -> list[Json]:
        return [error.body()]

    def whole(self) -> Json:
        choices = [
            self._choice(index, choice.content, choice.tokens, 0, choice.finish_reason)
            for index, choice in enumerate(self._choices)
        ]
        answer = self._head | {"choices": choices} | self._sums
        return answer | ({"tokens": token_list(self._choices[0].tokens)} if self._tokens else {})

    @property
    def _sums(self) -> Json:
        results: list[Result] = [choice.result for choice in self._choices]
        return {"usage": usage_of(results, self._n), "timings": self._timings(results)}

    def _timings(self, results: Sequence[Result]) -> Json:
        return timings_of(results, self._body, self._around)

    @property
    def _head(self) -> Json:
        around = self._around
        return {
            "id": f"cmpl-{around.id}",
            "object": "text_completion",
            "created": around.now,
            "model": around.model,
        }

    def _choice(self, index: int, text: str, tokens: Sequence[Token], offset: int, finish: str | None) -> Json:
        logprobs = self._logprobs_of(tokens, offset) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs_of(self, tokens: Sequence[Token], offset: int) -> Json:
        """`text_offset` counts characters of the answer."""
        piece, offsets = self._around.piece, []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [piece(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{piece(id): value for id, value in token.top_logprobs} for token in tokens],
            "text_offset": offsets,
        }
