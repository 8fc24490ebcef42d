"""The toy family with grammars, and with tags around reasoning."""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from foreglance import Engine
from foreglance.chat_format import ChatFormat, Tags
from foreglance.grammar import Grammars
from foreglance.prompt import Prompter
from support.toy import END, IMAGE, LETTERS, SPECIAL, ByteTokenizer, ToyTarget, toy_engine

TAGS = Tags("<t>", "</t>")


class Vocabulary:
    """What llguidance asks of a tokenizer."""

    eos_token_id, bos_token_id = END, None
    special_token_ids = tuple(SPECIAL.values())
    tokens = (*map(str.encode, SPECIAL), *(bytes([letter]) for letter in LETTERS))

    def __call__(self, text: bytes) -> list[int]:
        """Letters that no token has are left out."""
        return [LETTERS.index(letter) + len(SPECIAL) for letter in text if letter in LETTERS]


class Thinker(ByteTokenizer):
    """Its prompts end inside a block of reasoning."""

    def apply_chat_template(self, conversation, tokenize=False, add_generation_prompt=True) -> str:
        return super().apply_chat_template(conversation, tokenize, add_generation_prompt) + TAGS.start


@lru_cache
def toy_grammars() -> Grammars:
    return Grammars(lambda: LLTokenizer(TokenizerWrapper(Vocabulary())))


def with_grammars(engine: Engine, reasoning: Tags | None = None, opened: bool = False) -> Engine:
    """The same engine, fresh, whose answers may have a form and, with `reasoning`, begin with a block of it."""
    target = engine.target
    tokenizer = Thinker() if opened else ByteTokenizer()
    format = ChatFormat(None, reasoning, "")
    prompter = Prompter(tokenizer, IMAGE, target.spec.rule, target.prepare, format, toy_grammars())
    return Engine(target, prompter, engine.settings, draft_model=engine._draft_model)


def grammar_engine(target: ToyTarget | None = None, reasoning: Tags | None = None, opened=False, **settings) -> Engine:
    return with_grammars(toy_engine(target, **settings), reasoning, opened)
