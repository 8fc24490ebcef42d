"""Writes the data set of the embedded models: a tokenizer, and shards of tokenized chats.

Owns the tokenizer, the layout of a chat as tokens and which tokens are trained on. A shard holds token ids
and the seeds of the scenes; pictures are drawn again from their seeds when they are needed, which costs less
than reading them.
"""

import json
import random
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from foreglance.bench.scenes import HELD_OUT_SEED, content_words, position_words
from training.captions import Chats, Message, training_scene
from training.model import IM_END, ROWS_PER_IMAGE, SPECIAL_TOKENS

# What the trainer does with a token: read it, or learn to say it; words about the picture weigh more.
READ, SAY, SAY_CONTENT = 0, 1, 2
VALIDATION = "validation"


def chat_text(messages: list[Message], rows_per_image: int = ROWS_PER_IMAGE) -> str:
    """What the chat template makes of a chat, with a placeholder for every image row."""
    image = "<|vision_start|>" + "<|image_pad|>" * rows_per_image + "<|vision_end|>"
    text = ""
    for message in messages:
        parts = message["content"]
        if not isinstance(parts, str):
            parts = "".join(image if part["type"] == "image" else part["text"] for part in parts)
        text += f"<|im_start|>{message['role']}\n{parts}<|im_end|>\n"
    return text


def image_seeds(messages: list[Message]) -> list[int]:
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [part["seed"] for part in parts if part["type"] == "image"]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with Qwen3.5's splitting rule and the special tokens at ids 0 to 6."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Encoder:
    """Chats to token ids and to what the trainer does with each token."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.answer_start = tokenizer.encode("<|im_start|>assistant\n").ids
        words = [tokenizer.decode([i]).strip() for i in range(tokenizer.get_vocab_size())]
        told = {word.lower() for word in content_words() | position_words()}
        self.labels = np.array([SAY_CONTENT if word.lower() in told else SAY for word in words], np.int8)

    def encode(self, messages: list[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels; answers are said, their <|im_end|> included, the rest is read."""
        ids = self.tokenizer.encode(chat_text(messages)).ids
        labels = np.full(len(ids), READ, np.int8)
        width = len(self.answer_start)
        i = 0
        while i < len(ids):
            if ids[i : i + width] == self.answer_start:
                stop = ids.index(IM_END, i + width) + 1
                labels[i + width : stop] = self.labels[ids[i + width : stop]]
                i = stop
            else:
                i += 1
        return np.array(ids, np.int16), labels


class Shard:
    """Some thousand tokenized chats in one .npz file."""

    def __init__(self, path: Path):
        with np.load(path) as arrays:
            self._ids, self._labels, self._starts = arrays["ids"], arrays["labels"], arrays["starts"]
            self._seeds, self._image_starts = arrays["seeds"], arrays["image_starts"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._starts)

    def chat(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, labels and scene seeds of chat `i`."""
        rows = slice(self._starts[i], self._starts[i + 1])
        return (
            self._ids[rows],
            self._labels[rows],
            self._seeds[self._image_starts[i] : self._image_starts[i + 1]],
        )

    @staticmethod
    def pictures(seeds: np.ndarray) -> np.ndarray:
        """Draws scenes again: uint8 [n, 64, 64, 3]."""
        return np.stack([np.asarray(training_scene(int(seed))[1]) for seed in seeds])

    @staticmethod
    def write(path: Path, chats: list[list[Message]], encoder: Encoder) -> None:
        encoded = [encoder.encode(chat) for chat in chats]
        seeds = [image_seeds(chat) for chat in chats]
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(
            partial,
            ids=np.concatenate([ids for ids, _ in encoded]),
            labels=np.concatenate([labels for _, labels in encoded]),
            starts=np.cumsum([0, *(len(ids) for ids, _ in encoded)]),
            seeds=np.array([seed for each in seeds for seed in each], np.int64),
            image_starts=np.cumsum([0, *map(len, seeds)]),
        )
        partial.rename(path)


def shard_path(data: Path, i: int) -> Path:
    return data / f"train-{i:03d}.npz"


def main(
    data: Annotated[Path, typer.Option(help="Where the tokenizer and the shards go.")],
    shards: Annotated[int, typer.Option(help="Number of shards.")] = 40,
    chats_per_shard: int = 4000,
    tokenizer_chats: Annotated[int, typer.Option(help="Chats that the tokenizer is made from.")] = 12_000,
    validation_chats: Annotated[int, typer.Option(help="Chats about scenes that are never trained on.")] = 400,
    vocab_size: Annotated[int, typer.Option(help="Upper limit; the closed vocabulary needs less.")] = 1536,
    plain_shards: Annotated[int, typer.Option(help="First shards with scenes as they come.")] = 9,
    plain_last_shards: Annotated[int, typer.Option(help="Last shards with scenes as they come.")] = 4,
    writing_share: Annotated[float, typer.Option(help="Scenes chosen for their writing in the others.")] = 0.75,
    alone_share: Annotated[float, typer.Option(help="Chats about a picture of one thing alone, in the others.")] = 0.0,
    alone_kinds: Annotated[str, typer.Option(help="What that thing may be.")] = "shape number word",
    seed: int = 7,
) -> None:
    """Writes what is missing; finished files stay as they are."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / "tokenizer.json"
    if not path.exists():
        chats = Chats(random.Random(f"{seed} tokenizer"))
        texts = [re.sub(r"<\|\w+\|>", "", chat_text(chats.draw(), 0)) for _ in range(tokenizer_chats)]
        train_tokenizer(texts, vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    encoder = Encoder(tokenizer)

    held_out = data / f"{VALIDATION}.npz"
    if not held_out.exists():
        chats = Chats(random.Random(f"{seed} validation"), range(HELD_OUT_SEED, HELD_OUT_SEED + 100_000))
        Shard.write(held_out, [chats.draw() for _ in range(validation_chats)], encoder)
    for i in track(range(shards), "shards"):
        if not shard_path(data, i).exists():
            plain = not plain_shards <= i < shards - plain_last_shards
            shares = (
                {}
                if plain
                else {
                    "writing": writing_share,
                    "alone": alone_share,
                    "alone_kinds": tuple(alone_kinds.split()),
                }
            )
            chats = Chats(random.Random(f"{seed} {i}"), **shares)
            Shard.write(shard_path(data, i), [chats.draw() for _ in range(chats_per_shard)], encoder)
    summary = Shard(shard_path(data, 0))
    facts = {
        "vocabulary": tokenizer.get_vocab_size(),
        "chats": shards * chats_per_shard,
        "tokens a chat": round(float(summary.lengths.mean()), 1),
        "longest": int(summary.lengths.max()),
        "images a chat": round(len(summary._seeds) / len(summary), 2),
        "share learnt": round(float((summary._labels > READ).mean()), 3),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    typer.run(main)
