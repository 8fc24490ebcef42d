"""Tiny random Gemma-4 checkpoints and assistants in the published layout, what transformers says about them, and the
conversations that tests share.

No weight is left at a neutral start, so that a forgotten one shows. Prompts are spelled out by hand here: no chat
template and no row arithmetic of the engine is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    convert_image_to_patches,
    get_aspect_ratio_preserving_size,
    pad_along_first_dim,
)
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM

from foreglance.request import Image, Message, Text
from support.checkpoints import END, END_VISION, IMAGE, START_VISION, VIDEO, save_weights, write_tokenizer

PATCH, POOL, MAX_ROWS = 4, 2, 12
SIDE = PATCH * POOL
WINDOW = 12
KINDS = {"S": "sliding_attention", "F": "full_attention"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image_pad|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class GemmaSizes:
    """Sizes of a checkpoint. `layers`: S is sliding, F full attention; the last `shared` of them share caches.

    `calibrated`: the next token is mostly a fixed permutation of the current one, disturbed by what the layers saw, so
    that an assistant that knows the permutation guesses right and wrong.
    """

    name: str
    layers: str = "SSFSSF"
    shared: int = 0
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    full_kv_heads: int | None = None
    full_head_size: int = 32
    per_layer: int = 0
    double_wide: bool = False
    tied_values: bool = False
    experts: int = 0
    whole_images: bool = False
    softcap: float | None = None
    stretch: float = 1.0  # of positions on full layers
    standardize: bool = False
    clipped: bool = False
    stored: torch.dtype = torch.float32
    calibrated: bool = False
    vocab: int = 320
    seed: int = 1


DENSE = GemmaSizes("dense", full_kv_heads=1, tied_values=True, whole_images=True, seed=11)
SMALL = GemmaSizes(
    "per-layer inputs and shared caches",
    layers="SSFSSFSF",
    shared=4,
    kv_heads=1,
    per_layer=8,
    double_wide=True,
    softcap=6.0,
    clipped=True,
    seed=12,
)
MIXED = GemmaSizes(
    "mixture",
    layers="SFSF",
    experts=6,
    full_kv_heads=2,
    whole_images=True,
    tied_values=True,
    stretch=3.0,
    standardize=True,
    stored=torch.bfloat16,
    seed=13,
)
SHARED_WHOLE = GemmaSizes(
    "shared caches and whole images", layers="SFSSF", shared=2, per_layer=4, whole_images=True, seed=14
)
SIZES = (DENSE, SMALL, MIXED, SHARED_WHOLE)
PAIR = GemmaSizes(
    "pair", layers="SSFSF", shared=2, per_layer=4, whole_images=True, softcap=20.0, calibrated=True, seed=21
)


def text_config(sizes: GemmaSizes) -> dict:
    return {
        "vocab_size": sizes.vocab,
        "vocab_size_per_layer_input": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": len(sizes.layers),
        "layer_types": [KINDS[letter] for letter in sizes.layers],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "global_head_dim": sizes.full_head_size,
        "num_global_key_value_heads": sizes.full_kv_heads,
        "attention_k_eq_v": sizes.tied_values,
        "num_kv_shared_layers": sizes.shared,
        "hidden_size_per_layer_input": sizes.per_layer,
        "use_double_wide_mlp": sizes.double_wide,
        "enable_moe_block": sizes.experts > 0,
        "num_experts": sizes.experts or None,
        "top_k_experts": 2 if sizes.experts else None,
        "moe_intermediate_size": 24 if sizes.experts else None,
        "use_bidirectional_attention": "vision" if sizes.whole_images else None,
        "final_logit_softcapping": sizes.softcap,
        "sliding_window": WINDOW,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000.0,
                "factor": sizes.stretch,
            },
        },
        "pad_token_id": 1,
        "eos_token_id": END,
        "bos_token_id": None,
    }


def gemma_config(sizes: GemmaSizes) -> Gemma4Config:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": PATCH,
        "pooling_kernel_size": POOL,
        "position_embedding_size": 64,
        "standardize": sizes.standardize,
        "use_clipped_linears": sizes.clipped,
    }
    return Gemma4Config(
        text_config=text_config(sizes),
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=None,
        boi_token_id=START_VISION,
        eoi_token_id=END_VISION,
        tie_word_embeddings=not sizes.calibrated,
    )


@dataclass(frozen=True)
class GemmaCheckpoint:
    """A folder, and the same weights in transformers' classes. `follows` [vocab]: the permutation, if calibrated."""

    folder: Path
    sizes: GemmaSizes
    model: Gemma4ForConditionalGeneration
    follows: Tensor


