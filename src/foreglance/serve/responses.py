"""`/v1/responses`: input items to a job, events to the typed events of that endpoint and to a whole response. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foreglance.chat_format import ReasoningState
from foreglance.request import Event, Image, Message, Request, Text, Token, ToolCall
from foreglance.serve.answers import AnswerParser
from foreglance.serve.chat import Choice, logprob_of
from foreglance.serve.errors import ApiError, refused
from foreglance.serve.openai import (
    Job,
    Json,
    Surroundings,
    check_tools,
    content_parts,
    grammar_of,
    message_of,
    sampling_of,
    speculation_of,
    timings_of,
    tool_object,
)
from foreglance.serve.schema import (
    CallItem,
    CallOutputItem,
    InputItem,
    InputMessage,
    NamedFunctionTool,
    ReasoningItem,
    ResponseBody,
)
from foreglance.serve.tools import CallDelta

FIELD_NAMES = {
    "messages": "input",
    "image": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format",
}
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of the ids of items


def response_job(body: ResponseBody, around: Surroundings) -> Job:
    """Raises `RequestError` or `ApiError` for values that cannot be served."""
    tools, choice = body.tools or [], body.tool_choice
    check_tools(body, [(f"tools[{i}]", tool) for i, tool in enumerate(tools)])
    if tools and body.top_logprobs is not None:
        raise refused("top_logprobs", "is not served together with tools; /v1/chat/completions has both")
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
        tools=tuple(map(tool_object, tools)),
        tool_choice=choice.name if isinstance(choice, NamedFunctionTool) else choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_options=body.chat_template_kwargs or {},
    )
    return Job((request,), 1, ResponseReply(body, around))


def _messages(body: ResponseBody, around: Surroundings) -> Iterable[Message]:
    if body.instructions is not None:
        yield Message.of("system", body.instructions)
    if isinstance(body.input, str):
        yield Message("user", (Text(body.input),))
        return
    turn, called = Turn(), set()
    for i, item in enumerate(body.input):
        path = f"input[{i}]"
        if not turn.takes(item):
            yield from turn.end(path)
            turn = Turn()
        if isinstance(item, CallOutputItem):
            if item.call_id not in called:
                raise refused(f"{path}.call_id", f"no call before it has the id {item.call_id!r}")
            parts = content_parts(item.output, f"{path}.output", around.images)
            yield Message("tool", parts, tool_call_id=item.call_id)
        elif isinstance(item, InputMessage) and item.role != "assistant":
            yield message_of(item, path, around.images)
        else:
            turn.add(item, path, around)
            called |= {call.id for call in turn.calls}
    yield from turn.end("input")


@dataclass
class Turn:
    """An assistant's turn as it is put together from items: reasoning, then words, then calls, each of them or not."""

    reasoning: str | None = None
    words: tuple[Text | Image, ...] | None = None
    calls: tuple[ToolCall, ...] = ()

    def takes(self, item: InputItem) -> bool:
        """Whether an item goes on with this turn."""
        if isinstance(item, CallItem):
            return True
        if isinstance(item, ReasoningItem):
            return self.words is None and not self.calls
        return isinstance(item, InputMessage) and item.role == "assistant" and self.words is None and not self.calls

    def add(self, item: InputMessage | ReasoningItem | CallItem, path: str, around: Surroundings) -> None:
        if isinstance(item, ReasoningItem):
            self.reasoning = "".join(part.text for part in item.content or ())
        elif isinstance(item, CallItem):
            self.calls += (ToolCall(item.call_id, item.name, item.arguments),)
        else:
            self.words = content_parts(item.content, f"{path}.content", around.images)

    def end(self, path: str) -> Iterable[Message]:
        """The turn, if there is one. `path` is of what comes behind it."""
        if self.words is not None or self.calls:
            yield Message("assistant", self.words or (), self.calls, reasoning=self.reasoning)
        elif self.reasoning is not None:
            raise refused(path, "the answer of an assistant must follow its reasoning")


