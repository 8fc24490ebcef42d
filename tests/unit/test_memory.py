"""Memory of packed weights: tensors lie apart, begin with a cache line, and give it back with the last of them."""

import gc

import pytest
import torch

from foreglance.ops import memory

pytestmark = pytest.mark.skipif(not memory.HAS_PAGES, reason="this system has no large pages for the asking")


def mapped() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


def test_tensors_lie_apart_and_begin_with_a_cache_line():
    kinds = ((3, torch.uint8), (65, torch.float16), (1000, torch.float32), (memory.CHUNK, torch.uint8), (0, torch.int8))
    made = [memory.placed(torch.full((count, 2), number, dtype=kind)) for number, (count, kind) in enumerate(kinds)]
    for number, ((count, kind), tensor) in enumerate(zip(kinds, made, strict=True)):
        assert tensor.dtype == kind and tensor.shape == (count, 2) and tensor.is_contiguous()
        assert (tensor == number).all()
        assert count == 0 or tensor.data_ptr() % memory.LINE == 0


def test_large_tensors_begin_with_a_large_page():
    assert memory.empty((memory.CHUNK,), torch.uint8).data_ptr() % memory.PAGE == 0


def test_memory_is_given_back_with_the_last_tensor(monkeypatch):
    monkeypatch.setattr(memory, "_room", memory._Room())
    before = mapped()
    made = [memory.empty((memory.CHUNK // 4,), torch.uint8) for _ in range(9)]
    assert mapped() - before > 2 * memory.CHUNK
    kept = made[0].fill_(7)
    made.clear()
    gc.collect()
    assert mapped() - before < 2 * memory.CHUNK and (kept == 7).all()
    del kept
    gc.collect()
    assert mapped() - before < memory.CHUNK // 2


def test_a_strided_tensor_is_copied_in_its_own_order():
    tensor = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(memory.placed(tensor.transpose(1, 2)), tensor.transpose(1, 2))
