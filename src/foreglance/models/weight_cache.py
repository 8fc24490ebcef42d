"""Packed weights on disk, so that a checkpoint is quantised once and not at each load.

One folder for each state of a checkpoint, in a folder that only its user may write. One safetensors file in it for each
packed weight (or all experts of a layer), by the names of the tensors that it is made of, with a checksum. A file that
does not fit is made anew; whatever goes wrong with the disk costs the cache and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from foreglance.cache import whole
from foreglance.models.fingerprint import fingerprint, weight_files
from foreglance.ops import formats, memory, native
from foreglance.ops.formats import packed_shapes
from foreglance.ops.native import NativeLinear

log = logging.getLogger(__name__)

VARIABLE = "FOREGLANCE_CACHE"  # moves the folder
KIND, VERSION = "foreglance-weights", "1"
SMALLEST = 64 << 20  # bytes of a checkpoint below which quantising takes no time that anybody minds
SPARED = 20  # a disk is not filled beyond the last twentieth
MAX_HEADER = 1 << 16
BITS = {"q8": 8, "q4": 4}
TYPES = {"U8": torch.uint8, "F16": torch.float16}
_limit: ContextVar[int] = ContextVar("limit", default=0)


@contextmanager
def kept_within(limit: int) -> Iterator[None]:
    """Checkpoints that are loaded within keep what they pack in `limit` bytes of disk, 0: not at all."""
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)


def cache_folder() -> Path:
    """Where packed weights of this user lie, by the custom of the system."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser() / "weights"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "foreglance" / "weights"


def cache_of(folder: Path, stored_bytes: int) -> WeightCache | None:
    """For the checkpoint in `folder`, if one is wanted and worth it."""
    limit = _limit.get()
    return WeightCache(folder, cache_folder(), limit) if limit and stored_bytes >= SMALLEST else None


