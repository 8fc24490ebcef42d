"""A whole text model as the draft of a model that sees images: never another token, and draft rows that are right."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from support.toy import (
    ALL_KINDS,
    CACHES,
    VOCAB,
    ByteTokenizer,
    Stack,
    ToyTarget,
    ask,
    picture,
    run,
    talk,
    toy_engine,
    toy_rows,
    toy_target,
)

from foreglance import Engine, Message, RequestError
from foreglance.drafters.independent import IndependentDrafter
from foreglance.images import open_picture
from foreglance.prompt import MRope, OneAxis

WIDE, TALL, DOT = picture(2, 9, 40), picture(5, 3, 90), picture(1, 1, 200)
PROMPTS = {
    "text": ("say {salt} or say {salt} again", []),
    "one image": ("what <image>is {salt} here?", [WIDE]),
    "two images": ("compare <image> {salt} <image>, please", [TALL, WIDE]),
    "image at the very end": ("{salt}, see <image>", [TALL]),
    "image at the very start": ("<image>{salt}", [WIDE]),
    "nothing but an image": ("<image>", [TALL]),
    "one row": ("s", []),
}
SHAPES = (*PROMPTS, "image in turn 2")
SALTS = ("red", "green, or not", "a very long name of something blue")


@lru_cache
def toy_draft(kinds=ALL_KINDS, rule=None, context=None, seed=7) -> ToyTarget:
    """The toy target's table and permutation around layers of its own: right more often than not."""
    draft = ToyTarget(rule=rule or MRope(), head_kinds=())
    draft._stack = Stack(kinds, draft.spec.rule, torch.Generator().manual_seed(seed))
    caches = tuple(CACHES[kind] for kind in kinds)
    draft.spec = replace(draft.spec, name="toy-draft", caches=caches, context=context or draft.spec.context)
    return draft


HYBRID, SIMPLE = toy_draft(), toy_draft(("full", "full"), OneAxis())


def engine_with(draft, target=None, drafter=IndependentDrafter, **settings):
    plain = toy_engine(target, **settings)
    vocab_size = plain.target.spec.vocab_size
    return Engine(
        plain.target,
        plain._prompter,
        plain.settings,
        draft_model=lambda around: drafter(draft, vocab_size, around.capacity),
    )


def prompt(shape: str, salt: str, target=None, **options):
    target = target or toy_target()
    if shape == "image in turn 2":
        turns = [Message.of("user", f"hello {salt}"), Message.of("assistant", "hello, hello")]
        request = talk(*turns, Message.of("user", "and this?", [TALL, DOT]), **options)
        return request, toy_engine(target).prepare(request)
    text, images = PROMPTS[shape]
    inputs = [target.prepare(open_picture(image, 10**6)) for image in images]
    return ask(text, **options), toy_rows(target, ByteTokenizer().encode(text.format(salt=salt)), inputs)


@lru_cache
def alone(shape: str, salt: str, temperature: float, seed: int, target=None, max_tokens: int = 24):
    """Tokens with drafts off and nobody else in the engine."""
    request, rows = prompt(shape, salt, target, temperature=temperature, seed=seed, max_tokens=max_tokens)
    return run(toy_engine(target), [request], [rows])[0].token_ids


def run_prompts(engine, pairs):
    return run(engine, [request for request, _ in pairs], [rows for _, rows in pairs])


@pytest.mark.case("A24", "A25")
@pytest.mark.parametrize("draft", (HYBRID, SIMPLE), ids=("M-RoPE hybrid", "one axis"))
@pytest.mark.parametrize("num_sequences", (1, 3))
@pytest.mark.parametrize("depth", (1, 3, 7))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_second_model_never_changes_a_token(shape, depth, num_sequences, draft):
    """Cases A24, A25."""
    for temperature in (0.0, 0.8):
        options = {"draft": "model", "depth": depth, "temperature": temperature}
        salts = SALTS[:num_sequences]
        pairs = [prompt(shape, salt, seed=seed, **options) for seed, salt in enumerate(salts)]
        for seed, (salt, result) in enumerate(zip(salts, run_prompts(engine_with(draft), pairs), strict=True)):
            assert (result.finish_reason, result.error) == ("length", None)
            assert result.draft.kind == "model" and result.draft.off_because is None
            assert result.token_ids == alone(shape, salt, temperature, seed)
            assert sum(result.timings.drafted) > 0


