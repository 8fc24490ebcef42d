"""The Step-3.7 modules and their drafter against modules built from transformers' layers, by the logits of every row.

Which rows a module has is restated here from the design, one row at a time: module i at row t is fed the state of
module i - 1 at row t and the input of row t + 1 + i. If that is an image row, `see` takes its embedding and
`placeholder` the placeholder token's; `skip` has a row only if no input up to its own is an image, numbered over the
rows that it has.
The last tests prove that a fault of one row, one position or one kind of input would be seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from support.step_checkpoints import IMAGE, STEP_SIZES, StepCheckpoint, write_step3p7
from support.step_reference import CONVERSATIONS, Dialogue, pre_norm_states

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.models import step3p7
from foreglance.models.registry import load_model
from foreglance.prompt import Prompter

TOLERANCE = 1e-4
SHARP = 100 * TOLERANCE
NUM_TOKENS = 24
NAMES = ("text", "one image without crops", "one image with crops", "two images", "two turns")
sizes_param = pytest.mark.parametrize("sizes", STEP_SIZES, ids=lambda sizes: sizes.name)
name_param = pytest.mark.parametrize("name", NAMES)


def report(words: str, distance: float) -> None:
    print(f"\n  {words}: {distance:.2e}", end="")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints and what was loaded from them."""
    pairs = {}

    def get(sizes):
        if sizes not in pairs:
            checkpoint = write_step3p7(tmp_path_factory.mktemp(f"step-mtp-{sizes.name}"), sizes)
            pairs[sizes] = checkpoint, load_model(str(checkpoint.folder), Settings(weights="fp32"))
        return pairs[sizes]

    return get


