"""Step-3.7-Flash in GGUF: architecture `step35`, MTP blocks and vision tower.

Facts and where they come from (llama.cpp `conversion/step3.py`, `src/models/step35.cpp`):
- zero-centred norms are stored plus one; per-layer lists cover trunk and MTP layers;
- full layers turn half of each head, sliding ones all of it, which no key says; scaled frequencies of full layers come
  as factors (`rope_freqs`) that they are divided by, as many as a whole head has, of which the first half is used. The
  converter makes each for the frequency that a head turned as a whole has there; what it wrote is used as it is;
- MTP blocks are layers behind the trunk with `nextn` tensors, each with a norm and an output head of its own;
- crops have 504 pixels on each side, which no key says; other sizes are noted under a key of our own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreglance.models import step3p7
from foreglance.models.base import ModelError
from foreglance.models.gguf import dense
from foreglance.models.gguf.family import Family, Heads, Tower, num_heads
from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.naming import PLUS_ONE, Speller, Spelling
from foreglance.models.layers import FREQUENCY_FACTORS, default_inv_freq

ARCH, PROJECTOR = "step35", "step3vl"
TRUNK, TOWER, PROJECTION = "model.language_model.", "vision_model.", "vit_large_projector."
PLACEHOLDERS = ("<im_patch>", "<|image_pad|>")
TURNING = {step3p7.FULL: 0.5, step3p7.SLIDING: 1.0}
SIGMOID = 2  # llama.cpp's number for how the router scores
CROP, CROP_KEY = 504, "foreglance.image_crop"
LONGEST = 3024
NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "transformer.shared_head.norm.weight": "nextn.shared_head_norm.weight",
}
BLOCK = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "moe.gate.weight": "ffn_gate_inp.weight",
    "moe.router_bias": "exp_probs_b.bias",
    "moe.gate_proj.weight": "ffn_gate_exps.weight",
    "moe.up_proj.weight": "ffn_up_exps.weight",
    "moe.down_proj.weight": "ffn_down_exps.weight",
    "share_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "share_expert.up_proj.weight": "ffn_up_shexp.weight",
    "share_expert.down_proj.weight": "ffn_down_shexp.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "transformer.shared_head.output.weight": "nextn.shared_head_head.weight",
}
TOWER_BLOCK = {
    "ln_1.weight": "ln1.weight",
    "ln_1.bias": "ln1.bias",
    "ln_2.weight": "ln2.weight",
    "ln_2.bias": "ln2.bias",
    "ls_1.gamma": "ls1.weight",
    "ls_2.gamma": "ls2.weight",
    "attn.in_proj_weight": "attn_qkv.weight",
    "attn.in_proj_bias": "attn_qkv.bias",
    "attn.out_proj.weight": "attn_out.weight",
    "attn.out_proj.bias": "attn_out.bias",
    "mlp.c_fc.weight": "ffn_up.weight",
    "mlp.c_fc.bias": "ffn_up.bias",
    "mlp.c_proj.weight": "ffn_down.weight",
    "mlp.c_proj.bias": "ffn_down.bias",
}


def extra_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """What the frequencies of full layers are divided by, if they are scaled as Llama 3's."""
    text = config["text_config"]
    factors, rope = text.get(FREQUENCY_FACTORS), text["rope_parameters"][step3p7.FULL]
    if factors is None and rope.get("rope_type") == "llama3":
        from transformers import Step3p7Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        size = step3p7.Shape.of(text).head_size
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](Step3p7Config.from_dict(config).text_config, layer_type=step3p7.FULL)
        turned = default_inv_freq(rope["rope_theta"], 2 * len(scaled)) / scaled
        factors = torch.cat([turned, torch.ones(size // 2 - len(scaled))])
    return {} if factors is None else {"rope_freqs.weight": torch.as_tensor(factors)}


def config_of(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """The hub config that a file's metadata amounts to, without the tower."""

    def need(key: str) -> Any:
        return file.need(f"{ARCH}.{key}")

    def get(key: str, default: Any = None) -> Any:
        return file.get(f"{ARCH}.{key}", default)

    heads, total = num_heads(file), need("block_count")
    trunk = total - heads
    kinds = [step3p7.SLIDING if slides else step3p7.FULL for slides in need("attention.sliding_window_pattern")]
    query, keys = (_each(need(f"attention.{name}"), total) for name in ("head_count", "head_count_kv"))
    if len(kinds) < total or len(set(keys[:total])) != 1:
        raise ModelError(f"{file.path}: lists that are short, or key/value heads that differ, are not supported")
    full = next((n for n, kind in zip(query, kinds, strict=False) if kind == step3p7.FULL), query[0])
    slides = next((n for n, kind in zip(query, kinds, strict=False) if kind == step3p7.SLIDING), full)
    sparse = ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in file.tensors else "dense" for i in range(total)]
    tied = "output.weight" not in file.tensors
    text = {
        "model_type": "step3p5",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": trunk,
        "num_nextn_predict_layers": heads,
        "layer_types": kinds[:trunk],
        "mlp_layer_types": sparse[:trunk],
        "mtp_layer_types": kinds[trunk:total],
        "mtp_mlp_layer_types": sparse[trunk:],
        "num_attention_heads": full,
        "num_sliding_attention_heads": slides,
        "per_layer_config": {
            str(i): {"num_attention_heads": slides} for i, kind in enumerate(kinds[:trunk]) if kind == step3p7.SLIDING
        },
        "num_key_value_heads": keys[0],
        "head_dim": need("attention.key_length"),
        "query_pre_attn_scalar": need("attention.key_length"),
        "sliding_window": need("attention.sliding_window"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "n_routed_experts": get("expert_count", 0),
        "num_experts_per_tok": get("expert_used_count", 0),
        "moe_intermediate_size": get("expert_feed_forward_length", 0),
        "share_expert_dim": get("expert_shared_feed_forward_length", 0),
        "moe_router_scaling_factor": get("expert_weights_scale", 1.0),
        "swiglu_limits": get("swiglu_clamp_exp"),
        "swiglu_limits_shared": get("swiglu_clamp_shexp"),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": TURNING[kind]}
            for kind, theta in (
                (step3p7.FULL, need("rope.freq_base")),
                (step3p7.SLIDING, get("rope.freq_base_swa", 10_000.0)),
            )
        },
        FREQUENCY_FACTORS: dense.frequency_factors(file),
        "tie_word_embeddings": tied,
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": step3p7.FAMILY,
        "text_config": text,
        "vision_config": {},
        "image_token_id": next((tokens.index(word) for word in PLACEHOLDERS if word in tokens), -1),
        "projector_bias": False,
        "tie_word_embeddings": tied,
    }


def _each(value: Any, count: int) -> list[int]:
    return value if isinstance(value, list) else [value] * count


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The file's values for a hub config."""
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    shape, heads = step3p7.Shape.of(text), text.get("num_nextn_predict_layers") or 0
    for kind, share in TURNING.items():
        scalings = ("default", "llama3") if kind == step3p7.FULL else ("default",)
        if (
            rope[kind].get("partial_rotary_factor", 1.0) != share
            or rope[kind].get("rope_type", "default") not in scalings
        ):
            raise ModelError(f"GGUF has no words for the rotary settings of {kind} layers: {rope[kind]}")
    sparse = [*text["mlp_layer_types"], *["dense"] * heads]
    behind = text.get("mtp_layer_types") or [step3p7.SLIDING] * heads
    kinds = [*text["layer_types"], *behind[:heads]]
    values = {
        "block_count": len(kinds),
        "context_length": text["max_position_embeddings"],
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": [shape.heads(kind) for kind in kinds],
        "attention.head_count_kv": [shape.kv_heads] * len(kinds),
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": float(shape.eps),
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": [kind == step3p7.SLIDING for kind in kinds],
        "rope.freq_base": float(rope[step3p7.FULL]["rope_theta"]),
        "rope.freq_base_swa": float(rope[step3p7.SLIDING]["rope_theta"]),
        "expert_count": shape.num_experts,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.expert_inner,
        "expert_shared_feed_forward_length": shape.shared_inner,
        "expert_weights_scale": float(shape.router_scale),
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
        "leading_dense_block_count": sparse.index("sparse") if "sparse" in sparse else len(sparse),
        "moe_every_n_layers": 1,
    }
    for ours, theirs in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        if text.get(ours):
            values[theirs] = [float(v or 0.0) for v in text[ours]] + [0.0] * (len(kinds) - len(text[ours]))
    if heads:
        values["nextn_predict_layers"] = heads
    return {"general.architecture": ARCH} | {f"{ARCH}.{key}": value for key, value in values.items()}


def vision_config_of(file: GgufFile) -> dict[str, Any]:
    """The tower's hub config from an mmproj file."""

    def need(key: str) -> Any:
        return file.need(f"clip.vision.{key}")

    if file.get("clip.projector_type", file.get("clip.vision.projector_type")) != PROJECTOR:
        raise ModelError(f"{file.path} is no mmproj file of a Step-3.7 tower")
    return {
        "model_type": "step3p5_vision",
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "mlp_ratio": need("feed_forward_length") / need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": need("attention.head_count"),
        "patch_size": need("patch_size"),
        "image_size": need("image_size"),
        "max_position_embeddings": file.tensors["v.position_embd.weight"].shape[0],
        "layer_norm_eps": need("attention.layer_norm_epsilon"),
        "hidden_act": "quick_gelu",
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "axial"},
    }


def processor_of(file: GgufFile) -> dict[str, Any]:
    """preprocessor_config.json for an mmproj file."""
    side = file.need("clip.vision.image_size")
    return {
        "image_processor_type": "Step3p7ImageProcessor",
        "size": {"height": side, "width": side},
        "patch_size": file.get(CROP_KEY, CROP),
        "max_image_size": file.get("clip.vision.preproc_image_size", LONGEST),
        "vision_patch_size": file.need("clip.vision.patch_size"),
        "downsampler_stride": 4,
        "resample": 2,
        "image_mean": file.need("clip.vision.image_mean"),
        "image_std": file.need("clip.vision.image_std"),
    }


def vision_metadata_of(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """An mmproj file's values."""
    vision = config["vision_config"]
    values = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": PROJECTOR,
        "clip.use_gelu": False,
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": int(vision["hidden_size"] * vision["mlp_ratio"]),
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": float(vision["layer_norm_eps"]),
        "clip.vision.projector.scale_factor": 4,
        "clip.vision.preproc_image_size": processor.get("max_image_size", LONGEST),
        "clip.vision.image_mean": [float(v) for v in processor["image_mean"]],
        "clip.vision.image_std": [float(v) for v in processor["image_std"]],
    }
    crop = processor.get("patch_size", CROP)
    return values if crop == CROP else values | {CROP_KEY: crop}


def spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of trunk and MTP blocks, whether a file has it or not."""
    text, spell = config["text_config"], Speller()
    spell.add(f"{TRUNK}embed_tokens.weight", "token_embd.weight")
    spell.add(f"{TRUNK}norm.weight", "output_norm.weight", change=PLUS_ONE)
    tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    spell.add(f"{TRUNK}embed_tokens.weight" if tied else "lm_head.weight", "output.weight")  # llama.cpp ties none
    for i in range(text["num_hidden_layers"] + (text.get("num_nextn_predict_layers") or 0)):
        spell.under(f"{TRUNK}layers.{i}.", f"blk.{i}.", NORMS, PLUS_ONE)
        spell.under(f"{TRUNK}layers.{i}.", f"blk.{i}.", BLOCK)
    return spell.made


def vision_spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of the tower and its projection."""
    spell = Speller()
    spell.add(f"{TOWER}conv1.weight", "v.patch_embd.weight", keep=True)
    spell.add(f"{TOWER}positional_embedding", "v.position_embd.weight", keep=True)
    spell.under(f"{TOWER}ln_pre.", "v.pre_ln.", {"weight": "weight", "bias": "bias"})
    for i in range(config["vision_config"]["num_hidden_layers"]):
        spell.under(f"{TOWER}transformer.resblocks.{i}.", f"v.blk.{i}.", TOWER_BLOCK)
    for number in (1, 2):
        spell.add(f"{TOWER}vit_downsampler{number}.weight", f"mm.{number - 1}.weight", keep=True)
        spell.add(f"{TOWER}vit_downsampler{number}.bias", f"mm.{number - 1}.bias")
    spell.add(f"{PROJECTION}weight", "mm.model.fc.weight")
    return spell.made


def behind_the_trunk(hub: str, config: dict[str, Any]) -> bool:
    """Whether a hub tensor belongs to a layer behind the trunk's: those are MTP modules."""
    layer = hub.removeprefix(f"{TRUNK}layers.").partition(".")[0]
    return layer.isdecimal() and int(layer) >= config["text_config"]["num_hidden_layers"]


HEADS = Heads(
    "num_nextn_predict_layers",
    behind_the_trunk,
    (f"{TRUNK}embed_tokens.weight", f"{TRUNK}norm.weight", "lm_head.weight"),
)
SEES = Tower((TOWER, PROJECTION), vision_config_of, processor_of, vision_metadata_of, vision_spellings)
FAMILIES = (Family(ARCH, step3p7.FAMILY, config_of, metadata_of, spellings, extra_tensors, heads=HEADS, tower=SEES),)