@pytest.mark.parametrize("kinds", (("full",), ("sliding",), ("recurrent",), ("sliding", "recurrent", "full")))
@pytest.mark.parametrize("rule", (MRope(), OneAxis()), ids=("mrope", "one-axis"))
def test_a_draft_of_any_kind_of_layer_is_right_and_wrong_and_changes_nothing(kinds, rule):
    target = toy_target(rule=OneAxis())
    pairs = [prompt("two images", s, target, draft="model", depth=4, max_tokens=40) for s in SALTS]
    results = run_prompts(engine_with(toy_draft(kinds, rule), target), pairs)
    for salt, result in zip(SALTS, results, strict=True):
        assert result.token_ids == alone("two images", salt, 0.0, 0, target, 40)
    accepted, drafted = (sum(sum(part) for part in lists) for lists in zip(*map(counts, results), strict=True))
    assert 0.2 < accepted / drafted < 0.95


def counts(result):
    return result.timings.accepted, result.timings.drafted


class Watched(IndependentDrafter):
    """Keeps what each forward computed, and holds after every round that guesses and rows are those of a draft that
    begins from nothing with the text as it is known."""

    rest = range(0)  # rounds in which nothing may be guessed
    check_guesses = True

    def __init__(self, model, vocab_size, capacity=None):
        super().__init__(model, vocab_size, capacity)
        self.model, self.vocab_size = model, vocab_size
        self.forwards, self.rounds, self.compared = [], 0, 0
        forward = self._runner.forward

        def recorded(parts, inputs):
            batch, hidden = forward(parts, inputs)
            self.forwards.append(batch)
            return batch, hidden

        self._runner.forward = recorded

    def propose(self, settled):
        self.rounds += 1
        if self.rounds in self.rest:
            settled = [one._replace(depth=0) for one in settled]
        guesses = super().propose(settled)
        for one in settled if self.check_guesses else ():
            if one.depth and one.sequence.finish is None:
                self.compared += 1
                assert guesses[one.sequence.id] == self.from_nothing(one)
        return guesses

    def from_nothing(self, one):
        fresh = IndependentDrafter(self.model, self.vocab_size)
        report = one.sequence.report
        fresh.admit(one.sequence, None)
        one.sequence.report = report
        return fresh.propose([one])[one.sequence.id]


@pytest.mark.parametrize("draft", (HYBRID, SIMPLE), ids=("M-RoPE hybrid", "one axis"))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_after_any_verdict_the_draft_stands_where_the_text_stands(draft, temperature):
    engine = engine_with(draft, drafter=Watched)
    options = {"draft": "model", "temperature": temperature, "max_tokens": 30}
    pairs = [
        prompt(shape, salt, depth=depth, seed=depth, **options)
        for shape, salt, depth in zip(("two images", "text", "image in turn 2"), SALTS, (2, 5, 7), strict=True)
    ]
    results = run_prompts(engine, pairs)
    watched = engine._drafters["model"]
    assert watched.compared > 20
    assert all(0 < sum(r.timings.accepted) < sum(r.timings.drafted) for r in results)


def test_accepted_rows_are_not_computed_twice():
    """With the target itself as its draft every guess stands, and each row of the text is computed once."""
    target = toy_target(rule=OneAxis())
    for rule in (OneAxis(), MRope()):
        engine = engine_with(toy_target(rule=rule), target, Watched)
        engine._drafters["model"].check_guesses = False
        request, rows = prompt("text", "red", target, draft="model", depth=3, max_tokens=25)
        (result,) = run(engine, [request], [rows])
        assert result.timings.acceptance == 1.0, "equal axes are one axis, and no state may be off"
        tokens = [t for batch in engine._drafters["model"].forwards for t in batch.token_ids.tolist()]
        assert tokens == [*rows.token_ids.tolist(), *result.token_ids][: len(tokens)]
        assert len(tokens) >= len(rows) + 23


@pytest.mark.case("A25")
@pytest.mark.parametrize("draft", (HYBRID, SIMPLE), ids=("M-RoPE hybrid", "one axis"))
@pytest.mark.parametrize("shape", ("two images", "image in turn 2", "image at the very end"))
def test_the_draft_sees_the_text_alone_at_positions_of_its_own(draft, shape):
    engine = engine_with(draft, drafter=Watched)
    request, rows = prompt(shape, "red", draft="model", depth=1, max_tokens=2)
    run(engine, [request], [rows])
    batches = engine._drafters["model"].forwards
    text = rows.token_ids[~rows.is_image].tolist()
    seen = [token for batch in batches for token in batch.token_ids.tolist()]
    assert seen[: len(text)] == text and 1 not in seen
    positions = torch.cat([batch.positions for batch in batches], 1)
    assert positions.tolist() == [list(range(len(seen)))] * draft.spec.rule.axes
    assert all(batch.image_rows is None for batch in batches)


def test_all_sequences_share_one_forward_for_each_depth():
    engine = engine_with(SIMPLE, drafter=Watched)
    watched = engine._drafters["model"]
    watched.check_guesses = False
    pairs = [prompt("one row", "", draft="model", depth=3, max_tokens=20, seed=n) for n in range(3)]
    for request, rows in pairs:
        engine.add_rows(request, rows)
    for _ in range(5):
        engine.step()
    del watched.forwards[:]
    engine.step()
    assert [len(batch.parts) for batch in watched.forwards] == [3, 3, 3]
    assert all(part.num_rows == 1 for batch in watched.forwards[1:] for part in batch.parts)


