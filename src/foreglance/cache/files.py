"""A stored conversation as one safetensors file: written whole or not at all, read with distrust.

Owns the format. Names of tensors: `identities` int64 [rows]; `point.track.layer.i` float32, tensor i of a layer's piece
(`piece_shapes`), where track 0 is the target's and the others are the draft's stores; `point.waiting.track`. All else
is JSON in the header: format, version, the model it belongs to, the checkpoints, and a checksum of the tensors.

Nothing of a file is used before names, types, shapes and sizes are those that the model's specs demand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreglance.cache import whole
from foreglance.cache.prefix import RANK, Border, Point, Waiting
from foreglance.cache.store import LayerSpec, Segment

FORMAT, VERSION = "foreglance-slot", 1


class SlotFileError(ValueError):
    """A file that cannot be written or is not used, said so that a person can act on it."""


class NotWrittenError(SlotFileError):
    """The file system does not take a file: it is full, read-only, gone."""


@dataclass(frozen=True)
class Layout:
    """What a file must look like here.

    model    names the weights and how they are computed with; all of it must be equal
    tracks   specs of the target's layers and of each draft store's; `axes` of the target's positions
    waiting  how many of the draft's stores have states that wait; `width` of a state
    vocab    token ids are below it
    context  rows are no more
    budget   bytes are no more
    """

    model: Mapping[str, str]
    tracks: tuple[tuple[LayerSpec, ...], ...]
    axes: int
    waiting: int
    width: int
    vocab: int
    context: int
    budget: int


def save(path: Path, points: Many[Point], model: Mapping[str, str], key: str) -> int:
    """Write a conversation beside `path` and move it there; -> bytes. What was there stays until the last moment."""
    tensors = {"identities": torch.from_numpy(np.concatenate([point.identities for point in points]))}
    for number, point in enumerate(points):
        tensors |= {name: tensor.contiguous() for name, tensor in _tensors_of(number, point)}
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": json.dumps(dict(model)),
        "key": key,
        "points": json.dumps([_as_json(point) for point in points]),
        "sha256": _checksum(tensors),
    }
    try:
        whole.write(path, {name: (one.shape, [one]) for name, one in tensors.items()}, header, durable=True)
        return path.stat().st_size
    except OSError as error:
        raise NotWrittenError(f"{path.name} cannot be written: {error}") from error


def _tensors_of(number: int, point: Point) -> list[tuple[str, Tensor]]:
    pieces = [
        (f"{number}.{track}.{layer}.{i}", tensor)
        for track, segment in enumerate(point.tracks)
        for layer, piece in enumerate(segment.layers)
        for i, tensor in enumerate(piece)
    ]
    return [*pieces, *((f"{number}.waiting.{track}", one.states) for track, one in enumerate(point.waiting))]


def _as_json(point: Point) -> dict[str, Any]:
    return {
        "kind": point.border.kind,
        "cold": point.border.cold,
        "stops": [segment.stop for segment in point.tracks],
        "lasts": [segment.last for segment in point.tracks],
        "waiting": [[one.first, len(one.states)] for one in point.waiting],
        "inputs_from": point.inputs_from,
    }


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(whole.raw(tensors[name]))
    return made.hexdigest()


def read_key(path: Path) -> str:
    """Whose draft memory a file holds, which decides the `Layout` that it must have."""
    with _opened(path) as file:
        return _header(path, file)["key"]


def load(path: Path, layout: Layout) -> list[Point]:
    """The conversation in a file. Raises `SlotFileError` before it takes memory if the file does not fit."""
    with _opened(path) as file:
        header = _header(path, file)
        _check_model(path, header["model"], layout.model)
        drafts = _drafts_of(path, header["points"], layout)
        shapes = {"identities": ("I64", (drafts[-1].stops[0],))}
        for number, draft in enumerate(drafts):
            shapes |= {name: ("F32", shape) for name, shape in _shapes_of(number, draft, layout)}
        size = sum((8 if kind == "I64" else 4) * int(np.prod(shape)) for kind, shape in shapes.values())
        if size > layout.budget:
            raise SlotFileError(f"{path.name} takes {size} bytes, the prefix cache may take {layout.budget}")
        _check_tensors(path, file, shapes)
        tensors = {name: file.get_tensor(name).clone() for name in shapes}
    if _checksum(tensors) != header["sha256"]:
        raise SlotFileError(f"{path.name} is damaged: its checksum is another one")
    identities = tensors["identities"].numpy()
    if int(identities.max()) >= layout.vocab:
        raise SlotFileError(f"{path.name} names token {int(identities.max())}, the vocabulary has {layout.vocab}")
    return [_point(number, draft, identities, tensors, layout) for number, draft in enumerate(drafts)]


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise SlotFileError(f"there is no file {path.name}") from None
    except (OSError, SafetensorError) as error:
        raise SlotFileError(f"{path.name} is no whole safetensors file ({error})") from error


def _header(path: Path, file: Any) -> dict[str, str]:
    header = file.metadata() or {}
    if header.get("format") != FORMAT or not {"version", "model", "key", "points", "sha256"} <= header.keys():
        raise SlotFileError(f"{path.name} is no saved slot")
    if header["version"] != str(VERSION):
        raise SlotFileError(
            f"{path.name} has version {header['version']} of the format, this is version {VERSION}; save it anew"
        )
    return header


def _check_model(path: Path, text: str, ours: Mapping[str, str]) -> None:
    try:
        theirs = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise SlotFileError(f"{path.name} does not say which model it belongs to") from error
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise SlotFileError(
                f"{path.name} was saved with another model: {name} {theirs.get(name)}, here {ours.get(name)}"
            )


@dataclass(frozen=True)
class Draft:
    """A checkpoint as the header tells it, checked. `starts` and `stops` are row counts by track."""

    border: Border
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    lasts: tuple[tuple[int, ...] | None, ...]
    waiting: tuple[tuple[int, int], ...]
    inputs_from: int | None


def _drafts_of(path: Path, text: str, layout: Layout) -> list[Draft]:
    try:
        told = json.loads(text)
        drafts, starts = [], (0,) * len(layout.tracks)
        for one in told:
            drafts.append(_draft(one, starts, layout))
            starts = drafts[-1].stops
        if not drafts:
            raise ValueError("it holds no rows")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SlotFileError(f"{path.name} has a broken list of checkpoints ({error})") from error
    return drafts


def _draft(one: Mapping[str, Any], starts: tuple[int, ...], layout: Layout) -> Draft:
    stops = tuple(_count(stop, layout.context) for stop in one["stops"])
    if len(stops) != len(starts) or any(stop < start for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(f"rows {stops} do not follow rows {starts}")
    if stops[0] == starts[0]:
        raise ValueError(f"no row follows row {stops[0]}")
    lasts = tuple(None if last is None else tuple(_count(c, 1 << 40) for c in last) for last in one["lasts"])
    for stop, last in zip(stops, lasts, strict=True):
        if (last is None) != (stop == 0):
            raise ValueError(f"{stop} rows end at position {last}")
    if lasts[0] is None or len(lasts[0]) != layout.axes:
        raise ValueError(f"the model's positions have {layout.axes} axes, {lasts[0]} has others")
    waiting = tuple((_count(first, stops[0]), _count(n, stops[0])) for first, n in one["waiting"])
    if len(waiting) != layout.waiting or any(first + n != stops[0] for first, n in waiting[:1]):
        raise ValueError(f"states {waiting} wait at row {stops[0]}")
    if one["kind"] not in RANK or not isinstance(one["cold"], bool):
        raise ValueError(f"a checkpoint of kind {one['kind']!r}")
    inputs_from = None if one["inputs_from"] is None else _count(one["inputs_from"], 2 * layout.context)
    return Draft(Border(one["kind"], one["cold"]), starts, stops, lasts, waiting, inputs_from)


def _count(value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no count up to {most}")
    return value


def _shapes_of(number: int, draft: Draft, layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """Of `_tensors_of`."""
    pieces = [
        (f"{number}.{track}.{layer}.{i}", shape)
        for track, specs in enumerate(layout.tracks)
        for layer, spec in enumerate(specs)
        for i, shape in enumerate(spec.piece_shapes(draft.stops[track] - draft.starts[track]))
    ]
    return [*pieces, *((f"{number}.waiting.{track}", (n, layout.width)) for track, (_, n) in enumerate(draft.waiting))]


def _check_tensors(path: Path, file: Any, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    names = set(file.keys())
    if names != shapes.keys():
        odd = sorted(names ^ shapes.keys())[0]
        raise SlotFileError(f"{path.name}: tensor {odd} is {'left over' if odd in names else 'missing'}")
    for name, (kind, shape) in shapes.items():
        view = file.get_slice(name)
        if view.get_dtype() != kind or tuple(view.get_shape()) != shape:
            raise SlotFileError(
                f"{path.name}: tensor {name} is {view.get_dtype()} {view.get_shape()}, expected {kind} {list(shape)}"
            )


def _point(number: int, draft: Draft, identities: np.ndarray, tensors: Mapping[str, Tensor], layout: Layout) -> Point:
    tracks = []
    for track, specs in enumerate(layout.tracks):
        start, stop = draft.starts[track], draft.stops[track]
        counts = [len(spec.piece_shapes(stop - start)) for spec in specs]
        layers = [tuple(tensors[f"{number}.{track}.{layer}.{i}"] for i in range(n)) for layer, n in enumerate(counts)]
        tracks.append(Segment(start, stop, draft.lasts[track], layers))
    waiting = [Waiting(first, tensors[f"{number}.waiting.{track}"]) for track, (first, _) in enumerate(draft.waiting)]
    mine = identities[draft.starts[0] : draft.stops[0]].copy()
    return Point(mine, draft.border, tuple(tracks), tuple(waiting), draft.inputs_from)