@dataclass(frozen=True)
class Reference:
    """A conversation with everything that is known of it. The fields behind `images` are faults, off by default."""

    checkpoint: StepCheckpoint
    policy: str
    token_ids: list[int]
    hidden: torch.Tensor  # target states before the final norm, for all rows but those of guesses
    images: torch.Tensor  # embeddings of all image rows, in order
    late: int = 0  # pair a row with the state of this many rows before
    hole: int = 0  # skip positions from the middle on
    chained: str = "pre_norm"
    swapped: bool = False

    def is_image(self, row: int) -> bool:
        return self.token_ids[row] == IMAGE

    def embedding(self, row: int) -> torch.Tensor:
        if self.is_image(row) and self.policy == "see":
            return self.images[sum(self.is_image(before) for before in range(row))]
        return self.checkpoint.model.get_input_embeddings().weight[self.token_ids[row]]

    @torch.inference_mode()
    def states(self) -> list[dict[int, torch.Tensor]]:
        """Of each module, by target row."""
        before = {t: self.hidden[max(t - self.late, 0)] for t in range(len(self.hidden))}
        out = []
        for number, module in enumerate(self.checkpoint.modules):
            rows = [t for t in before if t + 1 + number < len(self.token_ids)]
            if self.policy == "skip":
                rows = [t for t in rows if not self.is_image(t + 1 + number)]
            embeddings = torch.stack([self.embedding(t + 1 + number) for t in rows])
            positions = torch.arange(len(rows))
            positions[len(rows) // 2 :] += self.hole
            states = torch.stack([before[t] for t in rows])
            made = module(states, embeddings, positions) if self.swapped else module(embeddings, states, positions)
            out.append(dict(zip(rows, made, strict=True)))
            handed = self.norm(number)(made) if self.chained == "post_norm" else made
            before = dict(zip(rows, handed, strict=True))
        return out

    def norm(self, number: int):
        own = self.checkpoint.modules[number].norm
        return own if own is not None else self.checkpoint.model.model.language_model.norm

    @torch.inference_mode()
    def logits(self) -> list[dict[int, torch.Tensor]]:
        out = []
        for number, states in enumerate(self.states()):
            head = self.checkpoint.modules[number].output or self.checkpoint.model.lm_head
            rows = head(self.norm(number)(torch.stack(list(states.values()))))
            out.append(dict(zip(states, rows, strict=True)))
        return out


def reference_of(checkpoint, policy, name, more: list[int]) -> Reference:
    dialogue = Dialogue(checkpoint, CONVERSATIONS[name], tuple(more))
    images = torch.cat(dialogue.images) if dialogue.images else torch.empty(0, checkpoint.sizes.hidden)
    return Reference(checkpoint, policy, dialogue.token_ids, pre_norm_states(checkpoint, dialogue.inputs), images)


class Noted:
    """A module that notes the last logits of each of its rows, and the logits that it guessed from."""

    def __init__(self, module):
        self.spec, self._module = module.spec, module
        self.rows: dict[int, torch.Tensor] = {}
        self.guessed: list[torch.Tensor] = []

    def forward(self, batch, caches):
        out = self._module.forward(batch, caches)
        first = caches[batch.parts[0].sequence].rows
        for i, logits in enumerate(self._module.logits(out)):
            self.rows[first + i] = logits
        return out

    def logits(self, hidden):
        self.guessed.append(self._module.logits(hidden))
        return self.guessed[-1]


@dataclass
class Chain:
    spec: object
    modules: tuple


class NotedTarget:
    """The target, with `Noted` modules."""

    def __init__(self, target):
        self.spec, self.forward, self.logits = target.spec, target.forward, target.logits
        self.prepare, self.embed_image = target.prepare, target.embed_image
        self.head = Chain(target.head.spec, tuple(Noted(module) for module in target.head.modules))


def drafted(loaded, name: str, policy: str, depth: int = 3, **settings):
    """Run a conversation with drafts; -> (the result, its modules). The placeholder is kept out of the answer: the
    reference would look for an image there."""
    target = NotedTarget(loaded.target)
    prompter = Prompter(loaded.tokenizer, target.spec.image_token, target.spec.rule, target.prepare)
    never = {target.spec.image_token: -math.inf}
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=never)
    engine = Engine(target, prompter, Settings(**{"grid": 16, **settings}))
    (result,) = engine.generate([Request(CONVERSATIONS[name], sampling, Speculation("mtp", depth, policy))])
    assert result.draft.off_because is None and result.draft.kind == "mtp"
    return result, target.head.modules


@pytest.mark.case("A4", "E4")
@sizes_param
@name_param
@pytest.mark.parametrize("policy", ["see", "placeholder", "skip"])
def test_every_row_of_every_module_is_the_reference_s_after_verify_rounds(made, sizes, name, policy):
    """Prompt in chunks, then rounds in which guesses are rejected and rows are done again."""
    checkpoint, loaded = made(sizes)
    result, modules = drafted(loaded, name, policy)
    expected = reference_of(checkpoint, policy, name, list(result.token_ids)).logits()
    for number, (module, rows) in enumerate(zip(modules, expected, strict=True)):
        settled = list(rows.items())[: len(rows) - 8]  # the last round left its guesses in the rows behind
        distance = max(float((module.rows[i] - logits).abs().max()) for i, (_, logits) in enumerate(settled))
        report(f"{sizes.name}, {name}, {policy}, module {number}, {len(settled)} rows", distance)
        assert distance < TOLERANCE
    assert sum(result.timings.drafted) > sum(result.timings.accepted)


@sizes_param
@name_param
def test_the_chain_of_guesses_is_the_reference_s(made, sizes, name):
    """The first round: three modules, then the last one again. Each guess is fed the guesses before it."""
    checkpoint, loaded = made(sizes)
    result, modules = drafted(loaded, name, "see", depth=4)
    known = Dialogue(checkpoint, CONVERSATIONS[name]).token_ids
    picked = [int(result.token_ids[0])]
    whole = reference_of(checkpoint, "see", name, [])
    guesses: list[int] = []
    for number, module in enumerate(modules):
        at = replace(whole, token_ids=[*known, *picked, *guesses])
        logits = at.logits()[number][len(known) - 1]
        distance = float((module.guessed[0][0] - logits).abs().max())
        report(f"{sizes.name}, {name}, guess {number + 1}", distance)
        assert distance < TOLERANCE
        guesses.append(int(logits.argmax()))
    again = deeper(whole, known, picked, guesses)
    distance = float((modules[-1].guessed[1][0] - again).abs().max())
    report(f"{sizes.name}, {name}, guess 4 by the last module", distance)
    assert distance < TOLERANCE


