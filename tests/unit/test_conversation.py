"""Conversations in the form of chat templates: tools, calls, answers of tools, options."""

from functools import lru_cache

import pytest
from transformers import AutoTokenizer

from foreglance import Message, RequestError, ToolCall
from foreglance.chat_format import CHANNEL, ChatFormat
from foreglance.conversation import as_conversation, render
from foreglance.models.weights import EMBEDDED
from foreglance.prompt import OneAxis, Prompter
from foreglance.request import Text
from foreglance.serve.answers import AnswerParser, Call, fold

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
CALLS = (ToolCall("1", "weather", '{"city": "Rome", "days": [1, 2]}'), ToolCall("2", "weather", '{"city": "Bern"}'))
TALK = (
    Message.of("system", "Be brief."),
    Message.of("user", "Weather?"),
    Message("assistant", (Text("I look."),), CALLS, reasoning="Two cities."),
    Message("tool", (Text("sunny"),), tool_call_id="1"),
    Message("tool", (Text("rain"),), tool_call_id="2", name="other"),
)


@lru_cache
def model(name):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / name)
    return tokenizer, ChatFormat.of_template(tokenizer.chat_template)


def test_calls_have_values_and_answers_of_tools_have_names():
    _, _, called, first, second = as_conversation(TALK, ChatFormat("xml"))
    assert called["reasoning_content"] == "Two cities." and called["content"] == "I look."
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == [
        {"city": "Rome", "days": [1, 2]},
        {"city": "Bern"},
    ]
    assert first == {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"}
    assert second["name"] == "other"


def test_templates_that_look_for_answers_of_tools_in_the_turn_of_the_call_find_them_there():
    format = ChatFormat.of_template("<|tool_call>call: {{ message['tool_responses'] }}")
    *_, called = as_conversation(TALK, format)
    assert called["tool_responses"] == [
        {"name": "weather", "response": "sunny"},
        {"name": "other", "response": "rain"},
    ]


@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-step", "tiny-gemma"))
def test_what_a_template_writes_is_what_the_parser_reads(name):
    tokenizer, format = model(name)
    text = render(tokenizer, format, TALK, [TOOL], {})
    assert '"weather"' in text or "declaration:weather{" in text
    places = [text.index(words) for words in ("weather", "Be brief.", "Weather?", "Rome", "Bern", "sunny", "rain")]
    assert places == sorted(places)
    turn = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    parser = AnswerParser(format, "none", [TOOL])
    answer = fold([*map(parser.push, turn), parser.finish()])
    assert answer.content == "I look."
    assert answer.calls == tuple(Call(call.name, call.arguments) for call in CALLS)
    assert answer.reasoning == ("Two cities." if format.reasoning else "")


@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-gemma"))
def test_without_tools_a_prompt_is_what_it_was_trained_on(name):
    tokenizer, format = model(name)
    roles = ("system", "user", "assistant", "user")
    talk = tuple(Message.of(role, f"words of {role}") for role in roles)
    turns = "".join(f"<|im_start|>{turn.role}\n{turn.parts[0].text}<|im_end|>\n" for turn in talk)
    assert render(tokenizer, format, talk, [], {}) == turns + "<|im_start|>assistant\n"


def test_what_a_template_would_ignore_is_refused():
    class Bare:
        def apply_chat_template(self, conversation, **options):
            raise AssertionError("must not be asked")

    for tools, options, param in (([TOOL], {}, "tools"), ([], {"enable_thinking": True}, "template_options")):
        with pytest.raises(RequestError) as error:
            render(Bare(), ChatFormat.of_template("{{ messages }}"), TALK, tools, options)
        assert error.value.param == param
    tokenizer, format = model("tiny-qwen")
    with pytest.raises(RequestError, match="reads no enable_thinkin"):
        render(tokenizer, format, TALK, [], {"enable_thinkin": True})


def test_a_role_that_a_template_does_not_know_is_refused_in_its_words():
    tokenizer, format = model("tiny-qwen")
    template = "{{ raise_exception('no tools here') if messages[-1].role == 'tool' }}"

    class Strict:
        def apply_chat_template(self, conversation, **options):
            return tokenizer.apply_chat_template(conversation, chat_template=template, **options)

    with pytest.raises(RequestError, match="no tools here") as error:
        render(Strict(), format, TALK, [], {})
    assert error.value.param == "messages"


def test_text_with_its_markup_keeps_the_words_of_the_format_and_no_other_special_ones():
    words = {0: "<|im_end|>", 1: "<|image|>", 2: "<|tool_call>", 3: '<|"|>', 4: "<|channel>", 5: "<think>", 6: "hi"}

    class Special:
        all_special_ids = (0, 1, 2, 3, 4, 5)

        def decode(self, token_ids, skip_special_tokens):
            return "".join(words[i] for i in token_ids if not (skip_special_tokens and i in self.all_special_ids))

    prompter = Prompter(Special(), 1, OneAxis(), lambda picture: None, ChatFormat("gemma", CHANNEL))
    assert prompter.decode(range(7)) == "hi"
    assert prompter.decode_markup(range(7)) == '<|tool_call><|"|><|channel>hi'
