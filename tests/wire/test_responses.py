"""`/v1/responses` through the `openai` client: text, images, several turns, streaming."""

import pytest
from support.served import MODEL, data_url

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
    assert (last.usage, last.status, last.incomplete_details) == (whole.usage, whole.status, whole.incomplete_details)
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
