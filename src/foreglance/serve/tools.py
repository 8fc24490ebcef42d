"""Tool calls in the text of an answer, as it streams. Pure: text to pieces of calls, in the formats of `chat_format`.

A call comes as its name first and its arguments, text of a JSON object, in fragments behind it. What comes does not
depend on how the text is cut into pieces. Text that begins like a call and is none stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foreglance.chat_format import CALL, GEMMA_CALL, GEMMA_QUOTE
from foreglance.detokenize import overlap
from foreglance.tool_grammar import may_be_text

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class CallDelta:
    """A piece of call number `index`: its name, with the first piece, or a fragment of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


class _Reader(Protocol):
    """Reads one call from behind the word that begins it.

    `name` is known once the call is sure to be one; `rest` is the text behind its end, None while it goes on; `failed`
    says that it is none.
    """

    name: str | None
    rest: str | None
    failed: bool

    def push(self, text: str) -> str:
        """-> the arguments that this text completes."""
        ...


class ToolCallParser:
    """Splits text into what is shown and calls. White space next to a call belongs to neither."""

    def __init__(self, syntax: str, tools: Sequence[Schema]):
        self._tags = GEMMA_CALL if syntax == "gemma" else CALL
        self._syntax = syntax
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._held = ""
        self._reader: _Reader | None = None
        self._read = ""  # the call so far, as long as it may be none
        self._behind_call = False
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """-> (text to show, pieces of calls) that this piece completes."""
        self._held += text
        shown, calls = "", []
        while self._held:
            if self._reader is not None:
                fragment, more = self._in_call(self._reader)
                shown += fragment
                calls += more
            elif (at := self._held.find(self._tags.start)) >= 0:
                before, self._held = self._held[:at], self._held[at + len(self._tags.start) :]
                shown += self._shown(before.rstrip())
                self._reader, self._read = self._new_reader(), before[len(before.rstrip()) :] + self._tags.start
            else:
                safe = len(self._held[: len(self._held) - overlap(self._held, self._tags.start)].rstrip())
                shown += self._shown(self._held[:safe])
                self._held = self._held[safe:]
                break
        return shown, calls

    def flush(self) -> str:
        """Text that was held back, at the end: also the beginning of a call that has no name yet."""
        if self._reader is None:
            return self._shown(self._held)
        return "" if self._reader.name is not None else self._shown(self._read)

    def _shown(self, text: str) -> str:
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        return text

    def _in_call(self, reader: _Reader) -> tuple[str, list[CallDelta]]:
        text, self._held, known = self._held, "", reader.name is not None
        arguments = reader.push(text)
        if reader.failed:
            behind = self._read.index(self._tags.start) + len(self._tags.start)
            self._reader, self._held = None, self._read[behind:] + text
            return self._shown(self._read[:behind]), []
        if reader.name is None:
            self._read += text
            return "", []
        calls = []
        if not known:
            calls.append(CallDelta(self._num_calls, reader.name))
            self._num_calls += 1
        if arguments:
            calls.append(CallDelta(self._num_calls - 1, None, arguments))
        if reader.rest is not None:
            self._reader, self._behind_call, self._held = None, True, reader.rest
        return "", calls

    def _new_reader(self) -> _Reader:
        if self._syntax == "xml":
            return _XmlReader(self._schemas)
        return _JsonReader() if self._syntax == "json" else _GemmaReader()


def _escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _StagedReader:
    """Reads a call in stages: each takes what it can of `_text`, gives the arguments that it completes, and may name
    the next one. The last one takes the word that ends a call, which may be missing."""

    _tags = CALL

    def __init__(self, first: Callable[[], str]) -> None:
        self.name: str | None = None
        self.rest: str | None = None
        self.failed = False
        self._text = ""
        self._stage = first

    def push(self, text: str) -> str:
        self._text += text
        arguments = ""
        while not self.failed and self.rest is None:
            stage, size = self._stage, len(self._text)
            arguments += self._stage()
            if self._stage == stage and len(self._text) == size:
                break
        return arguments

    def _last(self) -> str:
        self._text = self._text.lstrip()
        if self._text.startswith(self._tags.end):
            self.rest = self._text[len(self._tags.end) :]
        elif not self._tags.end.startswith(self._text):
            self.rest = self._text
        return ""


