"""Writing GGUF: a hub folder as the files that llama.cpp reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreglance.cache import whole
from foreglance.models import registry
from foreglance.models.base import ModelError
from foreglance.models.gguf.families import BY_MODEL_TYPE
from foreglance.models.gguf.family import Family
from foreglance.models.gguf.naming import Spelling
from foreglance.models.gguf.tokens import tokenizer_metadata
from foreglance.models.weights import Weights

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}  # llama.cpp's numbers for general.file_type
MODEL_TRUNKS = ("model.language_model.", "model.")


class HubTensors:
    """A checkpoint's tensors in the one spelling that families here know: the trunk under one prefix, and experts that
    are stored one by one as one tensor."""

    def __init__(self, folder: Path):
        self._weights = Weights(folder)
        self._trunk = next((p for p in MODEL_TRUNKS if f"{p}embed_tokens.weight" in self._weights), "model.")

    def __contains__(self, name: str) -> bool:
        return self._own(name) in self._weights or bool(self._singles(name))

    def get(self, name: str) -> Tensor:
        if self._own(name) in self._weights:
            own = self._own(name)
            return self._weights.take(own, *self._weights.shape(own))
        parts = [torch.stack([self.get(one) for one in names]) for names in self._singles(name)]
        return torch.cat(parts, 1)

    def _own(self, name: str) -> str:
        return name.replace(MODEL_TRUNKS[0], self._trunk, 1) if name.startswith(MODEL_TRUNKS[0]) else name

    def _singles(self, name: str) -> list[list[str]]:
        """Names of each expert's own tensors, gate before up; nothing if `name` is no tensor of experts."""
        stem, _, kind = self._own(name).rpartition("experts.")
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        count = sum(1 for one in self._weights.names(f"{stem}experts.") if one.endswith(".down_proj.weight"))
        return [[f"{stem}experts.{i}.{part}.weight" for i in range(count)] for part in kinds if count]

    def finish(self, left: Sequence[str]) -> None:
        """Raise `ModelError` naming what was not asked for; `left` are prefixes of what was meant to be left."""
        self._weights.finish(lambda name: name.startswith(tuple(left)) or name.endswith("rotary_emb.inv_freq"))


def export(
    folder: Path, out: Path, mmproj: Path | None = None, draft: Path | None = None, kind: str = "f16"
) -> list[Path]:
    """Write `folder`, a checkpoint in the hub layout, to `out`, its vision tower to `mmproj`, and its draft head into
    `out` or, if named, to the file `draft`; -> what was written. Raises `ModelError`.

    `kind` is the type of matrices, one of `TYPES`; those whose rows are no whole number of blocks are stored as f16,
    norms and biases always as f32.
    """
    if kind not in TYPES:
        raise ModelError(f"type {kind!r} is unknown; there are {', '.join(TYPES)}")
    model_type = registry.model_type_of(folder)
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise ModelError(f"{folder}: model_type {model_type!r} cannot be exported; {', '.join(BY_MODEL_TYPE)} can")
    read = next((one.read_config for one in registry.FAMILIES if model_type in one.model_types), registry.auto_config)
    config = read(folder).to_dict()
    tensors = HubTensors(folder)
    spelled = [one for one in family.spellings(config) if one.hub in tensors]
    head = [one for one in spelled if family.in_head(one.hub, config)]
    config = config if head else family.with_heads(config, 0)
    written = [out]
    if draft is None:
        _write(out, _model_values(folder, config, family, kind), spelled, tensors, kind, family.extra(config))
    else:
        if family.heads is None or not head:
            raise ModelError(f"{folder} has no draft head to write to {draft}")
        alone, trunk = family.with_heads(config, 0), [one for one in spelled if one not in head]
        _write(out, _model_values(folder, alone, family, kind), trunk, tensors, kind, family.extra(config))
        shared = [one for one in trunk if one.hub in family.heads.shared]
        _write(draft, _model_values(folder, config, family, kind), [*shared, *head], tensors, kind)
        written.append(draft)
    if mmproj is not None:
        if family.tower is None or not config.get("vision_config"):
            raise ModelError(f"{folder} has no vision tower to write to {mmproj}")
        processor = json.loads((folder / "preprocessor_config.json").read_text())
        values, towers = family.tower.metadata_of(config, processor), family.tower.spellings(config)
        _write(mmproj, values, towers, tensors, "f16" if kind != "f32" else kind)
        written.append(mmproj)
    tower = () if mmproj is not None or family.tower is None else family.tower.prefixes
    tensors.finish((*family.left, *tower))
    return written


def _model_values(folder: Path, config: dict[str, Any], family: Family, kind: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    values = family.metadata_of(config) | {
        "general.name": folder.name,
        "general.type": "model",
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
    }
    return values | tokenizer_metadata(folder, tokenizer, config.get("text_config", config)["vocab_size"])


def _write(
    path: Path,
    values: Mapping[str, Any],
    spelled: Sequence[Spelling],
    tensors: HubTensors,
    kind: str,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Whole or not at all. Raises `OSError` that names the file."""
    try:
        with whole.beside(path) as (hidden, _):
            _write_in(hidden, values, spelled, tensors, kind, extra or {})
            hidden.chmod(0o644)
            os.replace(hidden, path)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_in(
    path: Path,
    values: Mapping[str, Any],
    spelled: Sequence[Spelling],
    tensors: HubTensors,
    kind: str,
    extra: Mapping[str, Tensor],
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, values["general.architecture"])
    for key, value in values.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for one in spelled:
        for name, tensor in zip(one.file, one.change.store(tensors.get(one.hub)), strict=True):
            stored, number = _encoded(tensor, _kind_of(one, tensor, kind))
            writer.add_tensor(name, stored, raw_dtype=number)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.numpy(), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(spelling: Spelling, tensor: Tensor, kind: str) -> str:
    """What may not be quantised: kernels of a tower's patches stay floats, the rest is f32."""
    if not spelling.keep:
        return kind
    return "f16" if tensor.ndim > 2 and kind != "f32" else "f32"


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _encoded(tensor: Tensor, kind: str) -> tuple[np.ndarray, Any]:
    """Bytes or numbers of a tensor in a type, and the type that it got."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    if not tensor.is_floating_point():
        return tensor.int().contiguous().numpy(), GGMLQuantizationType.I32
    chosen = GGMLQuantizationType["F32" if tensor.ndim < 2 else kind.upper()]
    if tensor.shape and tensor.shape[-1] % GGML_QUANT_SIZES[chosen][0]:
        chosen = GGMLQuantizationType.F16
    values = tensor.float().contiguous().numpy()
    if chosen in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return values.astype(np.float32 if chosen == GGMLQuantizationType.F32 else np.float16), chosen
    return quants.quantize(values, chosen), chosen
