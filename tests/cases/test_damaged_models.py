"""Models whose files are damaged, cut short, incomplete or promise too much: one line that names the file and says what
is wrong, exit code 2, whoever loads them; and a file that is cut while its model runs takes nothing with it."""

import itertools
import json
import math
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from foreglance import Engine, Request, SamplingParams, Settings
from foreglance.cli import app
from foreglance.models.base import ModelError
from foreglance.models.gguf.export import add_value
from foreglance.models.registry import load_model
from foreglance.models.weights import EMBEDDED, INDEX, SINGLE

SMALLEST, HEADER = "tiny-text", 8  # bytes of a safetensors file before its JSON


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(EMBEDDED / name, folder / name)
    return folder / name


@pytest.fixture
def model(tmp_path) -> Path:
    return copied(SMALLEST, tmp_path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    """Folder with target and tower of tiny-qwen, and a draft."""
    folder = tmp_path_factory.mktemp("gguf")
    names = "target.gguf", "mmproj.gguf", "draft.gguf"
    for args in (
        ["--model", "tiny-qwen", "--out", str(folder / names[0]), "--mmproj", str(folder / names[1])],
        ["--model", SMALLEST, "--out", str(folder / names[2])],
    ):
        assert CliRunner().invoke(app, ["export-gguf", *args]).exit_code == 0
    PIL.Image.new("RGB", (64, 64), "red").save(folder / "red.png")
    return folder


def refused(*args: str | Path, names: Path) -> str:
    """What a command says that cannot load `names`: one line, exit code 2."""
    result = CliRunner().invoke(app, [*map(str, args)])
    words = result.stderr.replace("\n", "")
    assert result.exit_code == 2, (result.output, result.exception)
    assert words.count("foreglance: ") == 1 and str(names) in words and "Traceback" not in words, words
    return words


def generate(model: Path, *more: str | Path, names: Path | None = None) -> str:
    args = "generate", "--prompt", "Hello", "--max-tokens", "2", "--weights", "fp32", "--model", model
    return refused(*args, *more, names=model if names is None else names)


def retold(path: Path, change) -> None:
    """Change the values of a JSON file."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps(change(values) or values))


def retensored(folder: Path, change) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def reheaded(folder: Path, change) -> None:
    """Change the header of a safetensors file, tensors aside."""
    whole = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", whole[:HEADER])
    header = json.loads(whole[HEADER : HEADER + length])
    change(header)
    told = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(told)) + told + whole[HEADER + length :])


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def first(names, part: str) -> str:
    return next(name for name in names if part in name)


SHARDED = {"weight_map": {"a": "one.safetensors"}}
DAMAGE = {
    "weights are empty": (lambda m: cut(m / SINGLE, 0), "not a whole safetensors file"),
    "weights end in the header": (lambda m: cut(m / SINGLE, 300), "not a whole safetensors file"),
    "weights end in a tensor": (lambda m: cut(m / SINGLE, 900_000), "not a whole safetensors file"),
    "a header of terabytes": (
        lambda m: (m / SINGLE).write_bytes(struct.pack("<Q", 1 << 42) + (m / SINGLE).read_bytes()[HEADER:]),
        "not a whole safetensors file",
    ),
    "a tensor of terabytes": (
        lambda m: reheaded(m, lambda header: header["model.norm.weight"].update(data_offsets=[0, 1 << 42])),
        "not a whole safetensors file",
    ),
    "no weights": (lambda m: (m / SINGLE).unlink(), "neither model.safetensors nor"),
    "an index without its shard": (
        lambda m: (m / INDEX).write_text(json.dumps(SHARDED)),
        "lacks the shards one.safetensors",
    ),
    "an index that is no JSON": (lambda m: (m / INDEX).write_text("{"), "model.safetensors.index.json is no JSON"),
    "an index without names": (lambda m: (m / INDEX).write_text('{"weight_map": [1]}'), "no index of shards"),
    "an index of numbers": (lambda m: (m / INDEX).write_text('{"weight_map": {"a": 5}}'), "no index of shards"),
    "an index without end": (lambda m: (m / INDEX).write_text("[" * 100_000), "index.json is no JSON object"),
    "a shard that is no weights": (
        lambda m: (m / INDEX).write_text('{"weight_map": {"a": "config.json"}}'),
        "config.json is not a whole safetensors file",
    ),
    "a tensor of truths": (
        lambda m: retensored(m, lambda tensors: tensors.update({"model.norm.weight": torch.ones(128).bool()})),
        "1 mistyped: model.norm.weight is bool, expected one of float32",
    ),
    "tensors of bytes": (
        lambda m: retensored(m, lambda t: t.update({first(t, "up_proj"): t[first(t, "up_proj")].to(torch.int8)})),
        "is int8, expected one of float32",
    ),
    "tensors of eight-bit floats": (
        lambda m: retensored(
            m, lambda t: t.update({first(t, "q_proj"): t[first(t, "q_proj")].to(torch.float8_e4m3fn)})
        ),
        "is float8_e4m3fn, expected one of float32",
    ),
    "a tensor of another shape": (
        lambda m: retensored(m, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})),
        "1 mis-shaped: model.norm.weight is [3]",
    ),
    "a tensor that is not there": (lambda m: retensored(m, lambda t: t.pop("model.norm.weight")), "1 missing"),
    "a config that is cut": (lambda m: cut(m / "config.json", 100), "config.json is no JSON object"),
    "a config that is a list": (lambda m: (m / "config.json").write_text("[]"), "config.json is no JSON object"),
    "a config that says nothing": (lambda m: (m / "config.json").write_text("{}"), "model_type ''"),
    "a word for a number": (
        lambda m: retold(m / "config.json", lambda values: values.update(hidden_size="many")),
        "hidden_size",
    ),
    "rows of terabytes": (
        lambda m: retold(m / "config.json", lambda values: values.update(hidden_size=1 << 40)),
        "names a weight of",
    ),
    "rows of nothing": (
        lambda m: retold(m / "config.json", lambda values: values.update(intermediate_size=0)),
        "names a weight of",
    ),
    "a vocabulary of terabytes": (
        lambda m: retold(m / "config.json", lambda values: values.update(vocab_size=1 << 40)),
        "names a weight of",
    ),
    "a million layers": (
        lambda m: retold(m / "config.json", lambda v: v.update(num_hidden_layers=10**6, layer_types=None)),
        "num_hidden_layers is 1000000",
    ),
    "more layers than there are": (
        lambda m: retold(m / "config.json", lambda v: v.update(num_hidden_layers=900, layer_types=None)),
        "missing: model.layers.4.",
    ),
    "angles of terabytes": (
        lambda m: retold(
            m / "config.json",
            lambda v: v.update(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}
            ),
        ),
        "partial_rotary_factor is 1000000000.0",
    ),
    "no positions": (
        lambda m: retold(m / "config.json", lambda values: values.update(max_position_embeddings=0)),
        "max_position_embeddings is 0",
    ),
    "a weight that is no number": (
        lambda m: retensored(m, lambda t: t[first(t, "up_proj")].view(-1)[77].fill_(math.nan)),
        "1 not finite: model.layers.0.mlp.up_proj.weight holds 1 of",
    ),
    "weights that are infinite": (
        lambda m: retensored(
            m, lambda t: [t[first(t, part)].view(-1)[3:].fill_(-math.inf) for part in ("embed", "norm")]
        ),
        "2 not finite: model.embed_tokens.weight holds",
    ),
    "an epsilon that is no number": (
        lambda m: retold(m / "config.json", lambda values: values.update(rms_norm_eps=math.nan)),
        "config.json: rms_norm_eps is nan, no finite number",
    ),
    "angles without end": (
        lambda m: (m / "config.json").write_text(
            re.sub(r'"rope_theta": [0-9.e+]+', '"rope_theta": 1e999', (m / "config.json").read_text())
        ),
        "rope_theta is inf, no finite number",
    ),
    "a template that is cut": (
        lambda m: cut(m / "chat_template.jinja", (m / "chat_template.jinja").stat().st_size - 10),
        "chat_template.jinja, line ",
    ),
    "a template with a filter that is not there": (
        lambda m: (m / "chat_template.jinja").write_text("one\ntwo {{ messages | shouted }}"),
        "chat_template.jinja, line 2: the chat template is broken (No filter named 'shouted'",
    ),
    "a template that is a number": (
        lambda m: (
            (m / "chat_template.jinja").unlink(),
            retold(m / "tokenizer_config.json", lambda values: values.update(chat_template=5)),
        ),
        "tokenizer_config.json: the chat template is int, no text",
    ),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer"),
    "a tokenizer that is cut": (lambda m: cut(m / "tokenizer.json", 50_000), "its tokenizer cannot be read"),
    "a tokenizer that is null": (lambda m: (m / "tokenizer.json").write_text("null"), "its tokenizer cannot be read"),
    "a tokenizer's config that is a list": (
        lambda m: (m / "tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json is no JSON object",
    ),
    "an end of text that is cut": (
        lambda m: cut(m / "generation_config.json", 20),
        "generation_config.json is no JSON",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_model_is_refused_in_one_line_that_names_it(model, what):
    damage, words = DAMAGE[what]
    damage(model)
    assert words in generate(model)


ANY = ("weights end in a tensor", "tensors of bytes", "a config that is cut")


@pytest.mark.parametrize(
    ("command", "what"),
    [*itertools.product(("serve", "draft", "assistant"), ANY), ("serve", "no tokenizer"), ("draft", "no tokenizer")],
)
def test_so_is_a_damaged_draft_and_a_damaged_model_of_a_server(tmp_path, command, what):
    """An assistant needs no tokenizer of its own."""
    folder = copied("tiny-gemma-assistant" if command == "assistant" else SMALLEST, tmp_path)
    damage, words = DAMAGE[what]
    damage(folder)
    if command == "serve":
        assert words in refused("serve", "--port", "0", "--model", folder, names=folder)
    else:
        target = "tiny-gemma" if command == "assistant" else "tiny-qwen"
        assert words in generate(Path(target), "--draft", folder, names=folder)


def parts_of(path: Path) -> dict[str, int]:
    """Where a GGUF file may end: in its head, among its values, among its tensors."""
    size = path.stat().st_size
    return {"head": 20, "values": min(4000, size // 8), "tensors": size - size // 3}


@pytest.mark.parametrize("part", ("head", "values", "tensors", "a promise of terabytes"))
@pytest.mark.parametrize("name", ("target.gguf", "mmproj.gguf", "draft.gguf"))
def test_a_damaged_gguf_file_is_refused_in_one_line_that_names_it(gguf, tmp_path, name, part):
    bad = tmp_path / name
    shutil.copy(gguf / name, bad)
    if part in parts_of(bad):
        cut(bad, parts_of(bad)[part])
    else:
        whole = bad.read_bytes()
        bad.write_bytes(whole[:8] + struct.pack("<Q", 1 << 42) + whole[16:])
    files = {one: bad if one == name else gguf / one for one in ("target.gguf", "mmproj.gguf", "draft.gguf")}
    more = ["--mmproj", files["mmproj.gguf"], "--draft", files["draft.gguf"], "--image", gguf / "red.png"]
    words = generate(files["target.gguf"], *more, names=bad)
    assert "is not a whole GGUF file" in words
    if name == "target.gguf":
        assert "is not a whole GGUF file" in refused("serve", "--port", "0", "--model", bad, names=bad)


@pytest.mark.parametrize(
    ("name", "key"),
    (
        ("target.gguf", b"qwen35.block_count"),
        ("target.gguf", b"qwen35.embedding_length"),
        ("target.gguf", b"qwen35.rope.dimension_count"),
        ("mmproj.gguf", b"clip.vision.block_count"),
        ("mmproj.gguf", b"clip.vision.embedding_length"),
        ("mmproj.gguf", b"clip.vision.image_min_pixels"),
    ),
)
def test_a_number_of_billions_in_a_gguf_file_is_not_believed(gguf, tmp_path, name, key):
    bad = tmp_path / name
    shutil.copy(gguf / name, bad)
    whole = bad.read_bytes()
    at = whole.index(key) + len(key) + 4  # behind the key and its type
    bad.write_bytes(whole[:at] + struct.pack("<I", 2_000_000_000) + whole[at + 4 :])
    target = bad if name == "target.gguf" else gguf / "target.gguf"
    more = ["--mmproj", bad] if name == "mmproj.gguf" else []
    generate(target, *more, names=bad if name == "target.gguf" else target)


def test_a_template_that_fails_says_where_when_it_is_used(model):
    """It compiles, so that it may take other conversations."""
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}\n\n{{ 1 // (m.content | length - 5) }}{% endfor %}"
    )
    result = CliRunner().invoke(app, ["generate", "--prompt", "Hello", "--max-tokens", "2", "--model", str(model)])
    words = result.stderr.replace("\n", " ")
    assert result.exit_code == 2 and "by zero (line 3 of the template)" in words, words
    asked = CliRunner().invoke(app, ["generate", "--prompt", "Hello!", "--max-tokens", "2", "--model", str(model)])
    assert asked.exit_code == 0


def patched(path: Path, change) -> None:
    """Change the metadata and tensors of a GGUF file: `change` gets both by name, tensors with their type's number."""
    reader = GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {one.name: (one.data.copy(), one.tensor_type) for one in reader.tensors}
    change(values, tensors)
    writer = GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        add_value(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_nan(tensors, name, value=math.nan):
    data, kind = tensors[name]
    data.reshape(-1)[5] = value
    tensors[name] = data, kind


QWEN = "qwen35"
ODD_GGUF = {
    "a norm of bytes": (
        lambda v, t: t.update(
            {"output_norm.weight": (t["output_norm.weight"][0].astype(np.int8), GGMLQuantizationType.I8)}
        ),
        "tensor output_norm.weight is I8",
    ),
    "a norm that is no number": (lambda v, t: _with_nan(t, "output_norm.weight"), "1 not finite: model"),
    "a matrix that is infinite": (lambda v, t: _with_nan(t, "blk.0.ffn_up.weight", math.inf), "1 not finite: model"),
    "an epsilon that is no number": (
        lambda v, t: v.update({f"{QWEN}.attention.layer_norm_rms_epsilon": math.nan}),
        "layer_norm_rms_epsilon is nan, no finite number",
    ),
    "angles without end": (
        lambda v, t: v.update({f"{QWEN}.rope.freq_base": math.inf}),
        "rope.freq_base is inf, no finite number",
    ),
    "a list with an odd number": (
        lambda v, t: v.update({f"{QWEN}.made.up": [1.0, math.nan]}),
        "made.up is nan, no finite number",
    ),
    "a template that is cut": (
        lambda v, t: v.update({"tokenizer.chat_template": v["tokenizer.chat_template"][:-10]}),
        "tokenizer.chat_template, line ",
    ),
}


@pytest.mark.parametrize("what", ODD_GGUF)
def test_odd_numbers_and_templates_of_a_gguf_file_are_refused_in_one_line(gguf, tmp_path, what):
    bad, (change, words) = tmp_path / "bad.gguf", ODD_GGUF[what]
    shutil.copy(gguf / "target.gguf", bad)
    patched(bad, change)
    assert words in generate(bad, names=bad)


def test_odd_rotary_frequencies_of_a_gguf_file_are_refused_in_one_line(tmp_path):
    """They are no weight, but a tensor that counts as metadata."""
    bad = tmp_path / "bad.gguf"
    assert CliRunner().invoke(app, ["export-gguf", "--model", "tiny-gemma", "--out", str(bad)]).exit_code == 0
    patched(bad, lambda values, tensors: _with_nan(tensors, "rope_freqs.weight"))
    assert "tensor rope_freqs.weight holds numbers that are nan or infinite" in generate(bad, names=bad)


def test_a_file_that_is_patched_without_a_change_loads(gguf, tmp_path):
    shutil.copy(gguf / "target.gguf", tmp_path / "same.gguf")
    patched(tmp_path / "same.gguf", lambda values, tensors: None)
    args = ["generate", "--prompt", "Hello", "--max-tokens", "2", "--model", str(tmp_path / "same.gguf")]
    assert CliRunner().invoke(app, args).exit_code == 0


@pytest.fixture(scope="module")
def spare(tmp_path_factory) -> Path:
    return copied(SMALLEST, tmp_path_factory.mktemp("spare"))


@settings(max_examples=25)
@given(data=st.data())
def test_a_model_cut_anywhere_is_loaded_or_refused_in_words(spare, data):
    """Any file of it, at any place; weights that are not whole are never loaded."""
    names = sorted(path.name for path in (EMBEDDED / SMALLEST).iterdir() if path.name != "README.md")
    name = data.draw(st.sampled_from([SINGLE, *names]))
    whole = (EMBEDDED / SMALLEST / name).read_bytes()
    (spare / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    try:
        load_model(str(spare), Settings(weights="fp32"))
        assert name not in (SINGLE, "config.json", "tokenizer.json")
    except ModelError as error:
        assert str(spare) in str(error) and "\n" not in str(error)
    finally:
        (spare / name).write_bytes(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has mapped is listed on Linux alone")
@pytest.mark.parametrize("name", ("tiny-qwen", "tiny-step", "tiny-gemma", "target.gguf"))
def test_files_that_are_cut_while_a_model_runs_take_nothing_with_them(name, tmp_path, gguf):
    """Nothing of a loaded model lies in its files: a process that reads a mapped file behind its new end is killed."""
    place = tmp_path / name
    if place.suffix:
        files = [Path(shutil.copy(gguf / one, tmp_path)) for one in (name, "mmproj.gguf")]
    else:
        files = [copied(name, tmp_path) / SINGLE]
    assistant = [copied("tiny-gemma-assistant", tmp_path)] if name == "tiny-gemma" else []
    engine = Engine.load(str(place), Settings(try_drafts=False), draft_model=next(map(str, assistant), None))
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    request = Request.from_prompt("What is here?", [gguf / "red.png"], sampling=sampling)
    before = engine.generate(request)[0]
    for path in (*files, *(folder / SINGLE for folder in assistant)):
        os.truncate(path, 100)
    fresh = engine.with_target(engine.target)
    assert before.error is None and fresh.generate(request)[0].token_ids == before.token_ids
