"""Writing GGUF: a hub folder as the files that llama.cpp reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreglance.models.base import ModelError
from foreglance.models.gguf import qwen3_5
from foreglance.models.gguf.naming import Spelling
from foreglance.models.gguf.tokens import tokenizer_metadata
from foreglance.models.weights import Weights

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
FAMILIES: dict[str, ModuleType] = {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5}
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

    def any_under(self, prefix: str) -> bool:
        return any(self._weights.names(prefix))

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
        self._weights.finish(may_stay=lambda name: name.startswith(tuple(left)))


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
    config = json.loads((folder / "config.json").read_text())
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{folder}: model_type {config.get('model_type')!r} cannot be exported; {known} can")
    tensors = HubTensors(folder)
    if not tensors.any_under(family.MTP):
        config["text_config"]["mtp_num_hidden_layers"] = 0
    written = [out]
    spelled = [one for one in family.spellings(config) if one.hub in tensors]
    _write_model(folder, out, config, family, tensors, spelled, kind, with_draft=draft is None)
    if draft is not None:
        shared = [one for one in spelled if one.hub in family.SHARED or one.hub.startswith(family.MTP)]
        if len(shared) <= len(family.SHARED):
            raise ModelError(f"{folder} has no draft head to write to {draft}")
        _write(draft, _model_values(folder, config, family, kind), shared, tensors, kind)
        written.append(draft)
    if mmproj is not None:
        if not config.get("vision_config"):
            raise ModelError(f"{folder} has no vision tower to write to {mmproj}")
        processor = json.loads((folder / "preprocessor_config.json").read_text())
        towers = family.vision_spellings(config)
        _write(mmproj, family.vision_metadata_of(config, processor), towers, tensors, "f16" if kind != "f32" else kind)
        written.append(mmproj)
    tensors.finish(() if mmproj is not None else (family.TOWER,))
    return written


def _write_model(
    folder: Path,
    out: Path,
    config: dict[str, Any],
    family: ModuleType,
    tensors: HubTensors,
    spelled: Sequence[Spelling],
    kind: str,
    with_draft: bool,
) -> None:
    if not with_draft:
        config = config | {"text_config": config["text_config"] | {"mtp_num_hidden_layers": 0}}
        spelled = [one for one in spelled if not one.hub.startswith(family.MTP)]
    _write(out, _model_values(folder, config, family, kind), spelled, tensors, kind)


def _model_values(folder: Path, config: dict[str, Any], family: ModuleType, kind: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    values = family.metadata_of(config) | {
        "general.name": folder.name,
        "general.type": "model",
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
    }
    return values | tokenizer_metadata(folder, tokenizer, config["text_config"]["vocab_size"])


def _write(path: Path, values: Mapping[str, Any], spelled: Sequence[Spelling], tensors: HubTensors, kind: str) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, values["general.architecture"])
    for key, value in values.items():
        if key != "general.architecture":
            _add_value(writer, key, value)
    for one in spelled:
        for name, tensor in zip(one.file, one.change.store(tensors.get(one.hub)), strict=True):
            stored, kind_number = _encoded(
                tensor, "f16" if one.keep and tensor.ndim > 2 else "f32" if one.keep else kind
            )
            writer.add_tensor(name, stored, raw_dtype=kind_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_value(writer: Any, key: str, value: Any) -> None:
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

    chosen = GGMLQuantizationType["F32" if tensor.ndim < 2 else kind.upper()]
    if tensor.shape and tensor.shape[-1] % GGML_QUANT_SIZES[chosen][0]:
        chosen = GGMLQuantizationType.F16
    values = tensor.float().contiguous().numpy()
    if chosen in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return values.astype(np.float32 if chosen == GGMLQuantizationType.F32 else np.float16), chosen
    return quants.quantize(values, chosen), chosen
