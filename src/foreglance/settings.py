"""Settings of an engine, with the defaults that the command line shows. Touches nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal["auto", "fp32", "fp16", "q8", "q4"]
DraftFormat = Literal["auto", "same", "q8"]
TOOL_FORMATS = ("xml", "json", "gemma")
REASONING_FORMATS = ("think", "channel")


@dataclass(frozen=True)
class Settings:
    """How an engine is laid out. Lengths in rows (a token or one image embedding each), memory in bytes.

    context           rows that one sequence may hold, prompt and answer together; None: what the model allows
    slots             sequences that run at once; more wait in a queue
    grid              prompt chunks end at multiples of this row number (docs/exactness.md says why it is fixed)
    prefix_cache_bytes main memory for computed rows that another request may begin with; 0 switches reuse off
    max_images        images in one request
    max_pixels        pixels of one decoded image
    image_cache_bytes memory for image embeddings that may be asked about again
    weights           "fp32", "fp16", "q8", "q4", or "auto": as stored, as far as memory allows
    draft_weights     of draft heads: "same", "q8" where native kernels run, or "auto": q8 unless `weights` names one
    weight_cache_bytes disk for quantised weights, so that a checkpoint is quantised once (docs/kernels.md); 0: none
    try_drafts        draft a short text at load, to warn at once of a draft that hardly ever guesses right
    tool_format       how the model writes tool calls: "xml", "json", "gemma", "none", or "auto" by its chat template
    reasoning_format  how it writes reasoning: "think", "channel", "none", or "auto" by its chat template
    """

    context: int | None = None
    slots: int = 8
    grid: int = 256
    prefix_cache_bytes: int = 1 << 30
    max_images: int = 32
    max_pixels: int = 64_000_000
    image_cache_bytes: int = 256 << 20
    weights: WeightFormat = "auto"
    draft_weights: DraftFormat = "auto"
    weight_cache_bytes: int = 64 << 30
    try_drafts: bool = True
    tool_format: str = "auto"
    reasoning_format: str = "auto"

    def __post_init__(self) -> None:
        for name in ("slots", "grid", "max_images", "max_pixels"):
            if self.__dict__[name] < 1:
                raise ValueError(f"settings: {name} must be at least 1, got {self.__dict__[name]}")
        if self.context is not None and self.context < 2:
            raise ValueError(f"settings: context must be at least 2 rows, got {self.context}")
        if self.weights not in ("auto", "fp32", "fp16", "q8", "q4"):
            raise ValueError(f"settings: weights must be auto, fp32, fp16, q8 or q4, got {self.weights!r}")
        if self.draft_weights not in ("auto", "same", "q8"):
            raise ValueError(f"settings: draft_weights must be auto, same or q8, got {self.draft_weights!r}")
        for name, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            if self.__dict__[name] not in ("auto", "none", *known):
                raise ValueError(
                    f"settings: {name} must be auto, none, {', '.join(known)}, got {self.__dict__[name]!r}"
                )
