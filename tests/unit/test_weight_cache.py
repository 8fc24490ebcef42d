"""Packed weights on disk: bit for bit those that are made, or nothing; a disk costs the cache and never a load."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import os
import stat
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from foreglance import Engine, Settings
from foreglance.bench.quality import Passage, logits_of
from foreglance.cache import whole
from foreglance.models import gemma4, loader, moe, weight_cache
from foreglance.models.fingerprint import fingerprint
from foreglance.models.gguf.export import export
from foreglance.models.gguf.folder import lay_out
from foreglance.models.weight_cache import VARIABLE, WeightCache, cache_folder, kept_within
from foreglance.models.weights import SINGLE, SafeFiles, Weights, find_model
from foreglance.ops import formats, native
from foreglance.ops.formats import blocked_groups, packed_shapes, quantise
from foreglance.ops.linear import PATHS
from foreglance.ops.native import NativeOps
from foreglance.ops.numerics import kernels_are_native
from foreglance.ops.torch_ops import TorchOps
from foreglance.request import Message, Request, SamplingParams, Speculation

pytestmark = pytest.mark.skipif(not kernels_are_native(), reason="quantised weights are packed by the native kernels")
NAMES, MANY = ["a.weight", "b.weight"], 1 << 30
TENSORS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for name, shape in {"a.weight": (40, 100), "b.weight": (24, 100), "e.weight": (3, 20, 64), "n.bias": (7,)}.items()
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, for checkpoints of any size."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "SMALLEST", 0)
    return cache_folder()


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return written(tmp_path / "small")


def written(folder: Path, tensors=TENSORS) -> Path:
    folder.mkdir()
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text("{}")
    return folder


def ops_of(format: str) -> NativeOps:
    return NativeOps(TorchOps(next(path for path in PATHS if path.weights == format)), format)


def loaded(folder: Path, format: str = "q8", limit: int = MANY) -> list[native.NativeLinear]:
    with kept_within(limit):
        weights = Weights(folder)
    ops = ops_of(format)
    fused = weights.packed(ops, NAMES, lambda: torch.cat([weights.take(n, *TENSORS[n].shape) for n in NAMES]))
    each = weights.packed_each(ops, ["e.weight"], lambda: weights.take("e.weight", 3, 20, 64))
    weights.finish(lambda name: name == "n.bias")
    return [fused, *each]


def same(ours, theirs) -> bool:
    return len(ours) == len(theirs) and all(
        one.shape == other.shape
        and one.format == other.format
        and torch.equal(one.data, other.data)
        and torch.equal(one.scales, other.scales)
        for one, other in zip(ours, theirs, strict=True)
    )


def files_in(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("format", ("q8", "q4"))
def test_kept_weights_are_those_that_are_made_and_their_tensors_are_not_read(format, checkpoint, root, monkeypatch):
    made = loaded(checkpoint, format, limit=0)
    assert not root.exists()
    assert same(loaded(checkpoint, format), made) and len(files_in(root)) == 2
    monkeypatch.setattr(SafeFiles, "tensor", lambda self, name: pytest.fail(f"{name} was read"))
    kept = loaded(checkpoint, format)
    assert same(kept, made)
    assert all(one.data.data_ptr() % 64 == 0 and one.data.is_contiguous() for one in kept)


@pytest.mark.parametrize("model", ("tiny-qwen", "tiny-step", "tiny-gemma"))
def test_a_model_is_packed_once_and_computes_the_same(model, root, monkeypatch):
    kept = []
    keep = WeightCache.keep
    monkeypatch.setattr(WeightCache, "keep", lambda self, *of: (kept.append(of), keep(self, *of)))

    def logits(limit: int) -> torch.Tensor:
        how = Settings(weights="q4", slots=1, try_drafts=False, prefix_cache_bytes=0, weight_cache_bytes=limit)
        engine = Engine.load(model, how)
        asked = Request((Message.of("user", "Describe a red circle."),), SamplingParams(), Speculation("none"))
        return logits_of(engine, Passage(engine.prepare(asked), 0))

    plain = logits(0)
    assert not kept and torch.equal(logits(MANY), plain)
    count = len(kept)
    assert count > 20 and torch.equal(logits(MANY), plain) and len(kept) == count


def test_a_file_is_safetensors_with_names_and_a_checksum(checkpoint, root):
    made = loaded(checkpoint)
    (fused,) = [path for path in files_in(root) if b"a.weight" in path.read_bytes()]
    with safe_open(fused, framework="pt") as file:
        assert torch.equal(file.get_tensor("data")[0], made[0].data)
        assert torch.equal(file.get_tensor("scales")[0], made[0].scales)
        assert file.metadata()["of"] == "q8\na.weight\nb.weight" and len(file.metadata()["sha256"]) == 64


def test_a_damaged_file_is_said_so_and_made_anew(checkpoint, root, caplog):
    made = loaded(checkpoint)
    path = next(path for path in files_in(root) if b"a.weight" in path.read_bytes())
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    spots = [0, 4, 8, 12, whole.index(b"shape") + 9, whole.index(b"sha256") + 12, head, head + 999, len(whole) - 1]
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in spots]
    other = next(one for one in files_in(root) if one != path).read_bytes()
    for content in (*damaged, b"", whole[:5], whole[: head + 3], whole[:-1], whole + b"0", other):
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert same(loaded(checkpoint), made)
        (line,) = [record.message for record in caplog.records]
        assert path.name in line and "is damaged and made anew" in line and "\n" not in line
        assert path.read_bytes() == whole


def test_another_checkpoint_in_the_same_place_is_another_one(checkpoint, root):
    loaded(checkpoint)
    changed = TENSORS | {"a.weight": TENSORS["a.weight"] + 1}
    save_file(changed, checkpoint / SINGLE)
    assert same(loaded(checkpoint), loaded(checkpoint, limit=0)) and len(list(root.iterdir())) == 2
    found = (checkpoint / SINGLE).stat()
    os.utime(checkpoint / SINGLE, ns=(found.st_atime_ns, found.st_mtime_ns + 1))  # a fingerprint reads samples only
    loaded(checkpoint)
    assert len(list(root.iterdir())) == 3


def test_files_of_gguf_count_as_their_checkpoint(tmp_path):
    """Two files with one config: the folder that they are laid out in holds no weights itself."""
    source = tmp_path / "source"
    source.mkdir()
    for path in find_model("tiny-text").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    export(source, tmp_path / "one" / "m.gguf")
    with safe_open(source / SINGLE, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, source / SINGLE)
    export(source, tmp_path / "two" / "m.gguf")
    assert fingerprint(lay_out(tmp_path / "one" / "m.gguf")) != fingerprint(lay_out(tmp_path / "two" / "m.gguf"))


def test_code_that_makes_other_weights_makes_another_cache(checkpoint, root, monkeypatch, tmp_path):
    """The layout's version is the text of the modules that it follows from."""
    known = set(weight_cache.sources())
    for makes in (quantise, blocked_groups, native.pack, moe.Experts, loader.Loader, gemma4.load, formats.blocked):
        assert Path(inspect.getsourcefile(makes)) in known
    loaded(checkpoint)
    (tmp_path / "more.py").write_text("")
    monkeypatch.setattr(weight_cache, "sources", lambda: [*known, tmp_path / "more.py"])
    before = weight_cache.made_by.__wrapped__()
    (tmp_path / "more.py").write_text("# another way")
    assert weight_cache.made_by.__wrapped__() != before
    weight_cache.made_by.cache_clear()
    loaded(checkpoint)
    weight_cache.made_by.cache_clear()
    assert len(list(root.iterdir())) == 2


