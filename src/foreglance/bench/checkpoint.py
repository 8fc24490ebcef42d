"""A calibrated checkpoint: the shapes and the compute of a published model, with known tokens and a known acceptance.

Random weights say nothing about speculation, since no draft of theirs stands. Here every weight has its published shape
and is multiplied in every step, but the greedy answer is known: it walks a fixed cycle through some 1,300 printable
tokens, and the MTP head guesses the next one right for a chosen share of them. Written in the hub layout (Qwen3.5), so
every engine that reads it does the same work on the same tokens.

How: the tokens of the cycle have their embeddings on one orbit e_k = R^k e_0 of a block-diagonal rotation, nearly
orthogonal to each other. The output row of token k + 1 is e_k, and whatever a layer adds to its input is scaled to
nearly nothing. Two dimensions are set apart: one carries a flag in the embedding of each token, the other the output
row of a token outside the cycle. The MTP head passes the embedding on and moves the flag over, so it guesses that
token where the flag is up and the right one where it is not. With `reads` "hidden" it rotates the target's state
instead, and is right always, but only if it is fed the state of the right row.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from foreglance.cache import whole
from foreglance.models.registry import load_tokenizer
from foreglance.models.weights import EMBEDDED, SINGLE
from foreglance.request import RequestError

Reads = Literal["embedding", "hidden"]
CALIBRATION = "calibration.json"
TOKENIZER = EMBEDDED / "tiny-qwen"  # lends tokenizer and chat template; other ids of a large vocabulary have no text
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SET_APART = 2  # the last dimensions: a token's flag, and the output row of the wrong guess
QUIET = 1e-4  # standard deviation of the weights that write into the residual stream
USUAL = 0.02
FLAG = 0.25  # of the embedding's norm
WRITES = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Calibration:
    """What is known of a calibrated checkpoint. `cycle`: ids in the order in which they follow each other; `right`:
    whether the MTP head's guess for what follows each of them stands."""

    shape: str
    acceptance: float
    reads: Reads
    cycle: tuple[int, ...]
    right: tuple[bool, ...]

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """Of a folder; None if it is no calibrated checkpoint."""
        path = folder / CALIBRATION
        if not path.is_file():
            return None
        values = json.loads(path.read_text())
        return cls(**values | {"cycle": tuple(values["cycle"]), "right": tuple(values["right"])})

    def walk(self, first: int, count: int) -> list[int]:
        """The `count` tokens from `first` on."""
        start = self.cycle.index(first)
        return [self.cycle[(start + i) % len(self.cycle)] for i in range(count)]


def _tiny() -> dict[str, Any]:
    return json.loads((TOKENIZER / "config.json").read_text())


def _small() -> dict[str, Any]:
    """Qwen3.5-0.8B, from its published config. Its output head is the embedding table; here the two differ."""
    text = {
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    vision = {
        "depth": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_heads": 12,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": 1024,
    }
    tiny = _tiny()
    return tiny | {"text_config": tiny["text_config"] | text, "vision_config": tiny["vision_config"] | vision}


SHAPES = {"tiny": (_tiny, 4096), "qwen3.5-0.8b": (_small, 65_536)}  # config, and pixels of every picture


def write_checkpoint(
    folder: Path, shape: str = "qwen3.5-0.8b", acceptance: float = 0.7, reads: Reads = "embedding", seed: int = 0
) -> Calibration:
    """Write a calibrated checkpoint into `folder`, which must be new or empty, and say what is known of it."""
    config = _checked(folder, shape, acceptance, reads)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    calibration = _calibrate(shape, 1.0 if reads == "hidden" else acceptance, reads, generator)
    _write_small_files(folder, config, SHAPES[shape][1])
    _write_tensors(folder, config, calibration, generator)
    (folder / CALIBRATION).write_text(json.dumps(asdict(calibration)) + "\n")
    return calibration


def _checked(folder: Path, shape: str, acceptance: float, reads: str) -> dict[str, Any]:
    if shape not in SHAPES:
        raise RequestError(f"--shape {shape!r} is unknown; there are {', '.join(SHAPES)}", param="shape")
    if not 0 <= acceptance <= 1:
        raise RequestError(f"--acceptance must lie between 0 and 1, got {acceptance}", param="acceptance")
    if reads not in ("embedding", "hidden"):
        raise RequestError(f"--reads must be embedding or hidden, got {reads!r}", param="reads")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"--out {folder} exists already; name a new or empty folder", param="out")
    config = SHAPES[shape][0]()
    config |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    config["text_config"] |= {"tie_word_embeddings": False}
    return config


def _calibrate(shape: str, acceptance: float, reads: Reads, generator: torch.Generator) -> Calibration:
    tokenizer = load_tokenizer(TOKENIZER)
    special = set(tokenizer.all_special_ids)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in special}
    printable = [token for token, text in texts.items() if text and text.isascii() and text.isprintable()]
    order = torch.randperm(len(printable), generator=generator).tolist()
    stands = torch.randperm(len(printable), generator=generator) < round(acceptance * len(printable))
    return Calibration(shape, acceptance, reads, tuple(printable[i] for i in order), tuple(stands.tolist()))


