"""`/v1/responses` through the `openai` client: text, images, tools, several turns, streaming."""

import json

import openai
import pytest
from support.served import MODEL, data_url

from foreglance.chat_format import THINK, ChatFormat
from foreglance.request import DraftReport, Event, Result, Speculation, Timings, Token
from foreglance.serve.openai import Surroundings
from foreglance.serve.responses import ResponseReply
from foreglance.serve.schema import ResponseBody

LOOK = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": data_url(), "detail": "auto"},
            {"type": "input_text", "text": "Describe the image."},
        ],
    }
]
SIXTEEN = {"max_output_tokens": 16, "temperature": 0}


def respond(client, input="Hello!", **options):
    return client.responses.create(model=MODEL, input=input, **{**SIXTEEN, **options})


def test_a_response_is_what_chat_says(client):
    def chat(messages):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
        return answer.choices[0].message.content

    assert respond(client).output_text == chat([{"role": "user", "content": "Hello!"}])
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    assert respond(client, instructions="Be brief.").output_text == chat(system)


@pytest.mark.parametrize("input", ("Hello!", LOOK), ids=("text", "image"))
def test_streamed_events_add_up_to_the_whole_response(client, input):
    whole = respond(client, input, top_logprobs=1)
    events = list(respond(client, input, top_logprobs=1, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-1].response.output_text
    tokens = [entry.token for event in deltas for entry in event.logprobs]
    assert tokens == [entry.token for entry in whole.output[0].content[0].logprobs] and len(tokens) == 16
    last = events[-1].response
    assert (last.status, last.incomplete_details) == (whole.status, whole.incomplete_details)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (whole.usage.input_tokens, 16)
    assert {event.item_id for event in deltas} == {last.output[0].id}


def test_the_client_s_own_stream_helper_follows_a_response_to_its_end(client):
    with client.responses.stream(model=MODEL, input="Hello!", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == text and final.incomplete_details is None


def test_an_earlier_response_is_handed_back_as_it_was_given(client):
    first = respond(client, LOOK)
    turn = {"role": "user", "content": "Again."}
    second = respond(client, [*LOOK, *first.output, turn])
    by_hand = respond(client, [*LOOK, {"role": "assistant", "content": first.output_text}, turn])
    assert second.output_text == by_hand.output_text
    assert second.usage.input_tokens == by_hand.usage.input_tokens > first.usage.input_tokens


def test_a_response_says_what_was_asked_and_what_it_took(client):
    response = respond(client, LOOK, metadata={"kind": "test"}, top_p=0.5, extra_body={"speculative": {"depth": 2}})
    assert response.metadata == {"kind": "test"} and response.top_p == 0.5 and response.temperature == 0
    assert response.max_output_tokens == response.usage.output_tokens == 16 and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.total_tokens == response.usage.input_tokens + 16
    assert response.timings["draft_depth"] == 2 and response.timings["draft_n"] > 0 and not response.store


CITIES = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITIES, "strict": True}
IN_CHAT = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}
FORCED = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 80}


