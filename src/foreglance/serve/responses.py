"""`/v1/responses`: input items to a job, events to the typed events of that endpoint and to a whole response. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foreglance.chat_format import ReasoningState
from foreglance.request import Event, Message, Request, Text, Token
from foreglance.serve.answers import AnswerParser
from foreglance.serve.chat import Choice, logprob_of
from foreglance.serve.errors import ApiError, refused
from foreglance.serve.openai import (
    Job,
    Json,
    Surroundings,
    grammar_of,
    message_of,
    sampling_of,
    speculation_of,
    timings_of,
)
from foreglance.serve.schema import ReasoningItem, ResponseBody

FIELD_NAMES = {
    "messages": "input",
    "image": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format",
}


def response_job(body: ResponseBody, around: Surroundings) -> Job:
    """Raises `RequestError` or `ApiError` for values that cannot be served."""
    sampling = sampling_of(
        body,
        around,
        body.max_output_tokens,
        logprobs=body.top_logprobs,
        reasoning_budget=body.reasoning_budget,
        markup=True,
    )
    request = Request(
        tuple(_messages(body, around)),
        sampling,
        speculation_of(body.speculative, around.speculation),
        grammar=None if body.text is None else grammar_of(body.text.format),
        template_options=body.chat_template_kwargs or {},
    )
    return Job((request,), 1, ResponseReply(body, around))


def _messages(body: ResponseBody, around: Surroundings) -> Iterable[Message]:
    if body.instructions is not None:
        yield Message.of("system", body.instructions)
    if isinstance(body.input, str):
        yield Message("user", (Text(body.input),))
        return
    reasoning = None
    for i, item in enumerate(body.input):
        if isinstance(item, ReasoningItem):
            reasoning = "".join(part.text for part in item.content or ())
            continue
        if reasoning is not None and item.role != "assistant":
            raise refused(f"input[{i}]", "the answer of an assistant must follow its reasoning")
        yield message_of(item, f"input[{i}]", around.images, reasoning=reasoning)
        reasoning = None
    if reasoning is not None:
        raise refused("input", "the answer of an assistant must follow its reasoning")


@dataclass
class Item:
    """An output item as it grows: the reasoning, or the message with its one part."""

    kind: str  # "reasoning" or "message"
    id: str
    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def part_kind(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self, logprobs: list[Json]) -> Json:
        part = {"type": self.part_kind, "text": self.text}
        return part | ({"annotations": [], "logprobs": logprobs} if self.kind == "message" else {})

    def as_json(self, content: list[Json]) -> Json:
        own = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self.id, "type": self.kind, "status": self.status, "content": content} | own


class ResponseReply:
    """The reasoning, if there is any, then one message. Each event has a number and a type."""

    ends_with_done = False

    def __init__(self, body: ResponseBody, around: Surroundings):
        self._body, self._around = body, around
        self._number = 0
        self._items: list[Item] = []
        self._choice: Choice

    def prepared(self, states: Sequence[ReasoningState]) -> None:
        self._choice = Choice(AnswerParser(self._around.format, states[0]))

    def start(self) -> list[Json]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def take(self, index: int, event: Event) -> list[Json]:
        delta = self._choice.take(event)
        chunks = self._grow("reasoning", delta.reasoning, ()) if delta.reasoning else []
        wants_logprobs = self._body.top_logprobs is not None and bool(event.tokens) and not delta.reasoning
        if delta.content or wants_logprobs:
            chunks += self._grow("message", delta.content, event.tokens)
        if event.result is None:
            return chunks
        if not self._items or self._items[-1].kind != "message":
            chunks += self._grow("message", "", ())
        return chunks + self._close(self._status)

    def end(self) -> list[Json]:
        response = self.whole()
        return [self._event(response["status"], response=response)]

    def failed(self, error: ApiError) -> list[Json]:
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return [self._event("failed", response=response)]

    def whole(self) -> Json:
        timings, status = self._choice.result.timings, self._status
        usage = {
            "input_tokens": timings.prompt_tokens,
            "input_tokens_details": {"cached_tokens": timings.cached_rows},
            "output_tokens": timings.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._choice.num_reasoning},
            "total_tokens": timings.prompt_tokens + timings.num_tokens,
        }
        output = [item.as_json([self._part(item)]) for item in self._items]
        more = {"output": output, "usage": usage, "timings": timings_of([self._choice.result])}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(status) | more

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _grow(self, kind: str, text: str, tokens: Sequence[Token]) -> list[Json]:
        """Add text to the item of that kind, which may have to be opened."""
        chunks = []
        if not self._items or self._items[-1].kind != kind:
            chunks = (self._close("completed") if self._items else []) + self._open(kind)
        item = self._items[-1]
        item.text += text
        item.tokens += tokens
        if not (text or tokens):
            return chunks
        more = {"logprobs": self._logprobs(tokens)} if kind == "message" else {}
        return [*chunks, self._part_event(f"{item.part_kind}.delta", item, delta=text, **more)]

    def _open(self, kind: str) -> list[Json]:
        prefix = "msg" if kind == "message" else "rs"
        item = Item(kind, f"{prefix}_{self._around.id}", len(self._items))
        self._items.append(item)
        return [
            self._event("output_item.added", output_index=item.index, item=item.as_json([])),
            self._part_event("content_part.added", item, part=item.part([])),
        ]

    def _close(self, status: str) -> list[Json]:
        item = self._items[-1]
        item.status, part = status, self._part(item)
        more = {"logprobs": part["logprobs"]} if item.kind == "message" else {}
        return [
            self._part_event(f"{item.part_kind}.done", item, text=item.text, **more),
            self._part_event("content_part.done", item, part=part),
            self._event("output_item.done", output_index=item.index, item=item.as_json([part])),
        ]

    def _part(self, item: Item) -> Json:
        return item.part(self._logprobs(item.tokens))

    def _part_event(self, kind: str, item: Item, **more: object) -> Json:
        return self._event(kind, item_id=item.id, output_index=item.index, content_index=0, **more)

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
        text = body.text and body.text.format and body.text.format.model_dump(by_alias=True, exclude_none=True)
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
            "text": {"format": text or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
