"""Text decoders as GGUF: files give what the checkpoints give that they were written from, as targets and as drafts."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import save_file
from support.dense import LLAMA3, PLAIN, YARN, DenseSizes, sizes, write_dense
from support.gemma import MIXED as MIXTURE4
from support.gemma import SMALL as SHARED4
from support.gemma import write_gemma4
from support.gguf import TOKENIZER_FILES, largest_difference, load, logits, question
from support.step_checkpoints import MIXED, write_step3p7
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.models.base import ModelError
from foreglance.models.gguf.export import add_value, export
from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.folder import GgufTensors, lay_out
from foreglance.models.gguf.tokens import SPACE
from foreglance.models.registry import load_tokenizer, pick_weights
from foreglance.models.weights import SINGLE, Weights, find_model, stored_format
from foreglance.ops.numerics import kernels_are_native

CLOSE = 1e-3
LLAMA_CPP = importlib.util.find_spec("xllamacpp") is not None
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA = sizes("llama", LlamaConfig, vocab_size=1536, rope_parameters=PLAIN, num_shards=2)
BIASED = sizes(
    "llama with biases and scaled frequencies", LlamaConfig, tied=True, vocab_size=1536, attention_bias=True,
    mlp_bias=True, num_key_value_heads=4, head_dim=24, rope_parameters=LLAMA3, seed=2,
)  # fmt: skip
QWEN3 = sizes(
    "qwen3", Qwen3Config, tied=True, vocab_size=1536, head_dim=32, rope_parameters=YARN, stored=torch.bfloat16, seed=3
)
GEMMA3 = sizes(
    "gemma3", Gemma3TextConfig, tied=True, vocab_size=1536, num_hidden_layers=4, num_key_value_heads=1,
    sliding_window=11, query_pre_attn_scalar=16,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"sliding_attention": PLAIN, "full_attention": {**LINEAR, "rope_theta": 100_000.0}}, seed=5,
)  # fmt: skip
ALL = (LLAMA, BIASED, QWEN3, GEMMA3)
ASK_LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp
given = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = given["file"], 256, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
ask = {"max_tokens": given["count"], "temperature": 0, "logprobs": 1, "ignore_eos": True, "cache_prompt": False}
said = server.handle_completions(ask | {"prompt": given["prompt"]})
def read(text):
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    asked = urllib.request.Request(server.listening_address + "/tokenize", body, {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(asked).read())["tokens"]
chosen = said["choices"][0]["logprobs"] or {"content": []}  # none where the text ends inside a letter
print("ANSWER", json.dumps({"ids": [one["id"] for one in chosen["content"]],
                            "read": [read(text) for text in given["texts"]]}))
"""
TEXTS = (
    "<|im_start|>user\nDescribe this scene: a red circle.<|im_end|>\n<|im_start|>assistant\n",
    "What's in 64 pictures?\n\n  Über 3 naïve 12345  \t x", "  two  spaces", "",
)  # fmt: skip


def write(folder: Path, sizes: DenseSizes) -> Path:
    """A tiny random checkpoint with the tokenizer of tiny-qwen, whose pre-tokenizer GGUF has a name for."""
    write_dense(folder, sizes)
    for name in TOKENIZER_FILES:
        shutil.copy(find_model("tiny-qwen") / name, folder / name)
    return folder


def said_by_llama_cpp(file: Path, prompt: list[int], count: int = 24, texts: Sequence[str] = ()) -> dict:
    """In a process of its own: `ids` that llama.cpp picks greedily behind a prompt, and as what it `read` texts."""
    given = json.dumps({"file": str(file), "prompt": prompt, "count": count, "texts": texts})
    done = subprocess.run([sys.executable, "-c", ASK_LLAMA_CPP, given], capture_output=True, text=True, timeout=120)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr[-2000:]
    return json.loads(answers[0].removeprefix("ANSWER "))


def completed(engine, prompt: list[int], count: int = 24) -> list[int]:
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    (result,) = engine.generate(Request.raw(prompt, sampling=sampling, speculation=Speculation("none")))
    return list(result.token_ids)


def write_with_tokenizer(out: Path, folder: Path, values: dict) -> None:
    """The file of a checkpoint whose tokenizer is replaced by `values`."""
    export(folder, out.with_suffix(".first"), kind="f32")
    old = {key: None for key in GgufFile(out.with_suffix(".first")).meta if key.startswith("tokenizer.")}
    rewrite(out, out.with_suffix(".first"), old | values)


