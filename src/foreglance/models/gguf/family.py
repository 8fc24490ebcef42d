"""What reading and writing GGUF ask of a family, and the heads and towers that some families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foreglance.models.gguf.file import GgufFile
from foreglance.models.gguf.naming import Spelling

NEXTN = ".nextn."  # in the names of what only an MTP block has
FIRST_LAYER = "blk.0.attn_norm.weight"  # in every file that holds a trunk
Config = dict[str, Any]


@dataclass(frozen=True)
class Heads:
    """A draft head that is part of its target's checkpoint, and in GGUF of its file or of one beside it.

    `count_key` is the config's count of blocks, under `text_config`; `owns` says whether a hub tensor belongs to one;
    `shared` are tensors of the target that a file of its own repeats.
    """

    count_key: str
    owns: Callable[[str, Config], bool]
    shared: tuple[str, ...]

    def counted(self, config: Config, count: int) -> Config:
        """The config with that many blocks."""
        return config | {"text_config": config["text_config"] | {self.count_key: count}}


@dataclass(frozen=True)
class Tower:
    """A vision tower, which GGUF keeps in a file of its own. `prefixes` are those of its hub tensors."""

    prefixes: tuple[str, ...]
    config_of: Callable[[GgufFile], Config]
    processor_of: Callable[[GgufFile], Config]
    metadata_of: Callable[[Config, Config], dict[str, Any]]
    spellings: Callable[[Config], list[Spelling]]


def nothing(config: Config) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Family:
    """One hub `model_type` and what llama.cpp calls it.

    `config_of` reads a file's metadata, given its tokens; `metadata_of` writes them. `extra` are tensors that a file
    holds besides those spelled; `left` are prefixes of hub tensors that no file gets.
    """

    arch: str
    model_type: str
    config_of: Callable[[GgufFile, list[str]], Config]
    metadata_of: Callable[[Config], dict[str, Any]]
    spellings: Callable[[Config], list[Spelling]]
    extra: Callable[[Config], Mapping[str, Tensor]] = nothing
    heads: Heads | None = None
    tower: Tower | None = None
    left: tuple[str, ...] = ()

    def is_head_alone(self, file: GgufFile) -> bool:
        """Whether a file holds MTP blocks without their target."""
        alone = FIRST_LAYER not in file.tensors and any(NEXTN in name for name in file.tensors)
        return self.heads is not None and alone

    def in_head(self, hub: str, config: Config) -> bool:
        """Whether a hub tensor belongs to the draft head."""
        return self.heads is not None and self.heads.owns(hub, config)

    def with_heads(self, config: Config, count: int) -> Config:
        """The config with that many MTP blocks; as it is where the family has none."""
        return config if self.heads is None else self.heads.counted(config, count)


def num_heads(file: GgufFile) -> int:
    """MTP blocks in a file."""
    return file.get(f"{file.need('general.architecture')}.nextn_predict_layers", 0)
