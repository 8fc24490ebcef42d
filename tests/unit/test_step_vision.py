"""Pictures of Step-3.7 against the published algorithm, restated in numpy: how one is cut, and its pixel values."""

from __future__ import annotations

import math

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreglance.models.step_vision import CLIP_MEAN, CLIP_STD, Recipe, pixels_of, plan

PUBLISHED = Recipe()
TINY = Recipe(side=64, crop=48, longest=160)


def published_plan(width: int, height: int, recipe: Recipe):
    """Whole size, crop size, window, columns, rows; in the order of the published description."""
    if min(width, height) < 32 and max(width / height, height / width) > 4:
        width = height = max(width, height)
    if max(height, width) > recipe.longest:
        scale = recipe.longest / max(height, width)
        width, height = int(width * scale), int(height * scale)
    short, long = min(height, width), max(height, width)
    if long <= recipe.side:
        window = short if long / short > 1.5 else 0
    elif long / short > 4:
        window = min(short, recipe.crop)
    else:
        window = recipe.crop
    if window == 0:
        return (width, height), (width, height), 0, 0, 0
    sizes = []
    for size in (width, height):
        if size >= window:
            whole, rest = divmod(size, window)
            size = window * (whole + 1 if rest > 0.2 * window else whole)
        sizes.append(size)
    return (width, height), tuple(sizes), window, max(1, sizes[0] // window), max(1, sizes[1] // window)


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear with antialiasing: an axis at a time, uint8 between; a triangle as wide as the scale if it shrinks."""
    for axis, new in ((1, width), (0, height)):
        old = pixels.shape[axis]
        if old == new:
            continue
        scale = max(old / new, 1.0)
        weights = np.zeros((new, old))
        for i in range(new):
            centre = (i + 0.5) * old / new
            distance = np.abs(np.arange(old) + 0.5 - centre) / scale
            weights[i] = np.maximum(0, 1 - distance)
            weights[i] /= weights[i].sum()
        pixels = np.moveaxis(np.tensordot(weights, pixels.astype(np.float64), (1, axis)), 0, axis)
        pixels = np.floor(np.clip(pixels, 0, 255) + 0.5).astype(np.uint8)
    return pixels


def published_pixels(pixels: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, list[np.ndarray]]:
    height, width = pixels.shape[:2]
    if min(width, height) < 32 and max(width / height, height / width) > 4:
        padded = np.zeros((max(width, height),) * 2 + (3,), np.uint8)
        padded[:height, :width] = pixels
        pixels = padded
    whole, cropped, window, columns, rows = published_plan(width, height, recipe)
    view = resized(resized(pixels, whole[1], whole[0]), recipe.side, recipe.side)
    crops = []
    if window:
        large = resized(pixels, cropped[1], cropped[0])
        for top in range(rows):
            for left in range(columns):
                tile = large[top * window : (top + 1) * window, left * window : (left + 1) * window]
                crops.append(resized(tile, recipe.crop, recipe.crop))
    return view, crops


def normalised(pixels: np.ndarray) -> np.ndarray:
    return ((pixels / 255 - np.array(CLIP_MEAN)) / np.array(CLIP_STD)).transpose(2, 0, 1)


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_picture_is_cut_as_published(width, height):
    for recipe in (PUBLISHED, TINY):
        ours = plan(width, height, recipe)
        whole, cropped, window, columns, rows = published_plan(width, height, recipe)
        assert (ours.whole, ours.cropped, ours.window) == (whole, cropped, window)
        assert (ours.columns, ours.rows) == (columns, rows)


@pytest.mark.parametrize(
    "width, height, crops",
    [
        (728, 728, 0),
        (600, 500, 0),
        (728, 400, 2),
        (800, 600, 2),
        (1500, 1000, 6),
        (3000, 700, 12),
        (20, 100, 0),
        (4000, 3000, 30),
        (300, 1000, 2),
    ],
)
def test_published_sizes_have_the_published_number_of_crops(width, height, crops):
    """Counted by hand: windows of 504, a rest above a fifth of it counts; long small pictures by their short side."""
    assert plan(width, height, PUBLISHED).num_crops == crops


@pytest.mark.parametrize(
    "size", [(50, 40), (64, 64), (100, 70), (60, 30), (150, 12), (200, 90), (40, 120), (65, 300), (3, 2)]
)
def test_pixel_values_are_those_of_the_published_algorithm(size):
    """Libraries take the two passes of a resize in either order and round between them, so a value may differ by a step
    of 255 at each resize; the published one agrees with Pillow no better."""
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    whole, crops, how = pixels_of(PIL.Image.fromarray(pixels), TINY)
    view, tiles = published_pixels(pixels, TINY)
    assert whole.shape == (1, 3, 64, 64) and len(crops) == len(tiles) == how.num_crops
    step = 1 / 255 / min(CLIP_STD)
    for ours, theirs in zip([whole[0], *crops], [view, *tiles], strict=True):
        distance = np.abs(ours.numpy() - normalised(theirs))
        assert distance.max() < 2.01 * step, distance.max() / step
        assert distance.mean() < 0.4 * step
    assert whole.dtype == crops.dtype == torch.float32


def test_an_extreme_picture_keeps_its_corner_and_is_black_below():
    white = PIL.Image.new("RGB", (150, 12), (255, 255, 255))
    whole, crops, how = pixels_of(white, TINY)
    assert how.squared and len(crops) == 9
    top, bottom = whole[0, 0, 0].mean(), whole[0, 0, 20:].mean()
    assert math.isclose(float(top), (1 - CLIP_MEAN[0]) / CLIP_STD[0], abs_tol=0.05)
    assert math.isclose(float(bottom), -CLIP_MEAN[0] / CLIP_STD[0], abs_tol=0.05)


def test_crops_are_the_parts_of_the_picture_row_by_row():
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255)]
    picture = PIL.Image.new("RGB", (3 * 48, 2 * 48))
    for i, colour in enumerate(colours):
        picture.paste(colour, (48 * (i % 3), 48 * (i // 3), 48 * (i % 3) + 48, 48 * (i // 3) + 48))
    _, crops, how = pixels_of(picture, TINY)
    assert (how.columns, how.rows) == (3, 2)
    for crop, colour in zip(crops, colours, strict=True):
        expected = (np.array(colour) / 255 - CLIP_MEAN) / CLIP_STD
        np.testing.assert_allclose(crop.mean((1, 2)).numpy(), expected, atol=1e-5)
