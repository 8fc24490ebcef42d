"""Gemma-4's assistant against transformers' class: what it sees, where it stands, and which pairs are refused.

transformers' own generation shows an assistant one row of a rejected draft, so here the reference is given exactly the
verified rows, computed by the target without a cache, and of sliding layers those less than the window away.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.checkpoints import edit_config, edited
from support.gemma import (
    CONVERSATIONS,
    DENSE,
    FULL_HEAD,
    ORDERED,
    PAIR,
    SMALL,
    WINDOW,
    AssistantSizes,
    GemmaDialogue,
    GemmaSizes,
    write_assistant,
    write_gemma4,
)
from support.toy import toy_target

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.cache.kv import KV
from foreglance.drafters.shared_cache import SharedCacheDrafter
from foreglance.models import gemma4_assistant
from foreglance.models.base import ModelError
from foreglance.models.registry import auto_config, load_model
from foreglance.prompt import Prompter

TOLERANCE = 1e-4
DEPTH = 4


class Recorder:
    """A reader that keeps the logits of every depth."""

    def __init__(self, reader):
        self.spec, self._reader, self.forward, self.chained = reader.spec, reader, reader.forward, reader.chained
        self.seen: list[torch.Tensor] = []

    def logits(self, state):
        logits = self._reader.logits(state)
        self.seen.append(logits[0].clone())
        return logits


class Observed(SharedCacheDrafter):
    """Keeps what each round started from: (generated tokens, guesses, logits [depth, vocab])."""

    def __init__(self, reader, store):
        self.recorder, self.rounds = Recorder(reader), []
        super().__init__(self.recorder, store)

    def propose(self, settled):
        self.recorder.seen.clear()
        drafts = super().propose(settled)
        for one in settled:
            if drafts.get(one.sequence.id):
                logits = torch.stack(self.recorder.seen)
                self.rounds.append((tuple(one.sequence.generated), drafts[one.sequence.id], logits))
        return drafts


class Stale(Observed):
    """Sees one row of a rejected draft more, as in transformers."""

    def _lent(self, sequence):
        cache, lent = self._target_store[sequence.id], []
        for read in self._reader.spec.reads:
            layer = cache.layers[read.place]
            assert isinstance(layer, KV)
            first = 0 if read.window is None else max(0, cache.rows - read.window + 1)
            lent.append(tuple(tensor[:, : cache.rows + 1 - first] for tensor in layer.read(first, cache.rows + 1)))
        return lent


class Moving(Observed):
    """Goes one position further with every round's last row."""

    def _position(self, sequence):
        return super()._position(sequence) + 1


class Narrow(Observed):
    """Sees one row less than the window allows."""

    def _lent(self, sequence):
        reads = self._reader.spec.reads
        full = super()._lent(sequence)
        return [
            (k, v) if read.window is None else (k[:, 1:], v[:, 1:]) for (k, v), read in zip(full, reads, strict=True)
        ]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    """(checkpoint, loaded, assistant, reader) of sizes, made once."""
    targets, pairs = {}, {}

    def get(sizes: GemmaSizes, assistant: AssistantSizes):
        if sizes not in targets:
            checkpoint = write_gemma4(tmp_path_factory.mktemp("gemma"), sizes)
            targets[sizes] = checkpoint, load_model(str(checkpoint.folder), Settings(weights="fp32"))
        checkpoint, loaded = targets[sizes]
        if (sizes, assistant) not in pairs:
            made = write_assistant(tmp_path_factory.mktemp("assistant"), assistant, checkpoint)
            reader = gemma4_assistant.load("the assistant", made.folder, auto_config(made.folder), loaded.target)
            pairs[sizes, assistant] = made, reader
        return checkpoint, loaded, *pairs[sizes, assistant]

    return get


def observe(loaded, reader, name: str, kind=Observed, num_tokens: int = 20):
    """Rounds of one request with drafts, and how many guesses of each depth stood."""
    target, observers = loaded.target, []

    def make(around):
        observers.append(kind(reader, around.target_store))
        return observers[-1]

    prompter = Prompter(loaded.tokenizer, target.spec.image_token, target.spec.rule, target.prepare)
    engine = Engine(target, prompter, Settings(grid=16), None, make)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.5, seed=3)
    result = engine.generate(Request(CONVERSATIONS[name], sampling, Speculation("assistant", DEPTH)))[0]
    assert result.error is None and result.draft.off_because is None
    engine.check()
    return observers[0].rounds, result


@torch.inference_mode()
def reference(checkpoint, assistant, name: str, generated, guesses) -> torch.Tensor:
    """Logits [depth, vocab] of transformers' assistant for the round that began with `generated`."""
    dialogue = GemmaDialogue(checkpoint, CONVERSATIONS[name], generated[:-1])
    rows = len(dialogue.token_ids)
    shared = {kind: (keys, values) for kind, (keys, values) in dialogue.shared.items()}
    first = max(0, rows - WINDOW + 1)
    shared["sliding_attention"] = tuple(tensor[:, :, first:] for tensor in shared["sliding_attention"])
    embed, hidden, logits = checkpoint.model.get_input_embeddings(), dialogue.hidden[None, -1:], []
    for token in (generated[-1], *guesses[:-1]):
        inputs = torch.cat([embed(torch.tensor([[token]])), hidden], -1)
        out = assistant.model(inputs_embeds=inputs, position_ids=torch.tensor([[rows]]), shared_kv_states=shared)
        hidden = out.last_hidden_state
        logits.append(out.logits[0, 0])
    return torch.stack(logits)


