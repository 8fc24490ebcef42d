"""A GGUF file laid out as a hub folder: config, tokenizer and processor as small files, tensors where they are.

The folder is temporary and goes with the process. `POINTER` in it names the GGUF files; `tensors_of` reads them under
hub names, so nothing else needs to know where a tensor comes from.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

from torch import Tensor

from foreglance.models.base import ModelError
from foreglance.models.gguf.families import BY_ARCHITECTURE
from foreglance.models.gguf.family import Family, num_heads
from foreglance.models.gguf.file import INTEGERS, GgufFile, Stored
from foreglance.models.gguf.naming import Spelling
from foreglance.models.gguf.tokens import token_list, write_tokenizer
from foreglance.models.weights import in_words

POINTER = "gguf-files.json"
SUFFIX = ".gguf"
FORMATS = {"F32": "fp32", "F64": "fp32", "F16": "fp16", "BF16": "fp16"}  # beside the quantised types
FOUR_BITS = ("Q4", "Q3", "Q2", "IQ", "TQ", "MXFP4", "NVFP4")  # of four bits or fewer; the rest go to eight
COUNTS = (".block_count", ".nextn_predict_layers")  # of layers, each of which has tensors
COMPUTED = ("rope_freqs.weight",)  # read with the metadata


def names_of(model: str, mmproj: Path | None, draft: str | None) -> tuple[str, str | None]:
    """What to load a target and its second model by, given GGUF files or any other names of models: a draft head in a
    file of its own becomes part of the target. Raises `ModelError`."""
    if not model.endswith(SUFFIX):
        if mmproj is not None:
            raise ModelError(
                f"{mmproj} was given for {model}, which is no GGUF file; a folder brings its own vision tower"
            )
        return model, draft
    head = Path(draft) if draft is not None and draft.endswith(SUFFIX) and holds_draft_alone(Path(draft)) else None
    return str(lay_out(Path(model).expanduser(), mmproj, head)), draft if head is None else None


def lay_out(model: Path, mmproj: Path | None = None, draft: Path | None = None) -> Path:
    """A hub folder for a target's file, a vision tower's and an MTP block's; the same one while the files stay as they
    are. Without `mmproj` the one that lies in the model's folder is taken. Raises `ModelError`."""
    paths = model, mmproj or _beside(model), draft
    with in_words(model):
        return _lay_out(*paths, stamp=tuple(_stamp(path) for path in paths if path is not None))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read as a GGUF file ({error})") from error
    return found.st_size, found.st_mtime_ns


@functools.cache
def _lay_out(model: Path, mmproj: Path | None, draft: Path | None, stamp: tuple[tuple[int, int], ...]) -> Path:
    file = GgufFile(model)
    family = _family(file)
    if family.is_head_alone(file):
        raise ModelError(f"{model} holds a draft head alone; give the target with --model and this file with --draft")
    config = family.config_of(file, token_list(file))
    folder = Path(tempfile.mkdtemp(prefix="foreglance-")) / model.name.removesuffix(SUFFIX)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    write_tokenizer(file, folder)
    if mmproj is None or family.tower is None:
        mmproj = None
    else:
        with in_words(mmproj):
            tower = GgufFile(mmproj)
            _check_counts(tower)
            config["vision_config"] = family.tower.config_of(tower)
            (folder / "preprocessor_config.json").write_text(json.dumps(family.tower.processor_of(tower)))
    if draft is not None:
        _check_draft(file, GgufFile(draft), family)
        config = family.with_heads(config, num_heads(GgufFile(draft)))
    (folder / "config.json").write_text(json.dumps(config))
    paths = {"model": model, "mmproj": mmproj, "draft": draft}
    (folder / POINTER).write_text(json.dumps({name: str(p.resolve()) for name, p in paths.items() if p is not None}))
    return folder


def _family(file: GgufFile) -> Family:
    arch = file.need("general.architecture")
    _check_counts(file)
    if arch not in BY_ARCHITECTURE:
        hint = "; it is a vision tower, give it with --mmproj" if arch == "clip" else ""
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported, {', '.join(BY_ARCHITECTURE)} are{hint}")
    return BY_ARCHITECTURE[arch]


def _check_counts(file: GgufFile) -> None:
    """A file may promise any number of layers: no more are believed than it has tensors."""
    for key, count in file.meta.items():
        if key.endswith(COUNTS) and not (isinstance(count, int) and 0 <= count <= len(file.tensors)):
            raise ModelError(f"{file.path}: {key} is {count!r}, the file has {len(file.tensors)} tensors")


def _beside(model: Path) -> Path | None:
    """The one mmproj file in the model's folder, as downloads of a repository leave it there; None if there are none
    or several."""
    found = [path for path in model.parent.glob(f"mmproj*{SUFFIX}") if path != model]
    return found[0] if len(found) == 1 else None


