"""Tiny random checkpoints of the dense text decoders in the published layout, from transformers' own classes.

No weight is left at a neutral start, so that a forgotten norm or bias shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen3Config

from support.checkpoints import END, save_weights, write_tokenizer

VOCAB = 320
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class DenseSizes:
    """A checkpoint: its config class and what its config says beyond the sizes that all share."""

    name: str
    kind: type
    options: tuple[tuple[str, Any], ...] = ()
    tied: bool = False
    num_shards: int = 1
    stored: torch.dtype = torch.float32
    seed: int = 1

    @property
    def config(self):
        shared = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "tie_word_embeddings": self.tied,
            "eos_token_id": END,
            "bos_token_id": None,
            "pad_token_id": 0,
        }
        return self.kind(**(shared | dict(self.options)))


def sizes(name: str, kind: type, tied=False, num_shards=1, stored=torch.float32, seed=1, **options) -> DenseSizes:
    return DenseSizes(name, kind, tuple(options.items()), tied, num_shards, stored, seed)


LLAMA = sizes("llama", LlamaConfig, num_shards=2, rope_parameters=PLAIN)
LLAMA_BIASED = sizes(
    "llama with biases",
    LlamaConfig,
    tied=True,
    attention_bias=True,
    mlp_bias=True,
    num_key_value_heads=4,
    head_dim=24,
    rope_parameters=LLAMA3,
    seed=2,
)
QWEN3 = sizes("qwen3", Qwen3Config, tied=True, head_dim=32, rope_parameters=PLAIN, stored=torch.bfloat16, seed=3)
QWEN3_SLIDING = sizes(
    "qwen3 with a window and biases",
    Qwen3Config,
    attention_bias=True,
    use_sliding_window=True,
    sliding_window=9,
    max_window_layers=1,
    rope_parameters=YARN,
    seed=4,
)
GEMMA3 = sizes(
    "gemma3 text",
    Gemma3TextConfig,
    tied=True,
    num_hidden_layers=4,
    num_key_value_heads=1,
    sliding_window=11,
    query_pre_attn_scalar=40,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"sliding_attention": PLAIN, "full_attention": {**LINEAR, "rope_theta": 100000.0}},
    seed=5,
)
GEMMA3_UNTIED = sizes(
    "gemma3 text, untied", Gemma3TextConfig, sliding_window=16, num_hidden_layers=7, query_pre_attn_scalar=16, seed=6
)
ALL = (LLAMA, LLAMA_BIASED, QWEN3, QWEN3_SLIDING, GEMMA3, GEMMA3_UNTIED)
ROPES = tuple(
    sizes(f"{kind.model_type}, {rope['rope_type']} rope", kind, rope_parameters=rope, seed=7)
    for kind in (LlamaConfig, Qwen3Config)
    for rope in (LINEAR, LLAMA3, YARN)
) + tuple(
    sizes(
        f"gemma3_text, {rope['rope_type']} rope",
        Gemma3TextConfig,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={"sliding_attention": PLAIN, "full_attention": rope},
        seed=8,
    )
    for rope in (LLAMA3, YARN)
)


@dataclass(frozen=True)
class DenseCheckpoint:
    """A folder, and the same weights in transformers' class."""

    folder: Path
    sizes: DenseSizes
    model: PreTrainedModel

    @torch.inference_mode()
    def logits(self, token_ids) -> Tensor:
        """[n, vocab] of a whole text."""
        return self.model(torch.tensor([list(token_ids)])).logits[0]


def write_dense(folder: Path, sizes: DenseSizes) -> DenseCheckpoint:
    """Write a checkpoint folder and return it with its reference."""
    folder.mkdir(parents=True, exist_ok=True)
    config = sizes.config
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(sizes.seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(_scaled(name, noise, config.model_type).to(sizes.stored).float())
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": 0}))
    write_tokenizer(folder)
    state = {name: tensor.to(sizes.stored) for name, tensor in model.state_dict().items()}
    if sizes.tied:
        del state["lm_head.weight"]
    save_weights(folder, state, sizes.num_shards)
    return DenseCheckpoint(folder, sizes, model)


def _scaled(name: str, noise: Tensor, model_type: str) -> Tensor:
    if name.endswith("norm.weight") or "layernorm" in name:
        return 0.3 * noise if model_type == "gemma3_text" else 1 + 0.3 * noise
    if noise.ndim == 1 or name.endswith("embed_tokens.weight"):
        return 0.3 * noise
    unit = noise / noise.shape[1] ** 0.5
    return 0.5 * unit if name.endswith(("o_proj.weight", "down_proj.weight")) else unit
