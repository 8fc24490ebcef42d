"""What a token may be: grammars compiled against a tokenizer, and the state of one request in them.

llguidance owns grammars and masks; here is when it is asked. `Guide.allowed` is a function of the tokens so far alone,
so row i of a step is picked under the state after the drafts before it, a drafter's guesses are held to the same
grammar, and drafts never change a token. A rejected draft is rolled back when the next question shows that it is gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from foreglance.chat_format import ChatFormat, ReasoningState, Tags
from foreglance.lark import Word, bounded, literal, until
from foreglance.reasoning import ReasoningBudget, num_shared
from foreglance.request import MAX_DEPTH, Grammar, Request, RequestError
from foreglance.tool_grammar import tool_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED = 64  # grammars that are kept for requests to come


class Grammars:
    """Compiles what requests ask for. `read_vocabulary` is called once, when the first grammar is."""

    def __init__(self, read_vocabulary: Callable[[], LLTokenizer]):
        self._read_vocabulary = lru_cache(1)(read_vocabulary)
        self._compile = lru_cache(COMPILED)(self._compiled)

    def matcher(self, request: Request, format: ChatFormat, state: ReasoningState) -> LLMatcher:
        """A fresh matcher of what the answer must be. Raises `RequestError` for what cannot be compiled."""
        answer, param = _answer(request, format, self._word), "grammar" if request.grammar else "tools"
        matcher = self._compile(around_reasoning(answer, format.reasoning, state, self._word))
        if matcher.is_error():
            raise RequestError(
                f"{param}: cannot be compiled: {_error_of(matcher)}", param=param, code="invalid_grammar"
            )
        return matcher.deep_copy()

    def _compiled(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._read_vocabulary(), text, log_level=0)

    def _word(self, text: str) -> str:
        """A word in Lark: by its id if it is a special token, which no text can match, else as text."""
        vocabulary = self._read_vocabulary()
        ids = vocabulary.tokenize_str(text, parse_special=True)
        if len(ids) == 1 and vocabulary.is_special_token(ids[0]):
            return f"<[{ids[0]}]>"
        return literal(text)


def hugging_face_vocabulary(tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> LLTokenizer:
    """What llguidance needs of a transformers tokenizer. `vocab_size` is the model's, padding included."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=sorted(eos))


def _error_of(matcher: LLMatcher) -> str:
    """What llguidance says of itself, without the dump of its state behind it."""
    return matcher.get_error().partition("<state>")[0].strip()


def is_bound(request: Request) -> bool:
    """Whether a request asks for an answer of a given form: calls that the model is free to make have one if there may
    be but one, or if a tool is strict."""
    strict = any(tool["function"].get("strict") for tool in request.tools)
    bound = request.tool_choice == "auto" and bool(request.tools) and (strict or not request.parallel_tool_calls)
    return request.grammar is not None or request.forces_tool or bound


def _answer(request: Request, format: ChatFormat, word: Word) -> dict[str, Any]:
    """One of llguidance's grammars for the answer behind the reasoning."""
    if request.grammar is not None:
        return _of(request.grammar)
    if format.tools is None:
        raise RequestError(
            "tools: it is not known how this model writes calls", param="tools", code="tools_unsupported"
        )
    try:
        return {"lark_grammar": tool_grammar(request, format.tools, word)}
    except (AttributeError, TypeError, KeyError, RecursionError) as error:
        raise RequestError(
            f"tools: the parameters are no JSON schema that can be followed ({type(error).__name__}: {error})",
            param="tools",
            code="invalid_grammar",
        ) from error


