"""Checkpoint folders: where a model lies, and its tensors, strict both ways.

Reads safetensors (one file or shards with an index) and GGUF files that were laid out as a folder. No pickle, no
remote code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreglance.models.base import ModelError
from foreglance.models.weight_cache import cache_of
from foreglance.ops.base import Ops, PackedLinear

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Hear = Callable[[str, int, int], None]
_heard: ContextVar[Hear | None] = ContextVar("heard", default=None)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
BOUNDS = ("_min", "_max")  # ends of names of numbers that may be infinite: what a vision tower clips at
MOST_A_BYTE = 2  # weights in a byte of a file, at most
BYTES_A_WEIGHT = 2  # of published checkpoints, for how far a load is
SMALL = 1 << 20  # numbers that are nothing to worry about
EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"


def embedded_models() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(folder.name for folder in EMBEDDED.iterdir() if (folder / "config.json").is_file())


def find_model(name: str) -> Path:
    """An embedded model's name, a local folder, or a hub name -> a folder with a checkpoint.

    A hub name is downloaded once into the hub's cache; without a network only what is cached works.
    """
    if name in embedded_models():
        return EMBEDDED / name
    folder = Path(name).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        from foreglance.models.gguf.folder import lay_out

        return lay_out(folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json; give the folder of a checkpoint in the Hugging Face layout")
        return folder
    if name.count("/") == 1 and not folder.exists() and not name.startswith((".", "/", "~")):
        return _download(name)
    raise ModelError(
        f"no model {name!r}: it is neither an embedded model ({', '.join(embedded_models())}), nor a folder, nor a hub "
        "name like owner/model"
    )


def find_assistant(name: str) -> str | None:
    """The assistant that was made for a target: the checkpoint of that name with `-assistant` behind it, among the
    embedded models or in the folder next to the target's. None if there is none."""
    beside = find_model(name)
    if name in embedded_models():
        return f"{name}-assistant" if f"{name}-assistant" in embedded_models() else None
    folder = beside.parent / f"{beside.name}-assistant"
    return str(folder) if (folder / "config.json").is_file() else None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error.__cause__ or error).split("\n\n")[0].split())
        raise ModelError(f"model {name!r} is not cached and cannot be downloaded ({why})") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object of a checkpoint's small files. Raises `ModelError` that names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON object ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is no JSON object; fetch it again")
    return values


@contextmanager
def in_words(where: Path) -> Iterator[None]:
    """Whatever goes wrong within is the fault of the file or folder `where`: a `ModelError` of one line that names it.
    For what libraries make of a checkpoint, which may be damaged in any way."""
    try:
        yield
    except ModelError as error:
        if str(where) in str(error):
            raise
        raise ModelError(f"{where}: {error}") from error
    except KeyError as error:
        raise ModelError(f"{where}: the config lacks {error}") from error
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{where} cannot be used: {words}") from error


