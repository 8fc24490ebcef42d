"""Dense text decoders in GGUF: architectures `llama`, `qwen3` and `gemma3` (the text part).

Facts and where they come from (llama.cpp `conversion/llama.py`, `conversion/gemma.py`, `conversion/base.py`,
`src/models/{llama,qwen3,gemma3}.cpp`):
- the rows of a `llama` head's queries and keys are in pairs (0, h/2), (1, h/2 + 1) ... as its rotary kernel turns them;
- norms of `gemma3` are stored plus one; its layers slide in periods, six if the file does not say, the last one of each
  is full; attention is scaled by the head's size, at 62 layers (27B) by hidden size over heads;
- scaled frequencies of Llama 3 come as factors (`rope_freqs`) that they are divided by; linear and yarn scaling have
  keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreglance.models import dense
from foreglance.models.base import ModelError
from foreglance.models.gguf.family import Family
from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.naming import AS_IT_IS, PLUS_ONE, Change, Speller, Spelling
from foreglance.models.layers import FREQUENCY_FACTORS, default_inv_freq

LLAMA, QWEN3, GEMMA3 = "llama", "qwen3", "gemma3"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3", GEMMA3: "gemma3_text"}
CLASSES = {LLAMA: "LlamaForCausalLM", QWEN3: "Qwen3ForCausalLM", GEMMA3: "Gemma3ForCausalLM"}
TRUNK = "model."
PERIOD, THETA = 6, 10_000.0  # of gemma3's sliding layers, and what they turn by, where a file does not say
LARGEST_GEMMA3 = 62  # layers of the one whose attention is scaled in another way
GATES = {LLAMA: "silu", QWEN3: "silu", GEMMA3: "gelu"}
YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
ODD_SCALING = ("alpha", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
NORMS = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
SANDWICH_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
QK_NORMS = {"self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}
PRODUCTS = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config_of(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """The hub config that a file's metadata amounts to."""
    arch = file.need("general.architecture")

    def need(key: str) -> Any:
        return file.need(f"{arch}.{key}")

    def get(key: str, default: Any = None) -> Any:
        return file.get(f"{arch}.{key}", default)

    if get("expert_count"):
        raise ModelError(f"{file.path}: a mixture of experts of architecture {arch!r} is not supported, dense ones are")
    count, heads = need("block_count"), _one(need("attention.head_count"), file)
    size = get("attention.key_length", need("embedding_length") // heads)
    if get("attention.value_length", size) != size or get("rope.dimension_count", size) != size:
        raise ModelError(
            f"{file.path}: heads whose values are of another size, or that turn in part, are not supported"
        )
    config = {
        "architectures": [CLASSES[arch]],
        "model_type": MODEL_TYPES[arch],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": need("embedding_length"),
        "intermediate_size": _one(need("feed_forward_length"), file),
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(get("attention.head_count_kv", heads), file),
        "head_dim": size,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(file, arch),
        FREQUENCY_FACTORS: frequency_factors(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return config | _gemma3(file, config) if arch == GEMMA3 else config


def _one(value: Any, file: GgufFile) -> int:
    """A number that may be written once for each layer."""
    found = set(value) if isinstance(value, list) else {value}
    if len(found) != 1:
        raise ModelError(f"{file.path}: layers of different sizes ({sorted(found)}) are not supported for this family")
    return found.pop()


def frequency_factors(file: GgufFile) -> list[float] | None:
    """What each rotary frequency is divided by; None if the file does not scale them so."""
    return file.floats("rope_freqs.weight").flatten().tolist() if "rope_freqs.weight" in file.tensors else None


def _rope(file: GgufFile, arch: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get(f"{arch}.rope.freq_base", THETA)}
    scaling = {key.rpartition(".")[2]: value for key, value in file.meta.items() if f"{arch}.rope.scaling." in key}
    kind = scaling.get("type", "none")
    if kind == "none":
        return rope
    odd = [key for key in ODD_SCALING if key in scaling]
    if kind not in ("linear", "yarn") or odd:
        raise ModelError(f"{file.path}: rotary scaling {kind!r} {' with '.join(['', *odd])} is not supported")
    rope |= {"rope_type": kind, "factor": scaling["factor"]}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = scaling["original_context_length"]
        rope |= {ours: scaling[theirs] for ours, theirs in YARN.items() if theirs in scaling}
    return rope


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """What only this architecture has."""
    count, window = config["num_hidden_layers"], file.get("gemma3.attention.sliding_window", 0)
    period = file.get("gemma3.attention.sliding_window_pattern", PERIOD)
    slides = period if isinstance(period, list) else [(i + 1) % period > 0 for i in range(count)]
    sliding = {"rope_type": "default", "rope_theta": file.get("gemma3.rope.freq_base_swa", THETA)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window or None,
        "layer_types": [dense.SLIDING if window and slid else dense.FULL for slid in slides[:count]],
        "query_pre_attn_scalar": _scalar(config),
        "rope_parameters": {dense.FULL: config["rope_parameters"], dense.SLIDING: sliding},
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping"),
    }


def _scalar(config: dict[str, Any]) -> int:
    """The root of it divides the scores of gemma3's attention, as llama.cpp has it."""
    if config["num_hidden_layers"] == LARGEST_GEMMA3:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The file's values for a hub config."""
    shape = dense.Shape.of(config)
    arch = next(arch for arch, kind in MODEL_TYPES.items() if kind == config["model_type"])
    if shape.gate != GATES[arch]:
        raise ModelError(f"llama.cpp gates the MLP of {arch} with {GATES[arch]}, this checkpoint's is {shape.gate}")
    ropes = config["rope_parameters"]
    values = {
        "block_count": len(shape.kinds),
        "context_length": config["max_position_embeddings"],
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": float(shape.eps),
        "rope.dimension_count": shape.head_size,
        **_rope_values(ropes.get(dense.FULL, ropes)),
    }
    if arch == GEMMA3:
        values |= _gemma3_values(config, shape)
    elif dense.SLIDING in shape.kinds:
        raise ModelError(f"llama.cpp knows no sliding layers of {arch}, this checkpoint has some")
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def _rope_values(rope: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("default", "llama3"):  # llama3: its factors are a tensor
        return values
    odd = sorted(set(rope) - {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", *YARN})
    if rope["rope_type"] not in ("linear", "yarn") or odd:
        raise ModelError(f"GGUF has no words for these rotary settings: {rope}")
    values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values |= {f"rope.scaling.{theirs}": float(rope[ours]) for ours, theirs in YARN.items() if ours in rope}
    return values


def _gemma3_values(config: dict[str, Any], shape: dense.Shape) -> dict[str, Any]:
    full, sliding = (config["rope_parameters"][kind] for kind in (dense.FULL, dense.SLIDING))
    if config["query_pre_attn_scalar"] != _scalar(config):
        raise ModelError(
            f"llama.cpp scales the attention of this shape by {_scalar(config)} ** -0.5, the checkpoint by "
            f"{config['query_pre_attn_scalar']} ** -0.5"
        )
    if sliding["rope_type"] != "default" or full["rope_type"] == "llama3":
        raise ModelError(f"GGUF has no words for the rotary settings of gemma3: {config['rope_parameters']}")
    if dense.SLIDING not in shape.kinds:
        return {}
    slides = [kind == dense.SLIDING for kind in shape.kinds]
    period = next((n for n in range(1, len(slides) + 2) if slides == [(i + 1) % n > 0 for i in range(len(slides))]), 0)
    if not period:
        raise ModelError("llama.cpp's gemma3 has a full layer at the end of each period, this checkpoint has others")
    return {
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": period,
        "rope.freq_base_swa": float(sliding["rope_theta"]),
    }


def extra_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """What the frequencies are divided by, if they are scaled as Llama 3's."""
    rope, factors = config["rope_parameters"], config.get(FREQUENCY_FACTORS)
    if factors is None and rope.get("rope_type") == "llama3":
        factors = llama3_factors(config)
    return {} if factors is None else {"rope_freqs.weight": torch.as_tensor(factors)}


def llama3_factors(config: dict[str, Any]) -> Tensor:
    """float32 [head size / 2] of a config that says so in words."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**config))
    return default_inv_freq(config["rope_parameters"]["rope_theta"], dense.Shape.of(config).head_size) / scaled


def spellings(config: dict[str, Any]) -> list[Spelling]:
    """Every tensor of a decoder, whether a file has it or not."""
    shape, spell = dense.Shape.of(config), Speller()
    norm = PLUS_ONE if shape.traits.centred_norms else AS_IT_IS
    paired = config["model_type"] == MODEL_TYPES[LLAMA]
    spell.add(f"{TRUNK}embed_tokens.weight", "token_embd.weight")
    spell.add(f"{TRUNK}norm.weight", "output_norm.weight", change=norm)
    spell.add("lm_head.weight", "output.weight")
    for i in range(len(shape.kinds)):
        hub, file = f"{TRUNK}layers.{i}.", f"blk.{i}."
        spell.under(hub, file, SANDWICH_NORMS if shape.traits.sandwich_norms else NORMS, norm)
        spell.under(hub, file, QK_NORMS, norm)
        for kind in ("weight", "bias"):
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads)):
                change = _in_pairs(heads) if paired else AS_IT_IS
                spell.add(f"{hub}self_attn.{name}_proj.{kind}", f"{file}attn_{name}.{kind}", change=change)
            spell.under(hub, file, {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in PRODUCTS.items()})
    return spell.made


def _in_pairs(heads: int) -> Change:
    """Rows of each head [2, h/2] stored as [h/2, 2]."""

    def turned(tensor: Tensor, inner: tuple[int, int]) -> Tensor:
        return tensor.unflatten(0, (heads, *inner)).transpose(1, 2).flatten(0, 2)

    return Change(lambda t: (turned(t, (2, -1)),), lambda t: turned(t, (-1, 2)))


FAMILIES = tuple(
    Family(arch, kind, config_of, metadata_of, spellings, extra_tensors) for arch, kind in MODEL_TYPES.items()
)
