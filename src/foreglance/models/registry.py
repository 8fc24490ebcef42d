"""Which family serves a checkpoint, and loading one: folder -> config -> self-test -> weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from foreglance.chat_format import ChatFormat
from foreglance.grammar import Grammars, hugging_face_vocabulary
from foreglance.models import dense, gemma4, qwen3_5, qwen3_5_moe, step3p7
from foreglance.models.base import ModelError, Target
from foreglance.models.weight_cache import kept_within
from foreglance.models.weights import (
    SMALL,
    find_model,
    in_words,
    named,
    num_weights,
    read_json,
    stored_bytes,
    stored_format,
)
from foreglance.ops.base import Ops
from foreglance.ops.formats import BITS, FORMATS
from foreglance.ops.numerics import SelfTest, choose, kernels_are_native
from foreglance.prompt import Prompter
from foreglance.settings import Settings

log = logging.getLogger(__name__)
DEFAULT_CONTEXT = 32_768
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SMALL_FILES = ("generation_config.json", TOKENIZER_CONFIG, "preprocessor_config.json", "processor_config.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # the files that a tokenizer is made of
MAX_LAYERS = 1000
SLACK = 8  # numbers of a weight for each byte of the files: few bits each, and shapes that only some checkpoints have


def auto_config(folder: Path) -> Any:
    """transformers' config of a checkpoint folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@dataclass(frozen=True)
class Family:
    """How a family is shown and loaded. `shapes_of` gives the arguments of `ops.numerics.choose`."""

    model_types: tuple[str, ...]
    title: str
    shapes_of: Callable[[dict[str, Any]], tuple[set[Any], ...]]
    load: Callable[..., Target]
    read_config: Callable[[Path], Any] = auto_config


FAMILIES = (
    Family(
        ("qwen3_5", "qwen3_5_text"),
        "Qwen3.5 / 3.6 / 3.8 dense (MTP head, images)",
        qwen3_5.shapes_of,
        qwen3_5.load,
    ),
    Family(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        "Qwen3.5 / 3.6 mixture of experts (MTP head, images)",
        qwen3_5_moe.shapes_of,
        qwen3_5_moe.load,
    ),
    Family(("gemma4", "gemma4_text"), "Gemma-4 (assistant as draft, images)", gemma4.shapes_of, gemma4.load),
    Family(tuple(dense.TRAITS), "Llama, SmolLM, Qwen3, Gemma-3 text (text only)", dense.shapes_of, dense.load),
    Family(
        ("step3p7",),
        "Step-3.7-Flash (MoE, three chained MTP modules, images)",
        step3p7.shapes_of,
        step3p7.load,
        step3p7.read_config,
    ),
)


@dataclass(frozen=True)
class Loaded:
    """A target, its tokenizer, and what the self-test chose."""

    folder: Path
    target: Target
    tokenizer: Any
    self_test: SelfTest


def family_of(model_type: str) -> Family:
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(t for family in FAMILIES for t in family.model_types)
    raise ModelError(f"model_type {model_type!r} is not supported yet; supported are {known}")


def model_type_of(folder: Path) -> str:
    return read_json(folder / CONFIG).get("model_type", "")


def load_model(
    name: str, settings: Settings, instrument: Callable[[Ops], Ops] = lambda ops: ops, text_only: bool = False
) -> Loaded:
    """Load an embedded model, a folder or a hub name. Raises `ModelError` in words to act on.

    `instrument` may wrap the operations, e.g. to time them. `text_only` leaves vision tower and draft head unread.
    """
    folder = find_model(name)
    with in_words(named(folder)):
        check_small_files(folder)
        return _load(folder, family_of(model_type_of(folder)), settings, instrument, text_only)


def check_small_files(folder: Path) -> None:
    """What libraries will read of a checkpoint besides weights and tokenizer is JSON, and promises no million of
    layers. Raises `ModelError` that names the file."""
    read = {name: read_json(folder / name) for name in (CONFIG, *SMALL_FILES) if (folder / name).is_file()}
    for name, values in read.items():
        if (odd := _odd_number(values)) is not None:
            raise ModelError(f"{folder / name}: {odd}, no finite number")
    config = read.get(CONFIG, {})
    for values in (config, config.get("text_config"), config.get("vision_config")):
        layers = values.get("num_hidden_layers") if isinstance(values, dict) else None
        if isinstance(layers, int) and not 0 < layers <= MAX_LAYERS:
            raise ModelError(f"{folder / CONFIG}: num_hidden_layers is {layers}; 1 to {MAX_LAYERS} are read")


def _odd_number(values: dict[str, Any]) -> str | None:
    """The first number that is none, with its place: JSON as Python reads it knows NaN and Infinity, and 1e999."""
    left: list[tuple[str, Any]] = [("", values)]
    while left:
        place, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return f"{place} is {value}"
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left += [(f"{place}.{key}" if place else key, one) for key, one in inside]
    return None


def _check_sizes(folder: Path, shapes: set[tuple[int, int]], widths: set[int]) -> None:
    """A config may promise anything: nothing is made of a size that the files cannot fill."""
    stored = stored_bytes(folder)
    for rows, columns in (*sorted(shapes), *((1, width) for width in sorted(widths))):
        if min(rows, columns) < 1 or rows * columns > SLACK * stored + SMALL:
            raise ModelError(
                f"{folder / CONFIG} names a weight of {rows} by {columns} numbers, the weight files hold {stored} bytes"
            )