def stored_bytes(folder: Path) -> int:
    """Of a checkpoint's weight files."""
    from foreglance.models.gguf import folder as gguf

    if (folder / gguf.POINTER).is_file():
        return gguf.stored_bytes(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def named(folder: Path) -> Path:
    """What a person calls a checkpoint: the GGUF file that a folder was laid out of, or the folder."""
    from foreglance.models.gguf import folder as gguf

    return gguf.model_file(folder) if (folder / gguf.POINTER).is_file() else folder


def num_weights(folder: Path) -> float:
    """Of a checkpoint, about: published ones hold two bytes a weight."""
    from foreglance.models.gguf import folder as gguf

    return gguf.num_weights(folder) if (folder / gguf.POINTER).is_file() else stored_bytes(folder) / 2


def stored_format(folder: Path) -> str | None:
    """The weight format that keeps most of what a GGUF file holds; None for other checkpoints."""
    from foreglance.models.gguf import folder as gguf

    return gguf.stored_format(folder) if (folder / gguf.POINTER).is_file() else None


class TensorSource(Protocol):
    """Where tensors come from, by their hub names."""

    def keys(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        ...

    def tensor(self, name: str) -> Tensor:
        """As it is stored."""
        ...

    def close(self) -> None: ...


class SafeFiles:
    """One safetensors file, or shards with an index."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._place: dict[str, Path] = {}
        self._handles = {path: self._open(path) for path in self._files()}
        for path, handle in self._handles.items():
            self._place.update(dict.fromkeys(handle.keys(), path))

    def _files(self) -> list[Path]:
        index = self._folder / INDEX
        if index.is_file():
            names = _shards(index)
        elif (self._folder / SINGLE).is_file():
            names = [SINGLE]
        else:
            raise ModelError(f"{self._folder} has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
        absent = [name for name in names if not (self._folder / name).is_file()]
        if absent:
            raise ModelError(f"{self._folder} lacks the shards {', '.join(absent)} that its index names")
        return [self._folder / name for name in names]

    def _open(self, path: Path):
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error

    def keys(self) -> Iterable[str]:
        return self._place.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self._place[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """In memory of its own: a view of the mapped file would end the process once somebody cuts the file."""
        return self._handles[self._place[name]].get_tensor(name).clone()

    def close(self) -> None:
        self._stack.close()


def _shards(index: Path) -> list[str]:
    """Names of the shards of an index, which may name files of its own folder only."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ModelError(f"{index} is no index of shards: it has no weight_map of names; fetch it again")
    names = sorted(set(placed.values()))
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} names a shard outside its folder")
    return names


def open_tensors(folder: Path) -> TensorSource:
    """The tensors of a checkpoint folder, from safetensors or from the GGUF files that it was laid out of."""
    from foreglance.models.gguf.folder import POINTER, GgufTensors

    return GgufTensors(folder) if (folder / POINTER).is_file() else SafeFiles(folder)


@contextmanager
def heard_by(hear: Hear) -> Iterator[None]:
    """Checkpoints that are loaded within tell `hear`, before each tensor and at the end, how far they are: the folder's
    name, bytes read and packed, bytes in all."""
    token = _heard.set(hear)
    try:
        yield
    finally:
        _heard.reset(token)


class Weights:
    """The tensors of a checkpoint folder, handed out once each.

    `take` notes what is missing, mis-shaped, of another kind of number or not finite and goes on, so that `finish` can
    name everything that is wrong at once.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._source = open_tensors(folder)
        self._names = list(self._source.keys())
        self._known = set(self._names)
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._mistyped: list[str] = []
        self._not_finite: list[str] = []
        self._made_up = 0  # numbers of stand-ins
        self._hear, self._read = _heard.get(), 0
        self._total = stored_bytes(folder)
        self._kept = cache_of(folder, self._total)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def names(self, prefix: str = "") -> Iterator[str]:
        return (name for name in self._names if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there, without reading it."""
        return self._source.shape(name)

    def leave(self, prefixes: Sequence[str]) -> None:
        """Go on as if the file had no tensor of these beginnings: for parts that nothing here will use."""
        self._names = [name for name in self._names if not name.startswith(tuple(prefixes))]
        self._known = set(self._names)

    def take(self, name: str, *shape: int, kinds: Sequence[torch.dtype] = FLOATS) -> Tensor:
        """The tensor, as it is stored; zeros in its place if it is missing, has another shape, none of the `kinds` of
        numbers or one that is not finite (see `finish`)."""
        if name not in self._known:
            self._missing.append(f"{name} {list(shape)}")
            return self._stand_in(shape)
        self._taken.add(name)
        tensor = self._read_in(name)
        if tuple(tensor.shape) != shape:
            self._misshaped.append(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
            return self._stand_in(shape)
        return tensor if self._is_sound(kinds, name, tensor) else self._stand_in(shape)

    def _is_sound(self, kinds: Sequence[torch.dtype], name: str, tensor: Tensor) -> bool:
        if tensor.dtype not in kinds:
            expected = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
            self._mistyped.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected one of {expected}")
            return False
        if not is_finite(tensor) and not (name.endswith(BOUNDS) and not tensor.isnan().any()):
            count = int((~tensor.isfinite()).sum())
            self._not_finite.append(f"{name} holds {count} of {tensor.numel()} numbers that are nan or infinite")
            return False
        return True

    def _stand_in(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros. A config may promise anything, so they may not take more than what the files hold would."""
        self._made_up += math.prod(shape)
        if self._made_up > MOST_A_BYTE * self._total + SMALL:
            self._refuse([])
        return torch.zeros(shape)

    def take_all(self, prefix: str) -> dict[str, Tensor]:
        """Every tensor under a prefix, by the rest of its name: for parts whose shapes another library checks."""
        names = list(self.names(prefix))
        self._taken.update(names)
        found = {name: self._read_in(name) for name in names}
        for name, tensor in found.items():
            self._is_sound(FLOATS, name, tensor)
        return {name[len(prefix) :]: tensor for name, tensor in found.items()}

    def packed(self, ops: Ops, names: Sequence[str], make: Callable[[], Tensor]) -> PackedLinear:
        """What `make` makes of these tensors alone, packed for `ops`. If that was kept on disk it comes from there, and
        the tensors are not read. `names` tell one weight of a checkpoint from another."""
        return self.packed_each(ops, names, lambda: [make()])[0]

    def packed_each(self, ops: Ops, names: Sequence[str], make: Callable[[], Iterable[Tensor]]) -> list[PackedLinear]:
        """The same for several weights of one shape."""
        format = ops.kept_as
        if self._kept is None or format is None:
            return [ops.pack_linear(weight) for weight in make()]
        self._tell()
        kept = self._kept.find(format, names)
        if kept is None:
            made = [ops.pack_linear(weight) for weight in make()]
            if not (self._missing or self._misshaped or self._mistyped or self._not_finite):
                self._kept.keep(format, names, made)
            return made
        self._taken.update(names)
        self._read += sum(BYTES_A_WEIGHT * math.prod(one.shape) for one in kept)
        return kept

    def _read_in(self, name: str) -> Tensor:
        self._tell()
        tensor = self._source.tensor(name)
        self._read += tensor.numel() * tensor.element_size()
        return tensor

    def _tell(self) -> None:
        if self._hear is not None:
            self._hear(self._folder.name, min(self._read, self._total), self._total)

    def finish(self, may_stay: Callable[[str], bool] = lambda name: False) -> None:
        """Close the files; raise `ModelError` naming every missing, mis-shaped, mistyped and left-over tensor, and
        those that are not finite."""
        self._source.close()
        if self._kept is not None:
            self._kept.close()
        self._read = self._total
        self._tell()
        self._refuse(sorted(name for name in self._names if name not in self._taken and not may_stay(name)))

    def _refuse(self, left: Sequence[str]) -> None:
        """Raise if anything is wrong."""
        problems = [
            _listed("missing", self._missing),
            _listed("mis-shaped", self._misshaped),
            _listed("mistyped", self._mistyped),
            _listed("not finite", self._not_finite),
            _listed("left over", left),
        ]
        if any(problems):
            raise ModelError(
                f"{self._folder}: the checkpoint is damaged or does not fit its config; "
                + "; ".join(filter(None, problems))
            )


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are. As fast as they can be read, other than `isfinite`."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(end) for end in torch.aminmax(tensor))


def take_output(weights: Weights, table: Tensor, tied: bool, name: str = "lm_head.weight") -> Tensor:
    """The output head [vocab, hidden]. One that a tied checkpoint holds besides its `table` must be that table."""
    if tied and name not in weights:
        return table
    weight = weights.take(name, *table.shape)
    if tied and not torch.equal(weight, table):
        raise ModelError(
            f"the config ties the output head to the embedding, but {name} is another matrix; set "
            "tie_word_embeddings to false if the checkpoint was trained with both"
        )
    return weight


def _listed(word: str, names: Sequence[str], shown: int = 12) -> str:
    if not names:
        return ""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} {word}: {', '.join(names[:shown])}{more}"