class _XmlReader(_StagedReader):
    """Qwen3.5, Step-3.7: <function=name> <parameter=key> value </parameter> ... </function> </tool_call>."""

    def __init__(self, schemas: Mapping[str, Schema]):
        super().__init__(self._name)
        self._schemas = schemas
        self._num_values = 0
        self._as_text = False
        self._begun = False  # the value has lost its line break

    def _name(self) -> str:
        self._text = self._text.lstrip()
        head = "<function="
        if self._text.startswith(head):
            end = self._text.find(">")
            if end >= 0:
                self.name, self._text = self._text[len(head) : end].strip().strip("\"'"), self._text[end + 1 :]
                self._stage = self._between
        elif not head.startswith(self._text):
            self.failed = True
        return ""

    def _between(self) -> str:
        """Before a parameter or the end of the function; what else stands there is left out."""
        words = ("<parameter=", "</function>", CALL.end)
        found = min(((at, word) for word in words if (at := self._text.find(word)) >= 0), default=None)
        if found is None:
            self._text = self._text[len(self._text) - max(overlap(self._text, word) for word in words) :]
            return ""
        at, word = found
        if word == words[0]:
            return self._key(at + len(word))
        self._text = self._text[at + len(word) :] if word == words[1] else self._text[at:]
        self._stage = self._last
        return "}" if self._num_values else "{}"

    def _key(self, start: int) -> str:
        end = self._text.find(">", start)
        if end < 0:
            return ""
        key, self._text = self._text[start:end].strip().strip("\"'"), self._text[end + 1 :]
        self._schema = self._schemas.get(self.name or "", {}).get("properties", {}).get(key, {})
        self._as_text = self._schema.get("type") == "string"
        self._begun, self._stage = False, self._value
        self._num_values += 1
        lead = "{" if self._num_values == 1 else ", "
        return f"{lead}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._as_text else "")

    def _value(self) -> str:
        end = self._text.find("</parameter>")
        if not self._begun and self._text:
            self._begun = True
            if self._text[0] == "\n":
                self._text = self._text[1:]
                end -= end > 0
        if end >= 0:
            value, self._text = self._text[:end].removesuffix("\n"), self._text[end + len("</parameter>") :]
            self._stage = self._between
            return _escaped(value) + '"' if self._as_text else json_value(value, self._schema)
        if not self._as_text:
            return ""
        held = max(overlap(self._text, "\n</parameter>"), overlap(self._text, "</parameter>"))
        safe, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        return _escaped(safe)


def json_value(text: str, schema: Schema) -> str:
    """JSON of a value that was written without quotes: itself if it is JSON and the schema has room for it, else a
    string. Templates write true, false and null in Python's way."""
    word = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        value = parse_json(word)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or (may_be_text(schema) and not _has_room(value, schema)):
        return json.dumps(text, ensure_ascii=False)
    return word


def parse_json(text: str) -> Any:
    """Raises `ValueError` also for NaN and infinities, which Python's reader would take."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


_KINDS = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def _has_room(value: Any, schema: Schema) -> bool:
    """Whether a schema names the type of a value; one that names none has room for any."""
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return any(_has_room(value, one) for one in choices)
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds or ()
    return kinds is None or any(kind in named for kind in _KINDS[type(value)])


class _JsonReader(_StagedReader):
    """Hermes, Qwen3: {"name": name, "arguments": {...}} </tool_call>. Arguments stream if the name comes first."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"\\]*")\s*,\s*"arguments"\s*:\s*(?=\{)')

    def __init__(self) -> None:
        super().__init__(self._head)
        self._end = _JsonEnd()
        self._seen = 0  # of the text, what `_end` has looked at

    def _head(self) -> str:
        head = self._HEAD.match(self._text)
        if head is not None:
            self.name, self._text = json.loads(head[1]), self._text[head.end() :]
            self._stage, self._end = self._arguments, _JsonEnd()
            return ""
        begun = self._text.lstrip()
        if begun and begun[0] != "{":
            self.failed = True
            return ""
        end = self._end.push(self._text[self._seen :])
        if end is None:
            self._seen = len(self._text)
            return ""
        return self._whole(self._seen + end)

    def _whole(self, end: int) -> str:
        """A call whose keys are in another order, once all of it is there."""
        try:
            call = parse_json(self._text[:end])
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            self.failed = True
            return ""
        self.name, self._text = name, self._text[end:]
        self._stage = self._last
        return json.dumps(arguments, ensure_ascii=False)

    def _arguments(self) -> str:
        text, end = self._text, self._end.push(self._text)
        if end is None:
            self._text = ""
            return text
        self._text, self._end, self._stage = text[end:], _JsonEnd(depth=1), self._remainder
        return text[:end]

    def _remainder(self) -> str:
        """What stands in the call behind its arguments."""
        end = self._end.push(self._text)
        self._text = "" if end is None else self._text[end:]
        if end is None:
            return ""
        self._stage = self._last
        return ""


