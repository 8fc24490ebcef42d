"""Requests: what is refused, in words that name the field, before any work."""

import math

import jinja2
import pytest
from support.toy import toy_engine

from foreglance import Grammar, Message, Request, RequestError, SamplingParams, Settings, Speculation, ToolCall
from foreglance.prompt import OneAxis, Prompter
from foreglance.request import Text, Timings

BAD_SAMPLING = {
    "max_tokens": (0, -1, 1.5, "3", None),
    "temperature": (-0.1, 101, math.nan, math.inf, "1", True),
    "top_p": (0, 1.1, -1, math.nan),
    "top_k": (-1, 1.5),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0, -1, 1e4),
    "presence_penalty": (101, math.nan),
    "frequency_penalty": (-101, "x"),
    "seed": (-1, 2**64, 1.0),
    "stop": (["a"], ("",), "a", (1,)),
    "logit_bias": ({-1: 1.0}, {"a": 1.0}, {1: math.nan}, {1: math.inf}, {1: "x"}),
    "logprobs": (-1, 21, True, 1.0, "3"),
    "reasoning_budget": (-1, True, 1.5),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD_SAMPLING.items() for v in values], ids=str)
def test_a_bad_sampling_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name and error.value.code == "invalid_value"
    assert str(error.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("draft", "magic", "draft"),
        ("images", "blind", "draft_images"),
        ("depth", -1, "depth"),
        ("depth", 16, "depth"),
        ("depth", True, "depth"),
        ("depth", "deep", "depth"),
        ("depth", 1.0, "depth"),
    ],
)
def test_a_bad_speculation_value_is_refused_by_name(name, value, param):
    with pytest.raises(RequestError) as error:
        Speculation(**{name: value})
    assert error.value.param == param


def test_values_at_their_limits_are_taken():
    SamplingParams(max_tokens=1, temperature=100, top_p=1e-9, min_p=1, seed=2**64 - 1, logit_bias={0: -math.inf})
    SamplingParams(logprobs=0, reasoning_budget=0), SamplingParams(logprobs=20)
    Speculation(depth=15), Speculation(depth=0), Speculation(depth="auto", draft="ngram", images="gap")


def test_messages_are_checked():
    for make in (
        lambda: Message.of("robot", "hello"),
        lambda: Message("user", ("hello",)),
        lambda: Request(()),
        lambda: Request(({"role": "user", "content": "hello"},)),
        lambda: Message("user", (), tool_calls=(ToolCall("1", "add", "{}"),)),
        lambda: Message("user", (Text("hello"),), reasoning="hm"),
        lambda: Message("assistant", (Text("3"),), tool_call_id="1"),
        lambda: ToolCall("1", "", "{}"),
        lambda: ToolCall("1", "add", "{'a': 1}"),
        lambda: ToolCall("1", "add", "[1]"),
    ):
        with pytest.raises(RequestError) as error:
            make()
        assert error.value.param == "messages"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def function(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": ({"name": "add"},)}, "tools"),
        ({"tools": ({"type": "function", "function": "add"},)}, "tools"),
        ({"tools": (function("a b"),)}, "tools"),
        ({"tools": (function("required"),)}, "tools"),
        ({"tools": (function("x" * 65),)}, "tools"),
        ({"tools": (function("add", parameters=3),)}, "tools"),
        ({"tools": (ADD, ADD)}, "tools"),
        ({"tools": (ADD,), "tool_choice": "sub"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": (ADD,), "tool_choice": "add", "grammar": Grammar("json_object")}, "tool_choice"),
        ({"grammar": Grammar("json_object"), "sampling": SamplingParams(ignore_eos=True)}, "ignore_eos"),
        ({"template_options": {"tools": []}}, "template_options"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_together_is_refused_by_name(options, param):
    with pytest.raises(RequestError) as error:
        Request((Message.of("user", "hi"),), **options)
    assert error.value.param == param


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar("xml"),
        lambda: Grammar("regex"),
        lambda: Grammar("json_object", "{}"),
        lambda: Grammar("lark", 3),
    ],
)
def test_a_grammar_is_checked(make):
    with pytest.raises(RequestError) as error:
        make()
    assert error.value.param == "grammar"


def test_a_tool_choice_is_a_word_or_the_name_of_a_tool():
    requests = [Request((Message.of("user", "hi"),), tools=(ADD,), tool_choice=choice) for choice in ("auto", "none")]
    forced = [Request((Message.of("user", "hi"),), tools=(ADD,), tool_choice=choice) for choice in ("required", "add")]
    assert [one.forces_tool for one in requests + forced] == [False, False, True, True]
    assert ToolCall("1", "add", '{"a": 1}').values() == {"a": 1}


def test_a_prompt_puts_pictures_before_text_and_the_system_message_first():
    request = Request.from_prompt("what?", [b"png"], system="be brief")
    assert [message.role for message in request.messages] == ["system", "user"]
    assert [type(part).__name__ for part in request.messages[1].parts] == ["Image", "Text"]


def test_ids_are_unique_and_requests_do_not_change():
    one, two = Request.from_prompt("a"), Request.from_prompt("a")
    assert one.id != two.id
    with pytest.raises(AttributeError):
        one.id = "other"


@pytest.mark.parametrize("name", ("slots", "grid", "max_images", "max_pixels"))
def test_settings_that_cannot_work_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Settings(**{name: 0})


def test_more_settings_that_cannot_work():
    for options in ({"context": 1}, {"weights": "int3"}):
        with pytest.raises(ValueError, match="settings:"):
            Settings(**options)


def test_timings_add_up():
    timings = Timings(10, 4, 0, 5, (5, 3, 1), (3, 1, 0), 12.0, 500.0, 10)
    assert timings.acceptance_by_depth == [3 / 5, 1 / 3, 0]
    assert timings.acceptance == 4 / 9
    assert timings.tokens_per_step == 9 / 5
    assert timings.tokens_per_second == 18.0
    empty = Timings(10, 0, 0, 0, (), (), 1.0, 0.0, 1)
    assert (empty.acceptance, empty.tokens_per_step, empty.tokens_per_second) == (None, None, None)


@pytest.mark.parametrize("error", [ValueError("no chat template is set"), jinja2.TemplateError("roles must alternate")])
def test_a_conversation_that_the_template_refuses_is_a_bad_request(error):
    class Tokenizer:
        def apply_chat_template(self, conversation, **options):
            raise error

    prompter = Prompter(Tokenizer(), 0, OneAxis(), lambda picture: None)
    with pytest.raises(RequestError, match=f"chat template does not take this conversation: {error}"):
        prompter.rows([Message.of("user", "hi")], [])


def test_a_raw_prompt_is_text_or_token_ids_and_has_no_messages_beside_it():
    assert Request.raw("once").prompt == "once" and Request.raw([3, 4]).prompt == (3, 4)
    for make in (
        lambda: Request.raw([3, -1]),
        lambda: Request.raw([3, True]),
        lambda: Request((), prompt=[3]),
        lambda: Request((Message.of("user", "hi"),), prompt="once"),
    ):
        with pytest.raises(RequestError) as error:
            make()
        assert error.value.param == "prompt"


def test_a_raw_prompt_goes_through_no_template():
    engine = toy_engine()
    text, ids = engine.generate([Request.raw("abc"), Request.raw(engine._prompter.encode("abc"))])
    assert text.timings.prompt_tokens == 3 and text.token_ids == ids.token_ids
    for bad in ([10_000], []):
        with pytest.raises(RequestError):
            engine.add(Request.raw(bad))
