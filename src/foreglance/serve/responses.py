"""`/v1/responses`: input items to a job, events to the typed events of that endpoint and to a whole response. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from foreglance.request import Event, Message, Request, Result, Text, Token
from foreglance.serve.chat import logprob_of
from foreglance.serve.errors import ApiError
from foreglance.serve.openai import (
    Job,
    Json,
    Surroundings,
    message_of,
    sampling_of,
    speculation_of,
    timings_of,
)
from foreglance.serve.schema import ResponseBody

FIELD_NAMES = {"messages": "input", "image": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


def response_job(body: ResponseBody, around: Surroundings) -> Job:
    """Raises `RequestError` or `ApiError` for values that cannot be served."""
    request = Request(
        _messages(body, around),
        sampling_of(body, around, body.max_output_tokens, body.top_logprobs),
        speculation_of(body.speculative, around.speculation),
    )
    return Job((request,), 1, bool(body.stream), ResponseReply(body, around))


def _messages(body: ResponseBody, around: Surroundings) -> tuple[Message, ...]:
    head = () if body.instructions is None else (Message.of("system", body.instructions),)
    if isinstance(body.input, str):
        return (*head, Message("user", (Text(body.input),)))
    return (*head, *(message_of(item, f"input[{i}]", around.images) for i, item in enumerate(body.input)))


class ResponseReply:
    """One message, open from its first token on. Each event has a number and a type."""

    ends_with_done = False

    def __init__(self, body: ResponseBody, around: Surroundings):
        self._body, self._around = body, around
        self._number = 0
        self._is_open = False
        self._text = ""
        self._tokens: list[Token] = []
        self._result: Result | None = None

    def start(self) -> list[Json]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def take(self, index: int, event: Event) -> list[Json]:
        self._text += event.text
        self._tokens += event.tokens
        self._result = event.result
        chunks = [] if self._is_open else self._opened()
        if event.text or (event.tokens and self._body.top_logprobs is not None):
            chunks.append(self._delta(event))
        return chunks + (self._closed() if event.result is not None else [])

    def end(self) -> list[Json]:
        response = self.whole()
        return [self._event(response["status"], response=response)]

    def failed(self, error: ApiError) -> list[Json]:
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return [self._event("failed", response=response)]

    def whole(self) -> Json:
        result, status = self._result, self._status
        usage = {
            "input_tokens": result.timings.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.timings.cached_rows},
            "output_tokens": result.timings.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": result.timings.prompt_tokens + result.timings.num_tokens,
        }
        more = {"output": [self._item(status, [self._part()])], "usage": usage, "timings": timings_of([result])}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(status) | more

    @property
    def _status(self) -> str:
        return "incomplete" if self._result.finish_reason == "length" else "completed"

    def _delta(self, event: Event) -> Json:
        return self._part_event("output_text.delta", delta=event.text, logprobs=self._logprobs(event.tokens))

    def _opened(self) -> list[Json]:
        self._is_open = True
        return [
            self._event("output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._part_event("content_part.added", part=_text_part("", [])),
        ]

    def _closed(self) -> list[Json]:
        part = self._part()
        return [
            self._part_event("output_text.done", text=self._text, logprobs=part["logprobs"]),
            self._part_event("content_part.done", part=part),
            self._event("output_item.done", output_index=0, item=self._item(self._status, [part])),
        ]

    def _part(self) -> Json:
        return _text_part(self._text, self._logprobs(self._tokens))

    def _item(self, status: str, content: list[Json]) -> Json:
        id = f"msg_{self._around.id}"
        return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part_event(self, kind: str, **more: object) -> Json:
        return self._event(kind, item_id=f"msg_{self._around.id}", output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: object) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **more}
        self._number += 1
        return event

    def _logprobs(self, tokens: Sequence[Token]) -> list[Json]:
        if self._body.top_logprobs is None:
            return []
        return [logprob_of(token, self._around.piece) for token in tokens]

    def _response(self, status: str) -> Json:
        """What is known before the answer: the request's own fields, as the endpoint gives them back."""
        body, around = self._body, self._around
        return {
            "id": f"resp_{around.id}",
            "object": "response",
            "created_at": around.now,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": around.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
