"""The GGUF container: metadata and tensors of a file, read with bounds, since a file may be cut short or hostile.

Every count and length is checked against what the file still holds before anything is made of it. Tensors are views of
the mapped file until they are asked for. Blocks of quantised types are taken apart by the `gguf` package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreglance.models.base import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = "general.alignment"
WORDS = "tokenizer."  # metadata keys of the vocabulary, whose scores may be infinite
MAX_ITEMS = 4 << 20  # entries of one array; vocabularies have a quarter of a million
MAX_RECORDS = 1 << 18  # metadata keys, tensors
MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
INTEGERS = ("I8", "I16", "I32", "I64")
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies. `shape` is in torch's order, outermost first; `kind` is the name of its type."""

    shape: tuple[int, ...]
    kind: str
    start: int
    num_bytes: int


class Cursor:
    """Reads little-endian values; refuses to go beyond the end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data, self._path, self.at = data, path, 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is not a whole GGUF file: {what}; fetch it again")

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > len(self._data) - self.at:
            raise self.fail(f"it ends inside {what} at byte {len(self._data)}")
        piece = self._data[self.at : self.at + num_bytes]
        self.at += num_bytes
        return piece

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode("utf-8", "surrogateescape")

    def count(self, limit: int, what: str) -> int:
        found = self.number("Q", what)
        if found > limit:
            raise self.fail(f"it claims {found} {what}, more than {limit}")
        return found

    def value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self._array(what)
        raise self.fail(f"{what} has a value of unknown type {kind}")

    def _array(self, what: str) -> list[Any]:
        kind = self.number("I", what)
        count = self.count(MAX_ITEMS, f"entries of {what}")
        if kind == STRING:
            return [self.string(what) for _ in range(count)]
        if kind not in SCALARS:
            raise self.fail(f"{what} is a list of values of unknown type {kind}")
        return list(struct.unpack(f"<{count}{SCALARS[kind]}", self.take(count * struct.calcsize(SCALARS[kind]), what)))


class GgufFile:
    """One file, or all shards of a split one, opened by the first. `meta` are its values by key, `tensors` by name."""

    def __init__(self, path: Path):
        self.path = path
        self.meta: Mapping[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        self._maps: dict[str, mmap.mmap] = {}
        for shard in _shards(path):
            meta = self._read(shard)
            self.meta = self.meta or meta

    def _read(self, path: Path) -> dict[str, Any]:
        data = _mapped(path)
        cursor = Cursor(data, path)
        if cursor.take(4, "its head") != MAGIC:
            raise ModelError(f"{path} is no GGUF file")
        version = cursor.number("I", "its head")
        if version not in VERSIONS:
            raise ModelError(f"{path} has GGUF version {version}; little-endian files of versions 2 and 3 are read")
        num_tensors, num_keys = cursor.count(MAX_RECORDS, "tensors"), cursor.count(MAX_RECORDS, "metadata keys")
        meta: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string("a metadata key")
            meta[key] = cursor.value(cursor.number("I", key), key)
            if not key.startswith(WORDS) and (odd := _not_finite(meta[key])):
                raise ModelError(f"{path}: {key} is {odd[0]}, no finite number")
        records = [self._record(cursor) for _ in range(num_tensors)]
        alignment = meta.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.fail(f"{ALIGNMENT} is {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in records:
            stored = Stored(shape, kind, start + offset, _num_bytes(shape, kind, name, cursor))
            if stored.start + stored.num_bytes > len(data):
                raise cursor.fail(f"tensor {name} goes on beyond byte {len(data)}, where the file ends")
            if name in self.tensors:
                raise cursor.fail(f"tensor {name} is there twice")
            self.tensors[name], self._maps[name] = stored, data
        return meta

    @staticmethod
    def _record(cursor: Cursor) -> tuple[str, tuple[int, ...], str, int]:
        name = cursor.string("a tensor's name")
        num_dims = cursor.number("I", name)
        if not 0 <= num_dims <= MAX_DIMS:
            raise cursor.fail(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.number("Q", name) for _ in range(num_dims))[::-1]
        return name, shape, _kind(cursor.number("I", name), name, cursor), cursor.number("Q", name)

    def need(self, key: str) -> Any:
        """A value that must be there."""
        if key not in self.meta:
            raise ModelError(f"{self.path} lacks {key}")
        return self.meta[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.meta.get(key, default)

    def tensor(self, name: str) -> Tensor:
        """Numbers as they are stored, quantised ones as float32."""
        stored = self.tensors[name]
        raw = np.frombuffer(self._maps[name], np.uint8, stored.num_bytes, stored.start)
        if stored.kind in ("F32", "F16", "F64"):
            return torch.from_numpy(raw.view(f"<f{int(stored.kind[1:]) // 8}").reshape(stored.shape).copy())
        if stored.kind in INTEGERS:
            return torch.from_numpy(raw.view(f"<i{int(stored.kind[1:]) // 8}").reshape(stored.shape).copy())
        if stored.kind == "BF16":
            return torch.from_numpy(raw.view("<i2").reshape(stored.shape).copy()).view(torch.bfloat16)
        return self._dequantised(raw, stored, name)

    def floats(self, name: str) -> Tensor:
        """float32 numbers of a tensor that counts as metadata: finite ones."""
        tensor = self.tensor(name).float()
        if not tensor.isfinite().all():
            raise ModelError(f"{self.path}: tensor {name} holds numbers that are nan or infinite")
        return tensor

    def _dequantised(self, raw: np.ndarray, stored: Stored, name: str) -> Tensor:
        from gguf import GGMLQuantizationType, quants

        rows = raw.reshape(*stored.shape[:-1], stored.num_bytes // math.prod(stored.shape[:-1]))
        try:
            return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[stored.kind]))
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is {stored.kind}, which cannot be taken apart here"
            ) from error


def _not_finite(value: Any) -> list[float]:
    """Among the numbers of a metadata value."""
    return [
        one
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, float) and not math.isfinite(one)
    ]


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{path} cannot be read as a GGUF file ({error})") from error


def _shards(path: Path) -> list[Path]:
    """A split file is named -00001-of-00003.gguf and so on; the first one has the metadata."""
    found = SHARD.search(path.name)
    if found is None:
        return [path]
    stem, total = path.name[: found.start()], int(found[2])
    if int(found[1]) != 1:
        raise ModelError(f"{path} is part {int(found[1])} of {total}; name the first part")
    shards = [path.parent / f"{stem}-{i:05}-of-{total:05}.gguf" for i in range(1, total + 1)]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ModelError(f"{path} is split and lacks {', '.join(absent[:12])}")
    return shards


def _kind(number: int, name: str, cursor: Cursor) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        raise cursor.fail(f"tensor {name} has the unknown type {number}") from None


def _num_bytes(shape: tuple[int, ...], kind: str, name: str, cursor: Cursor) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    width = shape[-1] if shape else 1
    if width % block or 0 in shape:
        raise cursor.fail(f"tensor {name} of type {kind} has the shape {list(shape)}")
    return math.prod(shape) // block * size