class WeightCache:
    """What is kept of one checkpoint. `find` and `keep` never raise for what is wrong with a disk: a warning says so,
    once."""

    def __init__(self, checkpoint: Path, root: Path, limit: int):
        self._root, self._limit = root, limit
        self.folder = root / f"{checkpoint.name[:60]}-{_state_of(checkpoint)}"
        self._usable = self._writable = True
        self._held, self._wrote = 0, False
        with self._forgiving("is not used"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(root):
                raise OSError(f"others may write {root}, or it is theirs; give it to yourself alone or remove it")
            self.folder.mkdir(mode=0o700, exist_ok=True)
            whole.sweep(self.folder)
            self._held = _bytes_in(self.folder)
            with suppress(PermissionError):  # others may have made it readable only
                os.utime(self.folder)

    def find(self, format: str, names: Sequence[str]) -> list[NativeLinear] | None:
        """The weights that were kept under these names in a format; None if there are none, or damaged ones."""
        path = self._path(format, names)
        if not self._usable or not path.is_file():
            return None
        try:
            with path.open("rb", buffering=0) as file:
                return _read(file, path.stat().st_size, format, names)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("weight cache: %s is damaged and made anew (%s)", path, error)
            return None

    def keep(self, format: str, names: Sequence[str], packed: Sequence[NativeLinear]) -> None:
        """Write weights of one shape, whole or not at all."""
        if not (self._usable and self._writable):
            return
        size = sum(one.data.nbytes + (0 if one.scales is None else one.scales.nbytes) for one in packed)
        with self._forgiving("is not written"):
            if self._held + size > self._limit:
                raise OSError(f"this checkpoint alone is more than the {self._limit} bytes that it may hold")
            disk = shutil.disk_usage(self.folder)
            if disk.free - size < disk.total / SPARED:
                raise OSError(f"the disk of {self._root} has only {disk.free} bytes left")
            path = self._path(format, names)
            _write(path, format, names, packed)
            self._held, self._wrote = self._held + path.stat().st_size, True

    def close(self) -> None:
        """Remove the checkpoints that were used longest ago, if there are more than the limit allows."""
        if self._wrote and self._usable:
            with suppress(OSError):
                _trim(self._root, self._limit, self.folder)

    def _path(self, format: str, names: Sequence[str]) -> Path:
        return self.folder / f"{hashlib.sha256(_key(format, names).encode()).hexdigest()[:32]}.safetensors"

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._usable = self._usable and what != "is not used"
            self._writable = False
            log.warning("weight cache %s: %s", what, error)


def _key(format: str, names: Sequence[str]) -> str:
    return "\n".join((format, *names))


def _is_own(folder: Path) -> bool:
    """Whether nobody but this user can have put anything into a folder."""
    if sys.platform == "win32":
        return True
    found, entry = folder.stat(), folder.lstat()
    return found.st_uid == entry.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _state_of(checkpoint: Path) -> str:
    """Of a checkpoint's files, and of the code that makes packed weights of them. Times count too: a fingerprint reads
    large files in pieces."""
    made = hashlib.sha256(f"{VERSION} {made_by()} {fingerprint(checkpoint)}".encode())
    for path in weight_files(checkpoint):
        made.update(f" {path.name} {path.stat().st_mtime_ns}".encode())
    return made.hexdigest()[:24]


def sources() -> list[Path]:
    """The modules that say what a packed weight is made of, and how it is laid out."""
    families = Path(__file__).parent.rglob("*.py")
    return sorted([*families, *(Path(str(module.__file__)) for module in (formats, memory, native))])


@cache
def made_by() -> str:
    made = hashlib.sha256()
    for path in sources():
        made.update(path.read_bytes())
    return made.hexdigest()


def _about(format: str, names: Sequence[str], packed: Sequence[NativeLinear]) -> dict[str, str]:
    shape = [len(packed), *packed[0].shape]
    return {"kind": KIND, "version": VERSION, "of": _key(format, names), "shape": json.dumps(shape)}


def _parts(packed: Sequence[NativeLinear]) -> dict[str, list[Tensor]]:
    return {"data": [one.data for one in packed], "scales": [one.scales for one in packed if one.scales is not None]}


def _checksum(about: dict[str, str], parts: dict[str, list[Tensor]]) -> str:
    made = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for tensor in (*parts["data"], *parts["scales"]):
        made.update(whole.raw(tensor))
    return made.hexdigest()


def _write(path: Path, format: str, names: Sequence[str], packed: Sequence[NativeLinear]) -> None:
    """Part by part: what is loaded may not be there twice."""
    about, parts = _about(format, names, packed), _parts(packed)
    tensors = {name: ([len(packed), *some[0].shape], some) for name, some in parts.items()}
    whole.write(path, tensors, about | {"sha256": _checksum(about, parts)}, durable=False)


def _read(file: BinaryIO, size: int, format: str, names: Sequence[str]) -> list[NativeLinear]:
    """Straight into the memory that weights lie in. Raises `ValueError` and others of its kind for what does not fit:
    nothing that a file says is believed before it is checked."""
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise ValueError("its head is too long")
    header = json.loads(file.read(length))
    about = dict(header.pop("__metadata__"))
    checksum, shape = about.pop("sha256"), json.loads(about["shape"])
    count, num_out, num_in = (_positive(n) for n in shape)
    wanted = packed_shapes(num_out, num_in, BITS[format])
    if about["of"] != _key(format, names) or [about["kind"], about["version"]] != [KIND, VERSION]:
        raise ValueError("it holds something else")
    if any(header[name]["shape"] != [count, *wanted[name]] for name in wanted) or list(header) != list(wanted):
        raise ValueError("its tensors have other shapes")
    each = {name: (wanted[name], TYPES[header[name]["dtype"]]) for name in wanted}
    if 8 + length + sum(count * _num_bytes(*one) for one in each.values()) != size:
        raise ValueError("it is not as long as it says")
    parts = {name: [_filled(file, *one) for _ in range(count)] for name, one in each.items()}
    if _checksum(about, parts) != checksum:
        raise ValueError("its checksum is another one")
    return [NativeLinear((num_out, num_in), format, *both) for both in zip(*parts.values(), strict=True)]


def _positive(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 40:
        raise ValueError(f"a size of {value!r}")
    return value


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _filled(file: BinaryIO, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = memory.empty(shape, dtype)
    rest = memoryview(whole.raw(tensor))
    while len(rest):
        read = file.readinto(rest)
        if not read:
            raise ValueError("it ends early")
        rest = rest[read:]
    return tensor


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # somebody else removed it
            total += path.stat().st_size if path.is_file() else 0
    return total


def _trim(root: Path, limit: int, kept: Path) -> None:
    oldest = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    total = _bytes_in(root)
    for folder in oldest:
        if total <= limit:
            return
        if folder != kept:
            total -= _bytes_in(folder)
            shutil.rmtree(folder, ignore_errors=True)


def held() -> int:
    """Bytes that packed weights of this user take on disk."""
    return _bytes_in(cache_folder())


def clear() -> int:
    """Remove all of them; -> bytes that they took."""
    freed = held()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return freed - held()
