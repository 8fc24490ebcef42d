"""Made-up pictures whose contents are known: coloured shapes, a number or a word on a 4 x 4 grid.
 Owns the vocabulary of a scene, how one is sampled and how it is drawn. Knows nothing of models, tokens or
wording; the sentences about a scene are the training grammar's business. Used by the training of the embedded
models and by the benchmarks, so a benchmark can say which words of an answer are right.

A picture is 64 x 64 pixels and a cell 16 x 16, which is exactly one image token of the embedded models
(patches of 8 pixels, merged 2 x 2): content never straddles two image tokens, except a written word, which
fills two.

Scenes made from seeds of `HELD_OUT_SEED` or more are never trained on.
"""

import math
import random
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

IMAGE_SIZE = 64
GRID = 4
CELL_SIZE = IMAGE_SIZE // GRID
HELD_OUT_SEED = 1_000_000

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 220, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "pink": (245, 150, 190),
    "brown": (120, 75, 40),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "black": (15, 15, 15),
    "gray": (128, 128, 128),
    "beige": (230, 215, 180),
    "navy": (20, 25, 80),
}
DARK_BACKGROUNDS = ("black", "navy")
INK_ON_DARK = ("white", "yellow", "pink")
INK_ON_LIGHT = ("black", "red", "blue")
INKS = {**COLOURS, "white": BACKGROUNDS["white"], "black": BACKGROUNDS["black"]}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")
SIZES = ("small", "large")
COUNTS = ("zero", "one", "two", "three", "four", "five", "six")
WORDS = (
    "FOX", "SUN", "ICE", "MAP", "BED", "JAM", "OWL", "KEY", "ZOO", "HAT",
    "CUP", "PEN", "TAXI", "BOAT", "LION", "FROG", "MILK", "GOLD", "WIND", "KITE",
)  # fmt: skip
ROWS = ("top", "upper", "lower", "bottom")
COLUMNS = ("far left", "left", "right", "far right")
# One phrase a cell, in reading order: "top far left" to "bottom far right".
POSITIONS = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)


@dataclass(frozen=True)
class Item:
    """One thing in a cell. `shape` and `size` are empty for writing, `text` is empty for a shape."""

    cell: int
    kind: str  # "shape", "number" or "word"
    colour: str
    shape: str = ""
    size: str = ""
    text: str = ""

    @property
    def row(self) -> int:
        return self.cell // GRID

    @property
    def column(self) -> int:
        return self.cell % GRID

    @property
    def position(self) -> str:
        return POSITIONS[self.cell]


@dataclass(frozen=True)
class Scene:
    """A background and its items in reading order."""

    background: str
    items: tuple[Item, ...]

    @property
    def shapes(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.kind == "shape")

    @property
    def writing(self) -> Item | None:
        return next((item for item in self.items if item.kind != "shape"), None)


def content_words() -> frozenset[str]:
    """The words that only the picture can tell: colours, shapes, sizes, counts, digits and what is written.
     Positions are not among them: items are told in reading order, so a position can be half guessed from the
    text before.
    """
    digits = map(str, range(10))
    return frozenset([*INKS, *BACKGROUNDS, *SHAPES, *SIZES, *COUNTS, *WORDS, *digits])


def position_words() -> frozenset[str]:
    """The words that positions are made of."""
    return frozenset(" ".join(POSITIONS).split())


def sample_scene(rng: random.Random, num_shapes: int | None = None) -> Scene:
    """A scene of three to five items; `num_shapes` asks for that many shapes instead."""
    background = rng.choice(tuple(BACKGROUNDS))
    free = list(range(GRID * GRID))
    items = []
    kind = rng.choices(("shape", "number", "word"), (0.52, 0.32, 0.16))[0]
    if kind != "shape":
        width = 2 if kind == "word" else 1
        cell = rng.choice([c for c in free if c % GRID <= GRID - width])
        free = [c for c in free if not cell <= c < cell + width]
        ink = rng.choice(INK_ON_DARK if background in DARK_BACKGROUNDS else INK_ON_LIGHT)
        text = str(rng.randint(10, 99)) if kind == "number" else rng.choice(WORDS)
        items.append(Item(cell, kind, ink, text=text))
    if num_shapes is None:
        num_shapes = rng.choices((3, 4, 5), (4, 4, 3))[0] - len(items)
    for cell in rng.sample(free, num_shapes):
        shape, colour, size = rng.choice(SHAPES), rng.choice(tuple(COLOURS)), rng.choice(SIZES)
        items.append(Item(cell, "shape", colour, shape, size))
    return Scene(background, tuple(sorted(items, key=lambda item: item.cell)))


def scene_from_seed(seed: int, num_shapes: int | None = None) -> tuple[Scene, Image.Image]:
    """The scene and the picture that belong to a seed."""
    rng = random.Random(seed)
    scene = sample_scene(rng, num_shapes)
    return scene, render(scene, rng)


def render(scene: Scene, rng: random.Random) -> Image.Image:
    """Draws a scene at twice its size with small random shifts of place, size and colour, then halves it."""
    zoom = 2
    ground = _shifted(BACKGROUNDS[scene.background], 8, rng)
    picture = Image.new("RGB", (IMAGE_SIZE * zoom, IMAGE_SIZE * zoom), ground)
    draw = ImageDraw.Draw(picture)
    for item in scene.items:
        ink = _shifted(INKS[item.colour], 12, rng)
        shift = 0.8 if item.kind == "shape" else 0.4
        x = (CELL_SIZE * (item.column + 0.5) + rng.uniform(-shift, shift)) * zoom
        y = (CELL_SIZE * (item.row + 0.5) + rng.uniform(-shift, shift)) * zoom
        if item.kind == "shape":
            radius = (3.8 if item.size == "small" else 6.8) * zoom * rng.uniform(0.93, 1.07)
            _draw_shape(draw, item.shape, x, y, radius, ink)
        else:
            if item.kind == "word":
                x += CELL_SIZE / 2 * zoom
            draw.text((x, y), item.text, fill=ink, font=_font(11 * zoom), anchor="mm", stroke_width=0.7)
    return picture.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)


def _shifted(colour: tuple[int, int, int], spread: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(max(0, min(255, part + rng.randint(-spread, spread))) for part in colour)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _star_outline() -> tuple[tuple[float, float], ...]:
    angles = [(math.pi * i / 5, 1.1 if i % 2 == 0 else 0.45) for i in range(10)]
    return tuple((math.sin(angle) * reach, -math.cos(angle) * reach) for angle, reach in angles)


_ARM = 0.32
_OUTLINES = {
    "triangle": ((0, -1), (1, 0.85), (-1, 0.85)),
    "diamond": ((0, -1.1), (0.75, 0), (0, 1.1), (-0.75, 0)),
    "cross": (
        (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
        (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
    ),
    "star": _star_outline(),
}  # fmt: skip


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, ink: tuple) -> None:
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    elif shape == "square":
        side = radius * 0.88
        draw.rectangle((x - side, y - side, x + side, y + side), fill=ink)
    else:
        draw.polygon([(x + radius * dx, y + radius * dy) for dx, dy in _OUTLINES[shape]], fill=ink)