@pytest.mark.parametrize(
    ("bits", "shape"), [(bits, shape) for bits in (8, 4) for shape in ((40, 100), (1, 1), (16, 32))]
)
def test_shapes_of_packed_weights_are_known_beforehand(bits, shape):
    data, scales = blocked_groups(quantise(torch.ones(shape), bits))
    assert packed_shapes(*shape, bits) == {"data": tuple(data.shape), "scales": tuple(scales.shape)}


@pytest.mark.skipif(sys.platform == "win32", reason="rights are others there")
def test_the_cache_is_its_users_alone(checkpoint, root, caplog):
    made = loaded(checkpoint)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files_in(root))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (root, *root.iterdir()))
    root.chmod(0o777)
    path = next(path for path in files_in(root) if b"a.weight" in path.read_bytes())
    path.write_bytes(b"what somebody else put here")
    with caplog.at_level(logging.WARNING):
        assert same(loaded(checkpoint), made)
    (line,) = [record.message for record in caplog.records]
    assert f"others may write {root}" in line
    assert path.read_bytes() == b"what somebody else put here"


@pytest.mark.skipif(sys.platform == "win32", reason="rights are others there")
@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a folder away")
def test_a_cache_that_belongs_to_somebody_else_is_not_used(checkpoint, root, caplog):
    root.mkdir(parents=True, mode=0o700)
    os.chown(root, 12345, -1)
    with caplog.at_level(logging.WARNING):
        loaded(checkpoint)
    assert "or it is theirs" in caplog.text and not files_in(root)