def distances(checkpoint, assistant, name: str, rounds) -> list[float]:
    """Largest difference over considered tokens, by round."""
    found = []
    for generated, guesses, logits in rounds:
        expected = reference(checkpoint, assistant, name, generated, guesses)
        considered = logits.isfinite()
        found.append(float((logits - expected)[considered].abs().max()))
        for row, theirs in zip(considered, expected, strict=True):
            assert torch.equal(row, theirs > theirs.min()) or bool(row.all()), "other tokens are considered"
    return found


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(
    ("sizes", "assistant"),
    [(PAIR, FULL_HEAD), (PAIR, ORDERED), (DENSE, FULL_HEAD), (SMALL, ORDERED)],
    ids=lambda sizes: sizes.name,
)
def test_logits_at_every_depth_are_those_of_transformers(pair_of, sizes, assistant, name):
    """After a prompt longer than the window, with and without images, and after rounds of any acceptance (case A16);
    also for a target without layers that share caches (DENSE)."""
    checkpoint, loaded, made, reader = pair_of(sizes, assistant)
    rounds, result = observe(loaded, reader, name)
    assert result.timings.prompt_tokens > WINDOW and {len(guesses) for _, guesses, _ in rounds} >= {DEPTH}
    if sizes is PAIR:
        assert 0 < sum(result.timings.accepted) < sum(result.timings.drafted), "guesses must be right and wrong"
    found = distances(checkpoint, made, name, rounds[:6])
    spread = float(rounds[0][2][rounds[0][2].isfinite()].std())
    print(f"\n  {sizes.name}, {assistant.name}, {name}: {max(found):.2e} (logits spread {spread:.1f})", end="")
    assert spread > 0.5
    assert max(found) < TOLERANCE


@pytest.mark.parametrize("kind", [Stale, Moving, Narrow])
def test_the_tolerance_would_notice_what_must_not_be_seen(pair_of, kind):
    """A row of a rejected draft more, another position, a row less."""
    checkpoint, loaded, made, reader = pair_of(PAIR, FULL_HEAD)
    rounds, _ = observe(loaded, reader, "text", kind)
    rejected = [now for last, now in itertools.pairwise(rounds) if len(now[0]) - len(last[0]) <= len(last[1])]
    found = distances(checkpoint, made, "text", rejected[:4])
    print(f"\n  {kind.__name__}: {max(found):.2e}", end="")
    assert max(found) > 100 * TOLERANCE


def test_a_row_of_the_ordered_head_depends_on_no_other(pair_of):
    """transformers gives losers the batch's lowest logit; here they have no chance, row by row."""
    _, _, made, reader = pair_of(PAIR, ORDERED)
    states = torch.randn(5, ORDERED.hidden, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 6)[:, None]
    together = reader.logits(states)
    for i in range(5):
        assert torch.equal(reader.logits(states[i : i + 1]), together[i : i + 1])
    per_row = ORDERED.top_k * PAIR.vocab // ORDERED.centroids
    assert together.isfinite().sum(1).tolist() == [per_row] * 5
    with torch.inference_mode():
        theirs = made.model.masked_embedding(states[None], made.model.lm_head.weight)[0]
    considered = together.isfinite()
    assert float((together - theirs)[considered].abs().max()) < TOLERANCE


REFUSED = {
    "hidden size": (lambda values: values.update(backbone_hidden_size=72), "target's hidden size is 72, .* 64"),
    "vocabulary": (lambda values: values["text_config"].update(vocab_size=300), "vocabulary is 300, .* 320"),
    "window": (lambda values: values["text_config"].update(sliding_window=13), "window is 13, .* 12"),
    "head size": (lambda values: values["text_config"].update(head_dim=8), "sliding_attention head size is 8, .* 16"),
    "heads": (lambda values: values["text_config"].update(num_key_value_heads=4), "key/value heads is 4, .* 2"),
    "centroids": (
        lambda values: values.update(num_centroids=7, use_ordered_embeddings=True),
        "7 centroids do not divide 320",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_pair_that_does_not_fit_is_refused_in_one_sentence(pair_of, tmp_path, what):
    _, loaded, made, _ = pair_of(PAIR, FULL_HEAD)
    change, words = REFUSED[what]
    folder = edit_config(edited(made.folder, tmp_path / "assistant", lambda state: None), change)
    with pytest.raises(ModelError, match=words):
        gemma4_assistant.load("the assistant", folder, auto_config(folder), loaded.target)


def test_a_target_with_nothing_to_read_is_refused(pair_of):
    _, _, made, _ = pair_of(PAIR, FULL_HEAD)
    with pytest.raises(ModelError, match=r"the assistant \(gemma4_assistant\) .* target toy \(toy\)"):
        gemma4_assistant.load("the assistant", made.folder, auto_config(made.folder), toy_target())


def test_a_second_model_of_this_type_drafts_by_itself(pair_of):
    checkpoint, _, made, _ = pair_of(PAIR, FULL_HEAD)
    engine = Engine.load(str(checkpoint.folder), Settings(weights="fp32"), draft_model=str(made.folder))
    request = Request(CONVERSATIONS["one image"], SamplingParams(max_tokens=12, ignore_eos=True), Speculation(depth=2))
    result = engine.generate(request)[0]
    assert result.draft.kind == "assistant" and result.draft.model == made.folder.name
    assert sum(result.timings.drafted)
