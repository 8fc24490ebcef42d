"""Files of slots: whole or not there, and nothing of a bad one is used."""

import json
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from foreglance.cache import files, whole
from foreglance.cache.files import Layout, SlotFileError, load, read_key, save
from foreglance.cache.kv import KVSpec
from foreglance.cache.prefix import Border, Point, Waiting
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import Segment

SPECS = (KVSpec(2, 4), KVSpec(1, 4, 5), RecurrentSpec(((3,), (2, 2))))
DRAFT = (KVSpec(1, 8),)
MODEL = {"family": "toy", "weights": "0123"}
LAYOUT = Layout(MODEL, (SPECS, DRAFT), 3, 1, 6, 100, 64, 1 << 20)
KEY = "mtp/see"


def segment(specs, start, stop, generator):
    layers = [tuple(torch.randn(shape, generator=generator) for shape in s.piece_shapes(stop - start)) for s in specs]
    return Segment(start, stop, (stop - 1,) * 3 if stop else None, layers)


def conversation():
    generator, points, before = torch.Generator().manual_seed(0), [], (0, 0)
    for stops, border in (
        ((7, 6), Border("chunk", True)),
        ((9, 6), Border("prompt", True)),
        ((20, 19), Border("turn", False)),
    ):
        tracks = tuple(segment(s, a, b, generator) for s, a, b in zip((SPECS, DRAFT), before, stops, strict=True))
        identities = np.arange(before[0], stops[0]) - 3
        n = stops[0] - stops[1]
        waiting = (Waiting(stops[1], torch.randn(n, 6, generator=generator)),)
        points.append(Point(identities, border, tracks, waiting, stops[1] + 1))
        before = stops
    return points


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "one"
    save(path, conversation(), MODEL, KEY)
    return path


def test_what_was_saved_comes_back(saved):
    assert read_key(saved) == KEY
    for one, other in zip(conversation(), load(saved, LAYOUT), strict=True):
        assert (one.border, one.inputs_from) == (other.border, other.inputs_from)
        assert np.array_equal(one.identities, other.identities) and one.num_bytes == other.num_bytes
        assert torch.equal(one.waiting[0].states, other.waiting[0].states)
        assert one.waiting[0].first == other.waiting[0].first
        for a, b in zip(one.tracks, other.tracks, strict=True):
            assert (a.start, a.stop, a.last) == (b.start, b.stop, b.last)
            for left, right in zip(a.layers, b.layers, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def test_a_file_is_replaced_whole_or_not_at_all(saved, monkeypatch):
    """A full disk, a pulled plug: what was there stays, and no half file is left beside it."""
    before = saved.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(SlotFileError, match=r"one cannot be written: .*No space left"):
                save(saved, conversation()[:1], MODEL, KEY)
        assert saved.read_bytes() == before and [path.name for path in saved.parent.iterdir()] == ["one"]
    with pytest.raises(SlotFileError, match="two cannot be written"):
        save(saved.parent / "nowhere" / "two", conversation(), MODEL, KEY)
    save(saved, conversation()[:1], MODEL, KEY)
    assert len(load(saved, LAYOUT)) == 1 and [path.name for path in saved.parent.iterdir()] == ["one"]


def test_a_save_that_is_killed_leaves_what_a_sweep_finds(saved, monkeypatch):
    """And that is whole when the disk is told of it, and when it moves."""

    class Killed(BaseException):
        pass

    def killing(*given):
        (hidden,) = (path for path in saved.parent.iterdir() if path != saved)
        assert whole.UNFINISHED.fullmatch(hidden.name)
        assert len(load(hidden, LAYOUT)) == 1
        hidden.unlink()
        raise Killed

    before = saved.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, name, killing)
            save(saved, conversation()[:1], MODEL, KEY)
    assert saved.read_bytes() == before