@pytest.mark.parametrize("draft", (HYBRID, SIMPLE), ids=("M-RoPE hybrid", "one axis"))
@pytest.mark.parametrize("longest_wait", (256, 6))
def test_while_nothing_is_drafted_the_draft_rests_and_catches_up_later(monkeypatch, draft, longest_wait):
    """In pieces if it fell far behind."""
    for module in ("chains", "independent"):
        monkeypatch.setattr(f"foreglance.drafters.{module}.MAX_WAITING", longest_wait)
    engine = engine_with(draft, drafter=Watched)
    watched = engine._drafters["model"]
    watched.rest, watched.forwards_at = range(8, 24), defaultdict(int)
    request, rows = prompt("one image", "red", draft="model", depth=3, max_tokens=60)
    engine.add_rows(request, rows)
    results = []
    while not engine.is_idle:
        before = len(watched.forwards)
        results += [event.result for event in engine.step() if event.result]
        watched.forwards_at[watched.rounds] = len(watched.forwards) - before
        engine.check()
    assert results[0].token_ids == alone("one image", "red", 0.0, 0, None, 60)
    resting = sum(watched.forwards_at[n] for n in watched.rest)
    assert resting == 0 if longest_wait == 256 else 2 <= resting <= 4
    assert all(p.num_rows <= longest_wait for b in watched.forwards[2:] for p in b.parts if p.positions.at(0)[0] > 30)
    assert watched.forwards_at[24] >= 3 and sum(results[0].timings.accepted) > 0


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_one_batch_may_hold_every_kind_of_draft(temperature):
    engine, kinds = engine_with(HYBRID, slots=5), []
    for number, shape in enumerate(SHAPES):
        kinds += [(shape, number, {"draft": "model", "depth": 1 + number % 7})]
        kinds += [(shape, number, {"draft": ("mtp", "none", "ngram")[number % 3], "depth": 4})]
    pairs = [prompt(shape, "x", seed=n, temperature=temperature, **options) for shape, n, options in kinds]
    for (shape, number, options), result in zip(kinds, run_prompts(engine, pairs), strict=True):
        assert result.draft.kind == options["draft"]
        assert result.draft.model == ("toy-draft" if options["draft"] == "model" else None)
        assert result.token_ids == alone(shape, "x", temperature, number)


@pytest.mark.case("B1", "B5")
@pytest.mark.parametrize("draft", (HYBRID, SIMPLE), ids=("M-RoPE hybrid", "one axis"))
def test_a_second_turn_reuses_the_rows_of_target_and_draft(draft):
    """Cases B1, B5: the draft goes on where it stood, whatever was drafted when the first turn ended."""
    first = [Message.of("user", "what is red here, and why is it red?", [WIDE])]
    for depth in (1, 4):
        engine = engine_with(draft, drafter=Watched)
        watched = engine._drafters["model"]
        (one,) = run(engine, [talk(*first, draft="model", depth=depth)])
        answer = Message.of("assistant", one.text.replace("�", ""))
        second = [*first, answer, Message.of("user", "and now?", [DOT])]
        del watched.forwards[:]
        (two,) = run(engine, [talk(*second, draft="model", depth=depth)])
        (fresh,) = run(toy_engine(), [talk(*second)])
        reused, rows = two.timings.cached_rows, toy_engine().prepare(talk(*second))
        assert reused >= 32 and two.token_ids == fresh.token_ids
        start = int(watched.forwards[0].positions[0, 0])
        assert start == (~rows.is_image[:reused]).sum(), "draft rows of the reused prefix are not computed again"


def test_a_text_that_ends_within_its_guesses_leaves_no_row_of_them():
    """Else a conversation that goes on differently there would be drafted for with a row too many."""
    tokens = alone("text", "red", 0.0, 0, toy_target(rule=OneAxis()))
    end = next(token for n, token in enumerate(tokens) if n > 2 and token not in tokens[:n])
    itself = ToyTarget(rule=OneAxis(), eos=(end,))
    engine = engine_with(itself, itself)
    request, rows = prompt("text", "red", itself, draft="model", depth=7)
    (result,) = run(engine, [request], [rows])
    assert result.finish_reason == "stop" and result.token_ids[-1] == end
    points = [node.point for node in engine._prefixes.nodes()]
    assert points and all(point.draft_rows == point.rows for point in points)


