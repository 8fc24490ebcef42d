"""What shows the server: health, metrics, properties, slots, tokens, the rows of a conversation, the page."""

import xml.etree.ElementTree as ElementTree

from prometheus_client.parser import text_string_to_metric_families
from support.served import MODEL, data_url, user

import foreglance

CHAT = "/v1/chat/completions"
LOOK = {"messages": [user("Describe the image.", [data_url()])], "temperature": 0, "max_tokens": 12}


def metrics(http) -> dict:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name.removeprefix("foreglance_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_answers_report(served):
    served.settle()
    with served.http() as http:
        before = metrics(http)
        answers = [http.post(CHAT, json={**LOOK, "speculative": {"depth": 3}}).json() for _ in range(2)]
        assert http.post(CHAT, json={}).status_code == 400
        after = metrics(http)

    def gained(*name):
        return after.get(name, 0) - before.get(name, 0)

    timings = [answer["timings"] for answer in answers]
    assert gained("answers_total", "length") == 2 and gained("refusals_total", "400") == 1
    assert gained("tokens_total") == 24 and gained("first_token_seconds_count") == 2
    assert gained("prompt_tokens_total") == sum(t["prompt_n"] for t in timings)
    assert gained("prompt_tokens_cached_total") == sum(t["cache_n"] for t in timings)
    assert gained("image_rows_total") == sum(t["image_n"] for t in timings)
    for depth in range(3):
        assert gained("draft_tokens_total", str(depth + 1)) == sum(t["drafted_by_depth"][depth] for t in timings) > 0
        accepted = sum(t["accepted_by_depth"][depth] for t in timings)
        assert gained("draft_tokens_accepted_total", str(depth + 1)) == accepted
    assert after[("requests_running",)] == after[("requests_waiting",)] == 0
    assert after[("build_info", MODEL, foreglance.__version__)] == 1


def test_health_is_ok(served):
    with served.http() as http:
        assert http.get("/health").json() == {"status": "ok"}


def test_properties_say_what_a_client_may_ask_for(served, engine):
    with served.http() as http:
        props = http.get("/props").json()
        assert props["model"] == MODEL and props["context"] == engine.context and props["modalities"]["vision"]
        assert props["total_slots"] == engine.settings.slots and props["version"] == foreglance.__version__
        offered = props["speculation"]
        assert (
            offered["auto"] == "mtp" and "none" not in offered["draft_kinds"] and "gap" not in offered["image_policies"]
        )
        for draft in offered["draft_kinds"]:
            for images in offered["image_policies"]:
                body = {
                    **LOOK,
                    "max_tokens": 2,
                    "speculative": {"draft": draft, "depth": offered["max_depth"], "images": images},
                }
                assert http.post(CHAT, json=body).status_code == 200


def test_text_and_tokens_are_turned_into_each_other(served):
    text = "The red circle, d\u00e9j\u00e0 vu \U0001f642"
    with served.http() as http:
        tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
        assert len(tokens) > 5 and http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
        pieces = http.post("/tokenize", json={"content": "The red", "with_pieces": True}).json()["tokens"]
        assert "".join(piece["piece"] for piece in pieces) == "The red"
        assert [piece["id"] for piece in pieces] == http.post("/tokenize", json={"content": "The red"}).json()["tokens"]
        for bad in ([-1], [10**6], ["a"]):
            assert http.post("/detokenize", json={"tokens": bad}).json()["error"]["param"] == "tokens[0]"


def test_the_rows_of_a_conversation_are_explained_and_drawn(served):
    with served.http() as http:
        told = http.post("/explain", json=LOOK).json()
        answer = http.post(CHAT, json={**LOOK, "max_tokens": 1}).json()
        assert told["rows"] == answer["usage"]["prompt_tokens"] and told["model"] == MODEL
        assert {track["name"] for track in told["tracks"]} >= {"target", "see", "skip"}
        assert ElementTree.fromstring(told["svg"]).tag.endswith("svg")
        assert http.post("/explain", json={"messages": []}).json()["error"]["param"] == "messages"


def test_the_page_and_its_files_are_served(served):
    with served.http() as http:
        page = http.get("/")
        assert page.headers["Content-Type"].startswith("text/html") and "foreglance" in page.text
        assert http.get("/example.png").headers["Content-Type"] == "image/png"
        for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd"):
            assert http.get(path).status_code == 404


def test_the_description_names_every_path_and_the_shape_of_errors(served):
    with served.http() as http:
        document = http.get("/openapi.json").json()
    assert {CHAT, "/v1/completions", "/v1/responses", "/v1/models", "/health", "/slots"} <= set(document["paths"])
    refusals = document["paths"][CHAT]["post"]["responses"]
    assert {"400", "401", "413", "429", "503"} <= set(refusals) and "422" not in refusals
