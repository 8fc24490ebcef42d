"""Cases from the field as a client meets them: company, clients that leave, forms of answers, limits."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.served import MODEL, data_url, raw_request, until, user

LOOK = [user("Describe the image.", [data_url()])]
GREETING = [{"role": "user", "content": "Hello!"}]


def tokens_of(client, messages, **options):
    extra = {"return_tokens": True, **options.pop("extra_body", {})}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 16, **options}, extra_body=extra
    )
    return [token["id"] for token in answer.tokens], answer


@pytest.mark.case("A8", "C1", "C3")
def test_answers_side_by_side_are_those_that_come_alone(client):
    alone = [tokens_of(client, messages)[0] for messages in (LOOK, GREETING)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda messages: tokens_of(client, messages)[0], [LOOK, GREETING] * 3))
    assert together == alone * 3


@pytest.mark.case("B8")
def test_two_conversations_in_turn_are_answered_every_time(client):
    """A, B, A, B: none is refused or fails, and each answer is the first one again."""
    first = [tokens_of(client, messages)[0] for messages in (LOOK, GREETING)]
    for _ in range(2):
        assert [tokens_of(client, messages)[0] for messages in (LOOK, GREETING)] == first


@pytest.mark.case("C4")
def test_clients_that_hang_up_while_they_are_told_give_their_slots_back(served, client):
    want, _ = tokens_of(client, LOOK)
    body = {"model": MODEL, "messages": LOOK, "stream": True, "max_tokens": 400, "ignore_eos": True}
    for _ in range(8):
        connection = raw_request(served.url, json.dumps(body).encode())
        while b"data:" not in connection.recv(4096):
            pass
        connection.close()
    until(lambda: served.engine.is_idle, "all slots are free")
    assert tokens_of(client, LOOK)[0] == want


@pytest.mark.case("C11", "D1")
def test_each_request_has_its_own_depth_over_http(client):
    off, _ = tokens_of(client, LOOK, extra_body={"speculative": {"draft": "none"}})
    for depth in (0, 1, 4):
        on, answer = tokens_of(client, LOOK, extra_body={"speculative": {"depth": depth}})
        assert on == off
        assert (answer.timings["draft_n"] > 0) == (depth > 0)


@pytest.mark.case("A6")
def test_video_is_refused_in_words(client):
    video = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]}
    with pytest.raises(openai.BadRequestError, match=r"must be one of .text.*image_url"):
        tokens_of(client, [video])


@pytest.mark.case("A23")
def test_more_pictures_than_the_server_takes_are_refused_and_the_next_request_is_served(served, client):
    limit = served.engine.settings.max_images
    with pytest.raises(openai.BadRequestError, match=f"the limit is {limit}"):
        tokens_of(client, [user("What is it?", [data_url()] * (limit + 1))])
    assert tokens_of(client, GREETING)[0]
