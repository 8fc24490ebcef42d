"""Tokenizers: what a GGUF file says of one, as the files of a hub folder, and the way back.

Byte-level BPE (`gpt2`) and the Gemma family's BPE over spaces as words (`gemma4`), which is what the supported families
have. Pre-tokenizers go by name in a file; a name that is not known here is refused, since a wrong one would silently
give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foreglance.models.base import ModelError
from foreglance.models.gguf.file import GgufFile

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
MARKS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"qwen35": MARKS, "qwen2": LETTERS}
SPACE = "\u2581"


def token_list(file: GgufFile) -> list[str]:
    return file.need("tokenizer.ggml.tokens")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json, and the chat template if there is one."""
    tokens, kinds = token_list(file), file.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == len(tokens) else [NORMAL] * len(tokens)
    marked = {i: kind == CONTROL for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)}
    named = {name: tokens[i] for name, i in _named(file, len(tokens))}
    body = {
        "version": "1.0",
        "added_tokens": [_added(i, tokens[i], special) for i, special in marked.items()],
        **_pipeline(file),
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED},
            "merges": [merge.split(" ", 1) for merge in file.need("tokenizer.ggml.merges")],
            "byte_fallback": _model(file) == "gemma4",
            "unk_token": named.get("unk_token"),
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(body, ensure_ascii=False), "utf-8")
    special = [tokens[i] for i, is_special in marked.items() if is_special and tokens[i] not in named.values()]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": special, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), "utf-8")
    eos = [file.meta[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in file.meta]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos} if eos else {}), "utf-8")
    if (template := file.get("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")


def _named(file: GgufFile, count: int) -> Iterator[tuple[str, int]]:
    """The roles that tokens have, as far as the file names them."""
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        token = file.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < count:
            yield role, token


def _model(file: GgufFile) -> str:
    return file.need("tokenizer.ggml.model")


def _added(token: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": special, **flags}


def _pipeline(file: GgufFile) -> dict[str, Any]:
    """Normaliser, pre-tokenizer and decoder."""
    if _model(file) == "gemma4":
        byte_steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
        return {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, *byte_steps],
            },
        }
    pre = file.get("tokenizer.ggml.pre")
    if _model(file) != "gpt2" or pre not in SPLITS:
        raise ModelError(
            f"{file.path}: tokenizer {_model(file)!r} with pre-tokenizer {pre!r} is not supported; gpt2 with "
            f"{', '.join(SPLITS)} and gemma4 are"
        )
    split = {"type": "Split", "pattern": {"Regex": SPLITS[pre]}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def tokenizer_metadata(folder: Path, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """A file's values for the tokenizer of a hub folder; ids that have no token are named as padding."""
    body = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = {i: token for token, i in tokenizer.get_vocab().items()}
    added = {i: word.special for i, word in tokenizer.added_tokens_decoder.items()}
    tokens = [words.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    kinds = [
        UNUSED if i not in words else NORMAL if i not in added else CONTROL if added[i] else USER_DEFINED
        for i in range(vocab_size)
    ]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(folder, body),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in body["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }
    ids = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id}
    values |= {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
    if tokenizer.chat_template:
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def _pre(folder: Path, body: dict[str, Any]) -> str:
    steps = (body.get("pre_tokenizer") or {}).get("pretokenizers", [])
    found = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    name = next((name for name, split in SPLITS.items() if found == [split]), None)
    if name is None or body["model"]["type"] != "BPE":
        raise ModelError(f"{folder}: no GGUF name is known for its pre-tokenizer {found}, so it cannot be exported")
    return name
