"""The calibrated checkpoint is what it says; speed, peers and quality count what they say they count."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.bench import holes, peers, quality, speed
from foreglance.bench.checkpoint import Calibration, write_checkpoint
from foreglance.bench.prompts import image_cases, text_cases
from foreglance.cli import app
from foreglance.cli.options import CPUS
from foreglance.models.weights import find_model
from foreglance.request import RequestError

SETTINGS = Settings(weights="fp32", slots=1, prefix_cache_bytes=0, try_drafts=False)


def answer(*arguments, code=0) -> dict:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated") / "ck"
    body = answer("make-checkpoint", "--shape", "tiny", "--acceptance", 0.7, "--out", folder)
    assert body["acceptance"] == 0.7 and body["cycle"] > 1000
    return folder


def ask(engine: Engine, tokens: int, speculation: Speculation):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    (result,) = engine.generate(Request(image_cases(1)[0].messages, sampling, speculation))
    assert result.error is None
    return result


def test_the_calibrated_checkpoint_walks_its_cycle_and_drafts_as_often_right_as_asked(calibrated):
    known, engine = Calibration.read(calibrated), Engine.load(str(calibrated), SETTINGS)
    assert round(sum(known.right) / len(known.right), 3) == 0.7
    result = ask(engine, 400, Speculation("mtp", 2))
    assert list(result.token_ids) == known.walk(result.token_ids[0], 400)
    assert result.timings.acceptance_by_depth == pytest.approx([0.7, 0.7], abs=0.08)
    assert ask(engine, 60, Speculation("none")).token_ids == result.token_ids[:60]


def test_each_guess_stands_or_falls_as_its_token_is_marked(calibrated):
    known, engine = Calibration.read(calibrated), Engine.load(str(calibrated), SETTINGS)
    result = ask(engine, 80, Speculation("mtp", 1))
    marks, at, stood = dict(zip(known.cycle, known.right, strict=True)), 0, 0
    while at < len(result.token_ids) - 2:  # a guess made behind token t is for the one after it
        right = marks[result.token_ids[at]]
        stood, at = stood + right, at + 1 + right
    assert abs(sum(result.timings.accepted) - stood) <= 1


def test_a_head_that_reads_states_is_right_only_with_the_state_of_the_right_row(tmp_path):
    write_checkpoint(tmp_path / "ck", "tiny", reads="hidden")
    engine = Engine.load(str(tmp_path / "ck"), SETTINGS)
    assert ask(engine, 60, Speculation("mtp", 3)).timings.acceptance == 1.0
    variants = {variant.shift: variant for variant in holes.VARIANTS if variant.policy == "skip"}
    right, late = holes.measure(engine, image_cases(1), max_tokens=24, variants=[variants[0], variants[1]])
    assert right.acceptance[0] == 1.0 and late.acceptance[0] == 0.0


@pytest.mark.parametrize(
    ("more", "words"),
    (
        (("--shape", "huge"), "qwen3.5-0.8b"),
        (("--acceptance", 1.5), "less than or equal to 1"),
        (("--reads", "mind"), "embedding or hidden"),
    ),
)
def test_a_checkpoint_that_cannot_be_made_is_refused(more, words, tmp_path):
    assert words in answer("make-checkpoint", "--out", tmp_path / "x", *more, code=2)["error"]["message"]
    assert not (tmp_path / "x").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(RequestError, match="exists already"):
        write_checkpoint(tmp_path, "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_speed_says_what_a_step_costs(calibrated):
    body = answer(
        "speed", "--checkpoint", calibrated, "--weights", "fp32,fp16", "--rounds", 1, "--prefill", 32,
        "--contexts", "40", "--slots", "2",
    )  # fmt: skip
    assert body["checkpoint"] == str(calibrated) and body["weights"] == "fp32" and body["threads"] == 1
    assert set(body["step_ratio"]) == {"2", "4", "8"} and set(body["by_context"]) == {"40"}
    assert [one["weights"] for one in body["results"]] == ["fp32", "fp16"]
    for one in body["results"]:
        assert one["read_bandwidth"] > 1e8 and one["tokens_per_second"] > 1 and one["by_slots"]["2"] > 1
        assert one["decode_fraction_of_bandwidth"] is None  # the weights stay in a cache
    assert body["results"][0]["bytes_per_step"] == 2 * body["results"][1]["bytes_per_step"]
    assert sum(line["share"] for line in body["operations"]) == pytest.approx(1)


def test_the_bytes_of_a_step_are_those_of_the_matrices_that_it_multiplies():
    engine, counted = Engine.load("tiny-qwen", SETTINGS), 0
    shape = engine.target._shape
    inner = 384
    delta = shape.hidden * (shape.conv + shape.values + 2 * shape.v_heads) + shape.values * shape.hidden
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    attention = shape.hidden * (2 * q + 2 * kv) + q * shape.hidden
    counted = 4 * delta + 2 * attention + 6 * 3 * shape.hidden * inner + 1536 * shape.hidden
    assert speed.step_bytes(find_model("tiny-qwen"), "fp32") == 4 * counted
    assert speed.step_bytes(find_model("tiny-qwen"), "something") is None


def test_the_share_of_bandwidth_is_of_rounds_that_were_measured_together():
    seconds, bandwidth = np.array([1.0, 2.0, 4.0]), np.array([2e9, 1e9, 0.5e9])
    assert speed._fraction(1e9, seconds, bandwidth) == 0.5
    assert speed._fraction(1e6, seconds, bandwidth) is None and speed._fraction(None, seconds, bandwidth) is None


def test_a_mixture_reads_the_experts_that_are_chosen():
    folder = find_model("tiny-step")
    whole = speed.step_bytes(folder, "fp32") / 4
    experts = 3 * 3 * 4 * 96 * 192  # layers, matrices, experts
    tensors = speed.open_tensors(folder)
    every = sum(
        np.prod(tensors.shape(name))
        for name in list(tensors.keys())
        if len(tensors.shape(name)) > 1 and name.startswith("model.layers.") and int(name.split(".")[2]) < 6
    )
    assert whole == every - experts / 2 + 1568 * 192


def test_a_step_of_k_rows_has_k_rows_however_the_text_goes():
    bench = speed.Bench("tiny-qwen", "fp32", 1, 256, 1)
    engine = bench.running(4, 16)
    rows, reserve = [], engine._store.reserve
    engine._store.reserve = lambda sequence, count: (rows.append(count), reserve(sequence, count))[1]
    for _ in range(5):
        speed.timed_step(engine)
    assert rows == [4] * 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("speed", "--rows", "2,x"), "numbers with commas"),
        (("speed", "--rows", "99"), "from 1 to 16"),
        (("speed", "--threads", "0"), f"--threads takes numbers from 1 to {CPUS}, got '0'"),
        (("speed", "--threads", "99999"), f"--threads takes numbers from 1 to {CPUS}"),
        (("peers", "--depths", "2,x"), "--depths takes auto and numbers from 0 to 15, got '2,x'"),
        (("peers", "--figure", "peers.jpeg"), "--figure takes a file that ends in .svg or .png"),
        (("quality", "--text", "./nowhere"), "nowhere cannot be read as text"),
        (("acceptance", "--prompts", "0"), "'--prompts'"),
        (("acceptance", "--depths", "99"), "--depths takes auto and numbers from 0 to 15"),
        (("acceptance", "--temperatures", "0,nan"), "--temperatures takes numbers from 0 up"),
        (("acceptance", "--policies", "look"), "--policies takes some of see, skip, placeholder, gap"),
        (("acceptance", "--kinds", "sound"), "--kinds takes some of image, text"),
        (("acceptance", "--file", "./nowhere"), "nowhere cannot be read"),
        (("exactness", "--tokens", "0"), "'--tokens'"),
        (("exactness", "--draft-weights", "q9"), "--draft-weights takes some of same, "),
        (("holes", "--depth", "0"), "'--depth'"),
        (("speed", "--weights", "fp31"), "--weights takes some of"),
        (("speed", "--checkpoint", "./nowhere"), "no model"),
        (("peers", "--engines", "vllm"), "--engines takes some of"),
        (("quality", "--model", "./nowhere"), "no model"),
    ),
)
def test_bad_options_are_refused_in_words(arguments, words):
    assert words in answer(*arguments, code=2)["error"]["message"]


def test_peers_take_turns_and_one_that_fails_says_why(tmp_path):
    files = peers.Files({"f16": tmp_path / "nothing.gguf"}, None)
    made = peers.contenders("tiny-qwen", ["fp32"], 1, [0, 2], ["foreglance", "llama.cpp"], files, 256, 16)
    rows = peers.measure(made, image_cases(1), 8, rounds=2)
    ours, drafted, broken, also = rows
    assert ours.skipped is None and len(ours.runs) == 2 and ours.agrees == drafted.agrees == 1.0
    assert ours.acceptance is None and 0 <= drafted.acceptance <= 1
    assert broken.skipped and also.skipped and broken.tokens_per_second is None
    assert peers.ratios(rows) == {} and peers.best_of(rows, "foreglance") in (ours, drafted)
    peers.draw(rows, tmp_path / "peers.svg", "tiny-qwen")
    assert "foreglance" in (tmp_path / "peers.svg").read_text()


def test_ratios_are_of_the_best_settings_run_by_run():
    def row(engine, *runs):
        return peers.Row(engine, "-", "-", 1, float(np.median(runs)), max(runs), runs=list(runs))

    rows = [
        row("foreglance", 10, 10, 10),
        row("foreglance", 20, 30, 20),
        row("other", 10, 10, 5),
        row("other", 1, 1, 50),
    ]
    assert peers.ratios(rows) == {"other": 3.0}
    assert peers.ratios_of_best_runs(rows) == {"other": 30 / 50} and peers.ratios_of_best_runs(rows[2:]) == {}


def test_a_model_that_cannot_be_exported_leaves_llama_cpp_out(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    files, why = peers.files_for(str(tmp_path), None, None, ["f16"], tmp_path)
    assert files is None and "cannot be exported" in why


def test_quality_finds_what_a_format_changes(monkeypatch):
    lines = quality.measure("tiny-qwen", ["fp16"], None, count=2, max_rows=24)
    assert [line.weights for line in lines] == ["fp32", "fp16"] and lines[0].rms_error == 0 and lines[0].top1 == 1
    assert lines[1].rms_error < 1e-3 and lines[1].top1 == 1 and 10 < lines[0].tokens <= 24
    assert 1 < lines[0].perplexity < 20
    real = quality.logits_of
    calls = []

    def damaged(engine, passage):
        calls.append(engine)
        logits = real(engine, passage)
        return logits if len(calls) <= 2 else logits.roll(1, -1)

    monkeypatch.setattr(quality, "logits_of", damaged)
    worse = quality.measure("tiny-qwen", ["fp16"], None, count=2, max_rows=24)[1]
    assert worse.rms_error > 0.5 and worse.top1 < 0.2 and worse.divergence > 1 and worse.perplexity > 100


def test_quality_reads_rows_as_generating_does():
    """The best token of each scored row is what a greedy run picks there."""
    engine = Engine.load("tiny-qwen", SETTINGS)
    request = text_cases(1)[0].request(SamplingParams(max_tokens=20), Speculation("none"))
    rows = engine.prepare(request)
    (result,) = engine.generate(request)
    passage = quality.Passage(quality._with_answer(engine, rows, result.token_ids), len(rows) - 1)
    picked = quality.logits_of(engine, passage).argmax(-1).tolist()
    assert picked == list(result.token_ids) == passage.targets.tolist()


def test_the_bundled_text_is_for_models_without_one_of_their_own():
    body = answer("quality", "--model", "tiny-text", "--weights", "fp16", "--text", quality.TEXT, "--max-rows", 40)
    assert body["text"] == "lighthouse.txt" and [one["weights"] for one in body["results"]] == ["fp32", "fp16"]
