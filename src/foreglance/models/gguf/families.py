"""The families that can be read from GGUF and written to it, by what llama.cpp and the hub call them."""

from __future__ import annotations

from foreglance.models.gguf import dense, gemma4, qwen3_5, step35
from foreglance.models.gguf.family import Family

ALL: tuple[Family, ...] = (*qwen3_5.FAMILIES, *gemma4.FAMILIES, *step35.FAMILIES, *dense.FAMILIES)
BY_ARCHITECTURE = {family.arch: family for family in ALL}
BY_MODEL_TYPE = {family.model_type: family for family in ALL}
