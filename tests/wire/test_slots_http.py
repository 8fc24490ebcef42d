"""Slots over HTTP: what they hold, and conversations that outlive the process, drafts included."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from support.served import MODEL, PATIENCE, data_url, serving, until, user

from foreglance import Engine, Settings
from foreglance.serve.settings import ServerSettings

QUESTION = user("Describe the image.", [data_url()])
MTP = {"draft": "mtp", "depth": 3}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A server that saves slots, and their folder."""
    folder = tmp_path_factory.mktemp("slots")
    engine = Engine.load(MODEL, Settings(weights="fp32", slots=2, try_drafts=False))
    with serving(engine, ServerSettings(slot_save_path=folder)) as running, running.http() as http:
        running.folder, running.client = folder, http
        yield running


def chat(http, messages, **more):
    body = {"model": MODEL, "messages": messages, "max_tokens": 24, "speculative": MTP, "seed": 1, **more}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def second(answer):
    return [QUESTION, {"role": "assistant", "content": text_of(answer)}, user("What colour is it?")]


def told(answer):
    """The answer, what was reused, and what was guessed; all but the clock."""
    timings = answer["timings"]
    return text_of(answer), *(timings[name] for name in ("cache_n", "prompt_n", "draft_n", "draft_n_accepted"))


def act(http, slot, action, **body):
    return http.post(f"/slots/{slot}?action={action}", json=body)


def refusal(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_a_conversation_goes_to_a_file_and_back(kept):
    http = kept.client
    first = chat(http, [QUESTION])
    (slot,) = [one["id"] for one in http.get("/slots").json() if one["n_past"]]
    saved = act(http, slot, "save", filename="scene-1").json()
    assert (saved["id_slot"], saved["filename"]) == (slot, "scene-1")
    assert saved["n_saved"] == first["timings"]["prompt_n"] + first["timings"]["cache_n"] + 23
    assert saved["n_written"] == (kept.folder / "scene-1").stat().st_size and saved["timings"]["save_ms"] > 0
    straight_on = chat(http, second(first))
    for one in range(2):
        act(http, one, "erase")
    assert [one["n_past"] for one in http.get("/slots").json()] == [0, 0]
    cold = chat(http, second(first))
    assert cold["timings"]["cache_n"] == 0
    for one in range(2):
        act(http, one, "erase")
    restored = act(http, 1, "restore", filename="scene-1").json()
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    assert restored["timings"]["restore_ms"] > 0 and http.get("/slots").json()[1]["n_past"] == saved["n_saved"]
    again = chat(http, second(first))
    assert told(again) == told(straight_on) and again["timings"]["cache_n"] == saved["n_saved"]
    assert http.get("/slots").json()[1]["n_cached"] == saved["n_saved"], "it goes on in the slot where it was put"
    erased = act(http, 1, "erase").json()
    assert erased["n_erased"] > saved["n_saved"] and erased["id_slot"] == 1


def between_steps(kept, pool, call):
    """The answer to what is asked while the engine is held, one step later."""
    answer = pool.submit(call)
    until(lambda: answer.done() or not kept.host.worker._orders.empty(), "the order is in")
    if not answer.done():  # else the engine was still between two steps
        kept.gate.let_through(1)
    return answer.result(PATIENCE)


def test_slots_tell_what_runs_without_its_text(kept):
    http = kept.client
    with kept.held(), ThreadPoolExecutor(2) as pool:
        answer = pool.submit(chat, http, [QUESTION], max_tokens=80)
        until(lambda: kept.engine.num_waiting, "the request is in")
        kept.gate.let_through(6)
        shown = between_steps(kept, pool, lambda: http.get("/slots").json())
        (running,) = [one for one in shown if one["is_processing"]]
        assert (running["state"], running["n_image"], running["speculative"]["draft"]) == ("decoding", 16, "mtp")
        assert running["n_past"] == running["n_prompt"] + running["n_decoded"] - 1 and running["n_steps"] > 0
        assert running["speculative"]["n_rows"] > 16 and len(running["speculative"]["by_depth"]) == 3
        assert running["id_task"] and "prompt" not in running and running["n_ctx"] == kept.engine.context
        for action, body in (("save", {"filename": "busy"}), ("erase", {})):
            refused = between_steps(kept, pool, lambda a=action, b=body: act(http, running["id"], a, **b))
            assert refusal(refused) == (409, "slot_busy", "id_slot")
        kept.gate.open()
        assert answer.result(PATIENCE)["choices"]


def test_the_text_is_shown_if_the_server_was_told_to(tmp_path):
    engine = Engine.load(MODEL, Settings(weights="fp32", slots=2, try_drafts=False))
    with serving(engine, ServerSettings(slots_debug=True)) as running, running.http() as http:
        answer = chat(http, [QUESTION])
        shown = http.get("/slots").json()[0]["prompt"]
        assert "Describe the image." in shown and text_of(answer)[:20] in shown
        assert refusal(act(http, 0, "save", filename="x")) == (400, "slot_save_path_missing", None)
        assert act(http, 0, "erase").json()["n_erased"] > 0


@pytest.mark.parametrize(
    "name",
    ("", ".", "..", ".hidden", "-x", "a/b", "/etc/passwd", "a\\b", "../x", "a\0b", "a b", "ä", "x" * 201, "a\n", None),
)
@pytest.mark.parametrize("action", ("save", "restore"))
def test_only_plain_file_names_are_taken(kept, action, name):
    before = sorted(kept.folder.iterdir())
    status, code, param = refusal(act(kept.client, 0, action, filename=name))
    assert (status, param) == (400, "filename")
    assert code == ("missing_required_parameter" if name is None else "invalid_value")
    assert sorted(kept.folder.iterdir()) == before


def test_what_cannot_be_done_is_said(kept):
    http = kept.client
    (kept.folder / "torn").write_bytes(b"no such file")
    cases = [
        (act(http, 0, "restore", filename="gone"), (400, "slot_file", "filename"), "no file gone"),
        (act(http, 0, "restore", filename="torn"), (400, "slot_file", "filename"), "torn is no whole"),
        (act(http, 2, "erase"), (404, "slot_unknown", "id_slot"), "only 0 to 1"),
        (act(http, "x", "erase"), (404, "slot_unknown", "id_slot"), "no slot 'x'"),
        (act(http, "9" * 6000, "erase"), (404, "slot_unknown", "id_slot"), "no slot"),
        (act(http, 0, "melt"), (400, "invalid_value", "action"), "save, restore, erase"),
        (http.post("/slots/0"), (400, "invalid_value", "action"), "must be one of"),
        (act(http, 0, "save", filename="a", name=3), (400, "unknown_parameter", "name"), "not known"),
        (act(http, 0, "erase", filename="a"), (400, "unsupported_parameter", "filename"), "not taken"),
        (act(http, 0, "save", filename=7), (400, "invalid_value", "filename"), "must be a string"),
    ]
    for answer, want, words in cases:
        assert refusal(answer) == want and words in answer.json()["error"]["message"]
    act(http, 0, "erase")
    assert refusal(act(http, 0, "save", filename="nothing")) == (400, "slot_empty", "id_slot")


class Process:
    """`foreglance serve` as a process of its own."""

    def __init__(self, *options):
        command = [sys.executable, "-c", "from foreglance.cli import main; main()", "serve", "--port", "0", "--json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
        )
        line = self._process.stdout.readline()
        self.http = httpx2.Client(base_url=json.loads(line)["url"], timeout=PATIENCE)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE)
        self._process.stdout.close()
        self.http.close()


