"""The Qwen3.5 MTP head and its drafter against a head built from transformers' layer classes, by logits.

Acceptance hardly shows a wrong position or a wrong state at this size, so every row of the draft's cache is compared,
and the last tests prove that a fault of one position, one row or one kind of input would be seen.

Which rows a draft has is restated here from the design, in plain Python over one row at a time, for each policy:
a draft row for target row t carries the target's state of row t and the input of row t + 1. If that input is an image
row, `see` takes its embedding, `placeholder` the placeholder token's, `skip` and `gap` have no row. Positions are
numbered over the draft's own rows from 0, in `gap` they are the target's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.checkpoints import IMAGE, SIZES, TIED, UNTIED, Checkpoint
from support.qwen_reference import (
    CONVERSATIONS,
    GRIDS,
    LARGE,
    TALL,
    WIDE,
    Dialogue,
    hidden_states,
    image_features,
    model_inputs,
)

from foreglance import Request, SamplingParams, Settings, Speculation
from foreglance.drafters.base import Settled
from foreglance.drafters.mtp import MtpDrafter
from foreglance.prompt import ImageInput, MRope, make_rows
from foreglance.sequence import Sequence

TOLERANCE = 1e-4
SHARP = 100 * TOLERANCE
POLICIES = ("see", "placeholder", "skip", "gap")
PROMPTS = {
    "text": ([], list(range(20, 55))),
    "one image": ([WIDE], [1, 30, 31, 3, IMAGE, 4, 40, 41, 42, 43, 44]),
    "two images": ([TALL, LARGE], [1, 30, 3, IMAGE, 4, 50, 51, 3, IMAGE, 4, 60, 61, 62]),
    "image after the first token": ([LARGE], [3, IMAGE, 4, 70, 71, 72, 73, 74, 75, 76]),
    "image at the end": ([TALL], [1, 33, 34, 35, 36, 37, 3, IMAGE]),
}
sizes_param = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)
policy_param = pytest.mark.parametrize("policy", POLICIES)
prompt_param = pytest.mark.parametrize("name", PROMPTS)

Input = tuple[int, int, int]  # token id, index of the image or -1, place in the image


def report(words: str, distance: float) -> None:
    print(f"\n  {words}: {distance:.2e}", end="")


# The restatement.


def numbered(inputs: list[Input], grids: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """M-RoPE, one row after the other."""
    positions, start = [], 0
    for _, image, place in inputs:
        if image < 0:
            positions.append((start, start, start))
            start += 1
        else:
            height, width = grids[image]
            positions.append((start, start + place // width, start + place % width))
            if place == height * width - 1:
                start += max(height, width)
    return positions


@dataclass
class DraftRow:
    target_row: int
    input: Input
    position: tuple[int, int, int]


def draft_rows(policy: str, inputs: list[Input], grids: list[tuple[int, int]]) -> list[DraftRow]:
    """The rows of a draft whose target has the known `inputs`."""
    rows = [(t, inputs[t + 1]) for t in range(len(inputs) - 1)]
    if policy in ("skip", "gap"):
        rows = [(t, x) for t, x in rows if x[1] < 0]
    if policy == "gap":
        target = numbered(inputs, grids)
        positions = [target[t + 1] for t, _ in rows]
    elif policy == "skip":
        positions = [(i, i, i) for i in range(len(rows))]
    else:
        positions = numbered([x for _, x in rows], grids)
    if policy == "placeholder":
        rows = [(t, (IMAGE, -1, 0) if x[1] >= 0 else x) for t, x in rows]
    return [DraftRow(t, x, position) for (t, x), position in zip(rows, positions, strict=True)]


@dataclass
class Reference:
    """What the draft of a sequence must say, from transformers' classes, without a cache."""

    checkpoint: Checkpoint
    policy: str
    inputs: list[Input]
    grids: list[tuple[int, int]]
    hidden: torch.Tensor  # target states of the inputs' rows
    images: list[torch.Tensor]

    def rows(self, guesses: tuple[int, ...] = (), upto: int | None = None) -> list[DraftRow]:
        known = self.inputs[:upto] + [(guess, -1, 0) for guess in guesses]
        return draft_rows(self.policy, known, self.grids)

    @torch.inference_mode()
    def states(self, rows: list[DraftRow], chained: list[torch.Tensor] = ()) -> torch.Tensor:
        """[rows, h]; the last rows carry the head's own states `chained` instead of the target's."""
        table = self.checkpoint.model.get_input_embeddings()
        embeds = [
            self.images[i][place] if i >= 0 else table.weight[token] for token, i, place in (r.input for r in rows)
        ]
        first = rows[: len(rows) - len(chained)]
        hidden = [*(self.hidden[row.target_row] for row in first), *chained]
        positions = torch.tensor([row.position for row in rows]).t()
        return self.checkpoint.head(torch.stack(embeds), torch.stack(hidden), positions)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.checkpoint.model.lm_head(states)

    def chain(self, guesses: tuple[int, ...], upto: int | None = None) -> torch.Tensor:
        """Logits [1 + guesses, vocab]: of the last known row, then after each guess, states handed on."""
        states = [self.states(self.rows((), upto))[-1]]
        for depth in range(len(guesses)):
            states.append(self.states(self.rows(guesses[: depth + 1], upto), states)[-1])
        return self.logits(torch.stack(states))


