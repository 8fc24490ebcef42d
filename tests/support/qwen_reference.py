"""What transformers says about a conversation on a tiny Qwen3.5 checkpoint, and the conversations that tests share.

Prompts are spelled out by hand here: no chat template and no row arithmetic of the engine is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import PIL.Image
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoImageProcessor

from foreglance.request import Image, Message, Text
from support.checkpoints import IMAGE, MERGE, PATCH, Checkpoint


def picture(rows: int, columns: int, seed: int) -> PIL.Image.Image:
    """Random pixels of a merged grid of rows x columns."""
    side = PATCH * MERGE
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * side, columns * side, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


WIDE, TALL, LARGE = picture(2, 5, 1), picture(4, 1, 2), picture(3, 4, 3)
GRIDS = {id(WIDE): (2, 5), id(TALL): (4, 1), id(LARGE): (3, 4)}
LONG = "where does the red square stand next to the blue circle and what is in the picture? " * 4


def _user(*parts) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else Image(part) for part in parts))


CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "text": (Message.of("system", "the picture"), _user(LONG)),
    "one image": (_user(WIDE, "what is in the picture and where?"),),
    "two images": (_user("the red square", TALL, " next to ", LARGE, "what is where?"),),
    "two turns": (
        _user(LARGE, "what is in the picture?"),
        Message.of("assistant", "the blue circle"),
        _user("and in ", WIDE, "?"),
    ),
}


@dataclass(frozen=True)
class Dialogue:
    """A conversation on a checkpoint, as transformers takes it; `more` are token ids behind the prompt."""

    checkpoint: Checkpoint
    messages: tuple[Message, ...]
    more: tuple[int, ...] = ()

    @property
    def pictures(self) -> list[PIL.Image.Image]:
        return [part.source for m in self.messages for part in m.parts if isinstance(part, Image)]

    @property
    def grids(self) -> list[tuple[int, int]]:
        return [GRIDS[id(pixels)] for pixels in self.pictures]

    @cached_property
    def token_ids(self) -> list[int]:
        """The prompt by hand: roles, then each image as one placeholder per merged patch between its two markers."""
        text = ""
        for message in self.messages:
            text += f"<|im_start|>{message.role}\n"
            for part in message.parts:
                if isinstance(part, Text):
                    text += part.text
                else:
                    height, width = GRIDS[id(part.source)]
                    text += "<|vision_start|>" + height * width * "<|image_pad|>" + "<|vision_end|>"
            text += "<|im_end|>\n"
        text += "<|im_start|>assistant\n"
        tokenizer = Tokenizer.from_file(str(self.checkpoint.folder / "tokenizer.json"))
        return [*tokenizer.encode(text, add_special_tokens=False).ids, *self.more]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return model_inputs(self.checkpoint, self.token_ids, self.pictures)

    @cached_property
    def hidden(self) -> Tensor:
        """Target states after the final norm [rows, h]."""
        return hidden_states(self.checkpoint, self.inputs)

    @cached_property
    def logits(self) -> Tensor:
        """[rows, vocab]."""
        with torch.inference_mode():
            return self.checkpoint.model.lm_head(self.hidden)

    @cached_property
    def images(self) -> list[Tensor]:
        """Embeddings [rows, h] of each image."""
        return image_features(self.checkpoint, self.inputs)

    def greedy(self, num_tokens: int) -> list[int]:
        """What `generate` of transformers continues with."""
        out = self.checkpoint.model.generate(**self.inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return out[0, len(self.token_ids) :].tolist()


def model_inputs(checkpoint: Checkpoint, token_ids: list[int], pictures: list[PIL.Image.Image]) -> dict[str, Tensor]:
    """The arguments of a forward; with images the token kinds are mandatory."""
    ids = torch.tensor([token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        processor = AutoImageProcessor.from_pretrained(checkpoint.folder, backend="pil")
        inputs |= dict(processor(images=pictures, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


@torch.inference_mode()
def hidden_states(checkpoint: Checkpoint, inputs: dict[str, Tensor]) -> Tensor:
    checkpoint.model.model.rope_deltas = None  # it remembers the last conversation's
    return checkpoint.model.model(**inputs, use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def image_features(checkpoint: Checkpoint, inputs: dict[str, Tensor]) -> list[Tensor]:
    if "pixel_values" not in inputs:
        return []
    found = checkpoint.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return list(found.pooler_output)