@dataclass
class Item:
    """An output item as it grows: the reasoning, or a message, with its one part, or a call, whose `text` are its
    arguments."""

    kind: str  # "reasoning", "message" or "function_call"
    id: str
    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    status: str = "in_progress"
    call: tuple[str, str] = ("", "")  # its id, which the output names, and the function

    @property
    def part_kind(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self, logprobs: list[Json]) -> Json:
        part = {"type": self.part_kind, "text": self.text}
        return part | ({"annotations": [], "logprobs": logprobs} if self.kind == "message" else {})

    def as_json(self, content: list[Json]) -> Json:
        own = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return own | {"call_id": self.call[0], "name": self.call[1], "arguments": self.text}
        return own | {"content": content} | ({"role": "assistant"} if self.kind == "message" else {"summary": []})


class ResponseReply:
    """The reasoning, if there is any, then a message, then calls. Each event has a number and a type."""

    ends_with_done = False

    def __init__(self, body: ResponseBody, around: Surroundings):
        self._body, self._around = body, around
        self._number = 0
        self._items: list[Item] = []
        self._choice: Choice

    def prepared(self, states: Sequence[ReasoningState]) -> None:
        shown = [] if self._body.tool_choice == "none" else self._body.tools or []
        self._choice = Choice(AnswerParser(self._around.format, states[0], list(map(tool_object, shown))))

    def start(self) -> list[Json]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def take(self, index: int, event: Event) -> list[Json]:
        delta = self._choice.take(event)
        chunks = self._grow("reasoning", delta.reasoning, ()) if delta.reasoning else []
        wants_logprobs = self._body.top_logprobs is not None and bool(event.tokens) and not delta.reasoning
        if delta.content or wants_logprobs:
            chunks += self._grow("message", delta.content, event.tokens)
        for call in delta.calls:
            chunks += self._call(call)
        if event.result is None:
            return chunks
        if not self._items or self._items[-1].kind == "reasoning":
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
        output = [item.as_json(self._content(item)) for item in self._items]
        more = {
            "output": output,
            "usage": usage,
            "timings": timings_of([self._choice.result], self._body, self._around),
        }
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
            chunks = self._open(kind)
        item = self._items[-1]
        item.text += text
        item.tokens += tokens
        if not (text or tokens):
            return chunks
        more = {"logprobs": self._logprobs(tokens)} if kind == "message" else {}
        return [*chunks, self._part_event(f"{item.part_kind}.delta", item, delta=text, **more)]

    def _call(self, delta: CallDelta) -> list[Json]:
        """A piece of a call; the one with its name opens an item."""
        chunks = []
        if delta.name is not None:
            chunks = self._open("function_call", (f"call_{self._around.id}_{delta.index}", delta.name))
        if delta.arguments:
            item = self._items[-1]
            item.text += delta.arguments
            chunks.append(self._item_event("function_call_arguments.delta", item, delta=delta.arguments))
        return chunks

    def _open(self, kind: str, call: tuple[str, str] = ("", "")) -> list[Json]:
        """A new item, behind the end of the one before."""
        before = self._close("completed") if self._items else []
        index = len(self._items)
        item = Item(kind, f"{PREFIXES[kind]}_{self._around.id}_{index}", index, call=call)
        self._items.append(item)
        added = self._event("output_item.added", output_index=index, item=item.as_json([]))
        if kind == "function_call":
            return [*before, added]
        return [*before, added, self._part_event("content_part.added", item, part=item.part([]))]

    def _close(self, status: str) -> list[Json]:
        item = self._items[-1]
        item.status, content = status, self._content(item)
        done = []
        if item.kind == "function_call":
            more = {"name": item.call[1], "arguments": item.text}
            done.append(self._item_event("function_call_arguments.done", item, **more))
        for part in content:
            more = {"logprobs": part["logprobs"]} if item.kind == "message" else {}
            done.append(self._part_event(f"{item.part_kind}.done", item, text=item.text, **more))
            done.append(self._part_event("content_part.done", item, part=part))
        return [*done, self._event("output_item.done", output_index=item.index, item=item.as_json(content))]

    def _content(self, item: Item) -> list[Json]:
        return [] if item.kind == "function_call" else [item.part(self._logprobs(item.tokens))]

    def _item_event(self, kind: str, item: Item, **more: object) -> Json:
        return self._event(kind, item_id=item.id, output_index=item.index, **more)

    def _part_event(self, kind: str, item: Item, **more: object) -> Json:
        return self._item_event(kind, item, content_index=0, **more)

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
        body, around, choice = self._body, self._around, self._body.tool_choice
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunctionTool) else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