def write_gemma4(folder: Path, sizes: GemmaSizes) -> GemmaCheckpoint:
    """Write a checkpoint folder and return it with its reference."""
    folder.mkdir(parents=True, exist_ok=True)
    config = gemma_config(sizes)
    config._attn_implementation = "eager"
    model = Gemma4ForConditionalGeneration(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(sizes.seed)
    randomize(model, generator, sizes.stored)
    follows = torch.randperm(sizes.vocab - 8, generator=generator) + 8
    if sizes.calibrated:
        table = model.model.language_model.embed_tokens.weight
        model.lm_head.weight.mul_(0.4)
        model.lm_head.weight[follows] += 0.3 * table[8:]
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": 0}))
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_processor(folder)
    state = {name: tensor.to(sizes.stored) for name, tensor in model.state_dict().items()}
    if not sizes.calibrated:
        del state["lm_head.weight"]
    save_weights(folder, state)
    return GemmaCheckpoint(folder, sizes, model, follows)


def write_processor(folder: Path, **changes) -> None:
    """In a section of processor_config.json, where published checkpoints have it."""
    images = {"patch_size": PATCH, "pooling_kernel_size": POOL, "max_soft_tokens": MAX_ROWS, **changes}
    values = {
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **images},
        "image_seq_length": MAX_ROWS,
    }
    (folder / "processor_config.json").write_text(json.dumps(values))


def randomize(module: nn.Module, generator: torch.Generator, stored: torch.dtype) -> None:
    """Every parameter and stored buffer away from its neutral start, and exactly representable in `stored`."""
    named = dict(module.named_parameters())
    named |= {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()}
    for name, tensor in named.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(_scaled(name, noise).to(stored).float())


def _scaled(name: str, noise: Tensor) -> Tensor:
    last = name.rsplit(".", 1)[-1]
    if last in ("input_min", "output_min"):
        return -1.5 - noise.abs()
    if last in ("input_max", "output_max"):
        return 1.5 + noise.abs()
    if last in ("layer_scalar", "per_expert_scale", "scale", "std_scale"):
        return 0.8 + 0.2 * noise
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.5 + 0.1 * noise  # attention is not scaled, so norms decide how sharp it is
    if noise.ndim == 1:
        return 0.7 + 0.2 * noise
    if last == "position_embedding_table" or "embed_tokens" in name:
        return 0.3 * noise
    return noise * noise.shape[-1] ** -0.5


def picture(height: int, width: int, seed: int) -> PIL.Image.Image:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


WIDE, TALL, LARGE, ODD = picture(16, 40, 1), picture(32, 8, 2), picture(24, 32, 3), picture(50, 33, 4)
LONG = "where does the red square stand next to the blue circle and what is in the picture? " * 4


def _user(*parts) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else Image(part) for part in parts))


CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "text": (Message.of("system", "the picture"), _user(LONG)),
    "one image": (_user(WIDE, "what is in the picture and where?"),),
    "two images": (_user("the red square", TALL, LARGE, "what is where?"),),
    "two turns": (
        _user(ODD, "what is in the picture?"),
        Message.of("assistant", "the blue circle"),
        _user("and in ", WIDE, "?"),
    ),
}