def known_inputs(token_ids: list[int], grids: list[tuple[int, int]]) -> list[Input]:
    """Inputs of a prompt in which each image row is a placeholder."""
    inputs, image, place = [], 0, 0
    for token in token_ids:
        if token != IMAGE:
            inputs.append((token, -1, 0))
            continue
        inputs.append((token, image, place))
        place += 1
        if place == grids[image][0] * grids[image][1]:
            image, place = image + 1, 0
    return inputs


def reference_of(checkpoint: Checkpoint, policy: str, token_ids: list[int], pictures, more: list[int]) -> Reference:
    """`token_ids` holds a placeholder per image row; `more` was generated behind it."""
    grids = [GRIDS[id(pixels)] for pixels in pictures]
    feed = model_inputs(checkpoint, token_ids + more, pictures)
    inputs = known_inputs(token_ids, grids) + [(token, -1, 0) for token in more]
    return Reference(
        checkpoint, policy, inputs, grids, hidden_states(checkpoint, feed), image_features(checkpoint, feed)
    )


# What the head was fed and what it made of it.


@dataclass
class Call:
    """One sequence's rows in one forward of the head."""

    first: int
    token_ids: list[int]
    hidden: torch.Tensor
    out: torch.Tensor
    logits: torch.Tensor


class Listening:
    """A head that notes every forward; `change` may falsify a batch before it is computed."""

    def __init__(self, head, change=lambda batch: batch):
        self.spec, self._head, self._change = head.spec, head, change
        self.calls: dict[int, list[Call]] = {}
        self.most_sequences = 0

    def forward(self, batch, caches):
        batch = self._change(batch)
        out = self._head.forward(batch, caches)
        self.most_sequences = max(self.most_sequences, len(batch.parts))
        for index, part in enumerate(batch.parts):
            at = batch.rows_of(index)
            call = Call(
                caches[part.sequence].rows,
                part.token_ids.tolist(),
                batch.hidden[at],
                out[at],
                self._head.logits(out[at]),
            )
            self.calls.setdefault(part.sequence, []).append(call)
        return out

    def logits(self, hidden):
        return self._head.logits(hidden)


def new_sequence(policy: str, token_ids: list[int], grids: list[tuple[int, int]], depth: int = 3) -> Sequence:
    """`token_ids` holds one placeholder per image."""
    images = [ImageInput(str(i), grid) for i, grid in enumerate(grids)]
    request = Request.from_prompt("unused", speculation=Speculation("mtp", depth, policy))
    return Sequence(7, request, make_rows(token_ids, IMAGE, images, MRope()), MRope(), frozenset(), lambda ids: "", 512)


