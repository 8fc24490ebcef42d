"""Tiny random Step-3.7 checkpoints in the published layout, written from transformers' own classes.

The trunk and the tower are saved by transformers under the published names. The MTP modules are built here from its
layers, since its own MTP path deviates. No weight is left at a neutral start, so that a forgotten one shows.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Step3p7Config, Step3p7ForConditionalGeneration
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7DecoderLayer,
    Step3p7RMSNorm,
    Step3p7RotaryEmbedding,
)

from support.checkpoints import WORDS, save_weights

TAGS = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
SPECIAL = ("<|endoftext|>", "<|BOT|>", "<|EOT|>", "<im_patch>", *TAGS)
END, IMAGE = 2, 3
TEMPLATE = (
    "{% for m in messages %}{{ '<|BOT|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<im_patch>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|EOT|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|BOT|>assistant\n' }}{% endif %}"
)
SIDE, CROP, LONGEST, PATCH = 64, 48, 160, 4  # 4 x 4 rows for the whole picture, 3 x 3 for a crop


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a checkpoint. `layers`: F is full attention, S sliding; `sparse`: the layers with experts."""

    name: str
    layers: str = "FSSFS"
    mtp: str = "SSS"
    sparse: tuple[int, ...] = (1, 3, 4)
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    sliding_heads: int = 6
    kv_heads: int = 2
    head_size: int = 16
    window: int = 8
    experts: int = 6
    top_k: int = 2
    expert_inner: int = 24
    shared_inner: int = 40
    router_scale: float = 1.5
    rotary: tuple[float, float] = (0.5, 1.0)
    llama3: bool = True
    limits: bool = True
    tied: bool = False
    padded: bool = True
    own_heads: bool = True
    stored: torch.dtype = torch.float32
    vocab: int = 320
    seed: int = 1


MIXED = StepSizes("mixed")
DENSE = StepSizes(
    "dense",
    layers="SFFS",
    mtp="FSF",
    sparse=(),
    hidden=48,
    heads=6,
    sliding_heads=3,
    kv_heads=3,
    llama3=False,
    limits=False,
    tied=True,
    padded=True,
    own_heads=False,
    seed=2,
)
SPARSE = StepSizes(
    "sparse",
    layers="SSF",
    sparse=(0, 1, 2),
    heads=2,
    sliding_heads=2,
    head_size=32,
    window=5,
    experts=9,
    top_k=3,
    rotary=(1.0, 0.25),
    padded=False,
    stored=torch.bfloat16,
    seed=3,
)
STEP_SIZES = (MIXED, DENSE, SPARSE)


