"""Where packed weights lie: in pages of 2 MB where the system has them.

A step reads every weight once, in order. With pages of 4 kB a processor stops at each of them to look up the next and
to begin reading ahead anew, which cost a q8 product a fifth of its time (docs/kernels.md).
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from contextlib import suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK = 64 << 20  # bytes that are asked of the system at a time; what is never written takes no memory
LINE = 64  # bytes of a processor's cache line: every tensor begins with one
HAS_PAGES = sys.platform == "linux" and "MADV_HUGEPAGE" in vars(mmap)


class _Room:
    """Hands out memory of chunks one tensor after another. A chunk lives as long as one of its tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._at = self._size = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """A chunk, and the offset of `size` bytes in it."""
        size = -(-size // LINE) * LINE
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is not None and self._at + size <= self._size:
                self._at += size
                return chunk, self._at - size
            if size > CHUNK // 2:
                return _mapped(size)
            chunk, first = _mapped(CHUNK)
            self._chunk, self._at, self._size = weakref.ref(chunk), first + size, first + CHUNK
            return chunk, first


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """New memory that reads as zeros, and the offset where its first large page begins."""
    chunk = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk, -np.frombuffer(chunk, np.uint8).ctypes.data % PAGE


_room = _Room()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in large pages; ordinary memory where there are none."""
    count = prod(shape)
    if not HAS_PAGES or not count:
        return torch.empty(shape, dtype=dtype)
    chunk, offset = _room.take(count * dtype.itemsize)
    return torch.frombuffer(chunk, dtype=dtype, count=count, offset=offset).view(shape)


def placed(tensor: Tensor) -> Tensor:
    """A copy in large pages, in one piece."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
