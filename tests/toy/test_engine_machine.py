"""An engine under random use against a plain one: requests of every kind come, step, leave, are saved and come back,
with little memory. Whatever happens, a finished request has the tokens, the text and the end that it has alone, without
drafts, in an engine of its own, and leaves exactly its rows to the next turn; a cancelled one has a beginning of them;
every request ends once; nothing goes wrong unheard; and at the end nothing is held."""

import itertools
import logging
import os
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.toy import END, ByteTokenizer, ask, picture, run, talk, toy_engine, toy_target
from support.toy_chain import chained_target

from foreglance import Message, Speculation
from foreglance.prompt import MRope, OneAxis

IMAGES = [picture(2, 5, 30), picture(4, 3, 60), picture(2, 5, 90)]  # two of one size
PROMPTS = (
    lambda options: ask("hello", **options),
    lambda options: ask("a longer text than one chunk of the prompt has rows, " * 2, **options),
    lambda options: ask("a longer text than one chunk of the prompt has rows, and then it differs", **options),
    lambda options: ask("what is it?", IMAGES[:1], **options),
    lambda options: ask("what is it?", IMAGES[2:], **options),
    lambda options: ask("compare", IMAGES[:2], **options),
    lambda options: talk(
        Message.of("user", "hello", IMAGES[1:2]),
        Message.of("assistant", "hello, hello"),
        Message.of("user", "and this?", IMAGES[:1]),
        **options,
    ),
)
SAMPLINGS = (  # of texts that end at their length, at a stop string, at the end of text; drafts may go beyond each
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5, "seed": 2},
    {"temperature": 0.9, "seed": 3, "logit_bias": {END: 2.5}},
    {"ignore_eos": True},
    {"stop": ("rG ", "Pi-", "2j/")},
    {"temperature": 0.9, "seed": 1, "stop": ("<7#", "Tm)", "nothing like it"), "ignore_eos": True},
)
ENDS = (END, *ByteTokenizer().encode("w"))  # a letter ends the text too, one that drafts often guess
TARGETS = {
    "one module, three axes": lambda: toy_target(rule=MRope(), eos=ENDS),
    "whole images, one axis": lambda: toy_target(rule=OneAxis(), whole_images=True, eos=ENDS),
    "chained modules": lambda: chained_target(MRope(), eos=ENDS),
}


TRIES = int(os.environ.get("FOREGLANCE_TRIES", "1"))  # how much more than usual is drawn at random
LARGE = 1 << 24  # bytes for kept rows, of which none are given up


@cache
def alone(name, prompt, sampling, max_tokens):
    """A request in a plain engine: no drafts, one slot, no reuse."""
    request = PROMPTS[prompt]({**SAMPLINGS[sampling], "max_tokens": max_tokens})
    return run(toy_engine(TARGETS[name](), slots=1, prefix_cache_bytes=0), [request])[0]


class Troubles(logging.Handler):
    """What the package has logged as an error."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


class Engines(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(TARGETS)),
        slots=st.integers(1, 3),
        reuse=st.sampled_from((0, 100_000, LARGE, LARGE)),
        images=st.sampled_from((0, 4_000, 1 << 20)),
    )
    def begin(self, name, slots, reuse, images):
        self.name, self.folder = name, tempfile.TemporaryDirectory()
        layout = {"slots": slots, "prefix_cache_bytes": reuse, "image_cache_bytes": images}
        self.engine = toy_engine(TARGETS[name](), **layout)
        self.open: dict[str, tuple] = {}
        self.left: dict[str, list] = {}  # tokens so far
        self.troubles = Troubles()
        logging.getLogger("foreglance").addHandler(self.troubles)
        self.saved: list[Path] = []
        self.numbers = itertools.count()

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        max_tokens=st.sampled_from((1, 2, 9, 20, 32)),
        draft=st.sampled_from(("mtp", "mtp", "ngram", "none")),
        depth=st.sampled_from((1, 3, 7, "auto")),
        policy=st.sampled_from(("see", "skip", "placeholder")),
    )
    def add(self, prompt, sampling, max_tokens, draft, depth, policy):
        request = PROMPTS[prompt]({**SAMPLINGS[sampling], "max_tokens": max_tokens})
        request = replace(request, speculation=Speculation(draft, depth, policy), id=f"r{next(self.numbers)}")
        self.engine.add(request)
        self.open[request.id] = (prompt, sampling, max_tokens)
        self.left[request.id] = []

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.hear(self.engine.step())

    def hear(self, events):
        for event in events:
            tokens = self.left[event.request_id]
            tokens += event.tokens
            want, ids = alone(self.name, *self.open[event.request_id]), tuple(token.id for token in tokens)
            assert ids == want.token_ids[: len(ids)]
            assert want.text.startswith("".join(token.text for token in tokens))
            if event.result is not None:
                self.compare(event.result, ids, want)
                del self.open[event.request_id], self.left[event.request_id]

    def compare(self, result, ids, want):
        assert result.error is None and result.token_ids == ids
        assert "failed" not in (result.draft.off_because or "")
        if result.finish_reason == "cancelled":
            return
        assert (ids, result.text, result.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        if self.engine.settings.prefix_cache_bytes == LARGE:
            (slot,) = [slot for slot in self.engine.slots() if slot.request_id == result.request_id]
            assert slot.rows == result.timings.prompt_tokens + len(ids) - 1  # all but the last one's own

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.open))))

    @rule(data=st.data())
    def save(self, data):
        """What an idle slot holds, if it still holds something."""
        idle = [slot.id for slot in self.engine.slots() if slot.state == "idle" and slot.rows]
        if idle:
            path = Path(self.folder.name) / f"{next(self.numbers)}"
            self.engine.save_slot(data.draw(st.sampled_from(idle)), path)
            self.saved.append(path)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data):
        idle = [slot.id for slot in self.engine.slots() if slot.state == "idle"]
        if idle and self.engine.settings.prefix_cache_bytes == LARGE:  # a smaller one may refuse
            self.engine.restore_slot(data.draw(st.sampled_from(idle)), data.draw(st.sampled_from(self.saved)))

    @rule(data=st.data())
    def erase(self, data):
        idle = [slot.id for slot in self.engine.slots() if slot.state == "idle" and slot.rows]
        if idle:
            self.engine.erase_slot(data.draw(st.sampled_from(idle)))

    @invariant()
    def the_stores_are_whole(self):
        self.engine.check()
        for sequence in self.engine._scheduler.running:
            if sequence.id in self.engine._store:
                assert self.engine._store[sequence.id].rows == sequence.committed
        assert self.engine._prefixes.bytes_held <= self.engine.settings.prefix_cache_bytes
        assert self.engine._embeddings.bytes_held <= self.engine.settings.image_cache_bytes
        assert not self.troubles.messages

    def teardown(self):
        """All the rest runs to its end, and then nothing is held but what may be reused."""
        logging.getLogger("foreglance").removeHandler(self.troubles)
        while not self.engine.is_idle:
            self.hear(self.engine.step())
        assert not self.open
        self.engine.check()
        assert not self.engine._running and not self.engine._scheduler.running and not self.engine._scheduler.waiting
        self.engine._prefixes.clear()
        assert len(self.engine._prefixes) == 0 == self.engine._prefixes.bytes_held
        self.folder.cleanup()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=16 * TRIES, stateful_step_count=25)
