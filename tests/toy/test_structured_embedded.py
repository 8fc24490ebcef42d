"""Models that ship, under grammars and with drafts at depth 3: every answer is valid, and drafts change none."""

import json
from dataclasses import replace
from functools import lru_cache

import jsonschema_rs
import pytest

from foreglance import Engine, Grammar, Request, SamplingParams, Settings, Speculation
from foreglance.bench.prompts import image_cases
from foreglance.models.weights import find_assistant
from foreglance.serve.answers import AnswerParser, fold

COLOURS = ["red", "green", "blue", "yellow"]
SHORT = {"type": "string", "maxLength": 12}
SCHEMAS = {
    "enum": {"type": "object", "properties": {"colour": {"enum": COLOURS}}, "additionalProperties": False},
    "numbers": {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": -5, "maximum": 99},
            "y": {"type": "integer", "minimum": 0, "maximum": 95, "multipleOf": 5},
        },
        "required": ["x"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "shapes": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": SHORT, "colour": {"enum": COLOURS}},
                    "required": ["name", "colour"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 2,
            }
        },
        "required": ["shapes"],
        "additionalProperties": False,
    },
    "choice": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2}]},
    "pattern": {"type": "string", "pattern": "^[a-z]{3,8} [0-9]{2}$"},
    "recursive": {
        "$defs": {
            "leaf": {"type": "object", "properties": {"n": {"type": "null"}}, "additionalProperties": False},
        },
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
}  # fmt: skip
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"type": "string", "enum": COLOURS},
                    "times": {"type": "integer", "minimum": 1, "maximum": 9},
                    "at": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
                    "bold": {"type": "boolean"},
                },
                "required": ["colour", "times", "bold"],
            },
        },
    },
)


@lru_cache
def engine_of(name):
    return Engine.load(name, Settings(prefix_cache_bytes=0), draft_model=find_assistant(name))


def both(engine, request):
    """The answer without drafts, which must be the one with drafts, and what came of these."""
    plain, drafted = (
        engine.generate(replace(request, id=f"{request.id}-{depth}", speculation=Speculation(depth=depth)))[0]
        for depth in (0, 3)
    )
    assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
    assert drafted.error is None and drafted.draft.off_because is None and sum(drafted.timings.drafted) > 0
    return plain


def asked(case, temperature, seed=0, **sampling):
    return case.request(SamplingParams(max_tokens=160, temperature=temperature, seed=seed, **sampling), Speculation())


@pytest.mark.case("D8", "D11")
@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_is_valid_json_of_its_schema(name, temperature):
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[name]))
    for seed, case in enumerate(image_cases(2)):
        result = both(engine_of("tiny-qwen"), replace(asked(case, temperature, seed), grammar=grammar))
        assert result.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(result.text)), result.text


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_a_json_object_that_ends_is_one(temperature):
    ended = 0
    for seed, case in enumerate(image_cases(3)):
        result = both(engine_of("tiny-qwen"), replace(asked(case, temperature, seed), grammar=Grammar("json_object")))
        if result.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(result.text), dict)
    assert ended


@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-step", "tiny-gemma"))
def test_a_forced_call_is_one_of_the_tool(name):
    """In the format of the family; tiny-gemma drafts with its assistant, tiny-step with a chain."""
    engine = engine_of(name)
    for temperature in (0.0, 0.8):
        request = replace(
            asked(image_cases(1)[0], temperature), tools=TOOLS, tool_choice="paint", parallel_tool_calls=False
        )
        result = both(engine, replace(request, sampling=replace(request.sampling, markup=True)))
        parser = AnswerParser(engine.format, engine.prepare(request).reasoning, TOOLS)
        answer = fold([*map(parser.push, result.text), parser.finish()])
        assert result.finish_reason == "stop" and answer.content == answer.reasoning == ""
        (call,) = answer.calls
        assert call.name == "paint"
        assert jsonschema_rs.is_valid(TOOLS[0]["function"]["parameters"], json.loads(call.arguments)), call.arguments


@pytest.mark.case("D10")
@pytest.mark.parametrize("budget", (0, 7))
def test_reasoning_is_cut_and_a_call_follows(budget):
    """tiny-qwen was never taught to reason and would not end it by itself."""
    engine = engine_of("tiny-qwen")
    request = replace(
        asked(image_cases(1)[0], 0.8, reasoning_budget=budget, markup=True),
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        template_options={"enable_thinking": True},
    )
    state = engine.prepare(request).reasoning
    result = both(engine, request)
    end = engine._prompter.encode("</think>", special=False)
    assert state == "open" and list(result.token_ids[budget : budget + len(end)]) == end
    parser = AnswerParser(engine.format, state, TOOLS)
    answer = fold([*map(parser.push, result.text), parser.finish()])
    assert answer.reasoning == engine.decode(result.token_ids[:budget]).strip() and len(answer.calls) == 1


def test_thinking_is_off_unless_asked_for():
    engine = engine_of("tiny-qwen")
    request = Request.from_prompt("hello")
    states = [
        engine.prepare(replace(request, template_options=options)).reasoning
        for options in ({}, {"enable_thinking": False}, {"enable_thinking": True})
    ]
    assert states == ["done", "done", "open"]
