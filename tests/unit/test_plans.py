"""Plans: a recorded step computes what the forward computes, bit for bit; what cannot be recorded is run as it is."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.kernels import twin

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.batch import InputSpec, Part, pack
from foreglance.bench.plans import profile
from foreglance.cache.store import CacheStore
from foreglance.drafters import context
from foreglance.drafters.mtp import MtpDrafter
from foreglance.drafters.mtp_chain import ChainDrafter
from foreglance.drafters.shared_cache import SharedCacheDrafter
from foreglance.models import gemma4_assistant, plans, qwen3_5
from foreglance.models.plans import Plans
from foreglance.ops.native import NativeOps, native_module
from foreglance.ops.numerics import kernels_are_native
from foreglance.prompt import OneAxis, Positions
from foreglance.sequence import Sequence

pytestmark = pytest.mark.skipif(not kernels_are_native(), reason="native kernels are missing or switched off")
SETTINGS = Settings(weights="fp32", slots=2, prefix_cache_bytes=0, try_drafts=False)


def answers(model, planned, requests, threads=1, slots=2):
    """Tokens by request, of an engine whose steps are recorded or of one that records nothing."""
    engine = Engine.load(model, replace(SETTINGS, slots=slots))
    native_module().threads(threads)
    head = engine.target.head
    parts = () if head is None else head.modules if head.spec.num_modules > 1 else (head,)
    recorders = [engine.target.plans, *(part.plans for part in parts)]
    if not planned:
        for plans in recorders:
            plans.refused = "nothing is recorded here"
    tokens = {engine.add(request): [] for request in requests}
    while not engine.is_idle:
        for event in engine.step():
            tokens[event.request_id] += event.tokens
    assert all(bool(plans.refused) != planned for plans in recorders), [plans.refused for plans in recorders]
    return list(tokens.values())


def requests_of(temperature):
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=3, logprobs=2)
    return [
        Request.from_prompt(text, sampling=sampling, speculation=Speculation("auto", depth))
        for text, depth in (("Hello!", 3), ("What is this?", 1))
    ]


@pytest.mark.parametrize("model", ("tiny-qwen", "tiny-step", "tiny-gemma", "tiny-text"))
def test_a_recorded_step_has_the_bits_of_the_forward(model):
    """Two sequences, drafts on. Tokens carry log-probabilities, equal as numbers, and which of them were guessed."""
    for temperature in (0.0, 0.8):
        recorded, plain = (answers(model, planned, requests_of(temperature)) for planned in (True, False))
        assert recorded == plain and all(len(tokens) > 3 for tokens in plain)


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_a_chain_of_modules_guesses_alike_in_recorded_calls(temperature, monkeypatch):
    """One sequence at a time, fewer guesses than modules and more. The draft rows that stay are alike too: a wrong one
    would show in the guesses after it."""
    sampling = SamplingParams(max_tokens=90, temperature=temperature, seed=3, logprobs=2, ignore_eos=True)
    once, guesses = [], []
    original, propose = ChainDrafter._at_once, ChainDrafter.propose

    def noted(drafter, one):
        tokens = original(drafter, one)
        once.append(0 if tokens is None else len(tokens))
        return tokens

    def proposed(drafter, settled):
        tokens = propose(drafter, settled)
        guesses.append(tokens)
        return tokens

    monkeypatch.setattr(ChainDrafter, "_at_once", noted)
    monkeypatch.setattr(ChainDrafter, "propose", proposed)
    for depth in (2, 7):
        requests = [
            Request.from_prompt(text, sampling=sampling, speculation=Speculation("auto", depth))
            for text in ("Hello!", "What is this?", "Hello!", "Why?")
        ]
        found = []
        for planned in (True, False):
            once.clear()
            guesses.clear()
            found.append((answers("tiny-step", planned, requests, slots=1), list(guesses)))
            assert (max(once) == depth) == planned
        assert found[0] == found[1]


@pytest.mark.parametrize("slots", (1, 3))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_an_assistant_guesses_alike_in_recorded_calls(temperature, slots, monkeypatch):
    """Within the window of its sliding layers and beyond it, alone and together: the same tokens and guesses."""
    sampling = SamplingParams(max_tokens=90, temperature=temperature, seed=3, ignore_eos=True)
    original, guesses = SharedCacheDrafter.propose, []

    def noted(drafter, settled):
        tokens = original(drafter, settled)
        guesses.append(list(tokens.values()))
        return tokens

    monkeypatch.setattr(SharedCacheDrafter, "propose", noted)
    for depth in (2, 5):
        found = []
        for planned in (True, False):
            guesses.clear()
            engine = Engine.load("tiny-gemma", replace(SETTINGS, slots=slots), draft_model="tiny-gemma-assistant")
            with monkeypatch.context() as patched:
                if not planned:
                    patched.setattr(SharedCacheDrafter, "_at_once", lambda drafter, due: None)
                else:
                    patched.setattr(gemma4_assistant.Gemma4Assistant, "forward", None)  # not called
                requests = [
                    Request.from_prompt(text, sampling=sampling, speculation=Speculation("auto", deep))
                    for text, deep in (("Hello!", depth), ("What is this? " * 100, depth), ("Who are you?", depth + 1))
                ]
                tokens = [result.token_ids for result in engine.generate(requests)]
            assert max(len(own) for one in guesses for own in one) == depth + 1
            assert max(len(one) for one in guesses) == slots
            found.append((tokens, list(guesses)))
        assert found[0] == found[1]


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_a_head_guesses_for_several_in_recorded_calls(temperature, monkeypatch):
    """Six sequences of different lengths and depths, more rows than a tile, and one with a filter beside them: the
    guesses of unrecorded rows."""
    once, guesses = [], []
    original, at_once = MtpDrafter.propose, MtpDrafter._at_once

    def noted(drafter, settled):
        tokens = original(drafter, settled)
        guesses.append(sorted(tokens.items()))
        return tokens

    def noted_at_once(drafter, owing):
        num_rows = sum(one.num_rows for one in owing)
        tokens = at_once(drafter, owing)
        once.append((len(tokens), num_rows))
        return tokens

    monkeypatch.setattr(plans, "TILE", 8)
    monkeypatch.setattr(MtpDrafter, "propose", noted)
    monkeypatch.setattr(MtpDrafter, "_at_once", noted_at_once)
    requests = [
        Request.from_prompt(
            text,
            sampling=SamplingParams(
                max_tokens=130 + depth, temperature=temperature, seed=depth, top_k=top_k, ignore_eos=True
            ),
            speculation=Speculation("auto", depth),
        )
        for text, depth, top_k in (
            ("Hello!", 2, 0), ("Why? " * 100, 5, 0), ("What is this?", 8, 0), ("So", 4, 9), ("Who are you?", 7, 0),
            ("Tell me about you", 6, 0),
        )
    ]  # fmt: skip
    found = []
    for planned in (True, False):
        once.clear(), guesses.clear()
        tokens = answers("tiny-qwen", planned, requests, slots=6)
        assert any(count >= 5 and num_rows > 8 for count, num_rows in once) == planned, once
        found.append((tokens, list(guesses)))
    assert found[0] == found[1]


def test_threads_that_run_a_recorded_step_change_no_bit():
    """A thread that was late to leave one list once went on in the next one."""
    try:
        alone, together = (answers("tiny-qwen", True, requests_of(0.8), threads) for threads in (1, 3))
    finally:
        native_module().threads(1)
    assert alone == together


def batch_of(store, token_ids):
    n = len(token_ids)
    part = Part(0, np.array(token_ids), np.zeros(n, bool), Positions.run(0, n, 1), n, False)
    store.reserve(0, n)
    return pack([part], InputSpec(10, 4, None, OneAxis()), store.held())


def test_a_forward_that_computes_outside_the_kernels_is_run_as_it_is():
    ops, store = NativeOps(twin("fp32"), "fp32"), CacheStore(())
    store.open(0)
    table = torch.arange(40.0).view(10, 4)
    doubled = Plans(ops, lambda batch, caches: ops.embedding(table, batch.token_ids) * 2)
    for ids in ([1, 2], [3, 4], [5, 6]):
        assert torch.equal(doubled(batch_of(store, ids), {0: store[0]}), table[ids] * 2)
    assert doubled.refused is not None and "mul" in doubled.refused


def test_rows_beyond_a_tile_are_run_as_they_are():
    ops, store = NativeOps(twin("fp32"), "fp32"), CacheStore(())
    store.open(0)
    table, calls = torch.arange(40.0).view(10, 4), []

    def forward(batch, caches):
        calls.append(batch.num_rows)
        return ops.embedding(table, batch.token_ids)

    plans = Plans(ops, forward)
    for _ in range(4):
        plans(batch_of(store, [7] * 17), {0: store[0]})
        plans(batch_of(store, [8, 9]), {0: store[0]})
    assert calls.count(17) == 4 and calls.count(2) == 2  # once as it is, once recorded


@pytest.mark.parametrize(
    "model, assistant, guessing",
    [
        ("tiny-qwen", None, {"draft head, first guess": 1, "draft head, one guess more": 2}),
        ("tiny-step", None, {"draft modules, rows and guesses of all": 1}),
        ("tiny-gemma", "tiny-gemma-assistant", {"assistant, one guess": 3}),
    ],
)
def test_a_profile_shows_every_line_of_a_drafted_step_and_changes_no_answer(model, assistant, guessing):
    """How often each list runs in a step; a step whose number of rows is met for the first time is not recorded."""
    engine = Engine.load(model, replace(SETTINGS, slots=1), draft_model=assistant)
    request = Request.from_prompt("Hello!", sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    before = engine.generate(request)[0].token_ids
    reports = profile(engine, request, depth=3)
    runs = Counter()
    for report in reports:
        runs[report.who] += report.runs
        assert all(line.microseconds >= 0 and line.what for line in report.lines) and report.microseconds > 0
        kernels = [line.kernel for line in report.lines]
        assert "linear_fp32" in kernels and ("pick_rows" in kernels) == ("guess" in report.who or "picks" in report.who)
    step = "target, forward, output head and picks"
    assert [(one.num_rows, one.runs) for one in reports if one.who == step] == [(1, 1), (4, 1)]
    assert all(0.7 * often < runs[who] <= often for who, often in guessing.items())
    if model == "tiny-qwen":
        assert 0.7 < runs["draft head"] <= 1
        products = [line.what for line in reports[0].lines if line.kernel == "linear_fp32"]
        assert len(products) == 25 and products[0] == "n = 1, 192 to 776"
    assert engine.generate(request)[0].token_ids == before


def test_a_head_that_guesses_from_a_part_of_the_vocabulary_changes_no_token(monkeypatch):
    """Recorded guesses are those of the full row of logits, in which tokens outside part and context have no chance."""
    full = answers("tiny-qwen", True, requests_of(0.8))
    monkeypatch.setattr(qwen3_5, "DRAFT_VOCABULARY", 300)
    head = Engine.load("tiny-qwen", SETTINGS).target.head
    logits = head.logits(torch.randn(2, head.spec.hidden_size, generator=torch.Generator().manual_seed(1)))
    assert logits.shape == (2, head.spec.vocab_size) and logits.isfinite().sum(1).tolist() == [300, 300]
    recorded, plain = (answers("tiny-qwen", planned, requests_of(0.8)) for planned in (True, False))
    assert recorded == plain
    for some, all_of_them in zip(recorded, full, strict=True):
        assert [token.id for token in some] == [token.id for token in all_of_them]
        drafted = [token.id for token in some if token.depth]
        assert drafted and len(drafted) < len([token for token in all_of_them if token.depth])


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("planned", (True, False))
def test_tokens_of_the_context_are_guessed_wherever_they_lie_in_the_vocabulary(temperature, planned, monkeypatch):
    """A question is asked again, two sequences at once: the head that guesses from 64 tokens and those of the context
    guesses as one that guesses from all; without the context's it is seldom right. Tokens are the same."""
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    engine = Engine.load("tiny-qwen", SETTINGS)
    question = tuple(engine.prepare(Request.from_prompt("Hello! Who are you?")).token_ids.tolist())
    answer = engine.generate(Request((), prompt=question, sampling=sampling))[0].token_ids
    again = Request((), prompt=(*question, *answer, *question), sampling=sampling, speculation=Speculation("auto", 3))
    found = []
    for size, with_context in ((1 << 16, True), (64, True), (64, False)):
        monkeypatch.setattr(qwen3_5, "DRAFT_VOCABULARY", size)
        head = (engine := Engine.load("tiny-qwen", SETTINGS)).target.head
        if not with_context:
            head.output = None
            engine = engine.with_target(engine.target)
        if not planned:
            head.plans.refused = "nothing is recorded here"
        results = engine.generate([again, replace(again, id="another")])
        assert results[0].token_ids == results[1].token_ids
        found.append((results[0].token_ids, sum(results[0].timings.accepted)))
    (full, most), (with_part, as_many), (without, few) = found
    assert full == with_part == without
    assert most - 2 <= as_many and few < most / 3, (most, as_many, few)


