"""Tools to a grammar of calls in the format of the model. Builds Lark for `grammar`; parses nothing.

Arguments follow the tool's JSON schema: its properties in order, those that are not required may be left out. In the
formats that write a string without quotes ("xml", "gemma") any text is a string unless the schema enumerates them, and
lengths of arrays are left to the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreglance.chat_format import CALL, GEMMA_CALL, GEMMA_QUOTE, Tags
from foreglance.lark import Word, either, is_special, json_of, literal, until
from foreglance.request import Request

Schema = Mapping[str, Any]


def tool_grammar(request: Request, syntax: str, word: Word) -> str:
    """Lark of an answer that must call, or, where the choice is the model's, may call behind any text."""
    tools = [tool["function"] for tool in request.tools if request.tool_choice in (*_OPEN, tool["function"]["name"])]
    tags = GEMMA_CALL if syntax == "gemma" else CALL
    calls = _SYNTAXES[syntax](tools, word)
    rules = [f"body: {either(*calls.bodies)} {word(tags.end)}", *calls.rules]
    return "\n".join([*_start(request, word(tags.start), tags, "" if syntax == "gemma" else literal("\n")), *rules])


_OPEN = ("auto", "required")


def _start(request: Request, begin: str, tags: Tags, gap: str) -> list[str]:
    if request.forces_tool:
        return [f"start: {begin} body" + (f" ({gap} {begin} body)*" if request.parallel_tool_calls else "")]
    if is_special(begin):
        call, rules = f"text {begin} body", ["text: /(?s:.*)/"]
    else:
        word = tags.start.replace("|", r"\|")
        call, rules = "head body", [f"head[lazy]: /(?s:.*){word}/", "text: /(?s:.*)/"]
    return [f"start: ({call})* text" if request.parallel_tool_calls else f"start: text | {call}", *rules]


@dataclass(frozen=True)
class _Calls:
    """What may stand behind the word that begins a call, one term for each tool, and rules that they need."""

    bodies: Sequence[str]
    rules: Sequence[str]


def _schema_of(tool: Schema) -> Schema:
    """The schema of a tool's arguments. Those that it does not name are let in only if it says so."""
    schema = {"type": "object", **(tool.get("parameters") or {"properties": {}})}
    return {"additionalProperties": False, **schema} if "properties" in schema else schema


def _xml(tools: Sequence[Schema], word: Word) -> _Calls:
    """Qwen3.5 and Step-3.7: a block for each parameter; strings as they are, all else as JSON."""
    bodies, rules = [], []
    for i, tool in enumerate(tools):
        schema = _schema_of(tool)
        required, terms = schema.get("required", ()), []
        for j, (name, value) in enumerate(schema.get("properties", {}).items()):
            term, more = _xml_value(value, _definitions(schema), f"v{i}_{j}")
            rules += [f"p{i}_{j}: {literal(f'<parameter={name}>{chr(10)}')} {term}", *more]
            terms.append(f"p{i}_{j}" if name in required else f"p{i}_{j}?")
        head = literal(f"\n<function={tool['name']}>\n")
        bodies.append(" ".join([head, *terms, literal("</function>\n")]))
    return _Calls(bodies, rules)


def _xml_value(schema: Schema | bool, definitions: Schema, rule: str) -> tuple[str, list[str]]:
    schema = {} if schema is True else schema
    end = literal("\n</parameter>\n")
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if words is not None and all(isinstance(one, str) for one in words):
        return f"{either(*map(literal, words))} {end}", []
    if may_be_text(schema):
        term, definition = until(rule, end)
        return term, [definition]
    return f"{rule} {end}", [f"{rule}: {json_of({**schema, **definitions})}"]


def may_be_text(schema: Schema) -> bool:
    """Whether a value may be a string, as far as the schema says so itself."""
    kind = schema.get("type")
    if kind is None:
        choices = schema.get("anyOf") or schema.get("oneOf")
        return any(map(may_be_text, choices)) if choices else not any(k in schema for k in ("$ref", "enum", "const"))
    return "string" in ([kind] if isinstance(kind, str) else kind)


