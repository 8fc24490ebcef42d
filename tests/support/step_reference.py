"""What transformers says about a conversation on a tiny Step-3.7 checkpoint, and the conversations that tests share.

Prompts are spelled out by hand here: how each picture is cut is a constant, and no template, row or crop arithmetic of
the engine is used. Pixel values are the engine's own (`tests/unit/test_step_vision.py` compares those).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import PIL.Image
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foreglance.models.step_vision import Recipe, pixels_of
from foreglance.request import Image, Message, Text
from support.step_checkpoints import CROP, LONGEST, PATCH, SIDE, StepCheckpoint

RECIPE = Recipe(SIDE, CROP, LONGEST)


def picture(width: int, height: int, seed: int) -> PIL.Image.Image:
    """Random blocks of 5 x 5 pixels, so that something is left after resizing."""
    shape = (-(-height // 5), -(-width // 5), 3)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return PIL.Image.fromarray(blocks.repeat(5, 0).repeat(5, 1)[:height, :width])


SMALL, LARGE, LONG, STRIP = picture(50, 40, 1), picture(100, 70, 2), picture(60, 30, 3), picture(150, 12, 4)
CUTS = {id(SMALL): (0, 0), id(LARGE): (2, 2), id(LONG): (1, 2), id(STRIP): (3, 3)}  # rows and columns of crops
WHOLE_ROWS, CROP_ROWS = (SIDE // PATCH // 4) ** 2, (CROP // PATCH // 4) ** 2
TEXT = "where does the red square stand next to the blue circle and what is in the picture? " * 4


def _user(*parts) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else Image(part) for part in parts))


CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "text": (Message.of("system", "the picture"), _user(TEXT)),
    "one image without crops": (_user(SMALL, "what is in the picture and where?"),),
    "one image with crops": (_user("see ", LARGE, "what is in the picture and where?"),),
    "two images": (_user("the red square", LONG, " next to ", SMALL, "what is where?"),),
    "an extreme image": (_user(STRIP, "what?"),),
    "two turns": (
        _user(LARGE, "what is in the picture?"),
        Message.of("assistant", "the blue circle"),
        _user("and in ", SMALL, "?"),
    ),
}


def image_words(pixels: PIL.Image.Image) -> str:
    rows, columns = CUTS[id(pixels)]
    crop = "<patch_start>" + CROP_ROWS * "<im_patch>" + "<patch_end>"
    crops = "<patch_newline>".join([crop * columns] * rows)
    return crops + "<im_start>" + WHOLE_ROWS * "<im_patch>" + "<im_end>"


@dataclass(frozen=True)
class Dialogue:
    """A conversation on a checkpoint, as transformers takes it; `more` are token ids behind the prompt."""

    checkpoint: StepCheckpoint
    messages: tuple[Message, ...]
    more: tuple[int, ...] = ()

    @property
    def pictures(self) -> list[PIL.Image.Image]:
        return [part.source for m in self.messages for part in m.parts if isinstance(part, Image)]

    @cached_property
    def token_ids(self) -> list[int]:
        text = ""
        for message in self.messages:
            text += f"<|BOT|>{message.role}\n"
            for part in message.parts:
                text += part.text if isinstance(part, Text) else image_words(part.source)
            text += "<|EOT|>"
        text += "<|BOT|>assistant\n"
        tokenizer = Tokenizer.from_file(str(self.checkpoint.folder / "tokenizer.json"))
        return [*tokenizer.encode(text, add_special_tokens=False).ids, *self.more]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return model_inputs(self.token_ids, self.pictures)

    @cached_property
    def normed(self) -> Tensor:
        """Target states after the final norm [rows, h]."""
        with torch.inference_mode():
            return self.checkpoint.model.model(**self.inputs, use_cache=False).last_hidden_state[0]

    @cached_property
    def logits(self) -> Tensor:
        """[rows, vocab]."""
        with torch.inference_mode():
            return self.checkpoint.model.lm_head(self.normed)

    @cached_property
    def images(self) -> list[Tensor]:
        """Embeddings [rows, h] of each image."""
        return image_features(self.checkpoint, self.inputs)

    def greedy(self, num_tokens: int) -> list[int]:
        """What `generate` of transformers continues with."""
        out = self.checkpoint.model.generate(**self.inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return out[0, len(self.token_ids) :].tolist()


def model_inputs(token_ids: list[int], pictures: list[PIL.Image.Image]) -> dict[str, Tensor]:
    ids = torch.tensor([token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        made = [pixels_of(pixels, RECIPE) for pixels in pictures]
        inputs["pixel_values"] = torch.cat([whole for whole, _, _ in made])
        inputs["num_local_patches"] = torch.tensor([len(crops) for _, crops, _ in made])
        if inputs["num_local_patches"].any():
            inputs["pixel_values_local"] = torch.cat([crops for _, crops, _ in made])
    return inputs


@torch.inference_mode()
def image_features(checkpoint: StepCheckpoint, inputs: dict[str, Tensor]) -> list[Tensor]:
    if "pixel_values" not in inputs:
        return []
    features = checkpoint.model.model.get_image_features(
        inputs["pixel_values"], inputs.get("pixel_values_local"), inputs["num_local_patches"]
    )
    return list(features.pooler_output)


@torch.inference_mode()
def pre_norm_states(checkpoint: StepCheckpoint, inputs: dict[str, Tensor]) -> Tensor:
    """Target states before the final norm [rows, h]: what the first MTP module is fed."""
    seen = []
    hook = checkpoint.model.model.language_model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        checkpoint.model.model(**inputs, use_cache=False)
    finally:
        hook.remove()
    return seen[0][0]
