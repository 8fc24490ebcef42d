"""Vision towers and image processors: transformers' own, wrapped so that an image is rows with an identity.

Each image goes through the tower alone, so its embeddings do not depend on which others the request holds.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foreglance.images import Picture
from foreglance.models.base import ModelError
from foreglance.models.weights import Weights
from foreglance.prompt import ImageInput
from foreglance.request import RequestError

PROCESSOR_FILE = "preprocessor_config.json"
MOST_LEAST_PIXELS = 1 << 24  # that a processor may enlarge pictures to


class QwenVision:
    """The Qwen-VL tower: pictures to patches, patches to embeddings merged by `spatial_merge_size`."""

    def __init__(self, folder: Path, config: Any, weights: Weights, prefix: str):
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        self._merge = config.spatial_merge_size
        self._processor = load_processor(folder)
        least = self._processor.size.get("shortest_edge") or 0  # of all pixels, by this family's custom
        if least > MOST_LEAST_PIXELS:
            raise ModelError(
                f"{folder / PROCESSOR_FILE} enlarges every picture to {least} pixels; that is no sound size"
            )
        self._recipe = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        with torch.device("meta"):
            tower = Qwen3_5VisionModel(config)
        self._tower = fill_module(tower, weights, prefix)

    def prepare(self, picture: Picture) -> ImageInput:
        try:
            inputs = self._processor(images=[picture.pixels], return_tensors="pt")
        except ValueError as error:
            raise RequestError(
                f"an image of {picture.pixels.width}x{picture.pixels.height} pixels does not fit this model: {error}",
                param="image",
                code="image_unsupported",
            ) from error
        _, height, width = (int(n) for n in inputs["image_grid_thw"][0])
        digest = hashlib.sha256(f"{picture.digest}:{self._recipe}".encode()).hexdigest()
        patches = (inputs["pixel_values"].float(), inputs["image_grid_thw"])
        return ImageInput(digest, (height // self._merge, width // self._merge), patches)

    def embed(self, image: ImageInput) -> Tensor:
        pixels, grid = image.patches
        return self._tower(pixels, grid_thw=grid).pooler_output.float()


def no_tower(name: str) -> RequestError:
    """The answer to an image for a checkpoint without a vision tower."""
    return RequestError(
        f"the checkpoint of {name} has no vision tower, so it takes no images", param="image", code="images_unsupported"
    )


def load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    if not (folder / PROCESSOR_FILE).is_file():
        raise ModelError(f"{folder} has no {PROCESSOR_FILE}, so its images cannot be prepared")
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


State = dict[str, Tensor]


def fill_module(
    module: nn.Module, weights: Weights, prefix: str, rename: Callable[[State], State] = lambda state: state
) -> nn.Module:
    """Give a module built on the meta device its float32 weights; what does not fit is named. `rename` turns the names
    (and layouts) of a published checkpoint into the module's."""
    state = {name: tensor.float() for name, tensor in rename(weights.take_all(prefix)).items()}
    want = module.state_dict()
    wrong = [f"{prefix}{name} is missing" for name in want if name not in state]
    wrong += [f"{prefix}{name} is left over" for name in state if name not in want]
    wrong += [
        f"{prefix}{name} is {list(state[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in want.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        raise ModelError("the vision tower does not fit its config: " + "; ".join(wrong[:12]))
    module.load_state_dict(state, assign=True)
    _fill_buffers(module)
    return module.eval().requires_grad_(False)


def _fill_buffers(module: nn.Module) -> None:
    """Buffers that are computed and not stored (rotary frequencies) come from a module built for real."""
    for child in module.modules():
        if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
            fresh = type(child)(child.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                child.register_buffer(name, buffer, persistent=False)


class EmbeddingCache:
    """Image embeddings by digest, least recently used out first: another question about an image is free.

    `limit` in bytes; 0 keeps nothing.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._held: OrderedDict[str, Tensor] = OrderedDict()

    @property
    def bytes_held(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held.values())

    def clear(self) -> None:
        self._held.clear()

    def get(self, digest: str) -> Tensor | None:
        if digest in self._held:
            self._held.move_to_end(digest)
        return self._held.get(digest)

    def put(self, digest: str, embeddings: Tensor) -> None:
        self._held[digest] = embeddings
        while self._held and self.bytes_held > self._limit:
            self._held.popitem(last=False)
