"""The architecture of the embedded models, and the two pieces that training needs beyond transformers.
 Owns the configuration of `tiny-qwen` (a Qwen3.5 of 4 million parameters), the pixel layout and position rule
of its rows, and the MTP head with a forward that runs all draft steps of a whole sequence at once. Target and
vision tower are transformers' own classes; only the attention of the vision tower is replaced, by one that
treats a batch of pictures of one size in one call instead of a Python loop over pictures. The numbers are the
same.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(7)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
HIDDEN_SIZE = 192
PATCH_SIZE = 8
MERGE_SIZE = 2
GRID = 4  # merged rows and columns of a 64 x 64 picture
ROWS_PER_IMAGE = GRID * GRID


def make_config(vocab_size: int) -> Qwen3_5Config:
    """The configuration of `tiny-qwen` for a vocabulary of that size."""
    text = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "full_attention_interval": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 64,
    }
    return Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )


def pixel_rows(images: np.ndarray) -> tuple[Tensor, Tensor]:
    """uint8 pictures [n, 64, 64, 3] to the tower's patches [n * 64, 3 * 2 * 8 * 8] and its grid [n, 3].
     Same numbers as transformers' image processor: scaled to -1..1, patches in the order of the merged 2 x 2
    blocks, each twice because a still picture counts as two frames.
    """
    n = len(images)
    x = torch.from_numpy(np.array(images)).float().div_(127.5).sub_(1).permute(0, 3, 1, 2)
    x = x.view(n, 3, GRID, MERGE_SIZE, PATCH_SIZE, GRID, MERGE_SIZE, PATCH_SIZE)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    side = GRID * MERGE_SIZE
    return x.reshape(n * side * side, -1), torch.tensor([[1, side, side]] * n)


def mrope_positions(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Positions [3, n] of rows: text steps all axes by one, an image spans 4 x 4 and moves them by 4."""
    is_image = np.asarray(ids) == IMAGE_PAD
    positions = np.zeros((3, len(is_image)), np.int64)
    block = np.arange(ROWS_PER_IMAGE)
    offsets = np.stack([0 * block, block // GRID, block % GRID])
    start = row = 0
    while row < len(is_image):
        if is_image[row]:
            positions[:, row : row + ROWS_PER_IMAGE] = start + offsets
            start, row = start + GRID, row + ROWS_PER_IMAGE
        else:
            positions[:, row] = start
            start, row = start + 1, row + 1
    return positions


def _attend_equal_pictures(self, hidden_states, cu_seqlens, position_embeddings=None, max_seqlen=None, **_):
    """`Qwen3_5VisionAttention.forward` for pictures that all have the same number of patches."""
    num_rows, patches = hidden_states.shape[0], int(cu_seqlens[1])
    query, key, value = self.qkv(hidden_states).view(num_rows, 3, self.num_heads, -1).unbind(1)
    query, key = qwen.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    query, key, value = (
        x.view(num_rows // patches, patches, self.num_heads, -1).transpose(1, 2) for x in (query, key, value)
    )
    out = F.scaled_dot_product_attention(query, key, value, scale=self.scaling)
    return self.proj(out.transpose(1, 2).reshape(num_rows, -1))


def batch_pictures() -> None:
    """Makes vision towers in this process run pictures of equal size in one attention call."""
    qwen.Qwen3_5VisionAttention.forward = _attend_equal_pictures


class Target(nn.Module):
    """The model behind the two calls that training makes: rows to hidden states, hidden states to logits."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.model = Qwen3_5ForConditionalGeneration(make_config(vocab_size))

    @property
    def vision(self) -> nn.Module:
        return self.model.model.visual

    @property
    def text(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def embedding(self) -> Tensor:
        return self.text.embed_tokens.weight

    def image_rows(self, images: np.ndarray) -> Tensor:
        """uint8 pictures [n, 64, 64, 3] to image embeddings [n, 16, hidden]."""
        patches, grid = pixel_rows(images)
        return self.vision(patches, grid_thw=grid).pooler_output.view(len(images), ROWS_PER_IMAGE, -1)

    def embed(self, ids: Tensor, image_rows: Tensor | None) -> Tensor:
        """Token ids [b, t] to input embeddings [b, t, hidden], image rows put where the placeholders are."""
        embedded = self.text.embed_tokens(ids)
        if image_rows is None:
            return embedded
        return embedded.masked_scatter((ids == IMAGE_PAD).unsqueeze(-1), image_rows)

    def hidden(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [b, t, hidden] at positions [3, b, t] to normed last hidden states [b, t, hidden]."""
        return self.text(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T


class MtpHead(nn.Module):
    """The draft head: one full-attention layer over rows (hidden state of row t, input of row t + 1).
     Parameter names are those under `mtp.` in a checkpoint. `step` computes one draft step for all rows of a
    sequence at once, as the head would see them when it drafts from that row: the chain of the row itself,
    over the first-step rows before it.
    """

    def __init__(self, text_config):
        super().__init__()
        config = copy.deepcopy(text_config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, 0)])
        self.norm = qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def step(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], earlier: list) -> Tensor:
        """One draft step of all rows; `earlier` holds the steps' keys and values and gains this one's.
         embedded, hidden [b, t, hidden] and rotary (cos, sin) belong to the rows' inputs. The first step's
        rows see each other causally; a later step's row sees the first-step rows up to its own start and the
        rows of its own chain.
        """
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        residual = self.fc(joined)
        layer = self.layers[0]
        residual = residual + self._attend(layer.self_attn, layer.input_layernorm(residual), rotary, earlier)
        return self.norm(residual + layer.mlp(layer.post_attention_layernorm(residual)))

    def _attend(self, attention: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], earlier: list) -> Tensor:
        b, t, _ = x.shape
        size = attention.head_dim
        query, gate = attention.q_proj(x).view(b, t, -1, 2 * size).chunk(2, dim=-1)
        query = attention.q_norm(query).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(x).view(b, t, -1, size)).transpose(1, 2)
        value = attention.v_proj(x).view(b, t, -1, size).transpose(1, 2)
        query, key = qwen.apply_rotary_pos_emb(query, key, *rotary)
        key, value = (h.repeat_interleave(attention.num_key_value_groups, dim=1) for h in (key, value))
        earlier.append((key, value))
        (first_key, first_value), chain = earlier[0], earlier[1:]
        if not chain:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=attention.scaling)
        else:
            future = torch.ones(t, t, dtype=torch.bool).triu(1)
            scores = (query @ first_key.transpose(-1, -2)).masked_fill(future, float("-inf"))
            own = torch.stack([(query * k).sum(-1) for k, _ in chain], dim=-1)
            weights = (torch.cat([scores, own], dim=-1) * attention.scaling).softmax(-1)
            out = weights[..., :t] @ first_value
            for i, (_, v) in enumerate(chain):
                out = out + weights[..., t + i : t + i + 1] * v
        out = out.transpose(1, 2).reshape(b, t, -1) * torch.sigmoid(gate.reshape(b, t, -1))
        return attention.o_proj(out)
