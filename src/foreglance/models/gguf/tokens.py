"""Tokenizers: what a GGUF file says of one, as the files of a hub folder, and the way back.

Byte-level BPE (`gpt2`), the Gemma family's BPE over spaces as words (`gemma4`), and SentencePiece's BPE (`llama`), with
scores of pieces instead of merges: what the supported families have. Pre-tokenizers go by name in a file; a name
that is not known here is refused, since a wrong one would silently give other tokens.
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
THREES = LETTERS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPLITS = {"qwen35": MARKS, "qwen2": LETTERS, "llama-bpe": THREES}
SMOLLM = "smollm"  # digits one by one, then the split that byte-level BPE began with
PLAIN_TEXT = ("llama-bpe", SMOLLM)  # not normalised
STARTS = ("llama-bpe",)  # texts begin with a token if the file does not say otherwise; so does SentencePiece
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DIGITS = {"type": "Digits", "individual_digits": True}
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
            "merges": _merges(file, tokens),
            "byte_fallback": _model(file) != "gpt2",
            "ignore_merges": file.get("tokenizer.ggml.pre") == "llama-bpe",
            "unk_token": named.get("unk_token"),
        },
    }
    if _starts(file) and "bos_token" in named:
        body["post_processor"] = _starting_with(named["bos_token"], tokens.index(named["bos_token"]))
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


def _starts(file: GgufFile) -> bool:
    """Whether a plain text begins with the token for that."""
    usual = _model(file) == "llama" or file.get("tokenizer.ggml.pre") in STARTS
    return bool(file.get("tokenizer.ggml.add_bos_token", usual))


def _starting_with(token: str, number: int) -> dict[str, Any]:
    word, single, pair = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        *({"Sequence": {"id": s, "type_id": 0}} for s in "AB"),
    )
    return {
        "type": "TemplateProcessing",
        "single": [word, single],
        "pair": [word, single, pair],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _merges(file: GgufFile, tokens: list[str]) -> list[list[str]]:
    """Pairs in the order in which they join. SentencePiece joins what makes the piece with the highest score."""
    if _model(file) != "llama":
        return [merge.split(" ", 1) for merge in file.need("tokenizer.ggml.merges")]
    scores = file.need("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path} has {len(scores)} scores for {len(tokens)} tokens")
    known, order = set(tokens), sorted(range(len(tokens)), key=lambda i: (-scores[i], i))
    return [
        [tokens[i][:at], tokens[i][at:]]
        for i in order
        for at in range(1, len(tokens[i]))
        if tokens[i][:at] in known and tokens[i][at:] in known
    ]


def _pipeline(file: GgufFile) -> dict[str, Any]:
    """Normaliser, pre-tokenizer and decoder."""
    if _model(file) in ("gemma4", "llama"):
        return _spaces_as_words(bool(file.get("tokenizer.ggml.add_space_prefix", _model(file) == "llama")))
    pre = file.get("tokenizer.ggml.pre")
    if _model(file) != "gpt2" or pre not in (*SPLITS, SMOLLM):
        raise ModelError(
            f"{file.path}: tokenizer {_model(file)!r} with pre-tokenizer {pre!r} is not supported; gpt2 with "
            f"{', '.join((*SPLITS, SMOLLM))}, gemma4 and llama are"
        )
    if pre == SMOLLM:
        steps = [DIGITS, LEVEL | {"use_regex": True}]
    else:
        split = {"type": "Split", "pattern": {"Regex": SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [split, LEVEL | {"use_regex": False}]
    return {
        "normalizer": None if pre in PLAIN_TEXT else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def _spaces_as_words(prefixed: bool) -> dict[str, Any]:
    """Pieces over words that begin with a mark for the space before them; `prefixed`: also the first one."""
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        mark = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, mark]}
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"normalizer": mark, "pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": back}}


def tokenizer_metadata(folder: Path, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """A file's values for the tokenizer of a hub folder; ids that have no token are named as padding."""
    body = json.loads(tokenizer.backend_tokenizer.to_str())  # some classes split in their own way, whatever a file says
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
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer),
    }
    ids = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id}
    values |= {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
    if tokenizer.chat_template:
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def _adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]


def _pre(folder: Path, body: dict[str, Any]) -> str:
    steps = (body.get("pre_tokenizer") or {}).get("pretokenizers", [])
    splits = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    name = next((name for name, split in SPLITS.items() if splits == [split]), None)
    if [step["type"] for step in steps] == ["Digits", "ByteLevel"] and steps[0] == DIGITS and steps[1]["use_regex"]:
        name = SMOLLM
    if name is None or body["model"]["type"] != "BPE":
        raise ModelError(
            f"{folder}: no GGUF name is known for its pre-tokenizer {[step['type'] for step in steps]} {splits}, so it "
            "cannot be exported"
        )
    return name