def _check_rotary(folder: Path, rope: dict[str, Any]) -> None:
    """Angles are made for a share of a head, of all layers or by kind of layer."""
    for values in (rope, *(one for one in rope.values() if isinstance(one, dict))):
        share = values.get("partial_rotary_factor")
        if share is not None and not 0 <= share <= 1:
            raise ModelError(f"{folder / CONFIG}: partial_rotary_factor is {share}, no share of a head")


def _load(
    folder: Path, family: Family, settings: Settings, instrument: Callable[[Ops], Ops], text_only: bool
) -> Loaded:
    config = family.read_config(folder)
    values = config.to_dict()
    text = values.get("text_config", values)
    if text["max_position_embeddings"] < 2:
        raise ModelError(f"{folder / CONFIG}: max_position_embeddings is {text['max_position_embeddings']}")
    shapes, widths, *experts = family.shapes_of(values)
    _check_sizes(folder, shapes, widths)
    _check_rotary(folder, text.get("rope_parameters") or {})
    weights = pick_weights(settings.weights, folder, str(values.get("dtype") or text.get("dtype")))
    of_drafts = settings.draft_weights
    if of_drafts == "auto":
        of_drafts = "q8" if settings.weights == "auto" else "same"
    ops, report = choose(weights, shapes, widths, *experts, draft_weights=of_drafts)
    tokenizer = load_tokenizer(folder)
    _check_tokenizer(tokenizer, text["vocab_size"], folder)
    if not text_only:
        _check_templates(tokenizer, folder)
    context = min(settings.context or DEFAULT_CONTEXT, text["max_position_embeddings"])
    eos = end_tokens(folder, values, tokenizer)
    with kept_within(settings.weight_cache_bytes):
        target = family.load(folder.name, folder, config, instrument(ops), context, eos, text_only)
    return Loaded(folder, target, tokenizer, report)


def prompter_of(loaded: Loaded, settings: Settings) -> Prompter:
    """What makes rows for a loaded model; how it writes tool calls and reasoning is read off its chat template."""
    tokenizer, spec = loaded.tokenizer, loaded.target.spec
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    return Prompter(
        tokenizer,
        spec.image_token,
        spec.rule,
        loaded.target.prepare,
        ChatFormat.of_template(text, settings.tool_format, settings.reasoning_format),
        Grammars(lambda: hugging_face_vocabulary(tokenizer, spec.vocab_size, spec.eos)),
    )


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a checkpoint folder."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer, none of {', '.join(TOKENIZERS)}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing more exact
        raise ModelError(f"{folder}: its tokenizer cannot be read ({' '.join(str(error).split())})") from error


def _check_tokenizer(tokenizer: Any, vocab_size: int, folder: Path) -> None:
    """Special words alone may lie beyond the vocabulary: published text models of Gemma-3 keep the image placeholder
    of their larger siblings. A prompt that holds one is refused by its batch."""
    special = {id for id, word in tokenizer.added_tokens_decoder.items() if word.special}
    if any(id >= vocab_size and id not in special for id in tokenizer.get_vocab().values()):
        raise ModelError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size}; "
            "they do not belong together"
        )


def _check_templates(tokenizer: Any, folder: Path) -> None:
    """A chat template must compile. One that does may still not take every conversation, see `conversation.render`."""
    templates = tokenizer.chat_template
    for name, template in templates.items() if isinstance(templates, dict) else [(None, templates)]:
        if template is None:
            continue
        where = _template_file(folder, name)
        if not isinstance(template, str):
            raise ModelError(f"{where}: the chat template is {type(template).__name__}, no text")
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            words = " ".join((error.message or "").split())
            raise ModelError(f"{where}, line {error.lineno}: the chat template is broken ({words})") from error
        except Exception as error:  # of this conversation alone, perhaps
            log.debug("%s: %s", where, error)


def _template_file(folder: Path, name: str | None) -> Path | str:
    """Where transformers, or a GGUF file, has a template."""
    if named(folder) != folder:
        return "tokenizer.chat_template"
    places = [folder / "chat_template.jinja", folder / "additional_chat_templates" / f"{name}.jinja"]
    return next((path for path in places[name not in (None, "default") :] if path.is_file()), folder / TOKENIZER_CONFIG)


def end_tokens(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: the generation config's, else the config's, and the tokenizer's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    text = config.get("text_config", config)
    named = generation.get("eos_token_id", text.get("eos_token_id"))
    ids = named if isinstance(named, list) else [named]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)


def pick_weights(wanted: str, folder: Path, stored_as: str = "") -> str:
    """ "auto" is the format of a GGUF file. Else it loses as little as half of the memory that is free allows: fp32
    unless the checkpoint has no more than fp16, then fp16, and where native kernels run q8 and q4."""
    if wanted != "auto":
        return wanted
    kept, native = stored_format(folder), kernels_are_native()
    if kept in FORMATS and (native or kept in ("fp32", "fp16")):
        return kept
    weights, room = num_weights(folder), free_memory() / 2
    formats = [name for name in FORMATS if name != "fp32" or stored_as.removeprefix("torch.") != "float16"]
    if not native:
        formats = [name for name in formats if name in ("fp32", "fp16")]
    return next((name for name in formats if weights * BITS[name] / 8 <= room), formats[-1])


def free_memory() -> int:
    """Bytes that the system could give now; what it has in all where that is not said."""
    import os

    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
