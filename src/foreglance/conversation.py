"""A conversation to the text that a model reads: messages, tools and options in the form of its chat template."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2

from foreglance.chat_format import ChatFormat
from foreglance.request import Image, Message, RequestError, Text


class Templated(Protocol):
    """What is used of a transformers tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str: ...


def render(
    tokenizer: Templated,
    format: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> str:
    """The text of a conversation up to where the model goes on. Raises `RequestError` for what the template does not
    take; an option that it does not read would be ignored, so that is refused as well."""
    if tools and format.tools is None:
        raise RequestError(
            "tools: the chat template of this model takes no tools, or writes calls in a form that is not known here",
            param="tools",
            code="tools_unsupported",
        )
    unread = [name for name in options if not format.reads(name)]
    if unread:
        raise RequestError(
            f"template_options: the chat template of this model reads no {unread[0]}", param="template_options"
        )
    more = dict(options) | ({"tools": list(tools)} if tools else {})
    conversation = as_conversation(messages, format)
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **more)
    except Exception as error:  # a template is a program: anything may go wrong in it
        said = str(error) or type(error).__name__
        raise RequestError(
            f"the model's chat template does not take this conversation: {said}{_place(error)}", param="messages"
        ) from error


def _place(error: Exception) -> str:
    """The line of the template, where there is one; one that refuses a conversation in words of its own needs none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (line {lines[-1]} of the template)" if lines and type(error) is not jinja2.TemplateError else ""


def as_conversation(messages: Sequence[Message], format: ChatFormat) -> list[dict[str, Any]]:
    """The form that chat templates read. Published templates of Gemma-4 look for a tool's answers in the turn that
    called it, all others in turns of their own."""
    turns: list[dict[str, Any]] = []
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        turn = _as_template_message(message)
        if message.role == "tool":
            turn["name"] = message.name or names.get(message.tool_call_id or "", "unknown")
        if message.role == "tool" and format.reads("tool_responses") and format.tools == "gemma" and turns:
            turns[-1].setdefault("tool_responses", []).append({"name": turn["name"], "response": turn["content"]})
        else:
            turns.append(turn)
    return turns


def _as_template_message(message: Message) -> dict[str, Any]:
    """A plain string where there is only text, else typed parts; arguments of calls as values."""
    parts = [
        {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part.text} for part in message.parts
    ]
    is_text = all(isinstance(part, Text) for part in message.parts)
    turn: dict[str, Any] = {
        "role": message.role,
        "content": "".join(part["text"] for part in parts) if is_text else parts,
    }
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.values()}}
            for call in message.tool_calls
        ]
    more = {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    return turn | {key: value for key, value in more.items() if value is not None}