def test_a_cut_file_is_refused_at_every_length(saved):
    whole, cut = saved.read_bytes(), saved.parent / "cut"
    for length in (*range(0, 200, 7), *range(200, len(whole), 211), len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(SlotFileError, match="cut is no whole safetensors file"):
            load(cut, LAYOUT)
    cut.write_bytes(whole + b"x")
    with pytest.raises(SlotFileError, match="cut is no whole"):
        load(cut, LAYOUT)
    with pytest.raises(SlotFileError, match="there is no file gone"):
        read_key(saved.parent / "gone")
    with pytest.raises(SlotFileError):
        read_key(saved.parent)


@given(st.integers(0, 10_000_000), st.integers(1, 255))
def test_one_bit_more_or_less_is_noticed(tmp_path_factory, place, change):
    path = tmp_path_factory.getbasetemp() / "bits"
    if not path.exists():
        save(path, conversation(), MODEL, KEY)
        path.with_suffix(".whole").write_bytes(path.read_bytes())
    whole = bytearray(path.with_suffix(".whole").read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    at = 8 + length + place % (len(whole) - 8 - length)  # among the tensors
    whole[at] ^= change
    path.write_bytes(whole)
    with pytest.raises(SlotFileError, match="damaged"):
        load(path, LAYOUT)


def rewritten(saved, **changes):
    """The file with another header; `points` is a function of the list of checkpoints."""
    with safe_open(saved, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if "points" in changes and callable(changes["points"]):
        told = json.loads(header["points"])
        changes["points"] = json.dumps(changes["points"](told) or told)
    header = {name: value for name, value in (header | changes).items() if value is not None}
    path = saved.parent / "changed"
    save_file(tensors, path, header)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, "is no saved slot"),
        ({"sha256": None}, "is no saved slot"),
        ({"version": "2"}, "has version 2 of the format, this is version 1"),
        ({"model": json.dumps(MODEL | {"weights": "9"})}, "another model: weights 9, here 0123"),
        ({"model": json.dumps({"family": "toy"})}, "another model: weights None, here 0123"),
        ({"model": json.dumps(MODEL | {"draft": "7"})}, "another model: draft 7, here None"),
        ({"model": "[1]"}, "does not say which model"),
        ({"model": "{"}, "does not say which model"),
        ({"sha256": "00"}, "is damaged"),
        ({"points": "[]"}, "it holds no rows"),
        ({"points": "7"}, "broken list of checkpoints"),
        ({"points": "[" * 100_000}, "broken list of checkpoints"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(saved, changes, words):
    with pytest.raises(SlotFileError, match=words):
        load(rewritten(saved, **changes), LAYOUT)


def with_first(**values):
    return lambda told: told[0].update(values)


@pytest.mark.parametrize(
    "change",
    [
        with_first(stops=[7]),
        with_first(stops=[7, 6, 6]),
        with_first(stops=[0, 0]),
        with_first(stops=[-1, 6]),
        with_first(stops=[7.0, 6]),
        with_first(stops=[True, 6]),
        with_first(stops=["7", 6]),
        with_first(stops=[10, 6]),
        with_first(stops=[1 << 62, 6]),
        with_first(stops=[65, 6]),
        with_first(lasts=[[6, 6, 6], None]),
        with_first(lasts=[[6], [5, 5, 5]]),
        with_first(lasts=[None, [5, 5, 5]]),
        with_first(lasts=[[-1, 0, 0], [5, 5, 5]]),
        with_first(waiting=[]),
        with_first(waiting=[[6, 1], [6, 1]]),
        with_first(waiting=[[5, 1]]),
        with_first(waiting=[[6, 1 << 50]]),
        with_first(kind="any"),
        with_first(kind=["chunk"]),
        with_first(cold=1),
        with_first(inputs_from=-5),
        with_first(inputs_from="x"),
        lambda told: told.reverse(),
        lambda told: told.append(told[-1]),
        lambda told: [*told, 5],
        lambda told: [told],
        lambda told: told[0].pop("stops") and None,
    ],
)
def test_checkpoints_that_make_no_sense_are_refused_before_tensors_are_read(saved, change, monkeypatch):
    monkeypatch.setattr(files, "_check_tensors", lambda *given: pytest.fail("was believed"))
    with pytest.raises(SlotFileError, match="changed has a broken list of checkpoints"):
        load(rewritten(saved, points=change), LAYOUT)


def test_tensors_are_those_that_the_checkpoints_demand(saved):
    with pytest.raises(SlotFileError, match=r"tensor 0\.0\.0\.0 is F32 \[2, 7, 4\], expected F32 \[2, 6, 4\]"):
        load(rewritten(saved, points=with_first(stops=[6, 6], lasts=[[5] * 3] * 2, waiting=[[6, 0]])), LAYOUT)
    with safe_open(saved, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    for change, words in (
        ({"0.0.0.0": tensors["0.0.0.0"].double()}, "is F64"),
        ({"0.0.9.0": torch.zeros(1)}, "tensor 0.0.9.0 is left over"),
        ({"identities": torch.arange(20) + 81}, "is damaged"),
    ):
        save_file(tensors | change, saved.parent / "odd", header)
        with pytest.raises(SlotFileError, match=words):
            load(saved.parent / "odd", LAYOUT)
    save_file({name: tensor for name, tensor in tensors.items() if name != "1.waiting.0"}, saved.parent / "odd", header)
    with pytest.raises(SlotFileError, match=r"tensor 1\.waiting\.0 is missing"):
        load(saved.parent / "odd", LAYOUT)


def other(**changes):
    return Layout(**{**{name: getattr(LAYOUT, name) for name in Layout.__dataclass_fields__}, **changes})


def test_a_file_must_fit_the_engine(saved):
    for layout, words in (
        (other(vocab=16), "names token 16, the vocabulary has 16"),
        (other(context=19), "20 is no count up to 19"),
        (other(budget=2000), "bytes, the prefix cache may take 2000"),
        (other(axes=1), "axes"),
        (other(waiting=0), "wait at row 7"),
        (other(tracks=(SPECS,)), "do not follow"),
        (other(tracks=(SPECS, (KVSpec(1, 4),))), r"expected F32 \[1, 6, 4\]"),
        (other(width=5), r"expected F32 \[1, 5\]"),
    ):
        with pytest.raises(SlotFileError, match=words):
            load(saved, layout)


def test_what_a_save_left_that_was_cut_short_is_swept_and_nothing_else(saved):
    """Not a file that somebody writes at the moment, nor what only looks alike."""
    folder = saved.parent
    with whole.beside(saved) as (writing, _):
        kept = {writing.name, "one", ".one", ".one.part", "one.abcd1234.part"}
        for name in (*kept - {writing.name, "one"}, ".one.abcd1234.part", ".x.y.a_b_c_d_.part"):
            (folder / name).write_bytes(b"")
        (folder / ".folder.abcd1234.part").mkdir()
        (folder / ".link0000.abcd1234.part").symlink_to(saved)
        assert sorted(whole.sweep(folder)) == [".one.abcd1234.part", ".x.y.a_b_c_d_.part"]
        kept |= {".folder.abcd1234.part", ".link0000.abcd1234.part"}
        assert {path.name for path in folder.iterdir()} == kept
    assert not writing.exists()
    load(saved, LAYOUT)
