"""Disks that are really full, each a small file system of its own: what cannot be written is said in one line, and
nothing half-written stays. Slots of a server are in test_kills.py."""

import logging
import shutil
import tempfile

import pytest
from support.disks import fill
from typer.testing import CliRunner

from foreglance import Engine, Request, SamplingParams, Settings
from foreglance.cli import app
from foreglance.models import weight_cache
from foreglance.models.weights import EMBEDDED
from foreglance.ops.numerics import kernels_are_native

FULL = "No space left on device"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(not kernels_are_native(), reason="quantised weights are packed by the native kernels")
@pytest.mark.parametrize("when", ("before", "meanwhile"))
def test_weights_that_cannot_be_kept_load_all_the_same_with_one_line(disk, monkeypatch, caplog, when):
    """Whether the disk is full before a load, or others fill it after its room was looked at."""
    monkeypatch.setenv(weight_cache.VARIABLE, str(disk))
    monkeypatch.setattr(weight_cache, "SMALLEST", 0)
    if when == "meanwhile":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    request = Request.from_prompt("Hello", sampling=SamplingParams(max_tokens=12, ignore_eos=True))

    def tokens(limit):
        how = Settings(weights="q8", slots=1, try_drafts=False, weight_cache_bytes=limit)
        return Engine.load("tiny-qwen", how).generate(request)[0].token_ids

    plain = tokens(0)
    fill(disk, leave=700_000)
    with caplog.at_level(logging.WARNING):
        assert tokens(1 << 30) == plain
    (line,) = [record.getMessage() for record in caplog.records if "weight cache" in record.getMessage()]
    assert "\n" not in line and (FULL if when == "meanwhile" else "bytes left") in line
    kept = [path for path in (disk / "weights").rglob("*") if path.is_file()]
    assert kept and all(path.suffix == ".safetensors" for path in kept)
    assert tokens(1 << 30) == plain  # what is there is whole


@pytest.mark.parametrize(
    "command",
    (
        ("export-gguf", "--model", "tiny-text", "--out", "{}/x"),
        ("explain", "--model", "tiny-qwen", "--prompt", "Hello", "--svg", "{}/x"),
        ("bench", "make-checkpoint", "--shape", "tiny", "--out", "{}/x"),
    ),
    ids=lambda command: command[-4].removeprefix("--"),
)
def test_a_command_that_cannot_write_says_so_in_one_line(disk, command):
    fill(disk, leave=20_000 if "bench" in command else 0)
    result = CliRunner().invoke(app, [part.format(disk) for part in command])
    assert result.exit_code == 2 and result.stderr.count("foreglance: ") == 1, (result.output, result.exception)
    assert FULL in result.stderr.replace("\n", " ") and not [path for path in disk.rglob(".*")]
    if "export-gguf" in command:
        assert names_in(disk) == ["filler"]


def test_a_gguf_file_that_cannot_be_laid_out_is_refused_in_one_line(disk, tmp_path, monkeypatch):
    args = ["export-gguf", "--model", str(EMBEDDED / "tiny-text"), "--out", str(tmp_path / "x.gguf")]
    assert CliRunner().invoke(app, args).exit_code == 0
    fill(disk)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    result = CliRunner().invoke(app, ["generate", "--model", str(tmp_path / "x.gguf"), "--prompt", "Hello"])
    words = result.stderr.replace("\n", "")
    assert result.exit_code == 2 and FULL in words and "x.gguf" in words and words.count("foreglance: ") == 1
    (disk / "filler").unlink()
    result = CliRunner().invoke(
        app, ["generate", "--model", str(tmp_path / "x.gguf"), "--prompt", "Hello", "--max-tokens", "2"]
    )
    assert result.exit_code == 0