def rewrite(
    out: Path,
    source: Path,
    changes: dict,
    stored: Callable = lambda name, values: (values, GGMLQuantizationType.F32),
) -> None:
    """A file of llama with other values (None: none), and its tensors as `stored` gives them."""
    first, writer = GgufFile(source), GGUFWriter(out, "llama")
    for key, value in (dict(first.meta) | changes).items():
        if key != "general.architecture" and value is not None:
            add_value(writer, key, value)
    for name in first.tensors:
        values, kind = stored(name, first.tensor(name).float().numpy())
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    export(write(folder / "hub", LLAMA), folder / "m.gguf", kind="f32")
    return folder / "m.gguf"


@pytest.mark.parametrize("sizes", ALL, ids=lambda sizes: sizes.name)
def test_random_weights_give_the_same_logits(sizes, tmp_path):
    folder = write(tmp_path / "hub", sizes)
    export(folder, tmp_path / "m.gguf", kind="f32")
    hub, gguf = load(folder), load(tmp_path / "m.gguf")
    assert largest_difference(logits(hub, False), logits(gguf, False)) < CLOSE
    (ours,), (theirs,) = (engine.generate(question(False)) for engine in (hub, gguf))
    assert theirs.token_ids == ours.token_ids and gguf.target.spec.family == sizes.config.model_type


def test_rows_of_llama_heads_lie_in_the_pairs_that_llama_cpp_turns(tmp_path):
    """Facts of its converter, restated: row i of a head's first half and of its second one lie side by side."""
    folder = write(tmp_path / "hub", BIASED)
    export(folder, tmp_path / "m.gguf", kind="f32")
    file, hub, order = GgufFile(tmp_path / "m.gguf"), Weights(folder), [i // 2 + 12 * (i % 2) for i in range(24)]
    for name in ("q", "k"):
        for kind, shape in (("weight", (96, 64)), ("bias", (96,))):
            ours = hub.take(f"model.layers.1.self_attn.{name}_proj.{kind}", *shape).float()
            stored = file.tensor(f"blk.1.attn_{name}.{kind}").reshape(shape)
            assert torch.equal(stored.unflatten(0, (4, 24)), ours.unflatten(0, (4, 24))[:, order])
    factors = file.tensor("rope_freqs.weight")
    assert factors.shape == (12,) and factors[0] == 1 and torch.allclose(factors[-1], torch.tensor(8.0))


def test_a_text_decoder_drafts_from_its_file(tmp_path):
    export(find_model("tiny-qwen"), tmp_path / "qwen.gguf", tmp_path / "mmproj.gguf")
    export(find_model("tiny-text"), tmp_path / "text.gguf")
    engine = load(tmp_path / "qwen.gguf", draft_model=str(tmp_path / "text.gguf"))
    hub = load("tiny-qwen", draft_model="tiny-text")
    for with_picture in (True, False):
        (plain,) = engine.generate(question(with_picture, 48))
        (drafted,), (ours,) = (one.generate(question(with_picture, 48, depth=3)) for one in (engine, hub))
        assert drafted.token_ids == plain.token_ids == ours.token_ids
        assert drafted.draft.kind == "model" and sum(drafted.timings.accepted) > 10
        assert drafted.timings.accepted == ours.timings.accepted


def test_the_factors_of_step_are_taken_from_its_file(tmp_path):
    """Half of each head of a full layer turns, so half of the factors is used."""
    write_step3p7(tmp_path / "hub", replace(MIXED, vocab=1536))
    for name in TOKENIZER_FILES:
        shutil.copy(find_model("tiny-step") / name, tmp_path / "hub" / name)
    export(tmp_path / "hub", tmp_path / "m.gguf", kind="f32")
    factors = GgufFile(tmp_path / "m.gguf").tensor("rope_freqs.weight")
    assert factors.shape == (8,) and factors[3] == 2 and (factors[4:] == 1).all()
    hub, gguf = load(tmp_path / "hub"), load(tmp_path / "m.gguf")
    assert largest_difference(logits(hub, False), logits(gguf, False)) < CLOSE
    (ours,), (theirs,) = (engine.generate(question(False, depth=3)) for engine in (hub, gguf))
    assert theirs.token_ids == ours.token_ids and theirs.timings.accepted == ours.timings.accepted


REFUSED = (
    (
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        "no sliding layers of qwen3",
    ),
    (Gemma3TextConfig, {"query_pre_attn_scalar": 40}, r"by 16 \*\* -0.5, the checkpoint by 40 \*\* -0.5"),
    (LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}, "gates the MLP of llama with silu, this checkpoint's is gelu"),
    (LlamaConfig, {"rope_parameters": YARN | {"attention_factor": 2.0}}, "no words for these rotary settings"),
    (
        Gemma3TextConfig,
        {"query_pre_attn_scalar": 16, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        "full layer at the end of each period",
    ),
)


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_what_llama_cpp_would_compute_in_another_way_is_not_written(kind, options, words, tmp_path):
    folder = write(tmp_path / "hub", sizes("odd", kind, vocab_size=1536, **options))
    with pytest.raises(ModelError, match=words):
        export(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"llama.expert_count": 8}, "a mixture of experts of architecture 'llama' is not supported"),
        ({"llama.rope.dimension_count": 8}, "that turn in part"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling 'longrope'"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "layers of different sizes"),
        ({"tokenizer.ggml.pre": "falcon"}, "pre-tokenizer 'falcon' is not supported"),
    ),
)
def test_what_is_computed_in_no_family_here_is_not_read(change, words, llama_file, tmp_path):
    rewrite(tmp_path / "m.gguf", llama_file, change)
    with pytest.raises(ModelError, match=words):
        lay_out(tmp_path / "m.gguf")


