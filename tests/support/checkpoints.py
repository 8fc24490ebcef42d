"""Tiny random Qwen3.5 checkpoints in the published layout, written from transformers' own classes.

Owns sizes, weights, tokenizer and processor files, and the reference that a parity test compares with.
No weight is left at a neutral start (zero norms, equal gates), so that a forgotten one shows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END, START_VISION, END_VISION, IMAGE, VIDEO = 2, 3, 4, 5, 6
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "what is in the picture and where does the red square stand next to the blue circle user assistant system"
SPLIT = r"'s|'t|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATCH, MERGE = 4, 2


@dataclass(frozen=True)
class QwenSizes:
    """Sizes of a checkpoint. `layers`: L is linear attention, F full. `stored`: the type in the file. `experts`: 0 is
    the dense family, else the mixture with `top_k` of them for a row."""

    name: str
    layers: str = "LLFLLF"
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    rotary: float = 0.5
    sections: tuple[int, int, int] = (3, 3, 2)
    k_heads: int = 2
    v_heads: int = 4
    k_size: int = 16
    v_size: int = 16
    conv_width: int = 4
    tied: bool = True
    sharded: bool = False
    stored: torch.dtype = torch.float32
    vocab: int = 320
    seed: int = 1
    experts: int = 0
    top_k: int = 2


TIED = QwenSizes("tied")
UNTIED = QwenSizes(
    "untied",
    layers="LLLFL",
    hidden=48,
    inner=80,
    heads=6,
    rotary=0.25,
    sections=(2, 1, 1),
    k_heads=3,
    v_heads=6,
    v_size=8,
    tied=False,
    sharded=True,
    seed=2,
)
FULL_FIRST = QwenSizes(
    "full-first",
    layers="FLLF",
    heads=3,
    kv_heads=3,
    head_size=16,
    sections=(1, 2, 1),
    k_heads=1,
    v_heads=4,
    k_size=8,
    conv_width=3,
    tied=False,
    stored=torch.bfloat16,
    seed=3,
)
MOE = QwenSizes("mixture", layers="LFLF", inner=32, tied=False, sharded=True, seed=4, experts=6, top_k=3)
SIZES = (TIED, UNTIED, FULL_FIRST, MOE)


def qwen_config(sizes: QwenSizes) -> Qwen3_5Config | Qwen3_5MoeConfig:
    mixture = {
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "moe_intermediate_size": sizes.inner,
        "shared_expert_intermediate_size": sizes.inner + 16,
    }
    text = (mixture if sizes.experts else {"intermediate_size": sizes.inner}) | {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": len(sizes.layers),
        "layer_types": ["linear_attention" if kind == "L" else "full_attention" for kind in sizes.layers],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "linear_conv_kernel_dim": sizes.conv_width,
        "linear_num_key_heads": sizes.k_heads,
        "linear_num_value_heads": sizes.v_heads,
        "linear_key_head_dim": sizes.k_size,
        "linear_value_head_dim": sizes.v_size,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": sizes.rotary,
            "mrope_interleaved": True,
            "mrope_section": list(sizes.sections),
        },
        "tie_word_embeddings": sizes.tied,
        "eos_token_id": END,
        "pad_token_id": 0,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": sizes.hidden,
    }
    return (Qwen3_5MoeConfig if sizes.experts else Qwen3_5Config)(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=sizes.tied,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START_VISION,
        vision_end_token_id=END_VISION,
    )


class ReferenceHead(nn.Module):
    """`mtp.*` from transformers' layer classes; computes all rows at once, without a cache."""

    def __init__(self, config, layer: type[nn.Module] = Qwen3_5DecoderLayer):
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        config._attn_implementation = "eager"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.norm = Qwen3_5RMSNorm(size, eps)
        self._rotary = Qwen3_5TextRotaryEmbedding(config)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """embeds and hidden [n, h], positions [3, n] -> states [n, h]."""
        fused = torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], -1)
        x = self.fc(fused).unsqueeze(0)
        mask = torch.full((len(embeds), len(embeds)), float("-inf")).triu(1)[None, None]
        x = self.layers[0](x, self._rotary(x, positions.unsqueeze(1)), attention_mask=mask)
        return self.norm(x)[0]


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and the same weights in transformers' classes."""

    folder: Path
    sizes: QwenSizes
    model: Qwen3_5ForConditionalGeneration | Qwen3_5MoeForConditionalGeneration
    head: ReferenceHead