def _of(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "regex":
        from llguidance import regex_to_lark

        return {"lark_grammar": f"start: /{regex_to_lark(grammar.text)}/"}
    if grammar.kind == "lark":
        return {"lark_grammar": grammar.text}
    return {"json_schema": _schema(grammar.text or '{"type": "object"}')}


def _schema(text: str) -> dict[str, Any]:
    """A schema as llguidance takes it. Raises `RequestError` unless it is a JSON object."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise _refused(f"the schema is no JSON ({error})") from error
    if not isinstance(schema, dict):
        raise _refused(f"the schema must be a JSON object, got {text}")
    return bounded(schema)


def _refused(message: str) -> RequestError:
    return RequestError(f"grammar: {message}", param="grammar", code="invalid_grammar")


def around_reasoning(answer: dict[str, Any], tags: Tags | None, state: ReasoningState, word: Word) -> str:
    """llguidance's form of a grammar whose answer may follow a block of reasoning, which is free."""
    if tags is None or state == "done":
        return json.dumps({"grammars": [answer]})
    block, definition = until("free", word(tags.end))
    start = (
        f"start: {block} gap @answer" if state == "open" else f"start: (gap {word(tags.start)} {block} gap)? @answer"
    )
    lark = f"{start}\n{definition}\ngap: /[ \\t\\n\\r]{{0,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "answer", **answer}]})


class Guide:
    """What one request's next token may be, after any run of tokens that begins with what it generated."""

    def __init__(self, matcher: LLMatcher | None, budget: ReasoningBudget | None, vocab_size: int, eos: frozenset[int]):
        self._fresh, self._matcher = matcher, None if matcher is None else matcher.deep_copy()
        self._budget, self._vocab_size, self._eos = budget, vocab_size, eos
        self._path: list[int] = []  # what the matcher consumed
        self._masks: dict[int, bytes] = {}  # what may follow the first n tokens of the path, a bit for each token
        self._failure: tuple[tuple[int, ...], str] | None = None

    def allowed(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Ids int64 [m], ascending, of what may follow generated `tokens`; None: anything, so behind an end of text.

        What the grammar cannot be asked, since it became too complex, may be anything too; `failure` tells.
        """
        forced = None if self._budget is None else self._budget.forced(tokens)
        if forced is not None:
            return np.array([forced])
        if self._matcher is None or self.failure(tokens) is not None:
            return None
        known = num_shared(self._path, tokens)
        if known == len(tokens) and known in self._masks:
            return self._ids(self._masks[known])
        if any(token in self._eos for token in tokens[known:]):
            return None
        return self._advance(self._matcher, known, tokens)

    def failure(self, tokens: Sequence[int]) -> str | None:
        """Why the grammar was lost on the way to `tokens`, in words; None: it was not."""
        if self._failure is None:
            return None
        path, message = self._failure
        return message if tuple(tokens[: len(path)]) == path else None

    def _advance(self, matcher: LLMatcher, known: int, tokens: Sequence[int]) -> np.ndarray | None:
        if known < len(self._path):
            matcher.rollback(len(self._path) - known)
            del self._path[known:]
            self._masks = {n: mask for n, mask in self._masks.items() if n <= known}
        for token in tokens[known:]:
            if not matcher.validate_tokens([token]) or not matcher.consume_token(token):
                return self._lose(tokens, _error_of(matcher) or f"token {token} does not follow")
            self._path.append(token)
        mask = matcher.compute_bitmask()
        ids = self._ids(mask)
        if matcher.is_error() or not len(ids):
            return self._lose(tokens, _error_of(matcher) or "no token of the vocabulary can follow")
        self._masks[len(tokens)] = mask
        if len(self._masks) > 2 * MAX_DEPTH + 2:
            del self._masks[min(self._masks)]
        return ids

    def _ids(self, mask: bytes) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._vocab_size])

    def _lose(self, tokens: Sequence[int], message: str) -> None:
        """A matcher with an error keeps it, so the next way starts from the beginning."""
        assert self._fresh is not None
        self._failure = tuple(tokens), f"the grammar cannot be followed any further: {message}"
        self._matcher, self._path, self._masks = self._fresh.deep_copy(), [], {}
