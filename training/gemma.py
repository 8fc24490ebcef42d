"""The architecture of `tiny-gemma` (Gemma-4): sliding and full attention, shared keys and values, per-layer inputs.

Owns its configuration, its pixels and the masks of its image blocks. The target is transformers' own class. Rows of one
image see each other in the sliding layers, before and behind (`use_bidirectional_attention="vision"`); the last two
layers have no keys and values of their own and read those of the last layer of their kind before them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4 import modeling_gemma4 as gemma

from training.model import (
    END_OF_TEXT,
    GRID,
    IM_END,
    IMAGE_PAD,
    ROWS_PER_IMAGE,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)

HIDDEN_SIZE = 192
PATCH_SIZE = 8
POOLING = 2
PATCHES = GRID * POOLING  # in a row of a 64 x 64 picture
SLIDING_WINDOW = 256
BRANCH_GAIN = 0.2  # of what a layer adds, at the start


def make_config(vocab_size: int) -> Gemma4Config:
    """The configuration of `tiny-gemma`. There is no audio; the video token stands for it too, and is never used."""
    text = {
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "hidden_size_per_layer_input": 32,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "global_head_dim": 64,
        "sliding_window": SLIDING_WINDOW,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100000.0},
        },
    }
    vision = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "patch_size": PATCH_SIZE,
        "pooling_kernel_size": POOLING,
        "position_embedding_size": 64,
    }
    return Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        audio_token_id=VIDEO_PAD,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
        boa_token_id=None,
        eoa_token_index=None,
        tie_word_embeddings=True,
    )


def pixel_patches(pictures: np.ndarray) -> tuple[Tensor, Tensor]:
    """uint8 pictures [n, 64, 64, 3] to patches [n, 64, 8 * 8 * 3] of 0 to 1, and their places (x, y) [n, 64, 2]."""
    n = len(pictures)
    x = torch.from_numpy(np.array(pictures)).float().div_(255)
    x = x.view(n, PATCHES, PATCH_SIZE, PATCHES, PATCH_SIZE, 3).transpose(2, 3).reshape(n, PATCHES**2, -1)
    y, column = torch.meshgrid(torch.arange(PATCHES), torch.arange(PATCHES), indexing="ij")
    return x, torch.stack([column, y], dim=-1).view(1, -1, 2).expand(n, -1, -1)


def masks(ids: Tensor) -> dict[str, Tensor | None]:
    """Which rows [b, 1, t, t] a row sees, by the type of layer, for ids [b, t]; None is plain causal attention."""
    rows = torch.arange(ids.shape[1])
    is_image = ids == IMAGE_PAD
    begins = is_image & ~torch.roll(is_image, 1, dims=1)
    block = torch.where(is_image, begins.cumsum(1), 0)
    same_image = (block[:, :, None] == block[:, None, :]) & is_image[:, :, None]
    sees = (rows[:, None] >= rows) | same_image
    near = (rows[:, None] - rows) < SLIDING_WINDOW
    return {"full_attention": None, "sliding_attention": (sees & near)[:, None]}


@dataclass(frozen=True)
class Inputs:
    """What the text model reads: embeddings [b, t, hidden], per-layer inputs [b, t, layers, 32], and the ids."""

    embedded: Tensor
    per_layer: Tensor
    ids: Tensor


class Target(nn.Module):
    """The model behind the calls that training makes; the same ones as `training.model.Target` has."""

    hidden_size = HIDDEN_SIZE

    def __init__(self, vocab_size: int):
        super().__init__()
        self.model = Gemma4ForConditionalGeneration(make_config(vocab_size))
        temper(self.model)

    @property
    def vision(self) -> nn.Module:
        return nn.ModuleDict({"tower": self.model.model.vision_tower, "embedder": self.model.model.embed_vision})

    @property
    def text(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def embedding(self) -> Tensor:
        return self.text.embed_tokens.weight

    def image_rows(self, images: np.ndarray) -> Tensor:
        """uint8 pictures [n, 64, 64, 3] to image embeddings [n, 16, hidden]."""
        patches, places = pixel_patches(images)
        rows = self.model.model.vision_tower(patches, pixel_position_ids=places).last_hidden_state
        return self.model.model.embed_vision(rows).view(len(images), ROWS_PER_IMAGE, -1)

    def embed(self, ids: Tensor, image_rows: Tensor | None) -> Inputs:
        """Token ids [b, t] to the text model's inputs. Image rows have the per-layer inputs of the padding token."""
        is_image = ids == IMAGE_PAD
        embedded = self.text.embed_tokens(ids)
        per_layer = self.text.get_per_layer_inputs(torch.where(is_image, END_OF_TEXT, ids))
        if image_rows is not None:
            embedded = embedded.masked_scatter(is_image.unsqueeze(-1), image_rows)
        return Inputs(embedded, per_layer, ids)

    def run(self, inputs: Inputs) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Normed last hidden states, and the shared keys and values by type of layer."""
        out = self.text(
            inputs_embeds=inputs.embedded,
            per_layer_inputs=inputs.per_layer,
            attention_mask=masks(inputs.ids),
            logits_to_keep=torch.arange(inputs.ids.shape[1]),
            use_cache=False,
            return_shared_kv_states=True,
        )
        return out.last_hidden_state, out.shared_kv_states

    def hidden(self, inputs: Inputs, positions: Tensor | None = None) -> Tensor:
        """Normed last hidden states [b, t, hidden]; a row's position is its number, on one axis."""
        return self.run(inputs)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        cap = self.model.config.text_config.final_logit_softcapping
        return torch.tanh(hidden @ self.embedding.T / cap) * cap


@torch.no_grad()
def temper(model: nn.Module) -> None:
    """Start values that train from nothing. Attention is not scaled in this family, so its query norms begin small; and
    what a layer adds is normed, so at a gain of one it would drown what the layer was given.
    """
    for name, module in model.named_modules():
        if isinstance(module, gemma.Gemma4TextAttention | gemma.Gemma4VisionAttention):
            module.q_norm.weight.fill_(module.head_dim**-0.5)
        elif isinstance(module, gemma.Gemma4VisionPatchEmbedder):
            module.input_proj.weight.normal_(std=0.07)
            module.position_embedding_table.normal_(std=0.2)
        elif isinstance(module, gemma.Gemma4RMSNorm) and ".post_" in name:
            module.weight.fill_(BRANCH_GAIN)
