"""What tells one model from another, for files that only one of them can use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from foreglance.ops.numerics import SelfTest

WHOLE, SAMPLES, SAMPLE = 64 << 20, 256, 64 << 10  # bytes of a file that is read whole; else so many pieces of this size
KINDS = ("config.json", "*.safetensors", "*.gguf")


def weight_files(folder: Path) -> list[Path]:
    """A checkpoint's config and weights; of a GGUF file that was laid out, the file itself."""
    from foreglance.models.gguf import folder as gguf

    found = {path for kind in KINDS for path in folder.glob(kind)}
    return sorted(found | {*gguf.files_of(folder)})


def fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's config and weights. Of a large file its ends and pieces all over it are read: another
    training run changes nearly every weight, and reading tens of gigabytes would take minutes."""
    made = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        made.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                made.update(file.read())
                continue
            for piece in range(SAMPLES):
                file.seek((size - SAMPLE) * piece // (SAMPLES - 1))
                made.update(file.read(SAMPLE))
    return made.hexdigest()


@dataclass(frozen=True)
class Origin:
    """Where an engine's weights come from, and how it computes with them."""

    target: Path
    draft: Path | None
    self_test: SelfTest

    @cached_property
    def names(self) -> dict[str, str]:
        """What two engines must have in common to go on with each other's rows."""
        test = self.self_test
        how = f"{test.weights}, {test.linear}{', row by row' if test.rows_alone else ''}"
        return {"weights": fingerprint(self.target), "computed with": how}

    @cached_property
    def draft_names(self) -> dict[str, str]:
        """The same of a second model that drafts."""
        return {} if self.draft is None else {"draft": fingerprint(self.draft)}
