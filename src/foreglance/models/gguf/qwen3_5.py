"""Qwen3.5 in GGUF: architectures `qwen35` and `qwen35moe`, MTP block and vision tower.

Facts and where they come from (llama.cpp `conversion/qwen.py`, `conversion/qwen3vl.py`, `src/models/qwen35.cpp`):
- zero-centred norms are stored plus one, the delta net's gated norm as it is; A_log is stored as -exp(A_log);
- value heads of the delta net are tiled over key heads, not grouped by them;
- the MTP block is one more layer behind the trunk with `nextn` tensors; in a file of its own the trunk's are left out;
- the patch convolution of the tower is stored as one per frame.
"""

from __future__ import annotations

from typing import Any

from foreglance.models.base import ModelError
from foreglance.models.gguf.family import Family, Heads, Tower, num_heads
from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.naming import (
    AS_IT_IS,
    FRAMES,
    HALVES,
    PLUS_ONE,
    RATE,
    SQUEEZED,
    Change,
    Speller,
    Spelling,
    both,
    tiled,
)  # fmt: skip

DENSE, MOE = "qwen35", "qwen35moe"
PROJECTOR = "qwen3vl_merger"
TRUNK, TOWER, MTP = "model.language_model.", "model.visual.", "mtp."
MODEL_TYPES = {DENSE: "qwen3_5", MOE: "qwen3_5_moe"}
IMAGE_TAGS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TOKENS_AN_IMAGE = (8, 4096)  # what llama.cpp keeps images of this tower between, if the file does not say
ATTENTION = {
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
}
MLP = {
    "gate_proj.weight": "ffn_gate.weight",
    "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight",
}
MIXTURE = {
    "gate.weight": "ffn_gate_inp.weight",
    "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
TOWER_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def config_of(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """The hub config that a file's metadata amounts to, without the tower."""
    arch = file.need("general.architecture")

    def need(key: str) -> Any:
        return file.need(f"{arch}.{key}")

    heads = num_heads(file)
    num_layers, v_heads = need("block_count") - heads, need("ssm.time_step_rank")
    tied = "output.weight" not in file.tensors
    text = {
        "model_type": "qwen3_5_text" if arch == DENSE else "qwen3_5_moe_text",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": num_layers,
        "layer_types": [_layer_type(file, i) for i in range(num_layers)],
        "num_attention_heads": need("attention.head_count"),
        "num_key_value_heads": _one(need("attention.head_count_kv"), file),
        "head_dim": need("attention.key_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "linear_conv_kernel_dim": need("ssm.conv_kernel"),
        "linear_key_head_dim": need("ssm.state_size"),
        "linear_value_head_dim": need("ssm.inner_size") // v_heads,
        "linear_num_key_heads": need("ssm.group_count"),
        "linear_num_value_heads": v_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": need("rope.freq_base"),
            "partial_rotary_factor": need("rope.dimension_count") / need("attention.key_length"),
            "mrope_interleaved": True,
            "mrope_section": need("rope.dimension_sections")[:3],
        },
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": heads,
        "mtp_use_dedicated_embeddings": False,
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    if arch == DENSE:
        text["intermediate_size"] = _one(need("feed_forward_length"), file)
    else:
        text |= {
            "num_experts": need("expert_count"),
            "num_experts_per_tok": need("expert_used_count"),
            "moe_intermediate_size": need("expert_feed_forward_length"),
            "shared_expert_intermediate_size": need("expert_shared_feed_forward_length"),
        }
    ids = {name: tokens.index(word) for name, word in IMAGE_TAGS.items() if word in tokens}
    family = "Qwen3_5" if arch == DENSE else "Qwen3_5Moe"
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "vision_config": None,
        "tie_word_embeddings": tied,
        **ids,
    }


def _one(value: Any, file: GgufFile) -> int:
    """A number that may be written once for each layer; layers without attention may say 0."""
    found = set(value) - {0} if isinstance(value, list) else {value}
    if len(found) != 1:
        raise ModelError(f"{file.path}: layers of different sizes ({sorted(found)}) are not supported for this family")
    return found.pop()


def _layer_type(file: GgufFile, layer: int) -> str:
    return "linear_attention" if f"blk.{layer}.ssm_a" in file.tensors else "full_attention"


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The file's values for a hub config."""
    text = config["text_config"]
    moe = "num_experts" in text
    arch = MOE if moe else DENSE
    rope, kinds = text["rope_parameters"], text["layer_types"]
    _check_for_file(text)
    values = {
        "block_count": len(kinds) + text.get("mtp_num_hidden_layers", 0),
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds]
        + [False] * text.get("mtp_num_hidden_layers", 0),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(text["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_num_value_heads"] * text["linear_value_head_dim"],
        "full_attention_interval": kinds.index("full_attention") + 1,
    }
    if text.get("mtp_num_hidden_layers"):
        values["nextn_predict_layers"] = text["mtp_num_hidden_layers"]
    if moe:
        values |= {
            "expert_count": text["num_experts"],
            "expert_used_count": text["num_experts_per_tok"],
            "expert_feed_forward_length": text["moe_intermediate_size"],
            "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
        }
    else:
        values["feed_forward_length"] = text["intermediate_size"]
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def _check_for_file(text: dict[str, Any]) -> None:
    if text["linear_key_head_dim"] != text["linear_value_head_dim"]:
        raise ModelError("GGUF has one size for key and value heads of the delta net, this checkpoint has two")
    if "full_attention" not in text["layer_types"]:
        raise ModelError("llama.cpp needs at least one layer of full attention, this checkpoint has none")


def vision_config_of(file: GgufFile) -> dict[str, Any]:
    """The tower's hub config from an mmproj file."""

    def need(key: str) -> Any:
        return file.need(f"clip.vision.{key}")

    if file.get("clip.projector_type", file.get("clip.vision.projector_type")) != PROJECTOR:
        raise ModelError(f"{file.path} is no mmproj file of a Qwen3-VL tower")
    if any(need_deep for need_deep in file.get("clip.vision.is_deepstack_layers", [])):
        raise ModelError(f"{file.path}: a tower with deepstack layers is not supported; Qwen3.5 has none")
    return {
        "model_type": "qwen3_5_vision",
        "depth": need("block_count"),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_heads": need("attention.head_count"),
        "patch_size": need("patch_size"),
        "spatial_merge_size": need("spatial_merge_size"),
        "temporal_patch_size": 2,
        "num_position_embeddings": file.tensors["v.position_embd.weight"].shape[0],
        "out_hidden_size": need("projection_dim"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def processor_of(file: GgufFile) -> dict[str, Any]:
    """preprocessor_config.json for an mmproj file."""
    patch, merge = file.need("clip.vision.patch_size"), file.need("clip.vision.spatial_merge_size")
    low, high = (count * (patch * merge) ** 2 for count in TOKENS_AN_IMAGE)
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "image_mean": file.need("clip.vision.image_mean"),
        "image_std": file.need("clip.vision.image_std"),
        "size": {
            "shortest_edge": file.get("clip.vision.image_min_pixels", low),
            "longest_edge": file.get("clip.vision.image_max_pixels", high),
        },
    }


def vision_metadata_of(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """An mmproj file's values."""
    vision = config["vision_config"]
    side = round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": PROJECTOR,
        "clip.use_gelu": True,
        "clip.vision.image_size": side,
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.projection_dim": vision["out_hidden_size"],
        "clip.vision.block_count": vision["depth"],
        "clip.vision.attention.head_count": vision["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
        "clip.vision.image_mean": [float(v) for v in processor["image_mean"]],
        "clip.vision.image_std": [float(v) for v in processor["image_std"]],
        "clip.vision.image_min_pixels": processor["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": processor["size"]["longest_edge"],
        "clip.vision.is_deepstack_layers": [False] * vision["depth"],
    }


def spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of trunk and MTP block, whether a file has it or not."""
    text, spell = config["text_config"], Speller()
    moe, kinds = "num_experts" in text, text["layer_types"]
    spell.add(f"{TRUNK}embed_tokens.weight", "token_embd.weight")
    spell.add(f"{TRUNK}norm.weight", "output_norm.weight", change=PLUS_ONE)
    spell.add("lm_head.weight", "output.weight")
    for i, kind in enumerate(kinds):
        hub, file = f"{TRUNK}layers.{i}.", f"blk.{i}."
        if kind == "linear_attention":
            _delta(spell, f"{hub}linear_attn.", file, text)
        _block(spell, hub, file, moe, attends=kind == "full_attention")
    if text.get("mtp_num_hidden_layers"):
        behind = f"blk.{len(kinds)}."
        _block(spell, f"{MTP}layers.0.", behind, moe, attends=True)
        spell.add(f"{MTP}fc.weight", f"{behind}nextn.eh_proj.weight")
        names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
        for ours, theirs in names.items():
            spell.add(f"{MTP}{ours}.weight", f"{behind}nextn.{theirs}.weight", change=PLUS_ONE)
    return spell.made


def _block(spell: Speller, hub: str, file: str, moe: bool, attends: bool) -> None:
    norms = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
    }
    spell.under(hub, file, norms, PLUS_ONE)
    if attends:
        spell.under(f"{hub}self_attn.", file, ATTENTION)
        normed = {"q_norm.weight": "attn_q_norm.weight", "k_norm.weight": "attn_k_norm.weight"}
        spell.under(f"{hub}self_attn.", file, normed, PLUS_ONE)
    if not moe:
        spell.under(f"{hub}mlp.", file, MLP)
        return
    spell.under(f"{hub}mlp.", file, MIXTURE)
    spell.add(
        f"{hub}mlp.experts.gate_up_proj", f"{file}ffn_gate_exps.weight", f"{file}ffn_up_exps.weight", change=HALVES
    )


def _delta(spell: Speller, hub: str, file: str, text: dict[str, Any]) -> None:
    groups, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    size, keys = text["linear_value_head_dim"], 2 * groups * text["linear_key_head_dim"]

    def moved(rows: int, width: int, dim: int = 0) -> Change:
        return tiled(rows, groups, heads // groups, width, dim) if groups != heads else AS_IT_IS

    spell.add(f"{hub}in_proj_qkv.weight", f"{file}attn_qkv.weight", change=moved(keys, size))
    spell.add(f"{hub}in_proj_z.weight", f"{file}attn_gate.weight", change=moved(0, size))
    spell.add(f"{hub}in_proj_b.weight", f"{file}ssm_beta.weight", change=moved(0, 1))
    spell.add(f"{hub}in_proj_a.weight", f"{file}ssm_alpha.weight", change=moved(0, 1))
    spell.add(f"{hub}out_proj.weight", f"{file}ssm_out.weight", change=moved(0, size, dim=1))
    spell.add(f"{hub}conv1d.weight", f"{file}ssm_conv1d.weight", change=both(SQUEEZED, moved(keys, size)), keep=True)
    spell.add(f"{hub}A_log", f"{file}ssm_a", change=both(RATE, moved(0, 1)))
    spell.add(f"{hub}dt_bias", f"{file}ssm_dt.bias", change=moved(0, 1))
    spell.add(f"{hub}norm.weight", f"{file}ssm_norm.weight")


def vision_spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of the tower."""
    spell = Speller()
    patches = "v.patch_embd.weight", "v.patch_embd.weight.1"
    spell.add(f"{TOWER}patch_embed.proj.weight", *patches, change=FRAMES, keep=True)
    spell.add(f"{TOWER}patch_embed.proj.bias", "v.patch_embd.bias")
    spell.add(f"{TOWER}pos_embed.weight", "v.position_embd.weight", keep=True)
    parts = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
    for i in range(config["vision_config"]["depth"]):
        parts |= {f"blocks.{i}.{ours}": f"v.blk.{i}.{theirs}" for ours, theirs in TOWER_BLOCK.items()}
    for ours, theirs in parts.items():
        for kind in ("weight", "bias"):
            spell.add(f"{TOWER}{ours}.{kind}", f"{theirs}.{kind}")
    return spell.made


HEADS = Heads(
    "mtp_num_hidden_layers",
    lambda hub, config: hub.startswith(MTP),
    (f"{TRUNK}embed_tokens.weight", f"{TRUNK}norm.weight", "lm_head.weight"),
)
SEES = Tower((TOWER,), vision_config_of, processor_of, vision_metadata_of, vision_spellings)
FAMILIES = tuple(
    Family(arch, kind, config_of, metadata_of, spellings, heads=HEADS, tower=SEES) for arch, kind in MODEL_TYPES.items()
)