def write_qwen3_5(folder: Path, sizes: QwenSizes = TIED) -> Checkpoint:
    """Write a checkpoint folder and return it with its reference."""
    folder.mkdir(parents=True, exist_ok=True)
    config = qwen_config(sizes)
    whole = Qwen3_5MoeForConditionalGeneration if sizes.experts else Qwen3_5ForConditionalGeneration
    layer = Qwen3_5MoeDecoderLayer if sizes.experts else Qwen3_5DecoderLayer
    model = whole(config).eval().requires_grad_(False)
    head = ReferenceHead(config.text_config, layer).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None  # a test asks for a number of tokens
    generator = torch.Generator().manual_seed(sizes.seed)
    _randomize(model, generator, sizes.stored)
    _randomize(head, generator, sizes.stored)
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": 0}))
    write_tokenizer(folder)
    write_processor(folder)
    state = {name: tensor.to(sizes.stored) for name, tensor in model.state_dict().items()}
    if sizes.tied:
        del state["lm_head.weight"]
    own = experts_one_by_one(head.state_dict()) if sizes.experts else head.state_dict()
    state |= {f"mtp.{name}": tensor.to(sizes.stored) for name, tensor in own.items()}
    save_weights(folder, state, num_shards=3 if sizes.sharded else 1)
    return Checkpoint(folder, sizes, model, head)


def experts_one_by_one(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused experts in the spelling that published checkpoints use for the MTP block."""
    out = {}
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".experts.")
        if not stem:
            out[name] = tensor
            continue
        for number, weight in enumerate(tensor):
            parts = {"down_proj": weight}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            out |= {f"{stem}.experts.{number}.{part}.weight": matrix for part, matrix in parts.items()}
    return out


def _randomize(module: nn.Module, generator: torch.Generator, stored: torch.dtype) -> None:
    """Every parameter away from its neutral start, and exactly representable in `stored`."""
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(_scaled(name, noise).to(stored).float())


def _scaled(name: str, noise: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return 0.7 * noise
    if name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight")):
        return 1 + 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.3 * noise
    if noise.ndim == 1:
        return 0.3 * noise
    if ".experts." in name:  # [experts, out, in]
        return (0.3 if name.endswith("down_proj") else 1.0) * noise / noise.shape[-1] ** 0.5
    unit = noise * (noise.shape[0] / noise.numel()) ** 0.5  # weights [out, ...]: rows keep their size
    # A layer adds less than it gets, or rounding grows from layer to layer beyond what a test can tell from a fault.
    return 0.3 * unit if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) else unit


def save_weights(folder: Path, state: dict[str, Tensor], num_shards: int = 1) -> None:
    """One file, or shards with an index."""
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    if num_shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    place = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = sorted(state)[shard::num_shards]
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, whatever its shards."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 300 tokens, special tokens first, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_processor(folder: Path) -> None:
    """Pictures keep their own shape: sides are rounded to merged patches, areas are small."""
    side = PATCH * MERGE
    config = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": side * side, "longest_edge": 24 * side * side},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config))


def edited(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint whose tensors went through `change(state)`."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    state = load_weights(source)
    change(state)
    save_weights(folder, state)
    return folder


def edit_config(folder: Path, change: Callable[[dict], object]) -> Path:
    """Let `change` edit config.json of a folder that is the test's own."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return folder
