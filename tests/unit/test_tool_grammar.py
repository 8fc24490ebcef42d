"""Grammars of tool calls: what a model may write is what the parsers read, in every format."""

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from unit.test_answers import WRITERS

from foreglance import Message, Request, RequestError
from foreglance.chat_format import THINK, ChatFormat
from foreglance.grammar import Grammars, Guide, hugging_face_vocabulary, is_bound
from foreglance.models.weights import EMBEDDED

END, VOCAB = 2, 1600
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "other": {"anyOf": [{"type": "null"}, {"type": "number"}]},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
)
words = st.text("ab \né{", max_size=8)
arguments = st.fixed_dictionaries(
    {"city": words, "days": st.integers(0, 99)},
    optional={
        "unit": st.sampled_from(("C", "F")),
        "exact": st.booleans(),
        "tags": st.lists(words, max_size=2),
        "place": st.just({}) | st.fixed_dictionaries({"x": st.integers(0, 9)}),
        "other": st.none() | st.integers(0, 9),
    },
)


@lru_cache
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED / "tiny-qwen")


@lru_cache
def grammars():
    return Grammars(lambda: hugging_face_vocabulary(tokenizer(), VOCAB, [END, 0]))


def follows(text, syntax, choice="required", parallel=True, state="done", reasoning=None):
    """Whether an answer may be `text` and end there; None: it may not, but go on."""
    request = Request((Message.of("user", "-"),), tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    guide = Guide(grammars().matcher(request, ChatFormat(syntax, reasoning), state), None, VOCAB, frozenset({END, 0}))
    tokens = tokenizer().encode(text, add_special_tokens=False)
    for i, token in enumerate(tokens):
        if token not in guide.allowed(tokens[:i]):
            return False
    last = guide.allowed(tokens)
    assert (END in last) == (0 in last), "all tokens that end a text are alike"
    return True if END in last else None


def in_order(syntax, values):
    """Keys as the format has them: of the schema, or of the alphabet."""
    keys = sorted(values) if syntax == "gemma" else [key for key in SCHEMA["properties"] if key in values]
    return {key: values[key] for key in keys}


@pytest.mark.parametrize("syntax", WRITERS)
@given(values=arguments)
def test_a_call_that_fits_its_schema_may_be_written(syntax, values):
    call = WRITERS[syntax]("weather", in_order(syntax, values))
    assert follows(call, syntax) is True
    assert follows(call, syntax, "weather") is True
    assert follows(call, syntax, "now") is False


@pytest.mark.parametrize("syntax", WRITERS)
@pytest.mark.parametrize(
    "wrong",
    [{"days": 100}, {"days": "many"}, {"unit": "K"}, {"exact": 1}, {"tags": 1}, {"place": {"z": 1}}, {"more": 1}],
)
def test_one_that_does_not_may_not(syntax, wrong):
    fine = {"city": "Rome", "days": 3}
    assert follows(WRITERS[syntax]("weather", in_order(syntax, fine)), syntax)
    values = {**fine, **wrong}
    assert follows(WRITERS[syntax]("weather", values if "more" in wrong else in_order(syntax, values)), syntax) is False
    assert follows(WRITERS[syntax]("weather", {"days": 3}), syntax) is False


@pytest.mark.parametrize("syntax", WRITERS)
def test_how_many_calls_there_may_be(syntax):
    gap = "" if syntax == "gemma" else "\n"
    one = WRITERS[syntax]("now", {})
    two = one + gap + one
    assert follows(two, syntax) is True
    assert follows(two, syntax, parallel=False) is False
    assert follows("hello " + one, syntax) is False
    for text, want in (("hello", True), ("hello " + one, True), ("hello " + two, False), (one + " bye", False)):
        assert follows(text, syntax, "auto", parallel=False) is want, text
    half = one[: len(one) // 2]
    for text, want in (("hello " + two, True), (one + " bye", True), ("hello " + half, None), (one + half, None)):
        assert follows(text, syntax, "auto") is want, text


def test_calls_that_the_model_is_free_to_make_are_held_to_a_schema_only_if_that_was_asked_for():
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    free, tied = (Request((Message.of("user", "-"),), tools=tools) for tools in (TOOLS, (*TOOLS, strict)))
    assert not is_bound(free) and is_bound(tied) and is_bound(replace(free, parallel_tool_calls=False))
    assert is_bound(replace(free, tool_choice="now")) and not is_bound(replace(tied, tool_choice="none"))


def test_a_call_comes_behind_the_reasoning():
    call = WRITERS["xml"]("now", {})
    for state, text, want in (
        ("open", "hm {</think>\n\n", True),
        ("open", "", False),
        ("none", "<think>\nhm\n</think>\n\n", True),
        ("none", "", True),
        ("done", "<think>\nhm\n</think>\n\n", False),
    ):
        assert follows(text + call, "xml", state=state, reasoning=THINK) is want or (want is False and state == "open")
        assert follows(text, "xml", state=state, reasoning=THINK) is not True, "an answer without a call may not end"


@pytest.mark.parametrize(
    ("syntax", "properties"),
    [
        ("json", {"a": {"$ref": "#/$defs/none"}}),
        ("xml", {"a": {"type": "thing"}}),
        ("gemma", {"a": {"type": "thing"}}),
        ("xml", {"a": 3}),
        ("gemma", {"a": False}),
        ("xml", ["a"]),
    ],
)
def test_what_no_grammar_can_say_is_refused(syntax, properties):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    request = Request((Message.of("user", "-"),), tools=(tool,), tool_choice="required")
    with pytest.raises(RequestError) as error:
        grammars().matcher(request, ChatFormat(syntax), "done")
    assert (error.value.param, error.value.code) == ("tools", "invalid_grammar")


def test_calls_in_an_unknown_form_are_refused():
    with pytest.raises(RequestError) as error:
        follows("", None)
    assert (error.value.param, error.value.code) == ("tools", "tools_unsupported")
