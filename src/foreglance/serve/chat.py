"""`/v1/chat/completions`: a body to a job, events to chunks and to a whole answer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foreglance.chat_format import ReasoningState
from foreglance.detokenize import REPLACEMENT
from foreglance.request import Event, Message, Request, Result, Token, ToolCall
from foreglance.serve.answers import Answer, AnswerParser, Delta, fold
from foreglance.serve.errors import ApiError, refused
from foreglance.serve.openai import (
    Job,
    Json,
    Surroundings,
    check_together,
    check_tools,
    grammar_of,
    message_of,
    num_choices,
    requests_of,
    sampling_of,
    speculation_of,
    timings_of,
    tool_object,
    usage_of,
)
from foreglance.serve.schema import AssistantMessage, ChatBody, NamedTool, ToolMessage
from foreglance.serve.tools import CallDelta


def chat_job(body: ChatBody, around: Surroundings) -> Job:
    """Raises `RequestError` or `ApiError` for values that cannot be served."""
    n = num_choices(body, around)
    return Job(requests_of([request_of(body, around)], n), n, ChatReply(body, around))


def chat_names(body: ChatBody) -> dict[str, str]:
    """What fields of `request` are called in this body."""
    names = {"grammar": "response_format"}
    return names | ({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {})


def request_of(body: ChatBody, around: Surroundings) -> Request:
    _check_together(body)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    tools, choice = body.tools or [], body.tool_choice
    return Request(
        tuple(_message(message, f"messages[{i}]", around) for i, message in enumerate(body.messages)),
        sampling_of(
            body,
            around,
            max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            reasoning_budget=body.reasoning_budget,
            markup=True,
        ),
        speculation_of(body.speculative, around.speculation),
        grammar=grammar_of(body.response_format),
        tools=tuple(tool_object(tool.function) for tool in tools),
        tool_choice=choice.function.name if isinstance(choice, NamedTool) else choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_options=body.chat_template_kwargs or {},
    )


def _message(message: Any, path: str, around: Surroundings) -> Message:
    more: Json = {}
    if isinstance(message, ToolMessage):
        more["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        more["reasoning"] = message.reasoning_content
        more["tool_calls"] = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        )
    return message_of(message, path, around.images, **more)


def _check_together(body: ChatBody) -> None:
    check_together(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "has no meaning without logprobs: true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refused("max_completion_tokens", "is the same as max_tokens; give one of them")
    check_tools(body, [(f"tools[{i}].function", tool.function) for i, tool in enumerate(body.tools or ())])


class Choice:
    """One choice as it grows. A whole answer is the sum of the chunks' pieces. `num_reasoning` counts tokens up to the
    last one that added to the reasoning."""

    def __init__(self, parser: AnswerParser):
        self._parser = parser
        self._deltas: list[Delta] = []
        self.tokens: list[Token] = []
        self.result: Result | None = None
        self.num_reasoning = 0

    def take(self, event: Event) -> Delta:
        """What an event adds; the last one also what was held back."""
        deltas = [self._push(token) for token in event.tokens]
        if event.result is not None:
            self.result = event.result
            deltas.append(self._parser.finish())
        self._deltas += deltas
        return Delta(
            "".join(delta.reasoning for delta in deltas),
            "".join(delta.content for delta in deltas),
            tuple(call for delta in deltas for call in delta.calls),
        )

    def _push(self, token: Token) -> Delta:
        self.tokens.append(token)
        delta = self._parser.push(token.text)
        if delta.reasoning:
            self.num_reasoning = len(self.tokens)
        return delta

    @property
    def answer(self) -> Answer:
        return fold(self._deltas)

    @property
    def finish_reason(self) -> str | None:
        if self.result is None:
            return None
        calls = any(delta.calls for delta in self._deltas)
        return "tool_calls" if calls and self.result.finish_reason == "stop" else self.result.finish_reason


class ChatReply:
    """Chunks of all choices, and the whole answer, which is their sum."""

    ends_with_done = True

    def __init__(self, body: ChatBody, around: Surroundings):
        self._body, self._around = body, around
        self._logprobs, self._tokens = bool(body.logprobs), bool(body.return_tokens)
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._tools = [] if body.tool_choice == "none" else [tool_object(tool.function) for tool in body.tools or ()]
        self._choices: list[Choice] = []

    def prepared(self, states: Sequence[ReasoningState]) -> None:
        self._choices = [Choice(AnswerParser(self._around.format, state, self._tools)) for state in states]

    def start(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, None) for index in range(len(self._choices))]

    def take(self, index: int, event: Event) -> list[Json]:
        choice = self._choices[index]
        delta = choice.take(event)
        chunks = []
        if delta or (event.tokens and (self._tokens or self._logprobs)):
            chunks.append(self._chunk(index, self._delta(index, delta), None, event))
        if choice.result is not None:
            last = self._chunk(index, {}, choice.finish_reason)
            chunks.append(last | {"timings": self._timings([choice.result])})
        return chunks

    def end(self) -> list[Json]:
        if not self._usage:
            return []
        head = self._head("chat.completion.chunk") | {"choices": []}
        return [head | {"usage": self._usage_sum, "timings": self._timings(self._results)}]

    def failed(self, error: ApiError) -> list[Json]:
        return [error.body()]

    def whole(self) -> Json:
        answer = self._head("chat.completion") | {"choices": [self._whole_choice(i) for i in range(len(self._choices))]}
        answer |= {"usage": self._usage_sum, "timings": self._timings(self._results)}
        return answer | ({"tokens": token_list(self._choices[0].tokens)} if self._tokens else {})

    @property
    def _usage_sum(self) -> Json:
        usage = usage_of(self._results, len(self._choices))
        reasoning = sum(choice.num_reasoning for choice in self._choices)
        return usage | {"completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _timings(self, results: Sequence[Result]) -> Json:
        return timings_of(results, self._body, self._around)

    @property
    def _results(self) -> list[Result]:
        return [choice.result for choice in self._choices]

    def _whole_choice(self, index: int) -> Json:
        choice = self._choices[index]
        return {
            "index": index,
            "message": self._message(index, choice.answer),
            "logprobs": self._logprobs_of(choice.tokens),
            "finish_reason": choice.finish_reason,
        }

    def _message(self, index: int, answer: Answer) -> Json:
        content = None if answer.calls and not answer.content else answer.content
        message = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                self._call(index, i) | {"function": {"name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(answer.calls)
            ]
        return message

    def _delta(self, index: int, delta: Delta) -> Json:
        pieces: Json = {"content": delta.content} if delta.content or not delta else {}
        if delta.reasoning:
            pieces["reasoning_content"] = delta.reasoning
        if delta.calls:
            pieces["tool_calls"] = [self._call_delta(index, call) for call in delta.calls]
        return pieces

    def _call_delta(self, index: int, call: CallDelta) -> Json:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, **self._call(index, call.index), "function": function}

    def _call(self, index: int, call: int) -> Json:
        return {"id": f"call_{self._around.id}_{index}_{call}", "type": "function"}

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