def _definitions(schema: Schema) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _json(tools: Sequence[Schema], word: Word) -> _Calls:
    """Hermes: an object with the name and the arguments."""
    bodies, rules = [], []
    for i, tool in enumerate(tools):
        schema = _schema_of(tool)
        call = {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            **_definitions(schema),
        }
        bodies.append(f"{literal(chr(10))} call{i} {literal(chr(10))}")
        rules.append(f"call{i}: {json_of(call)}")
    return _Calls(bodies, rules)


def _gemma(tools: Sequence[Schema], word: Word) -> _Calls:
    """Gemma-4: bare keys, in order of the alphabet, strings in a quote of their own."""
    bodies, rules = [], _GemmaRules(word(GEMMA_QUOTE))
    for tool in tools:
        schema = _schema_of(tool)
        arguments = rules.value(schema, schema)
        bodies.append(f"{literal('call:' + tool['name'])} {arguments}")
    return _Calls(bodies, list(rules))


@dataclass
class _GemmaRules:
    """Rules of values, named as they are made. A reference to a definition becomes a rule once."""

    quote: str
    rules: list[str] = field(default_factory=list)
    definitions: dict[tuple[int, str], str] = field(default_factory=dict)
    free: bool = False

    def __iter__(self) -> Iterator[str]:
        return iter(self.rules)

    def value(self, schema: Schema | bool, root: Schema) -> str:
        """The Lark term of a value."""
        if schema is True:
            return self._any()
        if "$ref" in schema:
            return self._reference(schema["$ref"], root)
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return either(*(self.value(one, root) for one in choices))
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if words is not None:
            return either(*(self._constant(one) for one in words))
        kinds = schema.get("type")
        if kinds is None:
            return self._any()
        return either(*(self._of_kind(kind, schema, root) for kind in ([kinds] if isinstance(kinds, str) else kinds)))

    def _of_kind(self, kind: str, schema: Schema, root: Schema) -> str:
        if kind == "string":
            return self._text()
        if kind == "array":
            item = self.value(schema.get("items") or {}, root)
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object":
            return self._object(schema, root)
        return self._rule(json_of({**schema, "type": kind}))

    def _object(self, schema: Schema, root: Schema) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required", ())
        if not properties:
            return self._free_object() if schema.get("additionalProperties", "properties" not in schema) else '"{" "}"'
        first, rest = '""', '""'  # what follows where nothing was written yet, and where something was
        for name in sorted(properties, key=str.lower, reverse=True):
            pair = f"{literal(name + ':')} {self.value(properties[name], root)}"
            after = self._rule(f'"," {pair} {rest}' + ("" if name in required else f" | {rest}"))
            first = self._rule(f"{pair} {rest}" + ("" if name in required else f" | {first}"))
            rest = after
        return self._rule(f'"{{" {first} "}}"')

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote} {literal(value)} {self.quote}"
        return self._rule(json_of({"const": value}))

    def _text(self) -> str:
        term, definition = until("string", self.quote)
        if definition not in self.rules:
            self.rules.append(definition)
        return f"{self.quote} {term}"

    def _any(self) -> str:
        if not self.free:
            self.free = True
            scalar = json_of({"type": ["number", "boolean", "null"]})
            self.rules.append(f"scalar: {scalar}")
            self.rules.append(f'any: scalar | {self._text()} | "[" (any ("," any)*)? "]" | {self._free_object()}')
        return "any"

    def _free_object(self) -> str:
        self._any()
        return '"{" (/[^:{}\\[\\]",<]+/ ":" any ("," /[^:{}\\[\\]",<]+/ ":" any)*)? "}"'

    def _reference(self, reference: str, root: Schema) -> str:
        known = self.definitions.get((id(root), reference))
        if known is not None:
            return known
        name = self.definitions[id(root), reference] = f"d{len(self.definitions)}"
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) else {}
        self.rules.append(f"{name}: {self.value(target, root)}")
        return name

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


_SYNTAXES = {"xml": _xml, "json": _json, "gemma": _gemma}