@torch.inference_mode()
def drive(head: Listening, reference: Reference, token_ids: list[int], pieces: int, depth: int) -> tuple[int, ...]:
    """A whole prompt through the drafter in pieces, then the first generated token and `depth` guesses."""
    sequence = new_sequence(reference.policy, token_ids, reference.grids, depth)
    sequence.embeds = dict(enumerate(reference.images))
    drafter, n = MtpDrafter(head), len(sequence.rows)
    drafter.admit(sequence, None)
    for start in range(0, n, pieces):
        stop = min(start + pieces, n)
        sequence.advance(stop - start)
        if stop == n:
            sequence.generated.append(reference.inputs[n][0])
        states = reference.hidden[start:stop]
        guesses = drafter.propose([Settled(sequence, start, states, depth if stop == n else 0)])
    drafter.stores[0].check()
    return guesses[sequence.id]


def expanded(token_ids: list[int], grids: list[tuple[int, int]]) -> list[int]:
    sizes = iter(height * width for height, width in grids)
    return [token for t in token_ids for token in ([t] * next(sizes) if t == IMAGE else [t])]


def prompt_reference(checkpoint: Checkpoint, policy: str, name: str) -> Reference:
    pictures, token_ids = PROMPTS[name]
    grids = [GRIDS[id(pixels)] for pixels in pictures]
    return reference_of(checkpoint, policy, expanded(token_ids, grids), pictures, [17])


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.case("A2", "E4")
@sizes_param
@policy_param
@prompt_param
def test_every_draft_row_and_chain_says_what_the_reference_says(checkpoint_of, loaded_of, sizes, policy, name):
    checkpoint, target_head = checkpoint_of(sizes), loaded_of(sizes).target.head
    reference = prompt_reference(checkpoint, policy, name)
    expected = reference.logits(reference.states(reference.rows()))
    assert expected.std() > 0.5
    for pieces in (1000, 19, 4):
        head = Listening(target_head)
        guesses = drive(head, reference, PROMPTS[name][1], pieces, depth=4)
        calls = head.calls[7]
        rows, chains = calls[:-3], calls[-3:]
        distance = largest(torch.cat([call.logits for call in rows]), expected)
        assert [call.first for call in chains] == [len(expected), len(expected) + 1, len(expected) + 2]
        assert guesses[0] == int(expected[-1].argmax())
        deeper = largest(torch.cat([call.logits for call in chains]), reference.chain(guesses[:3])[1:])
        if pieces == 1000:
            report(f"{sizes.name}, {policy}, {name}, {len(expected)} rows", distance)
            report(f"{sizes.name}, {policy}, {name}, depths 2 to 4", deeper)
        assert max(distance, deeper) < TOLERANCE


@policy_param
@pytest.mark.parametrize("length", [2, 3, 5, 6, 8, 9, 11, 13])
def test_chains_from_every_start_around_the_images(checkpoint_of, loaded_of, policy, length):
    """Prompts that end before, at and behind each of two images."""
    pictures, token_ids = PROMPTS["two images"]
    token_ids = token_ids[:length]
    pictures = pictures[: token_ids.count(IMAGE)]
    grids = [GRIDS[id(pixels)] for pixels in pictures]
    reference = reference_of(checkpoint_of(UNTIED), policy, expanded(token_ids, grids), pictures, [90])
    head = Listening(loaded_of(UNTIED).target.head)
    guesses = drive(head, reference, token_ids, 1000, depth=3)
    first, *chains = head.calls[7]
    assert largest(first.logits, reference.logits(reference.states(reference.rows()))) < TOLERANCE
    assert largest(torch.cat([call.logits for call in chains]), reference.chain(guesses[:2])[1:]) < TOLERANCE


# The real engine: several rounds, partial acceptance, reuse, several sequences.

ALLOWED = (40, 61, 83, 84, 85)  # few tokens to choose from, so that some guesses of random weights stand


def request_of(messages, policy: str, max_tokens: int, depth: int = 3) -> Request:
    sampling = SamplingParams(max_tokens, ignore_eos=True, logit_bias=dict.fromkeys(ALLOWED, 100.0))
    return Request(messages, sampling, Speculation("mtp", depth, policy))