def test_a_context_s_rare_tokens_are_bounded_and_the_latest_stay(monkeypatch):
    monkeypatch.setattr(qwen3_5, "DRAFT_VOCABULARY", 300)
    monkeypatch.setattr(context, "MOST_GATHERED", 20)
    engine = Engine.load("tiny-qwen", SETTINGS)
    rows = engine.prepare(Request((), prompt=(1, 700, 701, 702, 700, *range(710, 727))))
    request = Request((), prompt="")
    sequence = Sequence(5, request, rows, engine.target.spec.rule, frozenset(), engine.decode, 100)
    tokens = context.ContextTokens.of(engine.target.head)
    assert tokens[sequence].numbers.tolist() == [701, 702, 700, *range(710, 727)]
    sequence.generated += [5, 800, 800, 711, 801]
    assert set(tokens[sequence].numbers.tolist()) == {700, *range(710, 727), 800, 801}
    sequence.generated += [701]
    assert set(tokens[sequence].numbers.tolist()) == {*range(710, 727), 800, 801, 701}
    hidden = torch.randn(1, engine.target.spec.hidden_size)
    logits = np.full((1, engine.target.spec.vocab_size), -np.inf, np.float32)
    tokens.complete(logits, hidden, [sequence])
    numbers = sorted([*range(710, 727), 800, 801, 701])
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == numbers
    assert np.array_equal(logits[0, numbers], engine.target.logits(hidden)[0, numbers].numpy())
    tokens.retire(sequence)
    sequence.generated.clear()
    assert 800 not in tokens[sequence].numbers


def test_text_that_ends_can_be_guessed_with_a_part_of_the_vocabulary():
    assert qwen3_5.draft_ids(2 * qwen3_5.DRAFT_VOCABULARY, frozenset({5})) is None
    ids = qwen3_5.draft_ids(200_000, frozenset({5, 199_999, 300_000}))
    assert ids.tolist() == [*range(qwen3_5.DRAFT_VOCABULARY), 199_999]
