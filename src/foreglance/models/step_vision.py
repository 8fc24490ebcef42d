"""Pictures of Step-3.7: one view of the whole picture, and crops of it if it is large or long.

The tower and its facts are transformers'; preparing pixels is ours, with Pillow, since the published processor needs
torchvision (`tests/unit/test_step_vision.py` compares with its algorithm, restated). Each image goes through the tower
alone.

    prompt:  <patch_start> rows <patch_end> ... <patch_newline> ...   <im_start> rows <im_end>
             crops, row by row, a newline after each row but the last  the whole picture
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from torch import Tensor

from foreglance.images import Picture
from foreglance.models.base import ModelError
from foreglance.models.vision import PROCESSOR_FILE, fill_module
from foreglance.models.weights import Weights
from foreglance.prompt import Grid, ImageInput

TAGS = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
NARROW, EXTREME = 32, 4  # a shorter side than this and a longer ratio than that: padded to a square first
ELONGATED = 1.5  # a small picture beyond this ratio is shown in crops, too
SNAP = 0.2  # a rest above this share of a window gets a window of its own
TOWERS = ("model.vision_model.", "vision_model.")
PROJECTORS = ("model.multi_modal_projector.", "multi_modal_projector.", "vit_large_projector.")
PUBLISHED = (  # the tower's names in published checkpoints, and in transformers
    ("conv1.weight", "embeddings.patch_embedding.weight"),
    ("positional_embedding", "embeddings.position_embedding.weight"),
    ("transformer.resblocks.", "layers."),
    ("ln_pre.", "pre_layernorm."),
    ("vit_downsampler", "downsampler"),
    (".ls_1.gamma", ".lambda_1"),
    (".ls_2.gamma", ".lambda_2"),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
    (".attn.", ".self_attn."),
    (".ln_1.", ".layernorm_before."),
    (".ln_2.", ".layernorm_after."),
)


@dataclass(frozen=True)
class Recipe:
    """How pixels are made, from the checkpoint's processor config; what that leaves out is as published."""

    side: int = 728
    crop: int = 504
    longest: int = 3024
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    scale: float = 1 / 255

    @classmethod
    def read(cls, folder: Path, side: int) -> Recipe:
        values = _processor_config(folder)
        if values.get("resample", 2) != PIL.Image.Resampling.BILINEAR:
            raise ModelError(f"{folder}: pictures of this family are resized bilinearly, not by {values['resample']!r}")
        return cls(
            side=values.get("size", {}).get("height", side),
            crop=values.get("patch_size", cls.crop),
            longest=values.get("max_image_size", cls.longest),
            mean=tuple(values.get("image_mean", cls.mean)),
            std=tuple(values.get("image_std", cls.std)),
            scale=values.get("rescale_factor", cls.scale),
        )


def _processor_config(folder: Path) -> dict[str, Any]:
    """Newer checkpoints hold it inside processor_config.json, and those with code of their own may lack it."""
    if (folder / PROCESSOR_FILE).is_file():
        return json.loads((folder / PROCESSOR_FILE).read_text())
    whole = folder / "processor_config.json"
    return json.loads(whole.read_text()).get("image_processor", {}) if whole.is_file() else {}


@dataclass(frozen=True)
class Plan:
    """How one picture is cut: sizes are (width, height); `window` 0 means no crops."""

    squared: bool
    whole: tuple[int, int]
    cropped: tuple[int, int]
    window: int
    columns: int
    rows: int

    @property
    def num_crops(self) -> int:
        return self.columns * self.rows


