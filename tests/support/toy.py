"""A tiny random family: full, sliding-window and recurrent layers, images, and a draft head that is sometimes right.

The next token is mostly a fixed permutation of the current one, disturbed by everything that the layers saw. The head
shares table, permutation and output with the target, but sees the context through a layer of its own, so it guesses
right more often than not and wrong often enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import PIL.Image
import torch

from foreglance import Engine, Message, Request, Result, SamplingParams, Settings, Speculation
from foreglance.batch import TILE
from foreglance.cache.kv import KVSpec
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.models.attention import attend
from foreglance.models.base import HeadSpec, ModelSpec, tiles_of
from foreglance.models.layers import default_inv_freq, embed_rows, interleaved_mrope_axes, rotary_table
from foreglance.ops.numerics import choose
from foreglance.prompt import ImageInput, MRope, Prompter, Rows, make_rows

HIDDEN, HEADS, KV_HEADS, SIZE, WINDOW, CONTEXT = 64, 4, 2, 16, 12, 512
END, IMAGE, TURN = 0, 1, 2
SPECIAL = {"<end>": END, "<image>": IMAGE, "<turn>": TURN}
LETTERS = b"\nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,!?:;-'\"()/<>=+*_#@&" + "é€".encode()
VOCAB = len(SPECIAL) + len(LETTERS)
CACHES = {
    "full": KVSpec(KV_HEADS, SIZE),
    "sliding": KVSpec(KV_HEADS, SIZE, WINDOW),
    "recurrent": RecurrentSpec(((3, 6 * SIZE), (2, SIZE, SIZE))),
}
ALL_KINDS = tuple(CACHES)


class ByteTokenizer:
    """A token is a byte or a special word; characters beyond ASCII need several."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        for word, token in SPECIAL.items():
            text = text.replace(word, chr(0xE000 + token))
        ids = []
        for letter in text:
            special = ord(letter) - 0xE000
            ids += [special] if 0 <= special < 3 else [LETTERS.index(b) + 3 for b in letter.encode()]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(LETTERS[t - 3] for t in token_ids if t >= 3).decode("utf-8", errors="replace")

    all_special_ids = tuple(SPECIAL.values())

    def apply_chat_template(self, conversation, tokenize=False, add_generation_prompt=True) -> str:
        def content(message):
            parts = message["content"]
            if isinstance(parts, str):
                return parts
            return "".join("<image>" if part["type"] == "image" else part["text"] for part in parts)

        turns = [f"<turn>{m['role'][0]}:{content(m)}<end>" for m in conversation]
        return "".join(turns) + ("<turn>a:" if add_generation_prompt else "")


@lru_cache
def toy_ops():
    """What the self-test chooses on this machine."""
    shapes = {(2 * HIDDEN, HIDDEN), (6 * SIZE + 4, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * SIZE), (VOCAB, HIDDEN)}
    return choose("fp32", shapes | {(HIDDEN, 2 * HIDDEN)}, {HIDDEN, SIZE, 2, 6 * SIZE})[0]


