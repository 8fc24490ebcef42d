"""Gemma-4 in GGUF: architectures `gemma4` and `gemma4-assistant`, and the vision tower.

Facts and where they come from (llama.cpp `conversion/gemma.py`, `src/models/gemma4*.cpp`):
- norms are stored as they are; sizes of sliding layers have keys of their own (`..._swa`), the plain keys are those of
  full ones;
- how much of a full layer's head turns is told by `rope_freqs`, which frequencies are divided by: 1 (or how far
  positions are stretched) for one that turns, a huge number else;
- whether image rows see each other is not told: llama.cpp goes by the hidden size, 1536 and 2560 do not;
- layers that read another's cache have no keys and values; a full layer without values takes its keys for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreglance.models import gemma4
from foreglance.models.base import ModelError
from foreglance.models.gguf.family import Family, Tower
from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.naming import AS_IT_IS, Change, Speller, Spelling

TARGET, ASSISTANT = "gemma4", "gemma4-assistant"
MODEL_TYPES = {TARGET: "gemma4", ASSISTANT: "gemma4_assistant"}
PROJECTOR = "gemma4v"
TRUNK, TOWER = "model.language_model.", "model."
TAGS = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>",
    "audio_token_id": "<|audio|>",
}
CAUSAL_IMAGES = (1536, 2560)  # hidden sizes of E2B and E4B
STILL = 1e30  # what a frequency that does not turn is divided by
POOLED, SOFT_TOKENS = 3, 280  # of the published tower, where a file does not say
BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
TOWER_NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TOWER_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SCALAR = Change(lambda t: (t.reshape(1),), lambda t: t.reshape(()))
LONG = Change(lambda t: (t.int(),), lambda t: t.long())


def extra_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Which frequencies of full layers turn, and how much slower."""
    text = config["text_config"]
    rope = text["rope_parameters"][gemma4.FULL]
    size = next(layer.head_size for layer in _shape(config).layers if layer.kind == gemma4.FULL)
    turning, slower = int(rope.get("partial_rotary_factor", 1.0) * size / 2), float(rope.get("factor") or 1.0)
    return {"rope_freqs.weight": torch.tensor([slower] * turning + [STILL] * (size // 2 - turning))}


def _is_assistant(config: dict[str, Any]) -> bool:
    return config["model_type"] == MODEL_TYPES[ASSISTANT]


def _shape(config: dict[str, Any]) -> gemma4.Shape:
    text = config["text_config"]
    lent = {kind: 0 for kind in text["layer_types"]} if _is_assistant(config) else None
    return gemma4.Shape.of(text, lent)


def config_of(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """The hub config that a file's metadata amounts to, without the tower."""
    arch = file.need("general.architecture")

    def need(key: str) -> Any:
        return file.need(f"{arch}.{key}")

    def get(key: str, default: Any = None) -> Any:
        return file.get(f"{arch}.{key}", default)

    count = need("block_count")
    kinds = [gemma4.SLIDING if sliding else gemma4.FULL for sliding in need("attention.sliding_window_pattern")][:count]
    full = [i for i, kind in enumerate(kinds) if kind == gemma4.FULL]
    heads, kv_heads, inner = (
        _each(need(key), count, file)
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    )
    slides = next((i for i, kind in enumerate(kinds) if kind == gemma4.SLIDING), 0)
    full_size, size = need("attention.key_length"), get("attention.key_length_swa", need("attention.key_length"))
    full_sizes = {"head_dim": full_size, "num_key_value_heads": kv_heads[full[0]]} if full else {}
    shared = get("attention.shared_kv_layers", 0)
    own_full = [i for i in full if i < count - shared]
    hidden = need("embedding_length")
    text = {
        "model_type": "gemma4_text",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "num_hidden_layers": count,
        "layer_types": kinds,
        "num_attention_heads": heads[0],
        "num_key_value_heads": kv_heads[slides],
        "head_dim": size,
        "per_layer_config": {str(i): full_sizes for i in full},
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file.tensors for i in own_full),
        "sliding_window": need("attention.sliding_window"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "max_position_embeddings": need("context_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": None if hidden in CAUSAL_IMAGES or arch == ASSISTANT else "vision",
        "rope_parameters": {
            gemma4.FULL: {
                "rope_type": "proportional",
                "rope_theta": need("rope.freq_base"),
                **_turning(file),
            },
            gemma4.SLIDING: {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10_000.0)},
        },
        "enable_moe_block": bool(get("expert_count", 0)),
        "num_experts": get("expert_count"),
        "top_k_experts": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "tie_word_embeddings": True,
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", 0),
    }
    if arch == ASSISTANT:
        return _assistant_config(file, text, need("embedding_length_out"))
    ids = {name: tokens.index(word) if word in tokens else None for name, word in TAGS.items()}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
        "tie_word_embeddings": True,
        **ids,
    }


def _assistant_config(file: GgufFile, text: dict[str, Any], backbone: int) -> dict[str, Any]:
    centroids = file.tensors.get("masked_embd_centroids.weight")
    ordered = {} if centroids is None else {"num_centroids": centroids.shape[0]}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": centroids is not None,
        "text_config": text
        | {
            "num_kv_shared_layers": text["num_hidden_layers"],
            "attention_k_eq_v": False,
            "vocab_size_per_layer_input": 0,
        },
        "tie_word_embeddings": True,
        **ordered,
    }


def _each(value: Any, count: int, file: GgufFile) -> list[int]:
    """A number for each layer."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) < count:
        raise ModelError(f"{file.path}: a list of {len(values)} sizes for {count} layers")
    return values


def _turning(file: GgufFile) -> dict[str, float]:
    """The share of a head that turns, and how far positions are stretched, if they are."""
    if "rope_freqs.weight" not in file.tensors:
        return {"partial_rotary_factor": 1.0}
    factors = file.floats("rope_freqs.weight")
    turning = factors[factors < STILL / 2]
    if len(turning.unique()) > 1 or not torch.equal(turning, factors[: len(turning)]):
        raise ModelError(f"{file.path}: rotary frequencies that are each divided by another number are not supported")
    share = {"partial_rotary_factor": len(turning) / len(factors)}
    return share if not len(turning) or turning[0] == 1 else share | {"factor": float(turning[0])}


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The file's values for a hub config."""
    text, shape = config["text_config"], _shape(config)
    arch = ASSISTANT if _is_assistant(config) else TARGET
    full = next(layer for layer in shape.layers if layer.kind == gemma4.FULL)
    slides = next((layer for layer in shape.layers if layer.kind == gemma4.SLIDING), full)
    rope = text["rope_parameters"]
    values = {
        "block_count": len(shape.layers),
        "context_length": text["max_position_embeddings"],
        "embedding_length": shape.hidden,
        "embedding_length_per_layer_input": shape.per_layer,
        "feed_forward_length": _as_few([layer.inner for layer in shape.layers]),
        "attention.head_count": full.heads,
        "attention.head_count_kv": _as_few([layer.kv_heads for layer in shape.layers]),
        "attention.key_length": full.head_size,
        "attention.value_length": full.head_size,
        "attention.key_length_swa": slides.head_size,
        "attention.value_length_swa": slides.head_size,
        "attention.layer_norm_rms_epsilon": float(shape.eps),
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [layer.kind == gemma4.SLIDING for layer in shape.layers],
        "attention.shared_kv_layers": text.get("num_kv_shared_layers") or 0,
        "rope.freq_base": float(rope[gemma4.FULL]["rope_theta"]),
        "rope.freq_base_swa": float(rope[gemma4.SLIDING]["rope_theta"]),
        "rope.dimension_count": full.head_size,
        "rope.dimension_count_swa": slides.head_size,
    }
    if text.get("final_logit_softcapping"):
        values["final_logit_softcapping"] = float(text["final_logit_softcapping"])
    if shape.mixture is not None:
        values |= {
            "expert_count": shape.mixture.experts,
            "expert_used_count": shape.mixture.top_k,
            "expert_feed_forward_length": shape.mixture.inner,
        }
    if arch == ASSISTANT:
        values |= {"embedding_length_out": config["backbone_hidden_size"], "nextn_predict_layers": len(shape.layers)}
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def _as_few(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def vision_config_of(file: GgufFile) -> dict[str, Any]:
    """The tower's hub config from an mmproj file."""

    def need(key: str) -> Any:
        return file.need(f"clip.vision.{key}")

    if file.get("clip.vision.projector_type", file.get("clip.projector_type")) != PROJECTOR:
        raise ModelError(f"{file.path} is no mmproj file of a Gemma-4 tower")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    return {
        "model_type": "gemma4_vision",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "patch_size": need("patch_size"),
        "pooling_kernel_size": file.get("clip.vision.projector.scale_factor", POOLED),
        "position_embedding_size": file.tensors["v.position_embd.weight"].shape[1],
        "rms_norm_eps": need("attention.layer_norm_epsilon"),
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
        "hidden_activation": "gelu_pytorch_tanh",
        "standardize": "v.std_bias" in file.tensors,
        "use_clipped_linears": any(name.endswith(".input_max") for name in file.tensors),
    }


def processor_of(file: GgufFile) -> dict[str, Any]:
    """preprocessor_config.json for an mmproj file."""
    patch, pool = file.need("clip.vision.patch_size"), file.get("clip.vision.projector.scale_factor", POOLED)
    pixels = file.get("clip.vision.image_max_pixels")
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": patch,
        "pooling_kernel_size": pool,
        "max_soft_tokens": SOFT_TOKENS if pixels is None else pixels // (patch * pool) ** 2,
        "do_normalize": False,
    }


def vision_metadata_of(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """An mmproj file's values."""
    vision = config["vision_config"]
    row = (vision["patch_size"] * vision["pooling_kernel_size"]) ** 2
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": PROJECTOR,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": float(vision["rms_norm_eps"]),
        "clip.vision.projector.scale_factor": vision["pooling_kernel_size"],
        "clip.vision.image_min_pixels": row,
        "clip.vision.image_max_pixels": processor["max_soft_tokens"] * row,
        "clip.vision.image_mean": [0.0, 0.0, 0.0],
        "clip.vision.image_std": [1.0, 1.0, 1.0],
    }


def spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of a target or an assistant, whether a file has it or not."""
    assistant = _is_assistant(config)
    trunk, spell = "model." if assistant else TRUNK, Speller()
    top = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if not assistant:
        top |= {
            "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
            "per_layer_model_projection.weight": "per_layer_model_proj.weight",
            "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
        }
    spell.under(trunk, "", top)
    for i in range(len(config["text_config"]["layer_types"])):
        spell.under(f"{trunk}layers.{i}.", f"blk.{i}.", BLOCK)
    if assistant:
        spell.add("pre_projection.weight", "nextn.pre_projection.weight")
        spell.add("post_projection.weight", "nextn.post_projection.weight")
        spell.add("masked_embedding.centroids.weight", "masked_embd_centroids.weight")
        spell.add("masked_embedding.token_ordering", "masked_embd_ordering", change=LONG)
    return spell.made


def vision_spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of the tower and its projection."""
    vision, spell = config["vision_config"], Speller()
    patch = vision["patch_size"]
    frames = Change(
        lambda t: (t.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2),),
        lambda t: t.permute(0, 2, 3, 1).flatten(1),
    )
    tower = f"{TOWER}vision_tower."
    spell.add(f"{tower}patch_embedder.input_proj.weight", "v.patch_embd.weight", change=frames, keep=True)
    spell.add(f"{tower}patch_embedder.position_embedding_table", "v.position_embd.weight", keep=True)
    spell.add(f"{TOWER}embed_vision.embedding_projection.weight", "mm.input_projection.weight")
    if vision.get("standardize"):
        spell.under(tower, "v.", {"std_bias": "std_bias", "std_scale": "std_scale"})
    clips = ("input_min", "input_max", "output_min", "output_max") if vision.get("use_clipped_linears") else ()
    for i in range(vision["num_hidden_layers"]):
        hub, file = f"{tower}encoder.layers.{i}.", f"v.blk.{i}."
        spell.under(hub, file, {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in TOWER_NORMS.items()}, AS_IT_IS)
        for ours, theirs in TOWER_LINEARS.items():
            spell.add(f"{hub}{ours}.linear.weight", f"{file}{theirs}.weight")
            for clip in clips:
                spell.add(f"{hub}{ours}.{clip}", f"{file}{theirs}.{clip}", change=SCALAR)
    return spell.made


SEES = Tower(
    ("model.vision_tower.", "model.embed_vision."),
    vision_config_of,
    processor_of,
    vision_metadata_of,
    vision_spellings,
)
FAMILIES = tuple(
    Family(
        arch,
        kind,
        config_of,
        metadata_of,
        spellings,
        extra_tensors,
        tower=SEES if arch == TARGET else None,  # an assistant reads what its target made of images
        left=("model.audio_tower.", "model.embed_audio."),
    )
    for arch, kind in MODEL_TYPES.items()
)