def test_a_file_of_mixed_types_keeps_what_each_tensor_holds(tmp_path):
    """As published ones are: most matrices in one K-quant, some in a larger one, and floats."""
    folder = write(
        tmp_path / "hub",
        sizes("wide", LlamaConfig, vocab_size=1536, hidden_size=256, intermediate_size=256, head_dim=64),
    )
    export(folder, tmp_path / "f32.gguf", kind="f32")
    kinds = {"token_embd": "Q4_K", "ffn_up": "Q4_K", "output": "Q6_K", "ffn_gate": "Q4_0", "attn_v": "Q8_0"}
    kinds |= {"attn_q": "BF16", "attn_k": "F16"}
    rng = np.random.default_rng(0)

    def stored(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        kind = GGMLQuantizationType[kinds.get(name.split(".")[-2], "F32") if values.ndim > 1 else "F32"]
        if kind.name.endswith("_K"):  # no one writes these here: blocks with small scales, whatever they say
            raw = rng.integers(0, 256, quants.quant_shape_to_byte_shape(values.shape, kind)).astype(np.uint8)
            blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
            half = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
            blocks[:, slice(-2, None) if kind.name == "Q6_K" else slice(0, 2)] = half
            blocks[:, 2:4] = half if kind.name == "Q4_K" else blocks[:, 2:4]
            return raw, kind
        return (values, kind) if kind.name == "F32" else (quants.quantize(values, kind), kind)

    rewrite(tmp_path / "m.gguf", tmp_path / "f32.gguf", {}, stored)
    laid = lay_out(tmp_path / "m.gguf")
    assert {one.kind for one in GgufFile(tmp_path / "m.gguf").tensors.values()} == {*kinds.values(), "F32"}
    source = GgufTensors(laid)
    save_file({name: source.tensor(name).float().contiguous() for name in [*source.keys()]}, folder / SINGLE)
    hub, gguf = load(folder), load(laid)
    assert largest_difference(logits(hub, False), logits(gguf, False)) < CLOSE
    assert stored_format(laid) == "q4" and pick_weights("auto", laid) == ("q4" if kernels_are_native() else "fp32")
    assert f"{pick_weights('auto', laid)} weights" in str(Engine.load(str(laid), Settings()).self_test)


def with_split(folder: Path, name: str) -> Path:
    """A checkpoint of tiny-text's with the tokenizer of another family. Llama 3's takes a word that it knows as it is,
    also where no merges lead to it."""
    shutil.copytree(find_model("tiny-text"), folder)
    body = json.loads((folder / "tokenizer.json").read_text())
    body |= {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[name]}}
    if name == "llama-bpe":
        fewer = [merge for i, merge in enumerate(body["model"]["merges"]) if i % 3]
        body |= {"post_processor": STARTS_WITH_END, "model": body["model"] | {"ignore_merges": True, "merges": fewer}}
    (folder / "tokenizer.json").write_text(json.dumps(body))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | AS_WRITTEN))
    return folder


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
THREES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
THREES += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": THREES}, "behavior": "Isolated", "invert": False},
        LEVEL | {"use_regex": False},
    ],
    "smollm": [{"type": "Digits", "individual_digits": True}, LEVEL | {"use_regex": True}],
}
AS_WRITTEN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
STARTS_WITH_END = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


@pytest.mark.parametrize("name", SPLITS)
def test_pre_tokenizers_of_llama_and_smollm_come_back_from_a_file(name, tmp_path):
    folder, starts = with_split(tmp_path / "hub", name), name == "llama-bpe"
    export(folder, tmp_path / "m.gguf")
    assert GgufFile(tmp_path / "m.gguf").need("tokenizer.ggml.pre") == name
    ours, theirs = load_tokenizer(folder), load_tokenizer(lay_out(tmp_path / "m.gguf"))
    assert ours.encode("12345") != load_tokenizer(find_model("tiny-text")).encode("12345") or name == "smollm"
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
        assert (theirs.encode(text)[:1] == [0]) == starts
    if LLAMA_CPP:
        assert said_by_llama_cpp(tmp_path / "m.gguf", [300], 1, TEXTS)["read"] == [ours.encode(t) for t in TEXTS]


