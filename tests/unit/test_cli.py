"""The command line, as a person or a script meets it. Runs on the embedded model."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from typer.testing import CliRunner

import foreglance
from foreglance.bench.scenes import HELD_OUT_SEED, scene_from_seed
from foreglance.cli import app, demo, generate, running, show
from foreglance.cli.chat import ChatOptions
from foreglance.cli.generate import GenerateOptions
from foreglance.images import open_picture
from foreglance.request import Message, Request, RequestError, SamplingParams, Speculation, Token
from foreglance.settings import Settings

SCENE = str(Path(foreglance.__file__).parent / "assets" / "scene.png")

# A fixed depth: how deep "auto" goes depends on how busy the machine is.
DESCRIBE = ("generate", "--image", SCENE, "--prompt", "Describe the image.", "--max-tokens", 40, "--depth", 3)


def call(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def answer(*arguments, code=0, stdin=None) -> dict:
    """What `--json` prints: exactly one line on stdout."""
    result = call(*arguments, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1 and result.stdout.endswith("\n"), result.stdout
    return json.loads(result.stdout)


def python(code: str, **environment) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def described() -> dict:
    return answer(*DESCRIBE)


# ---------------------------------------------------------------- start-up


@pytest.mark.parametrize("terminal, seconds, shown", [(True, -1.0, True), (True, 60.0, False), (False, -1.0, False)])
def test_a_long_load_shows_a_bar_on_a_terminal_only(monkeypatch, capsys, terminal, seconds, shown):
    monkeypatch.setattr(running, "LONG_LOAD", seconds)
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    monkeypatch.setenv("COLUMNS", "100")
    with running.loading_bar() as hear:
        hear("some-model", 1000, 4000)
    out, err = capsys.readouterr()
    assert out == "" and ("loading some-model" in err) == shown and ("1.0/4.0 kB" in err) == shown
    assert shown or err == ""


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_and_version_import_no_torch(arguments):
    code = f"""
import sys
from foreglance.cli import app
try:
    app({arguments})
except SystemExit as end:
    assert not end.code
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    assert python(code).splitlines()[-1] == "[]"