class Stack:
    """Layers of the given kinds around a residual stream."""

    def __init__(self, kinds: Sequence[str], rule, generator: torch.Generator):
        self.ops = toy_ops()
        self._kinds = tuple(kinds)

        def draw(*shape):
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        widths = {"full": 2 * HIDDEN, "sliding": 2 * HIDDEN, "recurrent": 6 * SIZE + 4}
        outs = {"full": HIDDEN, "sliding": HIDDEN, "recurrent": 2 * SIZE}
        self._in = [self.ops.pack_linear(2 * draw(widths[kind], HIDDEN)) for kind in kinds]
        self._out = [self.ops.pack_linear(draw(HIDDEN, outs[kind]) * 0.5) for kind in kinds]
        self._conv = draw(6 * SIZE, 4) * 4
        axes = interleaved_mrope_axes([4, 2, 2]) if rule.axes == 3 else torch.zeros(SIZE // 2, dtype=torch.int64)
        self._rotary = rotary_table(default_inv_freq(100.0, SIZE), 2 * CONTEXT, axes)
        self._ones = torch.ones(HIDDEN)

    def __call__(self, x, batch, caches):
        for layer, kind in enumerate(self._kinds):
            mixed = self.ops.linear(self.ops.rms_norm(x, self._ones, 1e-6), self._in[layer], batch.blocks)
            seen = (self._delta if kind == "recurrent" else self._attend)(mixed, layer, batch, caches)
            x = x + self.ops.linear(seen, self._out[layer], batch.blocks)
        return self.ops.rms_norm(x, self._ones, 1e-6)

    def _attend(self, mixed, layer, batch, caches):
        heads = mixed.view(len(mixed), -1, SIZE)
        turned = self.ops.rotary(heads[:, : HEADS + KV_HEADS], *self._rotary.angles(self.ops, batch.positions))
        query, keys = turned[:, :HEADS], turned[:, HEADS:]
        return attend(self.ops, batch, caches, layer, query, keys, heads[:, HEADS + KV_HEADS :], SIZE**-0.5)

    def _delta(self, mixed, layer, batch, caches):
        inputs, a, b = mixed.split([6 * SIZE, 2, 2], -1)
        decay, beta = self.ops.delta_gates(a.contiguous(), b.contiguous(), -torch.ones(2) / 4, torch.zeros(2))
        pieces = []
        for index, part in enumerate(batch.parts):
            rows, cache = batch.rows_of(index), caches[part.sequence].layers[layer]
            tail, state = cache.read()
            out, window = self.ops.causal_conv(inputs[rows], tail, self._conv)
            q, k, v = out.view(-1, 6, SIZE).split(2, 1)
            call = self.ops.delta_chunk if part.chunk else self.ops.delta_rows
            q, k = self.ops.l2_norm(q, 1e-6), self.ops.l2_norm(k, 1e-6)
            out, states = call(q, k, v, decay[rows], beta[rows], state)
            n = part.num_rows
            for i, after in [(n - 1, states)] if part.chunk else enumerate(states):
                cache.write(i + 1, (window[i + 1 : i + 4].clone(), after))
            pieces.append(out.reshape(n, 2 * SIZE))
        return torch.cat(pieces)


class ToyHead:
    """Row t: embedding of input t + 1 and a share of the target's state of row t, through layers of its own."""

    def __init__(self, target: ToyTarget, kinds: Sequence[str], generator: torch.Generator, position_of: str):
        spec = target.spec
        caches = tuple(CACHES[kind] for kind in kinds)
        self.spec = HeadSpec("toy", VOCAB, HIDDEN, spec.rule, caches, 1, position_of, IMAGE)
        self._target, self._stack = target, Stack(kinds, spec.rule, generator)

    def forward(self, batch, caches):
        x = embed_rows(self._stack.ops, self._target.table, batch) + 0.5 * batch.hidden
        return self._stack(x, batch, caches)

    def logits(self, hidden):
        return self._target.logits(hidden)


class ToyTarget:
    def __init__(self, rule=None, eos=(END,), head_kinds=("full",), position_of="input", whole_images=False, seed=0):
        rule = rule or MRope()
        generator = torch.Generator().manual_seed(seed)
        caches = tuple(CACHES[kind] for kind in ALL_KINDS)
        self.spec = ModelSpec("toy", "toy", VOCAB, HIDDEN, CONTEXT, rule, caches, whole_images, IMAGE, frozenset(eos))
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._stack = Stack(ALL_KINDS, rule, generator)
        follows = torch.randperm(VOCAB - 3, generator=generator) + 3  # the permutation; special words follow nothing
        output = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.2
        output[follows] += self.table[3:] * 0.2
        output[:3] = 0
        self._output = self._stack.ops.pack_linear(output)
        self.head = ToyHead(self, head_kinds, generator, position_of) if head_kinds else None

    def forward(self, batch, caches):
        return self._stack(embed_rows(self._stack.ops, self.table, batch), batch, caches)

    def logits(self, hidden):
        return self._stack.ops.linear(hidden, self._output, tiles_of(len(hidden), TILE))

    def prepare(self, picture) -> ImageInput:
        """One row for each 8 x 8 pixels."""
        pixels = picture.pixels
        return ImageInput(picture.digest, (max(1, pixels.height // 8), max(1, pixels.width // 8)))

    def embed_image(self, image: ImageInput) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(image.digest.encode()).digest()[:4], "little")
        return torch.randn(image.num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


@lru_cache
def toy_target(**options) -> ToyTarget:
    return ToyTarget(**options)


def toy_engine(target: ToyTarget | None = None, **settings) -> Engine:
    """A fresh engine; the grid is small so that prompts have several chunks."""
    target = target or toy_target()
    prompter = Prompter(ByteTokenizer(), IMAGE, target.spec.rule, target.prepare)
    return Engine(target, prompter, Settings(**{"grid": 16, "slots": 4, **settings}))


def picture(height: int, width: int, colour: int = 0) -> PIL.Image.Image:
    """A picture of height x width merged rows; another colour is another picture of the same size."""
    return PIL.Image.fromarray(np.full((8 * height, 8 * width, 3), colour, np.uint8))


def ask(text: str, images: Sequence = (), *, draft="none", depth=3, policy="see", **sampling) -> Request:
    """One user message, pictures before the text; drafts off unless asked for."""
    return talk(Message.of("user", text, images), draft=draft, depth=depth, policy=policy, **sampling)


def talk(*messages: Message, draft="none", depth=3, policy="see", **sampling) -> Request:
    params = SamplingParams(**{"max_tokens": 24, **sampling})
    return Request(messages, params, Speculation(draft, depth, policy))


def toy_rows(target: ToyTarget, token_ids: Sequence[int], images: Sequence[ImageInput] = ()) -> Rows:
    return make_rows(token_ids, IMAGE, images, target.spec.rule)


def run(engine: Engine, requests: Sequence[Request], rows: Sequence[Rows] | None = None) -> list[Result]:
    """Run requests together (on prompts that are rows already, if given) and hold what every request is promised:
    exactly one final event, the last one; events that add up to the result; stores that are whole and end empty."""
    rows = rows or [engine.prepare(request) for request in requests]
    for request, prompt in zip(requests, rows, strict=True):
        engine.add_rows(request, prompt)
    events = {request.id: [] for request in requests}
    while not engine.is_idle:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    results = []
    for request in requests:
        *before, last = events[request.id]
        assert last.result is not None and all(event.result is None for event in before)
        tokens = [token for event in events[request.id] for token in event.tokens]
        assert tuple(token.id for token in tokens) == last.result.token_ids
        assert "".join(token.text for token in tokens) == last.result.text
        results.append(last.result)
    return results