def listening_engine(engine_of, loaded_of, sizes, settings: Settings):
    target = copy.copy(loaded_of(sizes).target)
    target.head = Listening(target.head)
    return engine_of(sizes, settings, target=target), target.head


def replay(calls: list[Call], reference: Reference) -> tuple[float, int]:
    """Compare a sequence's calls with the reference from scratch -> (largest distance, rounds that guessed).

    A call is a deeper guess if it carries the state that the call before gave; else it computes settled rows, which
    must begin where the settled rows of the calls before end.
    """
    expected_rows = reference.rows()
    expected = reference.logits(reference.states(expected_rows))
    settled, worst, rounds, guesses, chain = calls[0].first, 0.0, 0, [], None
    for call, before in zip(calls, [None, *calls[:-1]], strict=True):
        if before is not None and torch.equal(call.hidden, before.out[-1:]):
            scores = before.logits[-1][list(ALLOWED)]
            assert call.token_ids == [ALLOWED[int(scores.argmax())]]
            assert call.first == settled + len(guesses)
            rounds += not guesses
            guesses += call.token_ids
            chain = reference.chain(tuple(guesses), upto=expected_rows[settled - 1].target_row + 2)
            worst = max(worst, largest(call.logits[0], chain[-1]))
            continue
        assert call.first == settled, "settled rows follow each other; no row of a guess stays"
        guesses, settled = [], settled + len(call.token_ids)
        worst = max(worst, largest(call.logits, expected[call.first : settled]))
    return worst, rounds


def dialogue_reference(checkpoint, policy: str, dialogue: Dialogue, generated) -> Reference:
    return reference_of(checkpoint, policy, dialogue.token_ids, dialogue.pictures, list(generated))


@pytest.mark.case("A4", "C1")
@policy_param
@pytest.mark.parametrize("sizes, grid", [(TIED, 19), (UNTIED, 8), (UNTIED, 256)], ids=["tied", "untied", "one chunk"])
def test_the_drafters_rows_after_many_rounds_and_in_a_shared_batch(
    checkpoint_of, loaded_of, engine_of, sizes, policy, grid
):
    engine, head = listening_engine(engine_of, loaded_of, sizes, Settings(grid=grid, slots=4))
    results = engine.generate([request_of(messages, policy, 24) for messages in CONVERSATIONS.values()])
    engine.check()
    assert head.most_sequences > 1
    drafted, accepted, rounds = 0, 0, 0
    for number, (name, result) in enumerate(zip(CONVERSATIONS, results, strict=True)):
        dialogue = Dialogue(checkpoint_of(sizes), CONVERSATIONS[name])
        reference = dialogue_reference(checkpoint_of(sizes), policy, dialogue, result.token_ids)
        worst, guessed = replay(head.calls[number], reference)
        report(f"{sizes.name}, {policy}, grid {grid}, {name}, {len(reference.rows())} rows", worst)
        assert worst < TOLERANCE
        drafted, accepted = drafted + sum(result.timings.drafted), accepted + sum(result.timings.accepted)
        rounds += guessed
    assert 0 < accepted < drafted
    assert rounds > 8