def holds_draft_alone(path: Path) -> bool:
    """Whether a file is an MTP block that goes with a target's file."""
    file = GgufFile(path)
    family = BY_ARCHITECTURE.get(file.get("general.architecture"))
    return family is not None and family.is_head_alone(file)


def _check_draft(target: GgufFile, draft: GgufFile, family: Family) -> None:
    arch = target.need("general.architecture")
    if draft.get("general.architecture") != arch or not family.is_head_alone(draft):
        raise ModelError(f"{draft.path} is no draft head of {arch}, the architecture of {target.path}")
    key = f"{arch}.embedding_length"
    if draft.need(key) != target.need(key):
        raise ModelError(
            f"{draft.path} cannot draft for {target.path}: its hidden size is {draft.need(key)}, the target's "
            f"{target.need(key)}"
        )


def stored_bytes(folder: Path) -> int:
    """Of the files that a laid-out folder's text decoder comes from."""
    return sum(path.stat().st_size for name, path in _paths(folder).items() if name != "mmproj")


def num_weights(folder: Path) -> int:
    """In all matrices of the text decoder's files."""
    return sum(prod(one.shape) for one in _matrices(folder))


def stored_format(folder: Path) -> str:
    """The format of ours that keeps the type which most weights of the target have."""
    counts: Counter[str] = Counter()
    for one in _matrices(folder):
        counts[FORMATS.get(one.kind, "q4" if one.kind.startswith(FOUR_BITS) else "q8")] += prod(one.shape)
    return counts.most_common(1)[0][0] if counts else "fp32"


def _matrices(folder: Path) -> list[Stored]:
    files = [GgufFile(path) for name, path in _paths(folder).items() if name != "mmproj"]
    return [one for file in files for one in file.tensors.values() if len(one.shape) > 1]


def files_of(folder: Path) -> list[Path]:
    """The GGUF files of a laid-out folder; none for another one."""
    return sorted(_paths(folder).values()) if (folder / POINTER).is_file() else []


def model_file(folder: Path) -> Path:
    """The target's file of a laid-out folder."""
    return _paths(folder)["model"]


def _paths(folder: Path) -> dict[str, Path]:
    return {name: Path(path) for name, path in json.loads((folder / POINTER).read_text()).items()}


class GgufTensors:
    """Tensors of a laid-out folder by hub name. A tensor that has no hub name keeps its own, so that it is missed."""

    def __init__(self, folder: Path):
        paths = _paths(folder)
        config = json.loads((folder / "config.json").read_text())
        target = GgufFile(paths["model"])
        family = _family(target)
        self._found: dict[str, tuple[GgufFile, Spelling]] = {}
        self._unknown: dict[str, GgufFile] = {}
        spelled = family.spellings(config)
        self._add(target, [s for s in spelled if "draft" not in paths or not family.in_head(s.hub, config)])
        if "draft" in paths:
            draft = GgufFile(paths["draft"])
            self._add(draft, [s for s in spelled if family.in_head(s.hub, config)], whole=False)
        if "mmproj" in paths and family.tower is not None:
            self._add(GgufFile(paths["mmproj"]), family.tower.spellings(config))

    def _add(self, file: GgufFile, spelled: list[Spelling], whole: bool = True) -> None:
        here = [one for one in spelled if all(name in file.tensors for name in one.file)]
        self._found.update({one.hub: (file, one) for one in here})
        known = {name for one in here for name in one.file}
        if whole:
            self._unknown.update({name: file for name in file.tensors if name not in known and name not in COMPUTED})

    def keys(self) -> Iterator[str]:
        yield from self._found
        yield from self._unknown

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._unknown:
            return self._unknown[name].tensors[name].shape
        return tuple(self.tensor(name).shape)

    def tensor(self, name: str) -> Tensor:
        if name in self._unknown:
            return self._unknown[name].tensor(name)
        file, spelling = self._found[name]
        try:
            tensor = spelling.change.load(*(file.tensor(one) for one in spelling.file))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{one} {list(file.tensors[one].shape)}" for one in spelling.file)
            raise ModelError(f"{file.path}: {shapes} does not fit the sizes that the file names ({error})") from error
        whole = [one for one in spelling.file if file.tensors[one].kind in INTEGERS]
        if whole and tensor.is_floating_point():  # what is changed on the way would not show it
            raise ModelError(f"{file.path}: tensor {whole[0]} is {file.tensors[whole[0]].kind}, no floating point")
        return tensor

    def close(self) -> None:
        """Nothing to do: a mapped file is closed when nobody refers to it."""
