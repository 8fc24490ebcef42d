"""Reasoning and tool calls in the text of an answer: the same whatever pieces it comes in."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreglance.chat_format import CHANNEL, THINK, ChatFormat
from foreglance.serve.answers import Answer, AnswerParser, Call, fold

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array"},
    "any": {},
    "maybe": {"type": ["integer", "string"]},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
FORMATS = {
    "xml": ChatFormat("xml", THINK),
    "json": ChatFormat("json", THINK),
    "gemma": ChatFormat("gemma", CHANNEL),
}
WORDS = (  # what a text is made of where parsers may go wrong
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "weather", ">", "</function>", "<parameter=",
    "city", "days", "</parameter>", "\n", " ", "a", "<", "</", "{", "}", "[", "]", ":", ",", '"', "\\", "1", "true",
    '{"name": "weather", "arguments": {', '"a": "b"', "<|channel>thought", "<channel|>", "<|tool_call>", "call:",
    "<tool_call|>", '<|"|>', "é🙂", '"name"', '"arguments"', "<|",
)  # fmt: skip


def parse(syntax, pieces, state="none"):
    parser = AnswerParser(FORMATS[syntax], state, TOOLS)
    return fold([*map(parser.push, pieces), parser.finish()])


def cut(text, data):
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("syntax", FORMATS)
@settings(max_examples=300)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=16), state=st.sampled_from(("none", "open", "done")), data=st.data()
)
def test_how_a_text_is_cut_does_not_matter(syntax, words, state, data):
    text = "".join(words)
    whole = parse(syntax, [text], state)
    assert parse(syntax, text, state) == whole
    assert parse(syntax, cut(text, data), state) == whole


def xml(name, arguments):
    def raw(value):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    values = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def hermes(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def gemma(name, arguments):
    def raw(value):
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{raw(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(raw, value)) + "]"
        return json.dumps(value)

    return f"<|tool_call>call:{name}{raw(arguments)}<tool_call|>"


WRITERS = {"xml": xml, "json": hermes, "gemma": gemma}
strings = st.text('ab \n"\\{}[]:,<>/é🙂', max_size=12)
scalars = st.one_of(strings, st.integers(-99, 99), st.booleans(), st.none(), st.floats(-9, 9))
plain_keys = st.sampled_from(("a", "b", "c"))
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(plain_keys, v, max_size=3), max_leaves=6
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": strings,
        "days": st.integers(),
        "exact": st.booleans(),
        "where": st.dictionaries(plain_keys, values, max_size=3),
        "tags": st.lists(values, max_size=3),
    },
)
calls = st.lists(st.tuples(st.just("weather"), arguments) | st.just(("now", {})), max_size=3)
prose = st.text("ab \n<{é", max_size=12).map(str.strip)


@pytest.mark.parametrize("syntax", WRITERS)
@given(
    thought=prose,
    content=prose,
    calls=calls,
    opened=st.booleans(),
    gap=st.sampled_from(("", "\n", "\n\n")),
    data=st.data(),
)
def test_what_was_written_is_read(syntax, thought, content, calls, opened, gap, data):
    tags = FORMATS[syntax].reasoning
    head = f"\n{thought}\n{tags.end}{gap}"
    text = ("" if opened else tags.start) + head + content + gap
    text += gap.join(WRITERS[syntax](*call) for call in calls)
    answer = parse(syntax, cut(text, data), "open" if opened else "none")
    assert answer.reasoning == thought
    assert answer.content == (content if calls else content + gap if content else "")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls


@pytest.mark.parametrize("syntax", WRITERS)
@given(calls=calls.filter(bool), data=st.data())
def test_a_call_that_is_cut_is_a_beginning_of_it(syntax, calls, data):
    """And nothing that was given out is taken back."""
    text = "".join(WRITERS[syntax](*call) for call in calls)
    short, whole = parse(syntax, [text[: data.draw(st.integers(0, len(text)))]]), parse(syntax, [text])
    assert len(short.calls) <= len(whole.calls)
    for mine, theirs in zip(short.calls, whole.calls, strict=False):
        assert mine.name == theirs.name and theirs.arguments.startswith(mine.arguments)


def test_the_name_comes_before_the_arguments_and_these_in_fragments():
    parser = AnswerParser(FORMATS["xml"], "done", TOOLS)
    pieces = [
        call for letter in xml("weather", {"city": "a long name", "days": 3}) for call in parser.push(letter).calls
    ]
    assert pieces[0].name == "weather" and pieces[0].arguments == ""
    assert all(piece.name is None and piece.arguments for piece in pieces[1:]) and len(pieces) > 10
    assert "".join(piece.arguments for piece in pieces) == '{"city": "a long name", "days": 3}'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<tool_call>", Answer("", "<tool_call>", ())),
        ("a <tool_call>\nnothing", Answer("", "a <tool_call>\nnothing", ())),
        ("<tool_call> <tool_call><function=now></function>", Answer("", "<tool_call>", (Call("now", "{}"),))),
        ("<tool_call>\n<function=now></function></tool_call> bye ", Answer("", "bye ", (Call("now", "{}"),))),
        ("<tool_call><function=now></tool_call>", Answer("", "", (Call("now", "{}"),))),
        ("x <think>y</think>", Answer("", "x <think>y</think>", ())),
        ("\n <think>y", Answer("y", "", ())),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(text, want):
    assert parse("xml", text) == want


@pytest.mark.parametrize(
    ("key", "written", "want"),
    [
        ("days", "3", 3),
        ("days", "three", "three"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("any", "None", None),
        ("any", "NaN", "NaN"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", '"a"', '"a"'),
        ("city", "3", "3"),
        ("maybe", "3", 3),
        ("maybe", "[3]", "[3]"),
        ("unknown", "[3]", [3]),
        ("city", "two\nlines\n", "two\nlines\n"),
    ],
)
def test_a_value_without_quotes_is_what_the_schema_says(key, written, want):
    text = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse("xml", [text]).calls
    assert json.loads(call.arguments) == {key: want}


def test_keys_of_a_call_may_come_in_another_order():
    text = '<tool_call>{"arguments": {"city": "</tool_call>"}, "name": "weather"}</tool_call>'
    assert parse("json", text).calls == (Call("weather", '{"city": "</tool_call>"}'),)
    text = '<tool_call>{"name": "weather", "arguments": {"a": [1, {}]}, "id": 3}</tool_call>'
    assert parse("json", text) == Answer("", "", (Call("weather", '{"a": [1, {}]}'),))


def test_without_tools_nothing_is_a_call():
    parser = AnswerParser(FORMATS["xml"], "done")
    assert fold([parser.push(xml("now", {})), parser.finish()]) == Answer("", xml("now", {}), ())


TEMPLATES = {
    "{{ '<tool_call>\\n<function=' }} <think> </think>": ("xml", THINK),
    "{{ '<tool_call>\\n{\"name\"' }}": ("json", None),
    "{{ '<|tool_call>call:' }} <|channel>thought <channel|>": ("gemma", CHANNEL),
    "{{ messages }}": (None, None),
}


@pytest.mark.parametrize(("template", "want"), TEMPLATES.items())
def test_a_template_says_how_calls_and_reasoning_are_written(template, want):
    format = ChatFormat.of_template(template)
    assert (format.tools, format.reasoning) == want
    assert ChatFormat.of_template(template, "none", "none").words == ()


def test_the_end_of_a_prompt_says_whether_the_model_reasons_already():
    format = FORMATS["xml"]
    assert format.state_after("<|im_start|>assistant\n<think>\n") == "open"
    assert format.state_after("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "done"
    assert format.state_after("what is <think>?<|im_start|>assistant\n") == "none"
    assert ChatFormat().state_after("<think>") == "done"
    assert FORMATS["gemma"].state_after("<|turn>model\n<|channel>thought\n<channel|>") == "done"