def test_the_package_gives_its_names_when_they_are_asked_for():
    code = """
import sys, foreglance
from foreglance import Request, Settings
assert "torch" not in sys.modules
from foreglance import Engine
assert "torch" in sys.modules and all(vars(foreglance)[name] for name in ("Engine", "Request"))
assert set(foreglance.__all__) <= set(dir(foreglance))
"""
    python(code)
    assert all(getattr(foreglance, name).__name__ == name for name in foreglance.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        foreglance.Nothing  # noqa: B018


def test_the_version_is_printed():
    assert call("--version").stdout == f"foreglance {foreglance.__version__}\n"


# ---------------------------------------------------------------- options


def test_defaults_are_those_of_the_dataclasses():
    options = ChatOptions()
    assert options.sampling() == SamplingParams()
    assert options.speculation() == Speculation()
    assert options.settings() == Settings()


def test_every_sampling_option_arrives():
    given = {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 4, "ignore_eos": True,
        "reasoning_budget": 9,
    }  # fmt: skip
    options = GenerateOptions(prompt="hi", **given, stop=["a", "b"], logit_bias=["5=-2.5", "6=1"])
    assert options.sampling() == SamplingParams(**given, stop=("a", "b"), logit_bias={5: -2.5, 6: 1.0})
    unseen = {"logprobs", "markup"}  # nothing that a terminal shows
    assert {*given, "stop", "logit_bias"} == {one.name for one in fields(SamplingParams)} - unseen


def test_system_prompt_and_pictures_make_the_messages():
    options = GenerateOptions(prompt="what?", image=["a.png", "b.png"], system="be brief")
    assert options.question() == (
        Message.of("system", "be brief"),
        Message.of("user", "what?", ["a.png", "b.png"]),
    )


BAD = [
    (["--temperature", "-1"], "temperature", "invalid_value"),
    (["--top-p", "0"], "top_p", "invalid_value"),
    (["--stop", ""], "stop", "invalid_value"),
    (["--seed", "-1"], "seed", "invalid_value"),
    (["--logit-bias", "5"], "logit_bias", "invalid_value"),
    (["--depth", "deep"], "depth", "invalid_value"),
    (["--depth", "16"], "depth", "invalid_value"),
    (["--draft-images", "gap"], "draft_images", "draft_images_unsupported"),
    (["--draft-images", "blur"], "draft_images", "invalid_value"),
    (["--weights", "int3"], "settings", "invalid_settings"),
    (["--context", "1"], "settings", "invalid_settings"),
    (["--image", "nowhere.png"], "image", "image_not_found"),
    (["--image", __file__], "image", "image_broken"),
    (["--image", SCENE] * 33, "image", "too_many_images"),
]


@pytest.mark.parametrize(("arguments", "param", "code"), BAD, ids=[" ".join(a[:2]) or "empty" for a, _, _ in BAD])
def test_bad_input_is_refused_before_a_model_is_loaded(monkeypatch, arguments, param, code):
    monkeypatch.setattr(generate, "load_engine", lambda *_: pytest.fail("a model was loaded"))
    error = answer("generate", "--prompt", "hi", *arguments, code=2)["error"]
    assert (error["param"], error["code"]) == (param, code)
    plain = call("generate", "--prompt", "hi", *arguments)
    assert plain.exit_code == 2 and plain.stdout == "" and "Traceback" not in plain.stderr
    assert plain.stderr.startswith(f"foreglance: {error['message'][:40]}") and plain.stderr.count("\n") == 1


@pytest.mark.parametrize("draft", ["assistant", "nobody", "some/model"])
def test_a_draft_that_is_not_there_is_refused(draft):
    error = answer("generate", "--prompt", "hi", "--draft", draft, code=2)["error"]
    assert (error["param"], error["code"]) == ("draft", "draft_unavailable")


@pytest.mark.parametrize("policy", ["look", "gap"])
def test_only_policies_that_can_be_had_are_offered(policy):
    error = answer("generate", "--prompt", "hi", "--draft-images", policy, code=2)["error"]
    assert "see, skip, placeholder" in error["message"] and "placeholder, gap" not in error["message"]


def test_a_second_model_is_named_where_the_kinds_of_drafts_are():
    assert GenerateOptions(prompt="hi", draft="some/model").second_model == "some/model"
    assert GenerateOptions(prompt="hi", draft="some/model").speculation().draft == "auto"
    assert GenerateOptions(prompt="hi", draft="ngram").second_model is None


@pytest.mark.parametrize(
    "arguments", [["--bogus"], ["--max-tokens", "many"], ["--threads", "0"], ["--threads", "99999"]]
)
def test_unknown_options_and_wrong_types_are_usage_errors(arguments):
    error = answer("generate", "--prompt", "hi", *arguments, code=2)["error"]
    assert error["code"] == "usage" and arguments[0] in error["message"]


@pytest.mark.parametrize("config", ["{", '{"model_type": "unheard_of"}', None])
def test_an_unusable_model_is_one_sentence(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    error = answer("generate", "--prompt", "hi", "--model", tmp_path, code=2)["error"]
    assert (error["param"], error["code"]) == ("model", "model_unusable")


def test_a_prompt_longer_than_the_context_is_refused():
    error = answer("generate", "--prompt", "hi", "--image", SCENE, "--context", 20, code=2)["error"]
    assert error["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- generate


def test_generate_gives_every_promised_number(described):
    promised = {
        "text", "token_ids", "finish_reason", "prompt_tokens", "image_rows", "drafted", "accepted",
        "acceptance_by_depth", "steps", "ttft_ms", "tokens_per_second", "draft",
    }  # fmt: skip
    assert promised <= described.keys()
    assert described["draft"] == {"kind": "mtp", "depth": 3, "images": "see", "off_because": None}
    assert described["image_rows"] == 16 and described["prompt_tokens"] > 16
    assert 0 < described["accepted"] <= described["drafted"]
    assert len(described["token_ids"]) == 1 + described["steps"] + described["accepted"]


def test_stdout_is_the_text_alone_and_statistics_go_to_stderr(described):
    plain = call(*DESCRIBE)
    assert plain.exit_code == 0
    assert plain.stdout == described["text"] + "\n"
    assert "tokens/s" in plain.stderr and "drafts accepted" in plain.stderr


@pytest.mark.parametrize("how", [["--draft", "none"], ["--depth", 3, "--draft-images", "skip"], ["--draft", "ngram"]])
def test_no_draft_option_changes_a_token(how):
    common = ["generate", "--image", SCENE, "--prompt", "Describe it.", "--max-tokens", 24, "--temperature", 0.9]
    assert answer(*common, *how)["token_ids"] == answer(*common)["token_ids"]


def test_ctrl_c_keeps_what_was_there_and_the_engine_goes_on():
    engine = running.load_engine(GenerateOptions(prompt=""), Settings(slots=1))
    handler = signal.getsignal(signal.SIGINT)

    def request():
        return Request.from_prompt("Hello", sampling=SamplingParams(max_tokens=60, ignore_eos=True))

    seen = []

    def press_after_five(token):
        seen.append(token.id)
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    result = running.run(engine, request(), press_after_five)
    assert result.finish_reason == "cancelled" and 5 <= len(result.token_ids) < 60
    assert signal.getsignal(signal.SIGINT) is handler
    engine.check()
    whole = running.run(engine, request())
    assert len(whole.token_ids) == 60 and whole.token_ids[: len(seen)] == tuple(seen)


def test_a_second_ctrl_c_is_not_waited_for():
    interrupt = running.Interrupt()
    interrupt.press()
    with pytest.raises(KeyboardInterrupt):
        interrupt.press()


# ---------------------------------------------------------------- chat


def test_earlier_turns_of_a_chat_are_not_computed_again():
    lines = f"/image {SCENE}\nDescribe the image.\n/image nowhere.png\n/nonsense\nWhat number is in it?\n/quit\nno\n"
    result = call("chat", "--json", "--max-tokens", 80, stdin=lines)
    assert result.exit_code == 0 and "nowhere.png" in result.stderr and "unknown command" in result.stderr
    first, second = json.loads(result.stdout)["turns"]
    assert first["cached_rows"] == 0 and first["image_rows"] == second["image_rows"] == 16
    assert second["cached_rows"] == first["prompt_tokens"] + len(first["token_ids"]) - 1  # all that was in the cache
    assert first["images"] == [SCENE] and second["images"] == []


def test_a_refused_message_leaves_the_conversation_as_it_was():
    lines = f"Hello\n{'much ' * 300}\n/stats\nHello again\n"
    result = call("chat", "--json", "--max-tokens", 8, "--context", 120, stdin=lines)
    assert "/reset starts anew" in result.stderr
    first, second = json.loads(result.stdout)["turns"]
    assert [first["user"], second["user"]] == ["Hello", "Hello again"]
    assert second["prompt_tokens"] < 100


def test_reset_forgets_the_conversation():
    result = answer("chat", "--max-tokens", 4, stdin="Hello\n/reset\nHello\n")
    first, second = result["turns"]
    assert first["prompt_tokens"] == second["prompt_tokens"] and first["token_ids"] == second["token_ids"]


def test_chat_prints_answers_alone_on_stdout():
    turns = answer("chat", "--max-tokens", 8, stdin="Hello\nAnd you?\n")["turns"]
    plain = call("chat", "--max-tokens", 8, stdin="Hello\nAnd you?\n")
    assert plain.stdout == "".join(turn["text"] + "\n" for turn in turns)
    assert plain.stderr.count("tokens/s") == 2 and "reused" in plain.stderr


# ---------------------------------------------------------------- demo


def test_the_bundled_picture_is_a_scene_that_was_never_trained_on():
    assert np.array_equal(open_picture(SCENE, 10_000).pixels, scene_from_seed(HELD_OUT_SEED)[1])


def test_the_demo_proves_that_drafts_change_nothing():
    numbers = answer("demo", "--max-tokens", 24)
    promised = {
        "text",
        "identical",
        "acceptance",
        "acceptance_by_depth",
        "tokens_per_step",
        "speedup",
        "model",
        "draft",
    }
    assert promised <= numbers.keys()
    assert numbers["identical"] is True and numbers["tokens_per_step"] >= 1
    assert numbers["model"] == "tiny-qwen" and numbers["draft"]["kind"] == "mtp"


def test_the_gain_that_the_demo_shows_is_that_of_the_speeds_that_it_shows():
    def ran(speed):
        return SimpleNamespace(timings=SimpleNamespace(tokens_per_second=speed))

    pairs = tuple((ran(on), ran(off)) for on, off in ((90, 30), (60, 50), (80, 60)))
    measured = demo.Measured(ran(1), ran(1), pairs)
    assert (measured.speed(True), measured.speed(False), measured.speedup) == (80, 50, 1.6)


def test_the_demo_fails_if_one_token_differs(monkeypatch):
    def forge(engine, request, *more):
        result = running.run(engine, request, *more)
        if request.speculation.draft == "none":
            object.__setattr__(result, "token_ids", (*result.token_ids[:-1], 0))
        return result

    monkeypatch.setattr(demo, "run", forge)
    assert answer("demo", "--max-tokens", 8, code=1)["identical"] is False


def test_the_demo_is_plain_text_on_a_pipe():
    plain = call("demo", "--max-tokens", 24)
    assert plain.exit_code == 0 and "\x1b" not in plain.stdout
    lines = plain.stdout.splitlines()
    assert lines[0] == "> Describe the image."
    assert any(line.split() == ["token", "ids", "identical", "yes"] for line in lines)


# ---------------------------------------------------------------- what is shown


def printed(capsys, monkeypatch, **environment) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    printer = show.TokenPrinter(marked=True)
    for token in (Token(1, 0, "plain"), Token(2, 1, " one"), Token(3, 2, "\x1b[2J two"), Token(4, 9, "")):
        printer(token)
    printer.end()
    return capsys.readouterr().out


def test_drafts_are_marked_by_depth_on_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = printed(capsys, monkeypatch, FORCE_COLOR="1", TERM="xterm-256color")
    assert text == "plain\x1b[4;32m one\x1b[0m\x1b[4;36m[2J two\x1b[0m\n"


def test_without_colour_underlines_stay(capsys, monkeypatch):
    text = printed(capsys, monkeypatch, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    assert text == "plain\x1b[4m one\x1b[0m\x1b[4m[2J two\x1b[0m\n"


def test_a_pipe_gets_the_text_as_it_is(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert printed(capsys, monkeypatch) == "plain one\x1b[2J two\n"


def test_a_picture_keeps_its_shape_in_half_blocks(tmp_path):
    PIL.Image.new("RGB", (200, 50), (255, 0, 0)).save(tmp_path / "wide.png")
    lines = show.picture(tmp_path / "wide.png").plain.splitlines()
    assert len(lines) == 4 and {len(line) for line in lines} == {32}
    assert len(show.picture(SCENE).plain.splitlines()) == 16


# ---------------------------------------------------------------- explain, models


def test_explain_draws_the_picture_and_gives_the_numbers(tmp_path):
    common = ["explain", "--image", SCENE, "--prompt", "What?"]
    numbers = answer(*common, "--svg", tmp_path / "rows.svg")
    assert [track["name"] for track in numbers["tracks"]] == ["target", "see", "skip", "placeholder", "gap"]
    target, see, skip, _, _ = numbers["tracks"]
    assert numbers["images"][0]["grid"] == [4, 4]
    assert target["rows"] == see["rows"] + 1 == skip["rows"] + 17
    assert "image 1: 4 × 4 = 16 rows" in (tmp_path / "rows.svg").read_text(encoding="utf-8")
    assert "[image 1: 4x4 = 16 rows" in call(*common).stdout


def test_explain_refuses_a_folder_that_is_not_there(monkeypatch):
    error = answer("explain", "--prompt", "hi", "--svg", "nowhere/rows.svg", code=2)["error"]
    assert error["param"] == "svg"


def test_models_lists_what_is_embedded_and_supported():
    found = answer("models")
    embedded = {one["name"]: one for one in found["embedded"]}
    assert embedded["tiny-qwen"]["images"] and 0 < embedded["tiny-qwen"]["bytes"] < 30e6
    assert {name: (one["draft_heads"], one["drafts"]) for name, one in embedded.items()} == {
        "tiny-gemma": (0, "its assistant"),
        "tiny-gemma-assistant": (0, "-"),
        "tiny-qwen": (1, "MTP head"),
        "tiny-step": (3, "3 MTP modules"),
        "tiny-text": (0, "-"),
    }
    assert "qwen3_5" in found["families"][0]["model_types"]
    lines = [line.split()[:3] for line in call("models").stdout.splitlines()]
    for name in embedded:
        assert [name, "embedded", embedded[name]["model_type"]] in lines


CALL_MODELS = "from foreglance.cli import app; app(['models', '--json'])"


def test_models_needs_no_cache(tmp_path):
    found = json.loads(python(CALL_MODELS, HF_HOME=str(tmp_path / "none"), HF_HUB_CACHE=str(tmp_path / "none")))
    assert found["cached"] == []


def test_models_lists_cached_checkpoints_of_supported_families(tmp_path):
    for name, config in (
        ("models--some--eyes", '{"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}'),
        ("models--some--other", '{"model_type": "bert"}'),
        ("models--some--broken", "{"),
    ):
        snapshot = tmp_path / name / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(config)
    (cached,) = json.loads(python(CALL_MODELS, HF_HUB_CACHE=str(tmp_path)))["cached"]
    assert (cached["name"], cached["draft_heads"], cached["images"]) == ("some/eyes", 1, False)


def test_json_is_one_line_of_utf8(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    show.print_json({"text": "größer\n"})
    assert out.getvalue() == '{"text": "größer\\n"}\n'


def test_request_errors_are_not_mistaken_for_bugs_and_bugs_not_for_request_errors(monkeypatch):
    monkeypatch.setattr(generate, "load_engine", lambda *_: (_ for _ in ()).throw(ValueError("a bug")))
    assert isinstance(call("generate", "--prompt", "hi").exception, ValueError)
    monkeypatch.setattr(generate, "load_engine", lambda *_: (_ for _ in ()).throw(RequestError("no", param="p")))
    assert call("generate", "--prompt", "hi").exit_code == 2
