"""The GGUF container: what is cut short, hostile or unknown is refused in words, before memory is spent on it."""

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import given, settings, strategies

from foreglance.models.base import ModelError
from foreglance.models.gguf.file import GgufFile

ROWS = np.linspace(-2, 2, 128, dtype=np.float32).reshape(2, 64)


def write(path):
    writer = GGUFWriter(path, "qwen35")
    writer.add_uint32("qwen35.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ü"])
    writer.add_array("qwen35.flags", [True, False])
    writer.add_float32("qwen35.eps", 0.5)
    writer.add_tensor("plain", ROWS)
    writer.add_tensor("half", ROWS.astype(np.float16))
    writer.add_tensor("eight", quants.quantize(ROWS, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf").read_bytes()


def opened(folder, content: bytes) -> GgufFile:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_values_and_tensors_are_read(tmp_path):
    file = GgufFile(write(tmp_path / "m.gguf"))
    assert file.need("qwen35.block_count") == 3 and file.need("qwen35.eps") == 0.5
    assert file.need("tokenizer.ggml.tokens") == ["a", "bc", "ü"] and file.need("qwen35.flags") == [True, False]
    assert file.tensors["half"].shape == (2, 64) and file.tensors["eight"].kind == "Q8_0"
    assert torch.equal(file.tensor("plain"), torch.from_numpy(ROWS))
    assert file.tensor("half").dtype == torch.float16
    assert (file.tensor("eight") - torch.from_numpy(ROWS)).abs().max() < 2 / 127
    with pytest.raises(ModelError, match=r"m\.gguf lacks qwen35\.context_length"):
        file.need("qwen35.context_length")


@pytest.mark.parametrize("kind", ("Q6_K", "Q4_K", "Q5_K", "Q3_K", "Q2_K"))
def test_k_quants_are_taken_apart(kind, tmp_path):
    number = GGMLQuantizationType[kind]
    size = quants.quant_shape_to_byte_shape((2, 256), number)
    raw = np.random.default_rng(0).integers(0, 60, size).astype(np.uint8)  # scales stay numbers
    writer = GGUFWriter(tmp_path / "m.gguf", "x")
    writer.add_tensor("k", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "m.gguf").tensor("k")
    assert found.shape == (2, 256) and found.isfinite().all() and found.abs().max() > 0
    np.testing.assert_array_equal(found.numpy(), quants.dequantize(raw, number))


def test_a_file_that_ends_anywhere_is_refused(whole, tmp_path):
    last = opened(tmp_path, whole).tensors["eight"]
    stop = last.start + last.num_bytes  # behind it lies padding
    for length in (*range(0, 64), *range(64, stop, 37), stop - 1):
        with pytest.raises(ModelError, match=r"m\.gguf"):
            opened(tmp_path, whole[:length])


@pytest.mark.parametrize(
    ("at", "value", "words"),
    (
        (0, b"GGML", "no GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "little-endian"),
        (8, struct.pack("<Q", 2**62), "tensors"),
        (16, struct.pack("<Q", 2**62), "metadata keys"),
        (24, struct.pack("<Q", 2**62), "ends inside a metadata key"),
    ),
)
def test_counts_are_believed_only_as_far_as_the_file_goes(at, value, words, whole, tmp_path):
    tracemalloc.start()
    with pytest.raises(ModelError, match=words):
        opened(tmp_path, whole[:at] + value + whole[at + len(value) :])
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_list_longer_than_the_file_is_refused(whole, tmp_path):
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 4
    with pytest.raises(ModelError, match=r"entries of tokenizer\.ggml\.tokens"):
        opened(tmp_path, whole[:at] + struct.pack("<Q", 2**60) + whole[at + 8 :])


def test_a_tensor_that_lies_beyond_the_end_is_named(whole, tmp_path):
    at = whole.index(b"half") + 4 + 4 + 16 + 4
    with pytest.raises(ModelError, match="tensor half goes on beyond"):
        opened(tmp_path, whole[:at] + struct.pack("<Q", 2**40) + whole[at + 8 :])
    with pytest.raises(ModelError, match="tensor plain is there twice"):
        opened(tmp_path, whole.replace(b"eight", b"plain"))


@settings(max_examples=300)
@given(data=strategies.data())
def test_any_damage_is_an_error_of_ours_or_none(data, whole, tmp_path_factory):
    at = data.draw(strategies.integers(0, len(whole) - 9))
    new = data.draw(strategies.binary(min_size=1, max_size=8))
    try:
        file = opened(tmp_path_factory.getbasetemp(), whole[:at] + new + whole[at + len(new) :])
        for name in file.tensors:
            file.tensor(name)
    except ModelError:
        pass


def test_a_split_file_is_read_whole_and_missed_in_part(tmp_path):
    write(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"lacks m-00002-of-00002\.gguf"):
        GgufFile(tmp_path / "m-00001-of-00002.gguf")
    writer = GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "qwen35")
    writer.add_tensor("more", ROWS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m-00001-of-00002.gguf")
    assert {"plain", "more"} <= set(file.tensors) and file.need("qwen35.block_count") == 3
    assert torch.equal(file.tensor("more"), file.tensor("plain"))
    with pytest.raises(ModelError, match="part 2 of 2; name the first part"):
        GgufFile(tmp_path / "m-00002-of-00002.gguf")