def pixels_of(image: PIL.Image.Image) -> tuple[Tensor, Tensor, int]:
    """Patches [1, most, patch * patch * 3], places [1, most, 2] and the number of image rows, as the published
    processor makes them: with its own functions, padding included."""
    most = MAX_ROWS * POOL**2
    height, width = get_aspect_ratio_preserving_size(image.height, image.width, PATCH, most, POOL)
    resized = image if (height, width) == (image.height, image.width) else image.resize((width, height), 3)
    values = (np.asarray(resized).transpose(2, 0, 1).astype(np.float64) / 255).astype(np.float32)
    patches = convert_image_to_patches(values, PATCH)
    x, y = np.meshgrid(np.arange(width // PATCH), np.arange(height // PATCH), indexing="xy")
    places = np.stack([x, y], -1).reshape(len(patches), 2)
    padded, places = pad_along_first_dim(patches, places, most)
    return torch.from_numpy(padded)[None], torch.from_numpy(places)[None], len(patches) // POOL**2


@dataclass(frozen=True)
class GemmaDialogue:
    """A conversation on a checkpoint, as transformers takes it; `more` are token ids behind the prompt."""

    checkpoint: GemmaCheckpoint
    messages: tuple[Message, ...]
    more: tuple[int, ...] = ()

    @property
    def pictures(self) -> list[PIL.Image.Image]:
        return [part.source for m in self.messages for part in m.parts if isinstance(part, Image)]

    @cached_property
    def token_ids(self) -> list[int]:
        """The prompt by hand: roles, then each image as its rows between two tags."""
        text = ""
        for message in self.messages:
            text += f"<|im_start|>{message.role}\n"
            for part in message.parts:
                if isinstance(part, Text):
                    text += part.text
                else:
                    text += "<|vision_start|>" + pixels_of(part.source)[2] * "<|image_pad|>" + "<|vision_end|>"
            text += "<|im_end|>\n"
        text += "<|im_start|>assistant\n"
        tokenizer = Tokenizer.from_file(str(self.checkpoint.folder / "tokenizer.json"))
        return [*tokenizer.encode(text, add_special_tokens=False).ids, *self.more]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([self.token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.pictures:
            made = [pixels_of(image) for image in self.pictures]
            inputs["pixel_values"] = torch.cat([patches for patches, _, _ in made])
            inputs["image_position_ids"] = torch.cat([places for _, places, _ in made])
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        return inputs

    @cached_property
    def _outputs(self):
        with torch.inference_mode():
            return self.checkpoint.model.model(
                **self.inputs, use_cache=False, return_shared_kv_states=True, output_hidden_states=True
            )

    @property
    def hidden(self) -> Tensor:
        """States after the final norm [rows, h]."""
        return self._outputs.last_hidden_state[0]

    @cached_property
    def logits(self) -> Tensor:
        """[rows, vocab]."""
        with torch.inference_mode():
            return self.checkpoint.model(**self.inputs, use_cache=False).logits[0]

    @property
    def shared(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values of all rows by kind of layer, each [1, kv heads, rows, d]."""
        return dict(self._outputs.shared_kv_states)

    @cached_property
    def images(self) -> list[Tensor]:
        """Embeddings [rows, h] of each image."""
        if not self.pictures:
            return []
        with torch.inference_mode():
            found = self.checkpoint.model.model.get_image_features(
                self.inputs["pixel_values"], self.inputs["image_position_ids"]
            )
        return list(found.pooler_output)


@dataclass(frozen=True)
class AssistantSizes:
    """Sizes of an assistant. `centroids`: 0 is a head over all tokens, else the number of ordered centroids."""

    name: str
    layers: str = "SSF"
    hidden: int = 48
    inner: int = 80
    heads: int = 8
    centroids: int = 0
    top_k: int = 6
    seed: int = 31


FULL_HEAD = AssistantSizes("full head")
ORDERED = AssistantSizes("ordered head", layers="SFSF", heads=4, centroids=20, seed=32)


@dataclass(frozen=True)
class Assistant:
    """A folder, and the same weights in transformers' class."""

    folder: Path
    model: Gemma4AssistantForCausalLM


def write_assistant(folder: Path, sizes: AssistantSizes, target: GemmaCheckpoint) -> Assistant:
    """An assistant for `target`; for a calibrated one it knows the permutation and is disturbed by what it sees."""
    folder.mkdir(parents=True, exist_ok=True)
    text = text_config(target.sizes) | {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": len(sizes.layers),
        "num_kv_shared_layers": len(sizes.layers),
        "layer_types": [KINDS[letter] for letter in sizes.layers],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": None,
    }
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.sizes.hidden,
        use_ordered_embeddings=sizes.centroids > 0,
        num_centroids=sizes.centroids or 20,
        centroid_intermediate_top_k=sizes.top_k,
    )
    config._attn_implementation = "eager"
    model = Gemma4AssistantForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(sizes.seed)
    randomize(model, generator, torch.float32)
    if target.sizes.calibrated:
        _calibrate(model, target)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(target.sizes.vocab, generator=generator))
        members = model.masked_embedding.token_ordering.view(sizes.centroids, -1)
        model.masked_embedding.centroids.weight.copy_(model.lm_head.weight[members].mean(1) * members.shape[1] ** 0.5)
    config.save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_weights(folder, state)
    return Assistant(folder, model)


def _calibrate(model: Gemma4AssistantForCausalLM, target: GemmaCheckpoint) -> None:
    """`pre_projection` passes on the token's embedding, and the head knows what follows it."""
    table = target.model.model.language_model.embed_tokens.weight
    hidden, width = model.pre_projection.weight.shape[0], table.shape[1]
    model.pre_projection.weight.mul_(0.15)
    model.pre_projection.weight[:, :width] += torch.eye(hidden, width)
    model.lm_head.weight.mul_(0.3)
    model.lm_head.weight[target.follows] += table[8:, :hidden]
