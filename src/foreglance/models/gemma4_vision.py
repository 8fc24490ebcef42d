"""Images of Gemma-4: pictures to patches with Pillow and numpy, patches to embeddings through transformers' tower.

The steps are those of the published processor (transformers `Gemma4ImageProcessor`), with two differences: any number
of image rows per image is allowed, not only five fixed ones, and an image is not padded to the largest, which changes
nothing since padding is masked.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from foreglance.images import Picture
from foreglance.models.base import ModelError
from foreglance.models.vision import PROCESSOR_FILE, fill_module
from foreglance.models.weights import Weights
from foreglance.prompt import ImageInput
from foreglance.request import RequestError

NESTED_FILE = "processor_config.json"  # newer checkpoints keep the image processor in a section of this one


@dataclass(frozen=True)
class Recipe:
    """How a picture becomes patches. A square of `pooling_kernel_size` patches on each side is one image row."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 280
    do_resize: bool = True
    resample: int = PIL.Image.Resampling.BICUBIC.value
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = False
    image_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    image_std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @classmethod
    def read(cls, folder: Path) -> Recipe:
        values = _processor_config(folder)
        known = {name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in known.items()})

    @property
    def side(self) -> int:
        """Pixels of one image row in each direction."""
        return self.patch_size * self.pooling_kernel_size

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """The largest (height, width) of the same shape, in whole image rows, within `max_soft_tokens`."""
        if not self.do_resize:
            return height, width
        factor = math.sqrt(self.max_soft_tokens * self.side**2 / (height * width))
        rows, columns = (math.floor(factor * edge / self.side) for edge in (height, width))
        if rows == 0:  # a very wide one
            rows, columns = 1, min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_soft_tokens), 1
        return rows * self.side, columns * self.side

    def pixels(self, image: PIL.Image.Image) -> np.ndarray:
        """float32 [height, width, 3]."""
        height, width = self.size_of(image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), PIL.Image.Resampling(self.resample))
        if not height or not width or height % self.side or width % self.side:
            raise ValueError(f"{width}x{height} pixels are no whole number of {self.side}x{self.side} squares")
        values = np.asarray(image)
        if self.do_rescale:
            values = (values.astype(np.float64) * self.rescale_factor).astype(np.float32)
        if self.do_normalize:
            values = (values - np.float32(self.image_mean)) / np.float32(self.image_std)
        return values.astype(np.float32)

    def patches(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """pixels [height, width, 3] -> (patches [n, patch * patch * 3], places int64 [n, 2] as (x, y)), row by row."""
        p = self.patch_size
        height, width = pixels.shape[0] // p, pixels.shape[1] // p
        patches = pixels.reshape(height, p, width, p, 3).swapaxes(1, 2).reshape(height * width, -1)
        y, x = np.divmod(np.arange(height * width), width)
        return patches, np.stack([x, y], -1)


def _processor_config(folder: Path) -> dict[str, Any]:
    if (folder / PROCESSOR_FILE).is_file():
        return json.loads((folder / PROCESSOR_FILE).read_text())
    nested = folder / NESTED_FILE
    values = json.loads(nested.read_text()) if nested.is_file() else {}
    if "image_processor" not in values:
        raise ModelError(f"{folder} has no {PROCESSOR_FILE} nor images in {NESTED_FILE}, so it cannot prepare any")
    return values["image_processor"]


class GemmaVision:
    """The tower and its projection. `config` is transformers' config of the whole checkpoint."""

    def __init__(self, folder: Path, config: Any, weights: Weights, prefix: str):
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

        self._recipe = Recipe.read(folder)
        vision = config.vision_config
        ours = (self._recipe.patch_size, self._recipe.pooling_kernel_size)
        if ours != (vision.patch_size, vision.pooling_kernel_size):
            raise ModelError(
                f"{folder}: images are prepared in patches of {ours[0]} pooled by {ours[1]}, the tower takes "
                f"{vision.patch_size} and {vision.pooling_kernel_size}"
            )
        self._image, self._tags = config.image_token_id, (config.boi_token_id, config.eoi_token_id)
        with torch.device("meta"):
            tower, embedder = Gemma4VisionModel(vision), Gemma4MultimodalEmbedder(vision, config.text_config)
        self._tower = fill_module(tower, weights, f"{prefix}vision_tower.")
        self._embedder = fill_module(embedder, weights, f"{prefix}embed_vision.")

    def prepare(self, picture: Picture) -> ImageInput:
        recipe = self._recipe
        try:
            patches, places = recipe.patches(recipe.pixels(picture.pixels))
        except ValueError as error:
            raise RequestError(
                f"an image of {picture.pixels.width}x{picture.pixels.height} pixels does not fit this model: {error}",
                param="image",
                code="image_unsupported",
            ) from error
        columns, rows = (places.max(0) + 1) // recipe.pooling_kernel_size
        grid = (int(rows), int(columns))
        told = json.dumps(asdict(recipe), sort_keys=True)
        digest = hashlib.sha256(f"{picture.digest}:{told}".encode()).hexdigest()
        begin, end = self._tags
        layout = (begin, *[self._image] * (grid[0] * grid[1]), end)
        return ImageInput(digest, grid, (torch.from_numpy(patches), torch.from_numpy(places)), layout)

    def embed(self, image: ImageInput) -> Tensor:
        patches, places = image.patches
        pooled = self._tower(patches.unsqueeze(0), places.unsqueeze(0)).last_hidden_state
        return self._embedder(pooled).float()