@torch.inference_mode()
def deeper(whole: Reference, known, picked, guesses) -> torch.Tensor:
    """One row more for the last module, fed its own state of the row before."""
    at = replace(whole, token_ids=[*known, *picked, *guesses[:2]])
    states = at.states()
    fed = torch.stack([*states[1].values()])[: len(states[2])]
    rows = replace(at, token_ids=[*known, *picked, *guesses])
    embeddings = torch.stack([rows.embedding(t + 3) for t in range(len(fed) + 1)])
    module = at.checkpoint.modules[2]
    fed = torch.cat([fed, states[2][len(known) - 1][None]])
    made = module(embeddings, fed, torch.arange(len(fed)))[-1:]
    head = module.output or at.checkpoint.model.lm_head
    return head(at.norm(2)(made))[0]


FAULTS = {
    "the state of the row before": {"late": 1},
    "a hole of one position": {"hole": 1},
    "a placeholder embedding for an image row": {"policy": "placeholder"},
    "states chained behind the norm": {"chained": "post_norm"},
    "embedding and state swapped": {"swapped": True},
}


@pytest.mark.case("E4")
@sizes_param
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_moves_logits_far_more_than_the_tolerance(made, sizes, fault):
    checkpoint, _ = made(sizes)
    right = reference_of(checkpoint, "see", "one image with crops", [30, 31, 32, 33])
    wrong = replace(right, **FAULTS[fault])
    first = 1 if fault == "states chained behind the norm" else 0
    for number, (rows, others) in enumerate(zip(right.logits(), wrong.logits(), strict=True)):
        if number >= first:
            distance = max(float((rows[t] - others[t]).abs().max()) for t in rows)
            report(f"{sizes.name}, {fault}, module {number}", distance)
            assert distance > SHARP


@sizes_param
def test_states_behind_the_final_norm_are_another_convention(made, sizes):
    checkpoint, _ = made(sizes)
    right = reference_of(checkpoint, "see", "text", [])
    normed = replace(right, hidden=Dialogue(checkpoint, CONVERSATIONS["text"]).normed)
    rows, others = right.logits()[0], normed.logits()[0]
    assert max(float((rows[t] - others[t]).abs().max()) for t in rows) > SHARP
    assert (step3p7.HIDDEN_FROM, step3p7.CHAINED_FROM) == ("pre_norm", "pre_norm")


@sizes_param
def test_the_other_convention_of_chaining_can_be_chosen(made, sizes):
    """`Conventions` reaches every module, and the reference's post-norm chain is what it then computes."""
    checkpoint, loaded = made(sizes)
    from foreglance.ops.numerics import choose

    config = step3p7.read_config(checkpoint.folder)
    ops, _ = choose("fp32", *step3p7.shapes_of(config.to_dict()))
    conventions = step3p7.Conventions(chained_from="post_norm")
    target = step3p7.load("other", checkpoint.folder, config, ops, 512, frozenset(), conventions=conventions)
    result, modules = drafted(replace(loaded, target=target), "one image with crops", "see")
    right = reference_of(checkpoint, "see", "one image with crops", list(result.token_ids))
    for number, rows in enumerate(replace(right, chained="post_norm").logits()):
        settled = list(rows.items())[: len(rows) - 8]
        distance = max(float((modules[number].rows[t] - logits).abs().max()) for t, logits in settled)
        assert distance < TOLERANCE
