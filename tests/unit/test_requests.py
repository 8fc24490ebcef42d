"""Requests: what is refused, in words that name the field, before any work."""

import math

import jinja2
import pytest

from foreglance import Message, Request, RequestError, SamplingParams, Settings, Speculation
from foreglance.prompt import OneAxis, Prompter
from foreglance.request import Timings

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
    Speculation(depth=15), Speculation(depth=0), Speculation(depth="auto", draft="ngram", images="gap")


def test_messages_are_checked():
    for make in (
        lambda: Message.of("robot", "hello"),
        lambda: Message("user", ("hello",)),
        lambda: Request(()),
        lambda: Request(({"role": "user", "content": "hello"},)),
    ):
        with pytest.raises(RequestError) as error:
            make()
        assert error.value.param == "messages"


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
