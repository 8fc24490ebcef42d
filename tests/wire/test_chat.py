"""Chat and text completions through the unmodified `openai` client."""

import io
import math
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from PIL import Image
from support.served import MODEL, PATIENCE, data_url, until, user

from foreglance import Request, SamplingParams
from foreglance.serve.openai import choice_seed

TOKENS = {"return_tokens": True}
GREETING = [{"role": "user", "content": "Hello!"}]
LOOK = [user("Describe the image.", [data_url()])]


def ask(client, messages=GREETING, **options):
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 24, **options}
    )


def chunks_of(client, messages=GREETING, **options):
    return list(ask(client, messages, stream=True, **options))


def text_of(chunks, index=0):
    deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(delta or "" for delta in deltas)


@pytest.mark.case("D7")
@pytest.mark.parametrize("messages", (GREETING, LOOK), ids=("text", "image"))
@pytest.mark.parametrize("temperature", (0, 0.9))
def test_a_streamed_answer_adds_up_to_the_whole_one(client, messages, temperature):
    options = {"temperature": temperature, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = ask(client, messages, **options, extra_body={"return_tokens": True})
    chunks = chunks_of(
        client, messages, **options, extra_body={"return_tokens": True}, stream_options={"include_usage": True}
    )
    choice = whole.choices[0]
    assert text_of(chunks) == choice.message.content and len(choice.message.content) > 10
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [choice.finish_reason]
    streamed = [token for chunk in chunks for token in (chunk.model_extra.get("tokens") or ())]
    assert [token["id"] for token in streamed] == [token["id"] for token in whole.tokens]
    entries = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
    pairs = zip(entries, choice.logprobs.content, strict=True)
    assert all(math.isclose(streamed.logprob, entry.logprob, abs_tol=1e-3) for streamed, entry in pairs)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(streamed)
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_usage_comes_only_when_it_is_asked_for(client):
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in chunks_of(client))
    *before, last = chunks_of(client, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.prompt_tokens > 0
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in before)


def test_a_chat_answer_is_what_the_engine_gives(client, served):
    request = Request.from_prompt("Hello!", sampling=SamplingParams(max_tokens=24, temperature=0.8, seed=11))
    answer = ask(client, temperature=0.8, seed=11, extra_body=TOKENS)
    (result,) = served.host.worker.ask(lambda engine: engine.generate(request)).result(PATIENCE)
    assert tuple(token["id"] for token in answer.tokens) == result.token_ids
    assert answer.choices[0].message.content == result.text


@pytest.mark.case("C11")
@pytest.mark.parametrize(
    ("speculative", "drafter"),
    (
        ({"depth": 0}, "none"),
        ({"draft": "none"}, "none"),
        ({"draft": "ngram"}, "ngram"),
        ({"draft": "mtp", "depth": 3, "images": "skip"}, "mtp"),
    ),
)
def test_speculation_is_taken_per_request_and_changes_no_token(client, speculative, drafter):
    plain = ask(client, LOOK, extra_body=TOKENS)
    other = ask(client, LOOK, extra_body={**TOKENS, "speculative": speculative})
    assert [t["id"] for t in other.tokens] == [t["id"] for t in plain.tokens]
    timings, deepest = other.timings, max(token["depth"] for token in other.tokens)
    assert timings["draft"] == drafter and timings["draft_images"] == speculative.get("images", "see")
    if drafter == "none":
        assert timings["draft_n"] == deepest == 0 and timings["off_because"]
    if drafter == "mtp":
        assert timings["draft_n"] > 0 and deepest == 3 and timings["off_because"] is None


def test_timings_are_those_that_llama_server_users_know_and_add_up(client):
    answer = ask(client, LOOK, extra_body={"speculative": {"draft": "mtp", "depth": 3}})
    t = answer.timings
    assert t["prompt_n"] + t["cache_n"] == answer.usage.prompt_tokens
    assert t["predicted_n"] == answer.usage.completion_tokens == 24
    assert t["draft_n"] == sum(t["drafted_by_depth"]) and t["draft_n_accepted"] == sum(t["accepted_by_depth"]) > 0
    assert len(t["acceptance_by_depth"]) == 3 and all(0 <= share <= 1 for share in t["acceptance_by_depth"])
    assert t["predicted_per_second"] == pytest.approx(23 / t["predicted_ms"] * 1e3)
    assert t["predicted_per_token_ms"] == pytest.approx(t["predicted_ms"] / 23)
    assert t["prompt_ms"] > 0 and t["queued_ms"] >= 0 and t["off_because"] is None and t["image_n"] == 16


def test_time_in_the_queue_is_not_counted_as_time_of_the_prompt(served, client):
    began = time.perf_counter()
    with served.held(), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client)
        until(lambda: served.engine.num_waiting == 1, "it waits")
        time.sleep(0.3)
        served.gate.open()
        timings = waiting.result(PATIENCE).timings
    whole = (time.perf_counter() - began) * 1e3
    assert timings["queued_ms"] >= 300
    assert timings["queued_ms"] + timings["prompt_ms"] + timings["predicted_ms"] < whole