def test_the_same_prompt_twice_drafts_as_before():
    engine = engine_with(HYBRID, drafter=Watched)
    requests = [prompt("two images", "red", draft="model", depth=5) for _ in range(3)]
    results = [run(engine, [request], [rows])[0] for request, rows in requests]
    assert results[1].timings.cached_rows > 0
    assert len({result.token_ids for result in results}) == 1
    assert len({counts(result) for result in results}) == 1


@pytest.mark.parametrize("num_steps", (0, 1, 2, 3, 5))
def test_a_cancelled_request_leaves_nothing_behind(num_steps):
    engine = engine_with(HYBRID)
    pairs = [prompt("two images", salt, draft="model", depth=4) for salt in SALTS[:2]]
    for request, rows in pairs:
        engine.add_rows(request, rows)
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel(pairs[0][0].id)
    events = []
    while not engine.is_idle:
        events += engine.step()
        engine.check()
    results = {event.request_id: event.result for event in events if event.result}
    assert results[pairs[0][0].id].finish_reason == "cancelled"
    assert results[pairs[1][0].id].token_ids == alone("two images", SALTS[1], 0.0, 0)
    again = prompt("two images", SALTS[0], draft="model", depth=4)
    assert run_prompts(engine, [again])[0].token_ids == alone("two images", SALTS[0], 0.0, 0)


@pytest.mark.parametrize("context", (8, 30, 45))
def test_a_text_that_outgrows_the_draft_is_finished_without_it(context):
    """Nor is a row of it ever asked for that lies beyond its context."""
    small = toy_draft(ALL_KINDS, MRope(), context)
    pairs = [prompt("one image", "red", draft="model", depth=7), prompt("one row", "", draft="model", depth=7)]
    engine = engine_with(small, drafter=Watched)
    watched = engine._drafters["model"]
    watched.check_guesses = False
    results = run_prompts(engine, pairs)
    assert max(int(batch.positions.max()) for batch in watched.forwards) < context
    for shape, salt, result in zip(("one image", "one row"), ("red", ""), results, strict=True):
        assert (result.error, result.draft.kind) == (None, "model")
        assert result.token_ids == alone(shape, salt, 0.0, 0)
        outgrown = len(toy_text(shape, salt)) + 22 > context
        assert (f"outgrew the {context} rows" in (result.draft.off_because or "")) == outgrown
    assert sum(results[1].timings.drafted) > 0


def toy_text(shape, salt):
    rows = prompt(shape, salt)[1]
    return rows.token_ids[~rows.is_image]


class OtherPadding:
    """A draft whose vocabulary is padded otherwise than the target's."""

    def __init__(self, draft: ToyTarget, vocab_size: int):
        self.spec, self._draft, self.seen = replace(draft.spec, vocab_size=vocab_size), draft, set()

    def forward(self, batch, caches):
        self.seen |= set(batch.token_ids.tolist())
        return self._draft.forward(batch, caches)

    def logits(self, hidden):
        logits = self._draft.logits(hidden)
        more = torch.full((len(logits), max(0, self.spec.vocab_size - VOCAB)), 1e3)  # would win
        return torch.cat([logits[:, : self.spec.vocab_size], more], 1)


@pytest.mark.parametrize("vocab_size", (VOCAB - 6, VOCAB, VOCAB + 9))
def test_a_vocabulary_padded_otherwise_changes_nothing(vocab_size):
    """Guesses stay within the target's ids; an id that the draft lacks is no fault, and it is given all that it has."""
    draft = OtherPadding(HYBRID, vocab_size)
    for temperature, more in ((0.0, {}), (0.8, {"logit_bias": {VOCAB - 1: 2.0}, "repetition_penalty": 1.1})):
        options = {"temperature": temperature, "max_tokens": 40, **more}
        pairs = [prompt("one image", salt, draft="model", depth=3, **options) for salt in SALTS]
        plain = [prompt("one image", salt, **options) for salt in SALTS]
        results = run_prompts(engine_with(draft), pairs)
        for one, other in zip(results, run_prompts(toy_engine(), plain), strict=True):
            assert one.token_ids == other.token_ids and one.draft.off_because is None
            assert sum(one.timings.accepted) > 0
    assert max(draft.seen) < vocab_size and (VOCAB - 1 in draft.seen) == (vocab_size >= VOCAB)


def test_auto_prefers_the_second_model_and_its_absence_is_said():
    (result,) = run(engine_with(HYBRID), [ask("hello", draft="auto", depth=2)])
    assert (result.draft.kind, result.draft.model) == ("model", "toy-draft")
    (result,) = run(toy_engine(), [ask("hello", draft="auto", depth=2)])
    assert (result.draft.kind, result.draft.model) == ("mtp", None)
    with pytest.raises(RequestError, match="no second model") as error:
        toy_engine().add(ask("hello", draft="model"))
    assert (error.value.param, error.value.code) == ("draft", "draft_unavailable")
