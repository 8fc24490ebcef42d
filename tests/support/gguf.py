"""Checkpoints that can be written as GGUF, and the logits of a loaded engine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import torch

from foreglance.bench.quality import Passage, logits_of
from foreglance.engine import Engine
from foreglance.models.weights import find_model
from foreglance.request import Message, Request, SamplingParams, Speculation
from foreglance.settings import Settings
from support.checkpoints import MOE, TIED, QwenSizes, write_qwen3_5

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
GROUPED = replace(TIED, name="grouped", vocab=1536)  # two value heads for a key head
ODD = replace(
    TIED, name="odd", layers="FLLF", heads=3, kv_heads=1, head_size=16, sections=(1, 2, 1), k_heads=2, v_heads=2,
    tied=False, stored=torch.bfloat16, vocab=1536, seed=9,
)  # fmt: skip
MIXTURE = replace(MOE, name="gguf-mixture", vocab=1536, sharded=False)
PICTURE = PIL.Image.effect_noise((40, 24), 90).convert("RGB")


def write_checkpoint(folder: Path, sizes: QwenSizes) -> Path:
    """A tiny random one with the tokenizer of tiny-qwen, whose pre-tokenizer GGUF has a name for."""
    write_qwen3_5(folder, sizes)
    for name in TOKENIZER_FILES:
        shutil.copy(find_model("tiny-qwen") / name, folder / name)
    return folder


def load(model: str | Path, **more) -> Engine:
    settings = Settings(weights="fp32", slots=1, prefix_cache_bytes=0, try_drafts=False)
    return Engine.load(str(model), settings, **more)


def question(with_picture: bool = True, max_tokens: int = 24, depth: int = 0) -> Request:
    speculation = Speculation("auto", depth) if depth else Speculation("none")
    message = Message.of("user", "Describe the image.", [PICTURE] if with_picture else [])
    return Request((message,), SamplingParams(max_tokens=max_tokens, ignore_eos=True), speculation)


def logits(engine: Engine, with_picture: bool = True) -> torch.Tensor:
    """Of every row of a prompt but the last, image rows too, computed as few rows."""
    return logits_of(engine, Passage(engine.prepare(question(with_picture)), 0))


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max()) if one.shape == other.shape else float(np.inf)