def plan(width: int, height: int, recipe: Recipe) -> Plan:
    """Source: transformers 5.24 `Step3p7ImageProcessor._plan_patches`."""
    squared = min(width, height) < NARROW and max(width, height) > EXTREME * min(width, height)
    if squared:
        width = height = max(width, height)
    if max(width, height) > recipe.longest:
        factor = recipe.longest / max(width, height)
        width, height = int(width * factor), int(height * factor)
    window = _window(min(width, height), max(width, height), recipe)
    if not window:
        return Plan(squared, (width, height), (width, height), 0, 0, 0)
    cropped = _snapped(width, window), _snapped(height, window)
    return Plan(squared, (width, height), cropped, window, max(1, cropped[0] // window), max(1, cropped[1] // window))


def _window(short: int, long: int, recipe: Recipe) -> int:
    """Side of the square that crops are cut with."""
    if long <= recipe.side:
        return short if long / short > ELONGATED else 0
    return min(short, recipe.crop) if long / short > EXTREME else recipe.crop


def _snapped(size: int, window: int) -> int:
    """`size` as whole windows; a side shorter than a window stays."""
    return size if size < window else window * (size // window + (size % window > SNAP * window))


def pixels_of(picture: PIL.Image.Image, recipe: Recipe) -> tuple[Tensor, Tensor, Plan]:
    """-> float32 whole picture [1, 3, side, side], its crops [crops, 3, crop, crop], and the plan."""
    how = plan(picture.width, picture.height, recipe)
    if how.squared:
        square = PIL.Image.new("RGB", (max(picture.size),) * 2)
        square.paste(picture)
        picture = square
    whole = _resized(_resized(picture, how.whole), (recipe.side, recipe.side))
    crops = []
    if how.window:
        large, side = _resized(picture, how.cropped), how.window
        for top in range(0, large.height, side):
            for left in range(0, large.width, side):
                box = (left, top, min(left + side, large.width), min(top + side, large.height))
                crops.append(_values(_resized(large.crop(box), (recipe.crop, recipe.crop)), recipe))
    empty = torch.empty(0, 3, recipe.crop, recipe.crop)
    return _values(whole, recipe).unsqueeze(0), torch.stack(crops) if crops else empty, how


def _resized(picture: PIL.Image.Image, size: tuple[int, int]) -> PIL.Image.Image:
    return picture if picture.size == size else picture.resize(size, PIL.Image.Resampling.BILINEAR)


def _values(picture: PIL.Image.Image, recipe: Recipe) -> Tensor:
    """[3, height, width], scaled and normalised in float32."""
    values = np.asarray(picture, np.float32) * np.float32(recipe.scale)
    values = (values - np.array(recipe.mean, np.float32)) / np.array(recipe.std, np.float32)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


class StepVision:
    """Pictures to patches, patches to embeddings."""

    def __init__(self, folder: Path, config: Any, weights: Weights, hidden: int):
        from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

        vision = config.vision_config
        self._recipe = Recipe.read(folder, vision.image_size)
        self._tags = read_tags(folder)
        self._image_token = config.image_token_id
        self._patch = vision.patch_size
        with torch.device("meta"):
            tower = Step3p7VisionModel(vision)
        prefix = next(prefix for prefix in TOWERS if any(weights.names(prefix)))
        self._tower = fill_module(tower, weights, prefix, lambda state: _renamed(state, vision.num_attention_heads))
        projector = next((p for p in PROJECTORS if f"{p}weight" in weights), PROJECTORS[0])
        self._project = weights.take(f"{projector}weight", hidden, 4 * vision.hidden_size).float()
        self._bias = weights.take(f"{projector}bias", hidden).float() if config.projector_bias else None

    def prepare(self, picture: Picture) -> ImageInput:
        whole, crops, how = pixels_of(picture.pixels, self._recipe)
        digest = hashlib.sha256(f"{picture.digest}:{self._recipe}".encode()).hexdigest()
        grid, crop = self._grid(self._recipe.side), self._grid(self._recipe.crop)
        return ImageInput(digest, grid, (whole, crops), self._layout(how, grid, crop), (*[crop] * len(crops), grid))

    def _grid(self, side: int) -> Grid:
        """Patches, halved twice by convolutions that round up."""
        patches = side // self._patch
        return (-(-patches // 4),) * 2

    def _layout(self, how: Plan, grid: Grid, crop: Grid) -> tuple[int, ...]:
        crop_start, crop_end, newline, start, end = self._tags
        ids = []
        for row in range(how.rows):
            for _ in range(how.columns):
                ids += [crop_start, *[self._image_token] * (crop[0] * crop[1]), crop_end]
            ids += [newline] if row < how.rows - 1 else []
        return (*ids, start, *[self._image_token] * (grid[0] * grid[1]), end)

    def embed(self, image: ImageInput) -> Tensor:
        """Crops before the whole picture, as they lie in the prompt."""
        whole, crops = image.patches
        rows = [self._tower(pixels).last_hidden_state.flatten(0, 1) for pixels in (crops, whole) if len(pixels)]
        return F.linear(torch.cat(rows), self._project, self._bias).float()


def _renamed(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """A tower as published to transformers' names: queries, keys and values apart, and rotary pairs as halves."""
    out = {}
    for name, tensor in state.items():
        for old, new in PUBLISHED:
            name = new + name.removeprefix(old) if name.startswith(old) else name.replace(old, new)
        if ".in_proj_" not in name:
            out[name] = tensor
            continue
        stem, kind = name.split("in_proj_")
        for part, piece in zip("qkv", tensor.chunk(3), strict=True):
            out[f"{stem}{part}_proj.{kind}"] = piece if part == "v" else _halves(piece, heads)
    return out


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Output rows of each head from (a0 b0 a1 b1 ..) to (a0 a1 .. b0 b1 ..)."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def read_tags(folder: Path) -> tuple[int, ...]:
    """Token ids of the tags around runs of rows."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json, so the tags around image rows are unknown")
    tokenizer = Tokenizer.from_file(str(path))
    ids = {tag: tokenizer.token_to_id(tag) for tag in TAGS}
    lost = [tag for tag, token in ids.items() if token is None]
    if lost:
        raise ModelError(f"{folder}: the tokenizer lacks {', '.join(lost)}, which stand around image rows")
    return tuple(ids.values())