def test_n_choices_draw_with_seeds_of_their_own_and_the_first_with_the_request_s(client):
    options = {"temperature": 1.2, "extra_body": {"ignore_eos": True}}
    answer = ask(client, seed=5, n=3, **options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    alone = [ask(client, seed=choice_seed(5, i), **options).choices[0].message.content for i in range(3)]
    assert texts == alone
    chunks = chunks_of(client, seed=5, n=3, **options)
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert answer.usage.prompt_tokens == ask(client).usage.prompt_tokens
    assert answer.usage.completion_tokens == 72


def test_without_a_seed_answers_differ_and_with_one_they_do_not(client):
    def texts(**seed):
        return {ask(client, temperature=1.5, **seed).choices[0].message.content for _ in range(4)}

    assert len(texts()) > 1 and len(texts(seed=-7)) == 1


def test_a_stop_string_ends_the_text_before_it_wherever_steps_end(client):
    whole = ask(client).choices[0].message.content
    stop = whole[len(whole) // 2 :][:5]
    for extra in ({"depth": 0}, {"depth": 5}):
        answer = ask(client, stop=[stop, "never there"], extra_body={"speculative": extra}).choices[0]
        assert answer.message.content == whole[: whole.index(stop)] and answer.finish_reason == "stop"
        assert text_of(chunks_of(client, stop=stop, extra_body={"speculative": extra})) == answer.message.content


def test_bias_and_penalties_reach_the_logits(client):
    first = ask(client, extra_body=TOKENS).tokens[0]["id"]
    banned = ask(client, logit_bias={str(first): -100}, extra_body=TOKENS)
    assert banned.tokens[0]["id"] != first
    plain = ask(client, LOOK, max_tokens=48).choices[0].message.content
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 1.8}}):
        assert ask(client, LOOK, max_tokens=48, **penalty).choices[0].message.content != plain


def test_log_probabilities_are_of_each_token_and_of_the_likeliest(client):
    entries = ask(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(entries) == 24
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0 and len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode() == entry.token


@pytest.mark.case("A9")
def test_images_of_several_turns_are_seen(client):
    red, blue = (data_url(square(colour)) for colour in ("red", "blue"))
    first = [user("Describe the image.", [red])]
    said = ask(client, first).choices[0].message.content
    turns = [*first, {"role": "assistant", "content": said}, user("And this one? Describe the image.", [blue, red])]
    answer = ask(client, turns)
    assert answer.timings["image_n"] == 3 * ask(client, first).timings["image_n"]
    other = [*first, {"role": "assistant", "content": said}, user("And this one? Describe the image.", [red, blue])]
    assert (
        ask(client, other, logprobs=True).choices[0].logprobs.content[0].logprob
        != ask(client, turns, logprobs=True).choices[0].logprobs.content[0].logprob
    )


def square(colour) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (128, 128), colour).save(out, "PNG")
    return out.getvalue()


@pytest.mark.case("C3", "A8")
def test_two_requests_at_once_get_the_tokens_that_each_gets_alone(served, client):
    bodies = [(GREETING, 0), (LOOK, 0.9), (GREETING, 0.7), (LOOK, 0)]

    def ids(case):
        messages, temperature = case
        with served.openai() as own:
            answer = ask(own, messages, temperature=temperature, seed=9, extra_body=TOKENS)
            return [token["id"] for token in answer.tokens]

    alone = [ids(body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        with served.held():
            together = pool.map(ids, bodies)
            until(lambda: served.host.dispatch.num_open == 4, "all are taken")
        assert list(together) == alone


def test_system_and_developer_messages_are_the_same_and_are_read(client):
    def prompt(role):
        return ask(client, [{"role": role, "content": "Be brief."}, *GREETING]).usage.prompt_tokens

    assert prompt("system") == prompt("developer") > ask(client).usage.prompt_tokens


def complete(client, prompt, **options):
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 12, **options})


def test_completions_take_text_and_token_ids_one_or_many(served, client):
    text = "The picture shows"
    ids = served.http().post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    answers = [complete(client, prompt).choices[0].text for prompt in (text, ids, [ids], [text])]
    assert len(set(answers)) == 1 and len(answers[0]) > 10
    many = complete(client, [text, "A red circle"], n=2, seed=1)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == answers[0]
    assert many.choices[2].text == complete(client, "A red circle").choices[0].text
    assert many.usage.completion_tokens == 48


def test_completions_stream_what_the_whole_answer_holds(client):
    whole = complete(client, "The picture shows", logprobs=2)
    chunks = list(
        complete(client, "The picture shows", logprobs=2, stream=True, stream_options={"include_usage": True})
    )
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    lists = [piece.logprobs for piece in pieces if piece.logprobs]
    for name in ("tokens", "text_offset"):
        assert [x for one in lists for x in vars(one)[name]] == vars(whole.choices[0].logprobs)[name]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # how many were kept and guessed may differ
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    text, places = whole.choices[0].text, whole.choices[0].logprobs
    assert all(text[at:].startswith(word) for at, word in zip(places.text_offset, places.tokens, strict=True))


def test_completions_give_sixteen_tokens_unless_told_and_chat_goes_on(client):
    assert client.completions.create(model=MODEL, prompt="A").usage.completion_tokens <= 16
    answer = client.chat.completions.create(model=MODEL, messages=LOOK, temperature=0)
    assert answer.usage.completion_tokens > 16 and answer.choices[0].finish_reason == "stop"


def test_models_are_listed_and_an_unknown_one_is_not_found(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=GREETING)
    assert error.value.body["param"] == "model" and error.value.code == "model_not_found"