class _JsonEnd:
    """Finds the end of a JSON object or array that comes in pieces, perhaps from `depth` brackets inside."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """The length of this piece up to the end of the value; None: it goes on."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class _GemmaReader(_StagedReader):
    """Gemma-4: call:name{key:<|"|>text<|"|>,key:1,key:[...],key:{...}} <tool_call|>."""

    _tags = GEMMA_CALL
    _HEAD = re.compile(r"\s*call:([^{\s]*)\s*\{")
    _BEGIN = re.compile(r"\s*(c(a(l(l(:([^{\s]*\s*)?)?)?)?)?)?\Z")

    def __init__(self) -> None:
        super().__init__(self._name)
        self._stack: list[str] = []
        self._comma = ""

    def _name(self) -> str:
        head = self._HEAD.match(self._text)
        if head is not None:
            self.name, self._text = head[1], self._text[head.end() :]
            return self._open("{")
        self.failed = self._BEGIN.match(self._text) is None
        return ""

    def _open(self, bracket: str) -> str:
        self._stack.append(bracket)
        self._stage = self._first
        return bracket

    def _first(self) -> str:
        """Behind a bracket or a comma: there may be nothing."""
        self._text = self._text.lstrip()
        if not self._text:
            return ""
        if self._text[0] in "}]":
            return self._shut()
        self._stage = self._key if self._stack[-1] == "{" else self._value
        comma, self._comma = self._comma, ""
        return comma

    def _shut(self) -> str:
        self._text, self._comma = self._text[1:], ""
        bracket = "}" if self._stack.pop() == "{" else "]"
        self._stage = self._next if self._stack else self._last
        return bracket

    def _key(self) -> str:
        end = self._text.find(":")
        if end < 0:
            return ""
        key, self._text = self._text[:end].strip(), self._text[end + 1 :]
        self._stage = self._value
        return json.dumps(key.replace(GEMMA_QUOTE, "").strip('"'), ensure_ascii=False) + ": "

    def _value(self) -> str:
        self._text = self._text.lstrip()
        if self._text.startswith(GEMMA_QUOTE):
            self._text, self._stage = self._text[len(GEMMA_QUOTE) :], self._string
            return '"'
        if not self._text or GEMMA_QUOTE.startswith(self._text):
            return ""
        if self._text[0] in "{[":
            bracket, self._text = self._text[0], self._text[1:]
            return self._open(bracket)
        return self._bare()

    def _string(self) -> str:
        end = self._text.find(GEMMA_QUOTE)
        if end >= 0:
            text, self._text, self._stage = self._text[:end], self._text[end + len(GEMMA_QUOTE) :], self._next
            return _escaped(text) + '"'
        safe = len(self._text) - overlap(self._text, GEMMA_QUOTE)
        text, self._text = self._text[:safe], self._text[safe:]
        return _escaped(text)

    def _bare(self) -> str:
        """A number, true, false or null; anything else is a string that lacks its quotes."""
        if self._text[0] == '"':
            found = re.match(r'"(?:[^"\\]|\\.)*"', self._text, re.DOTALL)
            end = found.end() if found else None
        else:
            end = next((at for at, letter in enumerate(self._text) if letter in ",}]"), None)
        if end is None:
            return ""
        text, self._text, self._stage = self._text[:end].strip(), self._text[end:], self._next
        try:
            parse_json(text)
        except ValueError:
            return json.dumps(text, ensure_ascii=False)
        return text

    def _next(self) -> str:
        self._text = self._text.lstrip()
        if not self._text:
            return ""
        if self._text[0] in "}]":
            return self._shut()
        self._text = self._text[1:] if self._text[0] == "," else self._text
        self._comma, self._stage = ", ", self._first
        return ""