def pieces_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: of all neighbours that make a piece, those of the best score join, the leftmost first."""
    parts = list(text)
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("prefixed", (True, False))
def test_scores_of_sentencepiece_give_its_pieces(prefixed, tmp_path):
    """As Llama 2 (a mark before the first word) and Gemma-3 (none) have it; llama.cpp reads the texts alike."""
    words = ("the", "then", "other", "he", "re", "three", "tree", "thee", "her", "there")
    made = sorted({f"{SPACE}{w}"[a:b] for w in words for a in range(len(w)) for b in range(a + 2, len(w) + 2)})
    made = [piece for i, piece in enumerate(made) if i % 3]  # so that the order decides where a word is cut
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz.\n"]
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_of, *letters, *made]
    order = np.random.default_rng(1).permutation(len(made)) + 1.0
    scores = [0.0] * (3 + 256 + len(letters)) + [-float(n) for n in order]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(made))
    sized = replace(LLAMA, options=(*(o for o in LLAMA.options if o[0] != "vocab_size"), ("vocab_size", len(tokens))))
    write_dense(tmp_path / "hub", sized)
    for name in TOKENIZER_FILES:
        shutil.copy(find_model("tiny-qwen") / name, tmp_path / "hub" / name)
    spm = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": prefixed,
    }  # fmt: skip
    write_with_tokenizer(tmp_path / "m.gguf", tmp_path / "hub", spm)
    tokenizer = load_tokenizer(lay_out(tmp_path / "m.gguf"))
    plain = ("the other three trees", "then  there", "her tree.\nthree", "e")
    known = dict(zip(tokens, scores, strict=True))
    differ = 0
    for text in plain:
        marked = (" " + text if prefixed else text).replace(" ", SPACE)
        ids = tokenizer.encode(text)
        pieces = pieces_by_score(marked, known)
        assert ids == [1, *(tokens.index(piece) for piece in pieces)]
        differ += pieces != pieces_by_score(marked, {piece: -score for piece, score in known.items()})
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert differ, "the order of scores decides nothing here"
    assert tokenizer.decode(tokenizer.encode("ü the"), skip_special_tokens=True) == "ü the"
    if LLAMA_CPP:
        read = said_by_llama_cpp(tmp_path / "m.gguf", [270], 1, (*plain, "ü the"))["read"]
        assert read == [tokenizer.encode(text) for text in (*plain, "ü the")]


@pytest.mark.skipif(not LLAMA_CPP, reason="xllamacpp is not installed (pip install foreglance[peers])")
@pytest.mark.parametrize("sizes", ALL, ids=lambda sizes: sizes.name)
def test_llama_cpp_picks_the_same_tokens(sizes, tmp_path):
    folder, prompt = write(tmp_path / "hub", sizes), list(range(300, 340))
    export(folder, tmp_path / "m.gguf", kind="f32")
    assert said_by_llama_cpp(tmp_path / "m.gguf", prompt, 24)["ids"] == completed(load(folder), prompt, 24)


# Of Gemma-4: stretched positions in a mixture, and shared layers behind a sliding and a full one, as llama.cpp expects.
GEMMA4 = (replace(MIXTURE4, vocab=1536), replace(SHARED4, layers="SSFSFSSF", shared=3, vocab=1536))


@pytest.mark.parametrize("sizes", GEMMA4, ids=lambda sizes: sizes.name)
def test_gemma4_of_other_shapes_is_read_alike_here_and_there(sizes, tmp_path):
    write_gemma4(tmp_path / "hub", sizes)
    for name in TOKENIZER_FILES:
        shutil.copy(find_model("tiny-gemma") / name, tmp_path / "hub" / name)
    export(tmp_path / "hub", tmp_path / "m.gguf", kind="f32")
    hub, gguf = load(tmp_path / "hub"), load(tmp_path / "m.gguf")
    assert largest_difference(logits(hub, False), logits(gguf, False)) < CLOSE
    if LLAMA_CPP:
        prompt = torch.randint(300, 1500, (40,), generator=torch.Generator().manual_seed(22)).tolist()
        assert said_by_llama_cpp(tmp_path / "m.gguf", prompt)["ids"] == completed(hub, prompt)


@pytest.mark.skipif(not LLAMA_CPP, reason="xllamacpp is not installed (pip install foreglance[peers])")
def test_llama_cpp_goes_on_with_a_text_as_tiny_text_does(tmp_path):
    export(find_model("tiny-text"), tmp_path / "m.gguf")
    engine = load("tiny-text")
    prompt = engine.encode(TEXTS[0])
    said = said_by_llama_cpp(tmp_path / "m.gguf", prompt, 40, TEXTS)
    assert said["ids"] == completed(engine, prompt, 40)
    assert said["read"] == [engine.encode(text) for text in TEXTS]