def test_a_conversation_outlives_a_kill_with_its_draft(tmp_path):
    """Case B9: the same answer, and as many guesses that stand from the first step on."""
    options = ("--slots", "2", "--slot-save-path", str(tmp_path), "--prefix-cache-bytes", "64M")
    before = Process(*options)
    try:
        first = chat(before.http, [QUESTION])
        assert act(before.http, 0, "save", filename="kept").status_code == 200
        straight_on = chat(before.http, second(first))
    finally:
        before.kill()
    after = Process(*options)
    try:
        assert act(after.http, 1, "restore", filename="kept").json()["n_restored"] > 16
        assert told(chat(after.http, second(first))) == told(straight_on)
        assert straight_on["timings"]["draft_n_accepted"] > 0 < straight_on["timings"]["cache_n"]
    finally:
        after.kill()


def test_options_of_the_caches_are_checked(tmp_path):
    from typer.testing import CliRunner

    from foreglance.cli import app
    from foreglance.cli.serve import num_bytes

    assert [num_bytes(text) for text in ("0", "1500", "500M", "4G", "2GiB", "3kb")] == [
        *(0, 1500, 500 << 20, 4 << 30, 2 << 30, 3 << 10)
    ]
    for options, words in (
        (["--prefix-cache-bytes", "much"], "no number of bytes"),
        (["--slot-save-path", str(tmp_path / "gone")], "is no folder"),
        (["--slot-save-path", str(tmp_path), "--replicas", "2"], "leave out --replicas"),
    ):
        result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
        assert result.exit_code and words in " ".join(result.output.replace("│", " ").split()), result.output
