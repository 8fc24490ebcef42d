"""Load: what clients take for a failure, what a soak says of a server, and that company changes no token."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from foreglance import Engine, SamplingParams, Settings, Speculation
from foreglance.bench import clients, soak, together
from foreglance.cli import app

DONE = b"data: [DONE]\n\n"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_a_short_soak_answers_everybody_and_leaves_nothing_behind(tmp_path):
    body, _ = run(
        "soak", "--minutes", 0.04, "--weights", "fp32", "--slots", 2, "--clients", 3, "--figure", tmp_path / "load.svg"
    )
    ends = body["by_kind"].values()
    assert sum(sum(told.values()) for told in ends) == body["requests"] > 5
    assert body["failures"] == [] and body["exit_code"] == 0 and not any(told["failed"] for told in ends)
    assert body["idle"] == body["idle"] | {"running": 0, "waiting": 0, "slots": 2, "lost_slots": 0}
    assert body["idle"]["rows_kept"] > 0 == body["idle"]["rows_after_erase"]
    assert 0 < body["most_running"] <= 2 and body["memory"]["start_mb"] > 100
    for latency in body["latency"].values():
        assert latency["answers"] and latency["tokens"]
        assert 0 < latency["whole_ms"]["p50"] <= latency["whole_ms"]["p99"] <= latency["whole_ms"]["max"] < 60_000
    assert "resident memory" in (tmp_path / "load.svg").read_text()


@pytest.mark.parametrize(
    "dies",
    (
        """print('{"error": {"message": "no model ./nowhere"}}'); exit(2)""",
        "import sys; sys.exit('no model ./nowhere')",
    ),
)
def test_a_server_that_does_not_start_says_why(dies, monkeypatch):
    monkeypatch.setattr(soak, "COMMAND", dies)
    body, _ = run("soak", code=2)
    assert body["error"]["message"] == "the server did not start: no model ./nowhere"


def test_a_server_that_goes_away_ends_the_run(monkeypatch):
    gone = (
        "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0))\n"  # bound, and nobody listens
        'print(\'{"url": "http://127.0.0.1:%d", "model": "m"}\' % s.getsockname()[1], flush=True)\n'
        "time.sleep(60)"
    )
    monkeypatch.setattr(soak, "COMMAND", gone)
    body, said = run("soak", code=1)
    assert body["requests"] == 0 and body["idle"] is None and "cannot be looked at" in said
    assert body["exit_code"] == -15 and len(body["failures"]) == 2


def event(choice=None, **more) -> bytes:
    choices = [] if choice is None else [choice]
    return f"data: {json.dumps({'choices': choices, **more})}\n\n".encode()


WORD = event({"delta": {"content": "red"}, "finish_reason": None})
END = event({"delta": {}, "finish_reason": "stop"}, timings={"predicted_n": 7})
WHOLE = json.dumps({"usage": {"completion_tokens": 7}, "choices": [{"finish_reason": "length"}]}).encode()


@pytest.mark.parametrize(
    ("stream", "status", "said", "end", "why"),
    (
        (True, 200, WORD + END + DONE, "finished", None),
        (False, 200, WHOLE, "finished", None),
        (False, 429, b"{}", "refused", None),
        (True, 500, b"it broke", "failed", "status 500: it broke"),
        (False, 503, b"", "failed", "status 503"),
        (False, 400, b"no such field", "failed", "no such field"),
        (True, 200, WORD, "failed", "stopped before its end"),
        (True, 200, WORD + DONE, "failed", "ended with None"),
        (True, 200, WORD + event(error={"message": "lost"}) + DONE, "failed", "lost"),
        (False, 200, WHOLE.replace(b"length", b"error"), "failed", "'error'"),
        (False, 200, b"{}", "failed", "another shape"),
        (True, 200, b"data: {}\n\n", "failed", "another shape"),
        (False, 200, b"[", "failed", "another shape"),
        (False, None, b"", "failed", "disconnected"),
        (True, 200, None, "left", None),
    ),
)
def test_what_a_client_makes_of_an_answer(stream, status, said, end, why):
    """`said` None: the server falls silent. `status` None: it hangs up."""

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        if status is not None:
            writer.write(
                f"HTTP/1.1 {status} -\r\nContent-Length: {len(WORD if said is None else said)}\r\n\r\n".encode()
            )
            writer.write(said or b"")
        if said is None:
            await asyncio.sleep(5)
        writer.close()

    async def asked():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, clients.connections() as pool:
            wish = clients.Wish("text", {"stream": stream}, 0.2 if said is None else None)
            return await clients.ask(pool, url, wish, 0.0)

    outcome = asyncio.run(asked())
    assert outcome.end == end, outcome
    assert outcome.why is None if why is None else why in outcome.why
    assert outcome.tokens == 7 or end != "finished"
    assert (outcome.whole is not None) == (end in ("finished", "refused"))
    assert (outcome.first is not None) == (WORD in (said or b"") and status == 200)


def test_requests_are_drawn_from_a_seed_and_half_of_them_without_drafts():
    drawn = [[clients.draw(rng, "m") for _ in range(300)] for rng in (random.Random("0 1"), random.Random("0 1"))]
    assert drawn[0] == drawn[1] and {wish.kind for wish in drawn[0]} == set(clients.SHARES)
    assert 100 < sum(wish.drafts for wish in drawn[0]) < 200
    assert all((wish.patience is not None) == (wish.kind == "leaving") for wish in drawn[0])
    rng = random.Random(0)
    assert not any("image_url" in json.dumps(clients.draw(rng, "m", takes_images=False).body) for _ in range(200))


GOOD = soak.Idle(0, 0, 4, 0, 100, 0)


@pytest.mark.parametrize(
    ("outcome", "idle", "code", "words"),
    (
        (clients.Outcome("image", True, 1.0, "failed", why="status 500"), GOOD, 0, "status 500"),
        (None, replace(GOOD, lost_slots=1), 0, "lost_slots=1"),
        (None, replace(GOOD, running=1), 0, "running=1"),
        (None, replace(GOOD, rows_after_erase=3), 0, "rows_after_erase=3"),
        (None, GOOD, -9, "code -9"),
        (None, GOOD, None, "did not end"),
        (None, GOOD, 0, None),
    ),
)
def test_a_soak_fails_if_a_request_did_or_something_is_held(outcome, idle, code, words, monkeypatch):
    plan = soak.Plan(1.0)
    readings = [soak.Reading(at, 400 + at / 6, 4, 1) for at in range(0, 61, 5)]
    outcomes = [clients.Outcome("text", True, 0.5, "finished", 0.25, 0.5, 9)] + ([outcome] if outcome else [])
    report = soak.Report(plan, outcomes, readings, 390.0, idle, exit_code=code)
    monkeypatch.setattr(soak, "run", lambda *_: report)
    body, said = run("soak", code=1 if words else 0)
    assert len(body["failures"]) == bool(words) and (words or "") in said
    assert body["memory"]["after_warm_up_mb"] == 402.5 and body["memory"]["growth_mb"] == 7.5
    assert body["memory"]["mb_per_minute"] == pytest.approx(10)
    assert body["latency"]["drafts"]["first_token_ms"]["p99"] == 250 and body["latency"]["no_drafts"]["answers"] == 0


def test_slots_share_an_engine_and_change_no_token():
    body, _ = run(
        "slots",
        "--weights",
        "fp32",
        "--slots",
        "2",
        "--prompts",
        3,
        "--max-tokens",
        8,
        "--rounds",
        1,
        "--temperature",
        0.8,
    )
    assert [(row["draft"], row["slots"]) for row in body["results"]] == [
        ("none", 1), ("none", 2), ("mtp", 1), ("mtp", 2),
    ]  # fmt: skip
    for row in body["results"]:
        assert row["differing"] == 0 and row["tokens"] == 2 * 3 * 8 and len(row["runs"]) == 1
        assert row["ratio"] == 1 or row["slots"] == 2


def test_a_token_that_company_changed_is_counted_and_ratios_are_to_one_slot_of_the_same_drafts(monkeypatch):
    engine = Engine.load("tiny-qwen", Settings(weights="fp32", try_drafts=False))
    timed = together._timed

    def changed(engine, requests):
        _, results = timed(engine, requests)
        slots, drafts = engine.settings.slots, requests[0].speculation.draft != "none"
        if slots == 2 and drafts:
            results[1] = replace(results[1], token_ids=(*results[1].token_ids[:-1], -1))
        return 2.0 * slots + 3 * drafts, results

    monkeypatch.setattr(together, "_timed", changed)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    rows = together.measure(engine, [2], [Speculation("none"), Speculation("mtp", 2)], sampling, 2, 1)
    assert [row.differing for row in rows] == [0, 0, 0, 2]  # one in the warm-up, one in the round
    assert [row.ratio for row in rows] == [1, 2, 1, 7 / 5]
    with pytest.raises(ValueError, match="from 1 to 64"):
        together.measure(engine, [65], [Speculation("none")], sampling, 2, 1)