def broken(code: int):
    def fail(*args, **more):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("module", "name", "code"),
    (
        (whole.tempfile, "mkstemp", errno.EROFS),
        (whole.os, "replace", errno.ENOSPC),
        (Path, "mkdir", errno.EACCES),
    ),
    ids=("read-only", "full", "no folder"),
)
def test_a_disk_that_takes_nothing_costs_the_cache_and_one_line(
    module, name, code, checkpoint, root, monkeypatch, caplog
):
    made = loaded(checkpoint, limit=0)
    monkeypatch.setattr(module, name, broken(code))
    with caplog.at_level(logging.WARNING):
        assert same(loaded(checkpoint), made)
    (line,) = [record.message for record in caplog.records]
    assert os.strerror(code) in line and not files_in(root)


def test_what_a_killed_load_left_half_written_goes(checkpoint, root):
    made = loaded(checkpoint)
    before = files_in(root)
    (before[0].parent / f".{before[0].name}.abcd1234.part").write_bytes(before[0].read_bytes()[:100])
    assert same(loaded(checkpoint), made) and files_in(root) == before


def test_a_disk_that_is_nearly_full_is_left_alone(checkpoint, root, monkeypatch, caplog):
    usage = type("Usage", (), {"total": 100 << 30, "free": 4 << 30})
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: usage)
    with caplog.at_level(logging.WARNING):
        loaded(checkpoint)
    assert "has only 4294967296 bytes left" in caplog.text and not files_in(root)


def test_what_was_used_longest_ago_makes_room(tmp_path, root):
    folders = [written(tmp_path / name) for name in ("first", "second", "third")]
    for folder in folders[:2]:
        loaded(folder)
    one = sum(path.stat().st_size for path in files_in(root)) // 2
    first, second = (next(root.glob(f"{name}-*")) for name in ("first", "second"))
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    loaded(folders[0])  # and so the second one was used longest ago
    assert first.stat().st_mtime > 2
    loaded(folders[2], limit=2 * one + one // 2)
    assert first.exists() and not second.exists() and list(root.glob("third-*"))


def test_a_checkpoint_larger_than_the_limit_is_kept_as_far_as_it_goes(checkpoint, root, caplog):
    with caplog.at_level(logging.WARNING):
        loaded(checkpoint, limit=9000)
    assert "this checkpoint alone is more than the 9000 bytes" in caplog.text
    assert len(files_in(root)) == 1


def test_small_checkpoints_are_not_kept(checkpoint, root, monkeypatch):
    monkeypatch.setattr(weight_cache, "SMALLEST", 1 << 20)
    loaded(checkpoint)
    assert not root.exists()


def test_weights_of_a_checkpoint_that_does_not_fit_are_not_kept(checkpoint, root):
    with kept_within(MANY):
        weights = Weights(checkpoint)
    weights.packed(ops_of("q8"), ["c.weight"], lambda: weights.take("c.weight", 32, 32))
    assert not files_in(root)


def test_several_at_once_read_and_write_whole_files(checkpoint, root):
    made, wrong = loaded(checkpoint), []

    def work():
        for turn in range(12):
            if turn % 3 == 0:
                for path in files_in(root):
                    path.unlink(missing_ok=True)
            if not same(loaded(checkpoint), made):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not list(root.rglob("*.part"))


def test_the_cache_is_shown_and_cleared(checkpoint, root):
    from typer.testing import CliRunner

    from foreglance.cli import app

    loaded(checkpoint)
    size = sum(path.stat().st_size for path in files_in(root))
    shown = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)["weight_cache"]
    assert shown == {"folder": str(root), "removed_bytes": 0, "bytes": size}
    assert f"{root}: 0.0 MB" in CliRunner().invoke(app, ["models", "--clear-cache"]).stdout
    assert not files_in(root)
