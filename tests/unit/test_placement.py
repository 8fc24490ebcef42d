"""Which replica a request goes to."""

import json
from collections import Counter

from foreglance.serve.placement import Placement, prefix_of

SYSTEM = {"role": "system", "content": "Be brief."}
CAT, DOG = ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}} for name in ("Q0FU", "RE9H"))


def text(words):
    return {"type": "text", "text": words}


def chat(*messages, **more):
    return prefix_of(json.dumps({"messages": list(messages), **more}).encode())


def user(*parts):
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def test_all_turns_of_a_conversation_have_one_name():
    first = (SYSTEM, user(CAT, text("what?")))
    later = (*first, {"role": "assistant", "content": "a cat"}, user(DOG, text("and this?")))
    assert chat(*first) == chat(*later, temperature=0.5, stream=True) is not None
    assert chat(user("hello")) == chat(user("hello"), {"role": "assistant", "content": "hi"}, user("bye"))


def test_questions_about_one_image_have_one_name_and_other_images_another():
    assert chat(user(CAT, text("what?"))) == chat(user(CAT, text("how many?")))
    assert chat(user(text("look:"), CAT, text("what?"))) == chat(user(text("look:"), CAT))
    different = [
        chat(user(CAT)),
        chat(user(DOG)),
        chat(user(CAT, DOG)),
        chat(user(text("look:"), CAT)),
        chat(SYSTEM, user(CAT)),
        chat(SYSTEM, user(DOG)),
        chat(user("what?")),
        chat(user("who?")),
    ]
    assert len(set(different)) == len(different)


def test_responses_and_raw_prompts_have_names_too():
    def name(**body):
        return prefix_of(json.dumps(body).encode())

    image = {"type": "input_image", "image_url": "data:image/png;base64,Q0FU"}
    asked = [{"role": "user", "content": [image, {"type": "input_text", "text": words}]} for words in ("what?", "who?")]
    assert name(input=[asked[0]]) == name(input=[asked[1]]) != name(input=[asked[1]], instructions="Be brief.")
    assert name(prompt="once upon" * 50) == name(prompt="once upon" * 50 + " a time") != name(prompt="a time")
    assert name(prompt=list(range(300))) == name(prompt=list(range(299))) != name(prompt=[1])


def test_what_is_no_prompt_has_none():
    for body in (b"", b"no JSON", b"[1]", b"{}", b'{"messages": []}', b'{"messages": 7}', b'{"prompt": null}'):
        assert prefix_of(body) is None
    for messages in ([7], ["text"], [SYSTEM], [{"role": "user"}], [{"role": "user", "content": [7]}], [[1, 2]]):
        prefix_of(json.dumps({"messages": messages}).encode())  # the replica will refuse it


def test_a_prefix_stays_at_home_while_that_one_has_room():
    placement = Placement(capacity=2)
    home = placement.choose("cat", {"a": 0, "b": 0})
    other = "b" if home == "a" else "a"
    assert placement.choose("cat", {home: 1, other: 0}) == home
    assert placement.choose("cat", {home: 2, other: 2}) == home
    assert placement.choose("cat", {home: 2, other: 1}) == other
    assert placement.choose("cat", {home: 0, other: 1}) == other  # that one holds it now too
    assert placement.choose("cat", {home: 2, other: 2}) == other


def test_a_prefix_finds_a_new_home_when_its_replica_is_gone_or_has_forgotten():
    placement = Placement(capacity=2)
    home = placement.choose("cat", {"a": 0, "b": 0})
    assert placement.choose("cat", {"c": 5}) == "c"
    placement.forget("c")
    assert placement.choose("cat", {home: 0, "c": 1}) == home


def test_new_prefixes_and_requests_without_one_go_where_least_is_to_do():
    placement = Placement(capacity=2)
    assert placement.choose("new", {"a": 3, "b": 1, "c": 2}) == "b"
    assert placement.choose(None, {"a": 3, "b": 1, "c": 2}) == "b"
    spread = Counter(placement.choose(f"prefix {i}", {"a": 0, "b": 0, "c": 0}) for i in range(300))
    assert len(spread) == 3 and min(spread.values()) > 50


def test_memory_of_homes_is_bounded(monkeypatch):
    monkeypatch.setattr("foreglance.serve.placement.HOMES", 10)
    placement = Placement(capacity=1)
    for i in range(50):
        placement.choose(f"prefix {i}", {"a": 0})
    assert placement.choose("prefix 49", {"a": 0, "b": 0}) == "a"
    assert len(placement._homes) == 10