@pytest.mark.parametrize("choice", ("required", {"type": "function", "name": "weather"}))
def test_a_call_is_what_chat_says_and_its_events_add_up(client, choice):
    options = {**FORCED, "tool_choice": choice}
    whole = respond(client, **options)
    (call,) = whole.output
    in_chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[IN_CHAT],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
    )
    (function,) = [made.function for made in in_chat.choices[0].message.tool_calls]
    assert (call.type, call.name, call.arguments) == ("function_call", function.name, function.arguments)
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo") and call.call_id.startswith("call_")
    assert (whole.status, call.status, whole.output_text) == ("completed", "completed", "")
    assert whole.tools[0].name == "weather" and not whole.parallel_tool_calls
    assert whole.tool_choice == choice if choice == "required" else whole.tool_choice.name == "weather"

    events = list(respond(client, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert "".join(event.delta for event in events[3:-3]) == events[-3].arguments == call.arguments
    opened, done = events[2].item, events[-2].item
    assert (opened.arguments, opened.name, opened.status) == ("", "weather", "in_progress")
    assert opened.call_id == done.call_id == events[-1].response.output[0].call_id
    assert {event.item_id for event in events[3:-2]} == {opened.id} == {done.id}


def test_what_a_call_gave_goes_back_into_the_conversation(client):
    first = respond(client, LOOK, **FORCED)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    second = respond(client, [*LOOK, *first.output, output], tools=[{**WEATHER, "strict": False}], tool_choice="none")
    made = {"id": "a", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    picture = {"type": "image_url", "image_url": {"url": data_url()}}
    turns = [
        {"role": "user", "content": [picture, {"type": "text", "text": "Describe the image."}]},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
    ]
    by_hand = client.chat.completions.create(
        model=MODEL, messages=turns, tools=[IN_CHAT], tool_choice="none", max_tokens=16, temperature=0
    )
    assert second.output_text == by_hand.choices[0].message.content
    assert second.usage.input_tokens == by_hand.usage.prompt_tokens
    assert [item.type for item in second.output] == ["message"]


def test_the_client_s_own_stream_helper_follows_a_call(client):
    with client.responses.stream(model=MODEL, input="Hello!", temperature=0, **FORCED) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds and json.loads(call.arguments)["city"]


CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "param"),
    (
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [IN_CHAT]}, "tools[0].name"),
        ({"tools": [WEATHER]}, "tools[0].strict"),
        ({"tools": [{**WEATHER, "strict": None}] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({**FORCED, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({**FORCED, "top_logprobs": 1}, "top_logprobs"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input[0].call_id"),
        ({"input": [{**CALLED, "arguments": "["}]}, "input"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}, {"role": "user", "content": "a"}]}, "input[1]"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input"),
    ),
)
def test_tools_and_turns_that_cannot_be_served_are_refused_by_name(client, change, param):
    body = {"input": "Hello!", "max_output_tokens": 4, **change}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input=body.pop("input"), extra_body=body)
    assert error.value.param == param


def items_of(text, around=4, cut=False):
    """The items that an answer of that text gives, streamed a few letters at a time, and those of the last event."""
    body = ResponseBody(input="-", tools=[{"type": "function", "name": "f"}], model=MODEL)
    surroundings = Surroundings(MODEL, Speculation(), 99, 1, 0, 0, "x", str, ChatFormat("xml", THINK), {})
    reply = ResponseReply(body, surroundings)
    reply.prepared(["open"])
    timings = Timings(1, 0, 0, 1, (), (), 1.0, 1.0, 1)
    end = Result("r", text, (), "length" if cut else "stop", timings, DraftReport("none", 0, "see"))
    pieces = [text[at : at + around] for at in range(0, len(text), around)]
    events = [Event("r", (Token(1, 0, piece),)) for piece in pieces[:-1]]
    events.append(Event("r", (Token(1, 0, pieces[-1]),), end))
    chunks = [*reply.start(), *(chunk for event in events for chunk in reply.take(0, event)), *reply.end()]
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
    done = [chunk["item"] for chunk in chunks if chunk["type"] == "response.output_item.done"]
    assert done == chunks[-1]["response"]["output"]
    assert len({item["id"] for item in done}) == len(done)
    return done


def call_text(value):
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("around", (1, 4, 1000))
def test_reasoning_words_and_calls_are_items_in_their_order(around):
    text = "why</think>\n\nLook: " + call_text(1) + "\n" + call_text("b")
    thought, words, one, other = items_of(text, around)
    assert thought["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert words["content"][0]["text"] == "Look:" and words["role"] == "assistant"
    assert [(call["name"], json.loads(call["arguments"])) for call in (one, other)] == [
        ("f", {"a": 1}),
        ("f", {"a": "b"}),
    ]
    assert one["call_id"] != other["call_id"]
    *before, cut = items_of(text[: -len("\n</parameter>\n</function>\n</tool_call>")], around, cut=True)
    assert [item["status"] for item in before] == ["completed"] * 3 and cut["status"] == "incomplete"
    assert [item["type"] for item in items_of("why</think>no more", around)] == ["reasoning", "message"]
    assert [item["type"] for item in items_of("why", around, cut=True)] == ["reasoning", "message"]


@pytest.mark.parametrize("endpoint", ("chat", "completions", "responses"))
def test_the_seed_that_was_drawn_is_told_and_gives_the_answer_again(client, endpoint):
    def ask(**options):
        if endpoint == "chat":
            turn = [{"role": "user", "content": "Hello!"}]
            made = client.chat.completions.create(model=MODEL, messages=turn, max_tokens=12, **options)
            return made.choices[0].message.content, made.timings["seed"]
        if endpoint == "completions":
            made = client.completions.create(model=MODEL, prompt="Hello!", max_tokens=12, **options)
            return made.choices[0].text, made.timings["seed"]
        made = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=12, extra_body=options)
        return made.output_text, made.timings["seed"]

    text, seed = ask()
    assert 0 <= seed < 2**53 and ask(seed=seed) == (text, seed)
    assert len({ask()[1] for _ in range(3)}) == 3
    assert ask(seed=-1)[1] == 2**64 - 1 and ask(temperature=0)[1] is None
