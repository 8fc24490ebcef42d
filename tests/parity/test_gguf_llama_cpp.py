"""llama.cpp reads what is exported and says the same: plainly and with drafts, about a picture. Without the wheel, what
it expects of single tensors is held by `test_tensors_are_laid_out_as_llama_cpp_expects`."""

from __future__ import annotations

import importlib.util
import tempfile

import pytest
import torch
from support.gguf import load

from foreglance.bench import peers
from foreglance.bench.prompts import image_cases
from foreglance.models.gguf.export import export
from foreglance.models.gguf.file import GgufFile
from foreglance.models.weights import Weights, find_model
from foreglance.request import SamplingParams, Speculation

INSTALLED = importlib.util.find_spec("xllamacpp") is not None


@pytest.mark.skipif(not INSTALLED, reason="xllamacpp is not installed (pip install foreglance[peers])")
@pytest.mark.parametrize(("model", "image_rows"), (("tiny-qwen", 16), ("tiny-step", 0)))
def test_the_same_text_and_drafts_that_stand(model, image_rows, tmp_path):
    export(find_model(model), tmp_path / "m.gguf", tmp_path / "mmproj.gguf")
    files = peers.Files({"f16": tmp_path / "m.gguf"}, tmp_path / "mmproj.gguf")
    (case,) = image_cases(1)
    (ours,) = load(model).generate(case.request(SamplingParams(max_tokens=32, ignore_eos=True), Speculation("none")))
    job = peers.job_of(case, 32)
    for one in peers.contenders(model, [], 1, [0, 3], ["llama.cpp"], files, 512, image_rows):
        with tempfile.TemporaryFile() as log:
            worker = peers.Worker(one.given, log)
            said = worker.run(job | {"draft": one.draft, "depth": one.depth})
            worker.close()
        assert said["text"].strip() == ours.text.strip()
        assert said["drafted"] == 0 if one.given["depth"] == 0 else said["accepted"] > said["drafted"] / 2


def test_tensors_are_laid_out_as_llama_cpp_expects(tmp_path):
    """Facts of its converter and loader, restated: two key heads, four value heads of 64."""
    folder = find_model("tiny-qwen")
    export(folder, tmp_path / "m.gguf", tmp_path / "mmproj.gguf", kind="f32")
    file, hub = GgufFile(tmp_path / "m.gguf"), Weights(folder)

    def taken(name: str) -> torch.Tensor:
        name = f"model.language_model.layers.0.{name}"
        return hub.take(name, *hub.shape(name)).float()

    order = [0, 2, 1, 3]  # head of value r of key k: k * 2 + r here, r * 2 + k there
    assert torch.allclose(file.tensor("blk.0.ssm_a"), -taken("linear_attn.A_log").exp()[order])
    assert torch.equal(file.tensor("blk.0.ssm_dt.bias"), taken("linear_attn.dt_bias")[order])
    assert torch.equal(file.tensor("blk.0.ssm_beta.weight"), taken("linear_attn.in_proj_b.weight")[order])
    z = taken("linear_attn.in_proj_z.weight").view(4, 64, -1)[order].flatten(0, 1)
    assert torch.equal(file.tensor("blk.0.attn_gate.weight"), z)
    qkv, conv = taken("linear_attn.in_proj_qkv.weight"), taken("linear_attn.conv1d.weight")[:, 0]
    for name, whole in (("attn_qkv.weight", qkv), ("ssm_conv1d.weight", conv)):
        values = whole[256:].view(4, 64, -1)[order].flatten(0, 1)
        assert torch.equal(file.tensor(f"blk.0.{name}"), torch.cat([whole[:256], values]))
    out = taken("linear_attn.out_proj.weight").view(-1, 4, 64)[:, order].flatten(1)
    assert torch.equal(file.tensor("blk.0.ssm_out.weight"), out)
    assert torch.equal(file.tensor("blk.0.attn_norm.weight"), taken("input_layernorm.weight") + 1)
    assert torch.equal(file.tensor("blk.0.ssm_norm.weight"), taken("linear_attn.norm.weight"))
    for ours, theirs in (
        ("pre_fc_norm_embedding", "enorm"),
        ("pre_fc_norm_hidden", "hnorm"),
        ("norm", "shared_head_norm"),
    ):
        assert torch.equal(file.tensor(f"blk.6.nextn.{theirs}.weight"), hub.take(f"mtp.{ours}.weight", 192).float() + 1)
    values = {key.removeprefix("qwen35."): value for key, value in file.meta.items() if key.startswith("qwen35.")}
    assert values["block_count"] == 7 and values["nextn_predict_layers"] == 1
    assert values["rope.dimension_sections"] == [6, 5, 5, 0] and values["full_attention_interval"] == 3
    assert values["attention.recurrent_layers"] == [True, True, False, True, True, False, False]
    assert {f"blk.6.nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")} <= set(
        file.tensors
    )
    assert file.need("tokenizer.ggml.pre") == "qwen35" and len(file.need("tokenizer.ggml.tokens")) == 1536
    tower = GgufFile(tmp_path / "mmproj.gguf")
    assert tower.need("clip.projector_type") == "qwen3vl_merger" and tower.need("clip.vision.image_size") == 64
    assert tower.tensors["v.patch_embd.weight"].shape == tower.tensors["v.patch_embd.weight.1"].shape == (128, 3, 8, 8)
