"""The architecture of `tiny-step` (Step-3.7): sliding and full attention, experts, crops of large pictures.

Owns its configuration, its pixels, where the crops of a large picture stand in a chat, and the batches that train them.
The target is transformers' own class. A picture of 64 x 64 pixels is one global view of 16 rows; a larger or longer one
has crops of 16 rows each before its global view, by the published rule (`Step3p7ImageProcessor`).
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Step3p7Config, Step3p7ForConditionalGeneration
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.step3p7.modeling_step3p7 import Step3p7TopKRouter

from training.batches import Batch, collate, endless
from training.model import END_OF_TEXT, IM_END, IMAGE_PAD, ROWS_PER_IMAGE, VISION_START
from training.prepare import READ, Shard

HIDDEN_SIZE = 192
PICTURE_SIZE = 64
NUM_MODULES = 3  # draft modules, after the trunk's layers
NEW_TOKENS = ("<patch_start>", "<patch_end>", "<patch_newline>")  # ids follow the shared vocabulary
# Width and height of the pictures that have crops, and their crops in a row and in a column.
LARGE = {(128, 64): (2, 1), (64, 128): (1, 2), (128, 128): (2, 2)}
LARGE_SHARE = 0.1  # of all batches
BALANCE_RATE = 1e-3


def make_config(vocab_size: int) -> Step3p7Config:
    """The configuration of `tiny-step` for the shared vocabulary, which grows by the crops' tokens."""
    layer_types = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    text = {
        "vocab_size": vocab_size + 32,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types + ["sliding_attention"] * NUM_MODULES,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3 + ["dense"] * NUM_MODULES,
        "num_nextn_predict_layers": NUM_MODULES,
        "num_attention_heads": 4,
        "num_sliding_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "sliding_window": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "share_expert_dim": 96,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    }
    vision = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": PICTURE_SIZE,
        "patch_size": 4,
        "mlp_ratio": 2.0,
        "max_position_embeddings": 256,
        "layer_scale_init_value": 1.0,
    }
    return Step3p7Config(text_config=text, vision_config=vision, image_token_id=IMAGE_PAD, tie_word_embeddings=True)


def normalize(pictures: np.ndarray) -> Tensor:
    """uint8 pictures [n, 64, 64, 3] to pixel values [n, 3, 64, 64]."""
    pixels = torch.from_numpy(np.array(pictures)).float().div_(255).permute(0, 3, 1, 2)
    return (pixels - torch.tensor(OPENAI_CLIP_MEAN).view(3, 1, 1)) / torch.tensor(OPENAI_CLIP_STD).view(3, 1, 1)


def views(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A scene's picture, enlarged to `size`, as the model sees it."""
    return views_of(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR))


def views_of(large: Image.Image) -> np.ndarray:
    """The crops of a picture in reading order, then its global view: uint8 [views, 64, 64, 3]."""
    if large.size not in LARGE:
        return np.asarray(large)[None]
    whole = np.asarray(large.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BILINEAR))
    columns, rows = LARGE[large.size]
    parts = np.asarray(large).reshape(rows, PICTURE_SIZE, columns, PICTURE_SIZE, 3).swapaxes(1, 2)
    return np.concatenate([parts.reshape(-1, PICTURE_SIZE, PICTURE_SIZE, 3), whole[None]])


def crop_ids(size: tuple[int, int], patch_start: int) -> list[int]:
    """The tokens of a large picture's crops: start, rows and end of each, a newline between rows of crops."""
    columns, rows = LARGE[size]
    crop = [patch_start, *[IMAGE_PAD] * ROWS_PER_IMAGE, patch_start + 1]
    line = crop * columns
    return [*line, *[patch_start + 2, *line] * (rows - 1)]


def with_crops(ids: np.ndarray, labels: np.ndarray, crops: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """A chat's ids and labels with the tokens of the crops before every image."""
    starts = np.flatnonzero(np.asarray(ids) == VISION_START)
    where = np.repeat(starts, len(crops))
    return np.insert(ids, where, np.tile(crops, len(starts))), np.insert(labels, where, READ)


@dataclass(frozen=True)
class LargeBatch(Batch):
    """A batch whose pictures are all of one large size."""

    size: tuple[int, int]

    def hidden(self, target: "Target") -> Tensor:
        pictures = np.concatenate([views(picture, self.size) for picture in Shard.pictures(self.seeds)])
        return target.hidden(target.embed(self.ids, target.image_rows(pictures)), self.positions)


@dataclass(frozen=True)
class _LargeShard:
    """A shard as `collate` reads it, with the crops of large pictures in its chats."""

    shard: Shard
    crops: list[int]

    def chat(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, labels, seeds = self.shard.chat(i)
        return *with_crops(ids, labels, self.crops), seeds


def batches(data: Path, rows: int, seed: int, skip: int, vocab_size: int) -> Iterator[Batch]:
    """Batches of all shards without end; in one of ten all pictures are large. Order and choice depend on the seed."""

    def collate_some_large(shard: Shard, chats: np.ndarray) -> Batch:
        rng = np.random.default_rng(zlib.crc32(np.asarray(chats, np.int64).tobytes()))
        seeing = [i for i in chats if len(shard.chat(int(i))[2])][: max(1, len(chats) * 2 // 3)]
        if rng.random() >= LARGE_SHARE or not seeing or max(shard.lengths[chats]) > 300:
            return collate(shard, chats)
        size = list(LARGE)[rng.integers(len(LARGE))]
        plain = collate(_LargeShard(shard, crop_ids(size, vocab_size)), np.array(seeing))
        return LargeBatch(plain.ids, plain.labels, plain.positions, plain.seeds, size)

    return endless(data, rows, seed, skip, collate_some_large)


class Target(nn.Module):
    """The model behind the calls that training makes; the same ones as `training.model.Target` has."""

    hidden_size = HIDDEN_SIZE

    def __init__(self, vocab_size: int):
        super().__init__()
        self.model = Step3p7ForConditionalGeneration(make_config(vocab_size))
        for module in self.modules():
            if isinstance(module, Step3p7TopKRouter):
                module.register_forward_hook(_balance)

    @property
    def vision(self) -> nn.Module:
        model = self.model.model
        return nn.ModuleDict({"tower": model.vision_model, "projector": model.multi_modal_projector})

    @property
    def text(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def embedding(self) -> Tensor:
        return self.text.embed_tokens.weight

    def image_rows(self, images: np.ndarray) -> Tensor:
        """uint8 views [n, 64, 64, 3] to image embeddings [n, 16, hidden]."""
        tower, projector = self.model.model.vision_model, self.model.model.multi_modal_projector
        return projector(tower(normalize(images)).last_hidden_state)

    def embed(self, ids: Tensor, image_rows: Tensor | None) -> Tensor:
        """Token ids [b, t] to input embeddings [b, t, hidden], image rows put where the placeholders are."""
        embedded = self.text.embed_tokens(ids)
        if image_rows is None:
            return embedded
        return embedded.masked_scatter((ids == IMAGE_PAD).unsqueeze(-1), image_rows)

    def hidden(self, embedded: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embeddings [b, t, hidden] to normed last hidden states; a row's position is its number, on one axis."""
        return self.text(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T


def _balance(router: Step3p7TopKRouter, _: tuple, out: tuple[Tensor, Tensor, Tensor]) -> None:
    """Moves the router's selection bias towards experts that got fewer rows than their share."""
    if not router.training or not torch.is_grad_enabled():
        return
    load = torch.bincount(out[2].flatten(), minlength=router.num_experts).float()
    router.e_score_correction_bias += BALANCE_RATE * torch.sign(load.mean() - load)
