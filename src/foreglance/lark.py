"""Pieces of llguidance grammars: words, texts and JSON in its Lark. Strings only; `grammar` compiles them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Word = Callable[[str], str]  # a word of a chat format to its Lark term: a special token's id, or text

WHITE_SPACE = " "  # at most one between the parts of JSON: a model that may write any number may never end it


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def either(*terms: str) -> str:
    return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema with a bound on the white space between the parts of an answer."""
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **(given if isinstance(given, dict) else {})}}


def json_of(schema: Mapping[str, Any]) -> str:
    """JSON of a schema."""
    return f"%json {json.dumps(bounded(schema), ensure_ascii=False)}"


def until(rule: str, end: str) -> tuple[str, str]:
    """Any text up to and with the word `end`, a Lark term -> (what to write in a rule, the rule that defines it)."""
    if is_special(end):
        return f"{rule} {end}", f"{rule}: /(?s:.*)/"
    return rule, f"{rule}[suffix={end}]: /(?s:.*)/"


def is_special(term: str) -> bool:
    """Whether a word is a special token, which no text can match."""
    return term.startswith("<[")
