"""The architecture of `tiny-text` (Qwen3): a small decoder without a vision tower, with `tiny-qwen`'s vocabulary.

Owns its configuration, and its batches: the same chats with the image rows taken out, since a text model that drafts
for one that sees is given the text alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from training import batches as plain
from training.batches import Batch
from training.model import END_OF_TEXT, IM_END, IMAGE_PAD
from training.prepare import Shard

HIDDEN_SIZE = 128


def make_config(vocab_size: int) -> Qwen3Config:
    """The configuration of `tiny-text`."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )


@dataclass(frozen=True)
class TextShard:
    """A shard as `collate` reads it, without image rows and images."""

    shard: Shard

    def chat(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, labels, _ = self.shard.chat(i)
        kept = ids != IMAGE_PAD
        return ids[kept], labels[kept], np.empty(0, np.int64)


def collate(shard: Shard, chats: np.ndarray) -> Batch:
    return plain.collate(TextShard(shard), chats)


def batches(data: Path, rows: int, seed: int, skip: int, vocab_size: int) -> Iterator[Batch]:
    """Batches of all shards without end. Their rows are counted with the images', so they are smaller than `rows`."""
    return plain.endless(data, rows, seed, skip, collate)


class Target(nn.Module):
    """The model behind the calls that training makes; the same ones as `training.model.Target` has."""

    hidden_size = HIDDEN_SIZE

    def __init__(self, vocab_size: int):
        super().__init__()
        self.model = Qwen3ForCausalLM(make_config(vocab_size))

    @property
    def vision(self) -> nn.Module:
        return nn.ModuleList()

    @property
    def text(self) -> nn.Module:
        return self.model.model

    @property
    def embedding(self) -> Tensor:
        return self.text.embed_tokens.weight

    def embed(self, ids: Tensor, image_rows: None = None) -> Tensor:
        return self.text.embed_tokens(ids)

    def hidden(self, embedded: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embeddings [b, t, hidden] to normed last hidden states; a row's position is its number, on one axis."""
        return self.text(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T
