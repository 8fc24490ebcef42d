"""An engine under random use against a plain one: requests of every kind come, step, leave, are saved and come back,
with little memory. Whatever happens, a finished request has the tokens that it has alone, without drafts, in an engine
of its own; a cancelled one has a beginning of them; every request ends once; and at the end nothing is held."""

import itertools
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.toy import ask, picture, run, talk, toy_engine, toy_target
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
SAMPLINGS = ({}, {"temperature": 0.9, "seed": 1}, {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5, "seed": 2})
TARGETS = {
    "one module, three axes": lambda: toy_target(rule=MRope()),
    "whole images, one axis": lambda: toy_target(rule=OneAxis(), whole_images=True),
    "chained modules": lambda: chained_target(MRope()),
}


@cache
def alone(name, prompt, sampling, max_tokens):
    """The tokens of a request in a plain engine: no drafts, one slot, no reuse."""
    request = PROMPTS[prompt]({**SAMPLINGS[sampling], "max_tokens": max_tokens})
    return run(toy_engine(TARGETS[name](), slots=1, prefix_cache_bytes=0), [request])[0].token_ids


class Engines(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(TARGETS)),
        slots=st.integers(1, 3),
        reuse=st.sampled_from((0, 100_000, 1 << 24)),
        images=st.sampled_from((0, 4_000, 1 << 20)),
    )
    def begin(self, name, slots, reuse, images):
        self.name, self.folder = name, tempfile.TemporaryDirectory()
        layout = {"slots": slots, "prefix_cache_bytes": reuse, "image_cache_bytes": images}
        self.engine = toy_engine(TARGETS[name](), **layout)
        self.open: dict[str, tuple] = {}
        self.left: dict[str, list[int]] = {}
        self.saved: list[Path] = []
        self.numbers = itertools.count()

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        max_tokens=st.sampled_from((1, 9, 20)),
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
            tokens += [token.id for token in event.tokens]
            want = alone(self.name, *self.open[event.request_id])
            assert tuple(tokens) == want[: len(tokens)]
            if event.result is not None:
                assert event.result.error is None and event.result.token_ids == tuple(tokens)
                assert "failed" not in (event.result.draft.off_because or "")
                assert event.result.finish_reason == "cancelled" or tuple(tokens) == want
                del self.open[event.request_id], self.left[event.request_id]

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
        if idle and self.engine.settings.prefix_cache_bytes == 1 << 24:  # a smaller one may refuse
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

    def teardown(self):
        """All the rest runs to its end, and then nothing is held but what may be reused."""
        while not self.engine.is_idle:
            self.hear(self.engine.step())
        assert not self.open
        self.engine.check()
        assert not self.engine._running and not self.engine._scheduler.running and not self.engine._scheduler.waiting
        self.engine._prefixes.clear()
        assert len(self.engine._prefixes) == 0 == self.engine._prefixes.bytes_held
        self.folder.cleanup()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=12, stateful_step_count=25)
