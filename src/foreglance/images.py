"""Bytes to checked pixels. Owns size and count limits and what makes two pictures the same.

Touches no network, no tokens, no weights.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import PIL.ImageOps

from foreglance.request import Image, ImageSource, Message, RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # PIL knows dozens; some of them call other programs
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of grey pictures of 16 bits, whose upper 8 PIL would drop


@dataclass(frozen=True)
class Picture:
    """A decoded RGB picture and its identity: the hash of its pixels, never its file name or size."""

    pixels: PIL.Image.Image
    digest: str


def open_picture(source: ImageSource, max_pixels: int, name: str = "image") -> Picture:
    """Decode a path, encoded bytes or a PIL image to RGB. Raises `RequestError` in words a person can act on; `name` is
    what they call a picture that has no path."""
    if not isinstance(source, (bytes, PIL.Image.Image)):
        name = f"image {str(source)!r}"
    try:
        image = _decode(source, name, max_pixels)
    except RequestError:
        raise
    except FileNotFoundError:
        raise RequestError(f"{name} does not exist", param="image", code="image_not_found") from None
    except PIL.Image.DecompressionBombError as error:
        raise RequestError(
            f"{name} has too many pixels ({error}); scale it down", param="image", code="image_too_large"
        ) from None
    except PIL.UnidentifiedImageError:
        raise RequestError(
            f"{name} is no picture of a known kind; give a PNG, JPEG, WebP, GIF or BMP file",
            param="image",
            code="image_broken",
        ) from None
    except Exception as error:
        raise RequestError(
            f"{name} cannot be read as a picture ({type(error).__name__}: {error}); "
            "give a PNG, JPEG, WebP, GIF or BMP file that opens elsewhere",
            param="image",
            code="image_broken",
        ) from error
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()
    return Picture(image, digest)


def _decode(source: ImageSource, name: str, max_pixels: int) -> PIL.Image.Image:
    if isinstance(source, PIL.Image.Image):
        image = source
    elif isinstance(source, bytes):
        image = _open(io.BytesIO(source))
    elif isinstance(source, (str, Path)):
        image = _open(io.BytesIO(Path(source).expanduser().read_bytes()))
    else:
        raise RequestError(f"an image must be a path, bytes or a PIL image, got {type(source).__name__}", param="image")
    if image.width * image.height > max_pixels:
        raise RequestError(
            f"{name} has {image.width}x{image.height} pixels, above the limit of {max_pixels}; scale it down",
            param="image",
            code="image_too_large",
        )
    return _flatten(image)


def _open(stream: io.BytesIO) -> PIL.Image.Image:
    """Open lazily: the header alone tells the size, so that a decompression bomb is refused before it is decoded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        return PIL.Image.open(stream, formats=FORMATS)


def _flatten(image: PIL.Image.Image) -> PIL.Image.Image:
    """First frame as RGB, turned as its EXIF data says; transparency over white: as it is seen on a page."""
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode in DEEP:
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        canvas = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(canvas, image).convert("RGB")
    return image.convert("RGB")


def open_pictures(messages: Sequence[Message], max_images: int, max_pixels: int) -> tuple[Picture, ...]:
    """All pictures of a conversation in order, within the limits. Refused whole if one is bad."""
    return tuple(each_picture(messages, max_images, max_pixels))


def each_picture(messages: Sequence[Message], max_images: int, max_pixels: int) -> Iterator[Picture]:
    """The pictures of a conversation, each decoded when it is its turn: together they may be more than fits in memory.
    Their number is checked at once."""
    sources = image_sources(messages)
    if len(sources) > max_images:
        raise RequestError(
            f"the request holds {len(sources)} images, the limit is {max_images}",
            param="image",
            code="too_many_images",
        )
    names = [f"image {i} of {len(sources)}" for i in range(1, len(sources) + 1)] if len(sources) > 1 else ["image"]
    return (open_picture(source, max_pixels, name) for source, name in zip(sources, names, strict=False))


def image_sources(messages: Sequence[Message]) -> list[ImageSource]:
    return [part.source for message in messages for part in message.parts if isinstance(part, Image)]
