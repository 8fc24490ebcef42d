"""Answers of a given form, tool calls and reasoning through the `openai` client, with drafts on."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from support.served import MODEL, data_url, user

LOOK = [user("Describe the image.", [data_url()])]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Shape(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue"]
    number: int = Field(ge=0, le=99)


def ask(client, messages=LOOK, **options):
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 120, "temperature": 0, **options}
    )


@pytest.mark.case("D8", "D11")
def test_a_schema_is_kept_to_streamed_or_whole_with_drafts_or_without(client):
    parsed = client.chat.completions.parse(model=MODEL, messages=LOOK, response_format=Shape, temperature=0)
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": Shape.model_json_schema()}}
    options = {"response_format": form, "extra_body": {"speculative": {"depth": 0}}}
    chunks = ask(client, stream=True, **options)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert parsed.choices[0].message.parsed == Shape.model_validate_json(streamed)


def test_a_json_object_is_one(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)
    assert answer.message.content.lstrip().startswith("{")


def test_responses_take_the_same_forms(client):
    form = {"type": "json_schema", "name": "shape", "schema": Shape.model_json_schema()}
    response = client.responses.create(model=MODEL, input="A shape?", text={"format": form}, temperature=0)
    Shape.model_validate_json(response.output_text)
    assert response.text.format.type == "json_schema" and response.text.format.schema_ == form["schema"]


@pytest.mark.parametrize("choice", ("required", {"type": "function", "function": {"name": "weather"}}))
def test_a_forced_call_comes_in_openai_s_shape_streamed_or_whole(client, choice):
    options = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(client, **options).choices[0]
    (call,) = whole.message.tool_calls
    values = json.loads(call.function.arguments)
    assert call.function.name == "weather" and call.id.startswith("call_") and whole.finish_reason == "tool_calls"
    assert values["city"] in ("Rome", "Oslo") and values["days"] in (1, 2, 3) and not whole.message.content
    pieces = [p for c in ask(client, stream=True, **options) for p in c.choices[0].delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == values
    assert {piece.index for piece in pieces} == {0} and pieces[0].id and pieces[0].type == "function"


def test_the_answer_of_a_tool_goes_back_into_the_conversation(client):
    first = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    turns = [
        *LOOK,
        first.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sunny."},
    ]
    answer = ask(client, turns, tools=[WEATHER], tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens > ask(client, max_tokens=1).usage.prompt_tokens


@pytest.mark.case("D11")
@pytest.mark.parametrize(
    ("change", "param"),
    (
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "robot"}}}},
            "response_format",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "tools[0].function.strict"),
        ({"chat_template_kwargs": {"no_such_variable": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"reasoning_budget": -1}, "reasoning_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages",
        ),
    ),
)
def test_forms_that_cannot_be_served_are_refused_by_name(client, change, param):
    body = {"messages": LOOK, **change}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=body.pop("messages"), extra_body=body)
    assert error.value.param == param
