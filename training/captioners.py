"""Exported models of every family behind one call, through transformers' own classes and `generate`.

Owns how pixels reach those families whose published processors do not run here: Step-3.7's needs torchvision, Gemma-4's
allows only five numbers of rows.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from training import gemma, step
from training.evaluate import Captioner
from training.model import IMAGE_PAD, ROWS_PER_IMAGE, VISION_END, VISION_START

LAYOUT = [VISION_START, *[IMAGE_PAD] * ROWS_PER_IMAGE, VISION_END]


class PixelCaptioner(Captioner):
    """A family whose pixels are made here; `pixels` gives `generate`'s keywords and the tokens of every image."""

    model_class = AutoModelForImageTextToText

    def __init__(self, folder: Path):
        self.model = self.model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def pixels(self, images: list[Image.Image]) -> tuple[dict, list[list[int]]]:
        raise NotImplementedError

    @torch.no_grad()
    def answer(
        self, chats: list[list[dict]], images: list[list[Image.Image]], max_new_tokens: int = 140
    ) -> list[list[int]]:
        """Greedy answers (token ids, without the end token) to chats whose prompts have the same length."""
        flat = [image for each in images for image in each]
        pixels, layouts = self.pixels(flat) if flat else ({}, [])
        layouts = iter(layouts)
        ids = torch.tensor([self._with_images(chat, layouts) for chat in chats])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **(pixels | self.more(ids)),
        )
        end = self.tokenizer.eos_token_id
        answers = [row.tolist() for row in out[:, ids.shape[1] :]]
        return [answer[: answer.index(end)] if end in answer else answer for answer in answers]

    def prompt_tokens(self, chat: list[dict], images: list[Image.Image]) -> list[int]:
        """A chat as `answer` gives it to the model."""
        return self._with_images(chat, iter(self.pixels(images)[1] if images else []))

    def _with_images(self, chat: list[dict], layouts: Iterator[list[int]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return [token for i in ids for token in (next(layouts) if i == IMAGE_PAD else [i])]

    def more(self, ids: torch.Tensor) -> dict:
        return {}


class StepCaptioner(PixelCaptioner):
    """Pictures of 64 x 64 have one view; of the sizes in `step.LARGE` also crops."""

    def pixels(self, images: list[Image.Image]) -> tuple[dict, list[list[int]]]:
        seen = [step.views_of(image) for image in images]
        patch_start = self.tokenizer.convert_tokens_to_ids("<patch_start>")
        crops = [step.normalize(views[:-1]) for views in seen if len(views) > 1]
        pixels = {
            "pixel_values": step.normalize(np.stack([views[-1] for views in seen])),
            "pixel_values_local": torch.cat(crops) if crops else None,
            "num_local_patches": [len(views) - 1 for views in seen],
        }
        layouts = [
            (step.crop_ids(image.size, patch_start) if image.size in step.LARGE else []) + LAYOUT for image in images
        ]
        return pixels, layouts


class GemmaCaptioner(PixelCaptioner):
    def pixels(self, images: list[Image.Image]) -> tuple[dict, list[list[int]]]:
        patches, places = gemma.pixel_patches(np.stack([np.asarray(image) for image in images]))
        return {"pixel_values": patches, "image_position_ids": places}, [LAYOUT] * len(images)

    def more(self, ids: torch.Tensor) -> dict:
        return {"mm_token_type_ids": (ids == IMAGE_PAD).int()}


class TextAnswerer(PixelCaptioner):
    model_class = AutoModelForCausalLM


KINDS = {"qwen3_5": Captioner, "step3p7": StepCaptioner, "gemma4": GemmaCaptioner, "qwen3": TextAnswerer}


def open_captioner(folder: Path) -> Captioner:
    """The captioner that fits an exported model."""
    return KINDS[json.loads((folder / "config.json").read_text())["model_type"]](folder)