@policy_param
@pytest.mark.parametrize("grid, first_tokens", [(16, 14), (256, 14), (256, 1)])
@pytest.mark.parametrize("name", ["one image", "two turns"])
def test_the_drafters_rows_on_a_reused_prefix(checkpoint_of, loaded_of, engine_of, policy, grid, first_tokens, name):
    """Turn 2 begins on the rows of turn 1: the draft's memory must go on as if it had been computed in one run."""
    engine, head = listening_engine(engine_of, loaded_of, TIED, Settings(grid=grid))
    checkpoint, request = checkpoint_of(TIED), request_of(CONVERSATIONS[name], policy, first_tokens)
    first = engine.generate(request)[0]
    more = [*first.token_ids, 2, 50, 51, 3, IMAGE, 4, 52, 53, 54]
    before = engine.prepare(request)
    picture = engine.target.prepare(_picture(TALL))
    compact = [int(t) for t, o in zip(before.token_ids, before.offset, strict=True) if t != IMAGE or o == 0]
    rows = make_rows([*compact, *more], IMAGE, [*before.images, picture], MRope())
    engine.add_rows(request_of(CONVERSATIONS[name], policy, 12), rows)
    second = None
    while second is None:
        second = next((event.result for event in engine.step() if event.result is not None), None)
    engine.check()
    assert second.finish_reason == "length", second.error
    assert second.timings.cached_rows >= len(before) // 16 * 16
    pictures = [*Dialogue(checkpoint, CONVERSATIONS[name]).pictures, TALL]
    reference = reference_of(checkpoint, policy, rows.token_ids.tolist(), pictures, list(second.token_ids))
    calls = head.calls[1]
    computed = 0 in head.calls  # a turn of one token may end before its draft rows are computed: their states wait
    assert computed or (grid, first_tokens) == (256, 1)
    assert (calls[0].first > 0) == computed, "the draft's rows are reused as well"
    worst, rounds = replay(calls, reference)
    report(f"{policy}, grid {grid}, {name}, {second.timings.cached_rows} rows reused", worst)
    assert rounds > 1
    assert worst < TOLERANCE


def _picture(pixels):
    from foreglance.images import open_picture

    return open_picture(pixels, 10_000)


# The test is sharp.


def _shifted(batch, first: int):
    positions = batch.positions.clone()
    positions[:, first:] += 1
    return replace(batch, positions=positions)


def _counted(batch):
    return replace(batch, positions=torch.arange(batch.num_rows).expand(3, -1))


def _wrong_state(batch):
    return replace(batch, hidden=batch.hidden.roll(1, 0)) if len(batch.hidden) > 1 else batch


def _as_placeholders(batch, table):
    return replace(batch, embeds=table[torch.full((len(batch.embeds),), IMAGE)]) if batch.embeds is not None else batch


def _image_end(reference: Reference) -> int:
    return max(i for i, row in enumerate(reference.rows()) if row.input[1] >= 0) + 1


FAULTS = {
    "text after the image one position late": lambda batch, end, table: _shifted(batch, end),
    "image rows counted like text": lambda batch, end, table: _counted(batch),
    "the state of the row before": lambda batch, end, table: _wrong_state(batch),
    "placeholder embeddings": lambda batch, end, table: _as_placeholders(batch, table),
}


@pytest.mark.case("E4")
@sizes_param
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["one image", "two images", "image after the first token"])
def test_a_fault_of_one_position_row_or_input_is_seen(checkpoint_of, loaded_of, sizes, fault, name):
    reference = prompt_reference(checkpoint_of(sizes), "see", name)
    expected = reference.logits(reference.states(reference.rows()))
    end, table = _image_end(reference), checkpoint_of(sizes).model.get_input_embeddings().weight
    faulty = Listening(loaded_of(sizes).target.head, lambda batch: FAULTS[fault](batch, end, table))
    drive(faulty, reference, PROMPTS[name][1], 1000, depth=1)
    distance = largest(faulty.calls[7][0].logits, expected)
    report(f"{sizes.name}, {name}, {fault}", distance)
    assert distance > SHARP


@sizes_param
def test_the_policies_differ(checkpoint_of, sizes):
    """Guards the reference itself: rows, numbers and inputs of each policy give other logits behind the image."""
    last = []
    for policy in POLICIES:
        reference = prompt_reference(checkpoint_of(sizes), policy, "two images")
        last.append(reference.logits(reference.states(reference.rows()))[-1])
    for i, one in enumerate(last):
        for other in last[i + 1 :]:
            assert largest(one, other) > SHARP
    np.testing.assert_array_equal(
        [row.position[0] for row in draft_rows("see", known_inputs([1, 1, 1, *[IMAGE] * 4, 1, 1], [(2, 2)]), [(2, 2)])],
        [0, 1, 2, 2, 2, 2, 4, 5],
    )