def _write_small_files(folder: Path, config: dict[str, Any], pixels: int) -> None:
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    vision = config["vision_config"]
    processor = json.loads((TOKENIZER / "preprocessor_config.json").read_text()) | {
        "patch_size": vision["patch_size"],
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def _write_tensors(folder: Path, config: dict[str, Any], known: Calibration, generator: torch.Generator) -> None:
    hidden, vocab = config["text_config"]["hidden_size"], config["text_config"]["vocab_size"]
    angles = _angles(hidden, len(known.cycle), generator)
    orbit = _orbit(angles, len(known.cycle), generator)
    made = {
        "model.language_model.embed_tokens.weight": _embeddings(orbit, known, vocab, generator),
        "lm_head.weight": _head(orbit, known, vocab, generator),
        "mtp.fc.weight": _fusion(angles, hidden, known.reads),
    }
    for name, shape in _shapes_of(config).items():
        if name not in made:
            made[name] = _plain_tensor(name, shape, generator)
    tensors = {name: (tensor.shape, [tensor.bfloat16().contiguous()]) for name, tensor in sorted(made.items())}
    whole.write(folder / SINGLE, tensors, {"format": "pt"}, durable=False)


def _shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint: transformers' model, and an MTP head whose layer is one of full attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    full = config["text_config"]["layer_types"].index("full_attention")
    layer = f"model.language_model.layers.{full}."
    hidden = config["text_config"]["hidden_size"]
    head = {name.replace(layer, "mtp.layers.0."): shape for name, shape in shapes.items() if name.startswith(layer)}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return shapes | head | {"mtp.fc.weight": (hidden, 2 * hidden)} | {f"mtp.{name}.weight": (hidden,) for name in norms}


def _plain_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Neutral norms and biases, noise elsewhere; what writes into the text decoder's residual stream is quiet."""
    if name.startswith("model.visual."):
        if len(shape) == 1:
            return torch.ones(shape) if "norm" in name and name.endswith(".weight") else torch.zeros(shape)
        return torch.randn(shape, generator=generator) * USUAL
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1:  # zero-centred norms, A_log, dt_bias
        return torch.zeros(shape)
    return torch.randn(shape, generator=generator) * (QUIET if name.endswith(WRITES) else USUAL)


def _angles(hidden: int, length: int, generator: torch.Generator) -> Tensor:
    """float64 [planes]: by how much each plane turns from one token of the cycle to the next; whole turns in all."""
    planes = (hidden - SET_APART) // 2
    turns = torch.randint(1, length, (planes,), generator=generator)
    return turns.double() * (2 * math.pi / length)


def _orbit(angles: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """[length, hidden - SET_APART], every row of root mean square 1."""
    phases = torch.rand(len(angles), generator=generator).double() * (2 * math.pi)
    turned = phases + torch.arange(length)[:, None] * angles
    return (torch.stack([turned.cos(), turned.sin()], -1).flatten(1) * math.sqrt(2)).float()


def _embeddings(orbit: Tensor, known: Calibration, vocab: int, generator: torch.Generator) -> Tensor:
    """[vocab, hidden]. A token outside the cycle lies anywhere on the orbit, so that what follows it is in the
    cycle. The flag is up (positive) where the guess is to be wrong."""
    length, width = orbit.shape
    place = torch.randint(length, (vocab,), generator=generator)
    place[list(known.cycle)] = torch.arange(length)
    flag = FLAG * math.sqrt(width) * (1 - 2 * torch.tensor(known.right).float()[place])
    if known.reads == "hidden":
        flag = torch.zeros_like(flag)
    return torch.cat([orbit[place], flag[:, None], torch.zeros(vocab, 1)], 1)


def _head(orbit: Tensor, known: Calibration, vocab: int, generator: torch.Generator) -> Tensor:
    """[vocab, hidden], rows of norm near 1: the token that follows k is scored by e_k, the wrong guess by the last
    dimension, every other by noise."""
    width = orbit.shape[1]
    rows = torch.randn(vocab, width, generator=generator) / math.sqrt(width)
    rows[list(known.cycle)] = orbit.roll(1, 0) / math.sqrt(width)
    apart = torch.zeros(vocab, SET_APART)
    wrong = next(token for token in range(8, vocab) if token not in known.cycle)
    rows[wrong], apart[wrong, 1] = 0.0, 1.0
    return torch.cat([rows, apart], 1)


def _fusion(angles: Tensor, hidden: int, reads: Reads) -> Tensor:
    """[hidden, 2 hidden] over (embedding, state): the embedding as it is, its flag moved to the wrong guess and made
    twice as loud as the right one; or the state turned by one token."""
    fusion, width = torch.zeros(hidden, 2 * hidden), hidden - SET_APART
    if reads == "embedding":
        fusion[:width, :width] = torch.eye(width)
        fusion[hidden - 1, hidden - 2] = 2 / FLAG
        return fusion
    first = torch.arange(0, width, 2)
    for row, column, value in ((0, 0, angles.cos()), (0, 1, -angles.sin()), (1, 0, angles.sin()), (1, 1, angles.cos())):
        fusion[first + row, hidden + first + column] = value.float()
    return fusion
