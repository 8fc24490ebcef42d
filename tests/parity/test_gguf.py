"""A GGUF file gives what the checkpoint gives that it was written from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from support.gguf import GROUPED, MIXTURE, ODD, largest_difference, load, logits, question, write_checkpoint

from foreglance.models.base import ModelError
from foreglance.models.gguf.export import export
from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.folder import holds_draft_alone, lay_out, names_of
from foreglance.models.registry import load_tokenizer, pick_weights
from foreglance.models.weights import find_model, num_weights, stored_format
from foreglance.ops.formats import quantise
from foreglance.ops.numerics import kernels_are_native

CLOSE = 1e-3


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """tiny-qwen: model with head, model and head apart, tower; Gemma: model, tower, assistant."""
    folder = tmp_path_factory.mktemp("gguf")
    export(find_model("tiny-qwen"), folder / "whole.gguf", folder / "mmproj-qwen.gguf")
    export(find_model("tiny-qwen"), folder / "trunk.gguf", draft=folder / "head.gguf", kind="f32")
    gemma = folder / "gemma"
    gemma.mkdir()
    export(find_model("tiny-gemma"), gemma / "gemma.gguf", gemma / "mmproj.gguf")
    export(find_model("tiny-gemma-assistant"), gemma / "assistant.gguf")
    return folder


@pytest.mark.parametrize("sizes", (GROUPED, ODD, MIXTURE), ids=lambda sizes: sizes.name)
def test_random_weights_give_the_same_logits_and_drafts(sizes, tmp_path):
    folder = write_checkpoint(tmp_path / "hub", sizes)
    export(folder, tmp_path / "m.gguf", tmp_path / "mmproj.gguf", kind="f32")
    hub, gguf = load(folder), load(tmp_path / "m.gguf")
    assert largest_difference(logits(hub), logits(gguf)) < CLOSE
    (ours,), (theirs,) = (engine.generate(question(depth=3)) for engine in (hub, gguf))
    assert theirs.draft.kind == "mtp" and sum(theirs.timings.drafted)
    assert theirs.timings.accepted == ours.timings.accepted and theirs.token_ids == ours.token_ids


def test_half_precision_is_kept(files):
    hub, gguf = load("tiny-qwen"), load(files / "whole.gguf")
    assert largest_difference(logits(hub), logits(gguf)) < CLOSE
    stored = GgufFile(files / "whole.gguf").tensor("blk.0.attn_qkv.weight")
    assert stored.dtype == torch.float16


def test_a_head_in_a_file_of_its_own_joins_the_target(files):
    assert holds_draft_alone(files / "head.gguf") and not holds_draft_alone(files / "trunk.gguf")
    model, second = names_of(str(files / "trunk.gguf"), files / "mmproj-qwen.gguf", str(files / "head.gguf"))
    assert second is None
    (ours,), (theirs,) = (engine.generate(question(depth=2)) for engine in (load("tiny-qwen"), load(model)))
    assert theirs.token_ids == ours.token_ids and theirs.timings.accepted == ours.timings.accepted
    assert load(files / "trunk.gguf").best_draft == "none"


def test_gemma_and_its_assistant(files):
    hub = load("tiny-gemma", draft_model="tiny-gemma-assistant")
    gguf = load(files / "gemma" / "gemma.gguf", draft_model=str(files / "gemma" / "assistant.gguf"))
    assert largest_difference(logits(hub), logits(gguf)) < CLOSE
    (ours,), (theirs,) = (engine.generate(question(depth=3)) for engine in (hub, gguf))
    assert theirs.draft.kind == "assistant" and theirs.timings.accepted == ours.timings.accepted
    assert theirs.token_ids == ours.token_ids


def test_step_and_its_three_modules(tmp_path):
    export(find_model("tiny-step"), tmp_path / "step.gguf", tmp_path / "mmproj.gguf", kind="f32")
    hub, gguf = load("tiny-step"), load(tmp_path / "step.gguf")
    assert largest_difference(logits(hub), logits(gguf)) < CLOSE
    (ours,), (theirs,) = (engine.generate(question(depth=3)) for engine in (hub, gguf))
    assert len(theirs.timings.accepted) == 3 and theirs.timings.accepted == ours.timings.accepted
    assert theirs.token_ids == ours.token_ids


def test_the_tokenizer_comes_from_the_file(files):
    ours, theirs = load_tokenizer(find_model("tiny-qwen")), load_tokenizer(lay_out(files / "whole.gguf"))
    assert theirs.get_vocab() == ours.get_vocab()
    assert (theirs.eos_token, theirs.pad_token) == (ours.eos_token, ours.pad_token)
    assert theirs.all_special_ids == ours.all_special_ids and theirs.chat_template == ours.chat_template
    for text in ("What's in 64 pictures?\n\n  Über 3 naïve e\u0301 12", "<|im_start|>user\nhi<|im_end|>", "  \n x"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text))


def test_a_vocabulary_with_ids_that_no_token_has(tmp_path):
    folder = write_checkpoint(tmp_path / "hub", replace(GROUPED, vocab=1600))
    export(folder, tmp_path / "m.gguf")
    laid = lay_out(tmp_path / "m.gguf")
    assert load_tokenizer(laid).get_vocab() == load_tokenizer(folder).get_vocab()
    assert load(laid).target.spec.vocab_size == 1600


@pytest.mark.parametrize("kind", ("q8_0", "q4_0", "bf16"))
def test_a_type_is_written_and_taken_apart_as_the_format_says(kind, tmp_path):
    export(find_model("tiny-qwen"), tmp_path / "m.gguf", kind=kind)
    file, name = GgufFile(tmp_path / "m.gguf"), "blk.1.ffn_down.weight"
    assert file.tensors[name].kind == kind.upper()
    assert file.tensors["blk.1.attn_norm.weight"].kind == "F32"
    restored = file.tensor(name).float().numpy()
    again = quants.quantize(restored, GGMLQuantizationType[kind.upper()])
    back = quants.dequantize(again, GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(back, restored)
    (result,) = load(tmp_path / "m.gguf").generate(question(with_picture=False, max_tokens=4))
    assert result.error is None and len(result.token_ids) == 4


@pytest.mark.parametrize(("kind", "kept"), (("f32", "fp32"), ("bf16", "fp16"), ("q8_0", "q8"), ("q4_0", "q4")))
def test_auto_keeps_the_precision_of_the_file(kind, kept, tmp_path):
    export(find_model("tiny-qwen"), tmp_path / "m.gguf", kind=kind)
    laid = lay_out(tmp_path / "m.gguf")
    assert stored_format(laid) == kept and stored_format(find_model("tiny-qwen")) is None
    assert 2_500_000 < num_weights(laid) < 4_300_000
    assert pick_weights("auto", laid) == (kept if kernels_are_native() or kept.startswith("fp") else "fp32")
    assert pick_weights("fp16", laid) == "fp16"


@pytest.mark.parametrize(("kind", "bits"), (("q8_0", 8), ("q4_0", 4)))
def test_quantised_blocks_go_through_our_own_quantiser_unchanged(kind, bits, tmp_path):
    export(find_model("tiny-qwen"), tmp_path / "m.gguf", kind=kind)
    restored = GgufFile(tmp_path / "m.gguf").tensor("blk.0.ffn_up.weight")
    assert torch.equal(quantise(restored, bits).restored(), restored)


def test_what_a_file_is_for_is_said(files, tmp_path):
    with pytest.raises(ModelError, match="draft head alone; give the target with --model"):
        lay_out(files / "head.gguf")
    with pytest.raises(ModelError, match="vision tower, give it with --mmproj"):
        lay_out(files / "mmproj-qwen.gguf")
    with pytest.raises(ModelError, match="no mmproj file of a Gemma-4 tower"):
        lay_out(files / "gemma" / "gemma.gguf", mmproj=files / "mmproj-qwen.gguf")
    with pytest.raises(ModelError, match="no draft head of qwen35"):
        lay_out(files / "trunk.gguf", draft=files / "gemma" / "assistant.gguf")
    with pytest.raises(ModelError, match="which is no GGUF file"):
        names_of("tiny-qwen", files / "mmproj-qwen.gguf", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(ModelError, match=r"'mistral' cannot be exported; qwen3_5, .*gemma3_text can"):
        export(tmp_path, tmp_path / "x.gguf")


def test_a_tensor_that_no_name_is_known_for_is_named(files, tmp_path):
    raw = (files / "whole.gguf").read_bytes()
    (tmp_path / "odd.gguf").write_bytes(raw.replace(b"blk.3.ffn_up.weight", b"blk.3.ffn_UP.weight"))
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight.*left over: blk\.3\.ffn_UP\.weight"):
        load(tmp_path / "odd.gguf")


def test_two_sizes_of_delta_net_heads_cannot_be_written(tmp_path):
    folder = write_checkpoint(tmp_path / "hub", replace(GROUPED, v_size=8))
    with pytest.raises(ModelError, match="one size for key and value heads"):
        export(folder, tmp_path / "m.gguf")


def test_the_same_files_are_laid_out_once(files):
    first = lay_out(files / "whole.gguf")
    assert lay_out(files / "whole.gguf") == first
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen3_5"