def step_config(sizes: StepSizes) -> dict:
    """config.json as it is published: per-layer lists, legacy names, lists that cover MTP layers if `padded`."""
    kinds = sizes.layers + (sizes.mtp if sizes.padded else "")
    text = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": len(sizes.layers),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "attention_other_setting": {"num_attention_heads": sizes.sliding_heads},
        "head_dim": sizes.head_size,
        "sliding_window": sizes.window,
        "layer_types": ["full_attention" if kind == "F" else "sliding_attention" for kind in kinds],
        "moe_layers_enum": ",".join(map(str, sizes.sparse)),
        "n_routed_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "moe_intermediate_size": sizes.expert_inner,
        "share_expert_dim": sizes.shared_inner,
        "moe_router_scaling_factor": sizes.router_scale,
        "rope_theta": [100.0 if kind == "F" else 10_000.0 for kind in kinds],
        "partial_rotary_factors": [sizes.rotary[kind == "S"] for kind in kinds],
        "max_position_embeddings": 512,
        "num_nextn_predict_layers": len(sizes.mtp),
        "eos_token_id": END,
        "pad_token_id": 0,
        "tie_word_embeddings": sizes.tied,
    }
    if sizes.limits:
        text["swiglu_limits"] = [0.5 if layer % 3 == 1 else 0.0 for layer in range(len(kinds))]
        text["swiglu_limits_shared"] = [0.7 if layer % 4 else 0.0 for layer in range(len(kinds))]
    if sizes.llama3:
        text["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 8.0,
        }
    vision = {
        "width": 32,
        "layers": 2,
        "heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "mlp_ratio": 2.0,
        "ls_init_value": 0.5,
    }
    return {
        "model_type": "step3p7",
        "architectures": ["Step3p7ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "projector_bias": sizes is DENSE,
        "tie_word_embeddings": sizes.tied,
    }


class ReferenceModule(nn.Module):
    """One MTP module without a cache, from transformers' layers; the states that it hands on are before its norm."""

    def __init__(self, config, layer: int, own_head: bool):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.enorm, self.hnorm = Step3p7RMSNorm(hidden, eps), Step3p7RMSNorm(hidden, eps)
        self.layer = Step3p7DecoderLayer(config, layer)
        self.norm = Step3p7RMSNorm(hidden, eps) if own_head else None
        self.output = nn.Linear(hidden, config.vocab_size, bias=False) if own_head else None
        self.rotary = Step3p7RotaryEmbedding(config)
        self._kind = config.layer_types[layer]
        self._window = config.sliding_window if self._kind == "sliding_attention" else 10_000

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """embeddings, hidden [n, h], positions [n] -> [n, h]."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1)).unsqueeze(0)
        row = torch.arange(len(embeddings))
        seen = (row[None] <= row[:, None]) & (row[None] > row[:, None] - self._window)
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        angles = self.rotary(x, positions[None], self._kind)
        return self.layer(x, attention_mask=mask, position_embeddings=angles)[0]

    def published(self) -> dict[str, Tensor]:
        names = {"norm.weight": "transformer.shared_head.norm.weight"}
        names["output.weight"] = "transformer.shared_head.output.weight"
        return {names.get(name, name.removeprefix("layer.")): tensor for name, tensor in self.state_dict().items()}


@dataclass
class StepCheckpoint:
    """A folder, what it was written from, and its MTP modules."""

    folder: Path
    sizes: StepSizes
    model: Step3p7ForConditionalGeneration
    modules: list[ReferenceModule]


def write_step3p7(folder: Path, sizes: StepSizes) -> StepCheckpoint:
    folder.mkdir(parents=True, exist_ok=True)
    values = step_config(sizes)
    config = Step3p7Config.from_dict(copy.deepcopy(values))
    model = Step3p7ForConditionalGeneration(config).eval().requires_grad_(False)
    model.set_attn_implementation("eager")
    deeper = copy.deepcopy(values)["text_config"]
    kinds = ["full_attention" if kind == "F" else "sliding_attention" for kind in sizes.layers + sizes.mtp]
    deeper |= {"num_hidden_layers": len(kinds), "num_nextn_predict_layers": 0, "layer_types": kinds}
    deeper |= {
        "rope_theta": [100.0 if kind == "full_attention" else 10_000.0 for kind in kinds],
        "partial_rotary_factors": [sizes.rotary[kind == "sliding_attention"] for kind in kinds],
    }
    if sizes.limits and not sizes.padded:
        for name in ("swiglu_limits", "swiglu_limits_shared"):
            deeper[name] = deeper[name] + [0.0] * len(sizes.mtp)
    text = type(config.text_config)(**deeper)
    text._attn_implementation = "eager"
    first = len(sizes.layers)
    modules = [
        ReferenceModule(text, first + i, sizes.own_heads).eval().requires_grad_(False) for i in range(len(sizes.mtp))
    ]
    generator = torch.Generator().manual_seed(sizes.seed)
    for module in (model, *modules):
        randomize(module, generator, sizes.stored)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for i, module in enumerate(modules):
        state |= {f"model.layers.{first + i}.{name}": tensor for name, tensor in module.published().items()}
    save_weights(folder, {name: tensor.to(sizes.stored) for name, tensor in state.items()})
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": 0}))
    write_tokenizer(folder)
    processor = {"image_processor_type": "Step3p7ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    processor |= {"patch_size": CROP, "max_image_size": LONGEST, "vision_patch_size": PATCH}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    model.generation_config.eos_token_id = None  # a test asks for a number of tokens
    return StepCheckpoint(folder, sizes, model, modules)


def randomize(module: nn.Module, generator: torch.Generator, stored: torch.dtype) -> None:
    """Every parameter and stored buffer away from its neutral start, and exactly representable in `stored`."""
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(_scaled(name, noise).to(stored).float())


def _scaled(name: str, noise: Tensor) -> Tensor:
    if "vision_model" in name and noise.ndim == 1 and "weight" in name:
        return 1 + 0.3 * noise  # layer norms
    if name.endswith(("lambda_1", "lambda_2")):
        return 0.5 + 0.2 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.3 * noise
    if noise.ndim == 1:
        return 0.3 * noise
    unit = noise * (noise.shape[-1] if noise.ndim < 4 else noise[0].numel()) ** -0.5
    # A layer adds less than it gets, or rounding grows from layer to layer beyond what a test can tell from a fault.
    return 0.3 * unit if "o_proj" in name or "down_proj" in name else unit


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 300 tokens, special tokens first, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|EOT|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
