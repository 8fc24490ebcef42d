"""Damaged inputs and what must become of them: a result within its bounds or an error in words, and nothing else.

`TARGETS` are used by the suite with few inputs and by scripts/fuzz.py with many.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from gguf import GGUFWriter
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import save as to_safetensors

from foreglance import Engine, RequestError, Settings, Speculation
from foreglance.cache import files
from foreglance.cache.kv import KVSpec
from foreglance.cache.prefix import Border, Point
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import Segment
from foreglance.images import open_picture
from foreglance.models.base import ModelError
from foreglance.models.gguf.file import GgufFile
from foreglance.models.weights import SINGLE, Weights
from foreglance.serve.chat import chat_job
from foreglance.serve.errors import ApiError
from foreglance.serve.openai import Surroundings
from foreglance.serve.schema import ChatBody

MAX_PIXELS = 250_000
MAX_SIZE = 1 << 16  # bytes of a mutated input


@dataclass(frozen=True)
class Target:
    """Sound inputs to begin with, and a check that raises for what must not happen."""

    seeds: Callable[[], list[bytes]]
    check: Callable[[bytes], None]


@st.composite
def damaged(draw, seeds: list[bytes]) -> bytes:
    """A sound input with some damage: bytes changed, cut out, put in, doubled, made huge, or all of it noise."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from((1, 1, 4, 8, 40)))
        match draw(st.sampled_from(["change", "change", "cut", "insert", "double", "huge", "end", "noise"])):
            case "change":
                data[at : at + size] = draw(st.binary(min_size=size, max_size=size))
            case "cut":
                del data[at : at + size]
            case "insert":
                data[at:at] = draw(st.binary(max_size=size))
            case "double":
                data[at:at] = data[at : at + size]
            case "huge":
                data[at : at + 8] = draw(st.sampled_from((b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0" * 8, b"99999999")))
            case "end":
                del data[at:]
            case "noise":
                data[:] = draw(st.binary(max_size=64))
    return bytes(data[:MAX_SIZE])


def _images() -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 255, (13, 17, 4), dtype=np.uint8)
    picture, out = PIL.Image.fromarray(noise), []
    for kind, mode in (("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "RGB"), ("GIF", "P"), ("WEBP", "RGBA"), ("BMP", "RGB")):
        stream, options = io.BytesIO(), {}
        if kind == "JPEG":
            exif = PIL.Image.Exif()
            exif[0x0112] = 6
            options["exif"] = exif
        picture.convert("RGB").convert(mode).save(stream, kind, **options)
        out.append(stream.getvalue())
    return out


def _check_image(data: bytes) -> None:
    try:
        picture = open_picture(data, MAX_PIXELS)
    except RequestError as error:
        assert error.param == "image" and error.code in ("image_broken", "image_too_large"), error
        return
    assert picture.pixels.mode == "RGB" and picture.pixels.width * picture.pixels.height <= MAX_PIXELS


def _chats() -> list[bytes]:
    stream = io.BytesIO()
    PIL.Image.new("RGB", (9, 9), "red").save(stream, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    user = {"role": "user", "content": "Hello"}
    bodies = [
        {"model": "m", "messages": [user]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}], "stream": True},
        {"messages": [user], "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a", "b"], "max_tokens": 5, "n": 2},
        {"messages": [user], "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": -1.5}, "stop": "x"},
        {"messages": [user], "speculative": {"draft": "mtp", "depth": 3, "images": "skip"}},
        {"messages": [user], "response_format": {"type": "json_object"}},
    ]
    return [json.dumps(body).encode() for body in bodies]


@cache
def _engine() -> Engine:
    return Engine.load("tiny-qwen", Settings(try_drafts=False))


def _check_chat(data: bytes) -> None:
    engine = _engine()
    try:
        body = ChatBody.model_validate_json(data)
        around = Surroundings(
            model="m",
            speculation=Speculation(),
            context=engine.context,
            choices=4,
            seed=1,
            now=0,
            id="x",
            piece=engine.piece,
            format=engine.format,
            images={},
        )
        for request in chat_job(body, around).requests:
            engine.prepare(request)
    except (ValidationError, RequestError, ApiError) as error:
        assert str(error)


def _tensors() -> list[bytes]:
    tensors = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.float16)}
    return [to_safetensors(tensors), to_safetensors({}), to_safetensors(tensors, {"format": "pt"})]


def _check_tensors(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SINGLE).write_bytes(data)
        try:
            weights = Weights(Path(folder))
            taken = weights.take("a.weight", 2, 3), weights.take("b.weight", 4)
            weights.finish()
        except ModelError as error:
            assert str(error)
            return
        assert [tuple(one.shape) for one in taken] == [(2, 3), (4,)]


def _ggufs() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_uint32("some.count", 7)
        writer.add_string("some.name", "a name")
        writer.add_array("some.words", ["one", "two", "three"])
        writer.add_array("some.numbers", [1.5, 2.5])
        writer.add_tensor("a.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
        writer.add_tensor("b.weight", np.ones(8, dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [path.read_bytes()]


def _check_gguf(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.gguf"
        path.write_bytes(data)
        try:
            file = GgufFile(path)
            for name in list(file.tensors):
                file.tensor(name)
        except ModelError as error:
            assert str(error)


SPECS = KVSpec(2, 4), RecurrentSpec(((3,),))
MODEL = {"target": "one"}


def _layout() -> files.Layout:
    return files.Layout(MODEL, (SPECS,), axes=3, waiting=0, width=4, vocab=50, context=64, budget=1 << 20)


def _slots() -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    layers = [tuple(torch.randn(shape, generator=generator) for shape in s.piece_shapes(5)) for s in SPECS]
    point = Point(np.arange(5), Border("chunk", True), (Segment(0, 5, (4, 4, 4), layers),))
    with tempfile.TemporaryDirectory() as folder:
        files.save(Path(folder) / "slot", [point], MODEL, "")
        return [(Path(folder) / "slot").read_bytes()]


def _check_slot(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slot"
        path.write_bytes(data)
        try:
            files.read_key(path)
            files.load(path, _layout())
        except files.SlotFileError as error:
            assert str(error)


TARGETS = {
    "image": Target(cache(_images), _check_image),
    "chat": Target(cache(_chats), _check_chat),
    "safetensors": Target(cache(_tensors), _check_tensors),
    "gguf": Target(cache(_ggufs), _check_gguf),
    "slot": Target(cache(_slots), _check_slot),
}
