"""A chain of draft modules with caches of their own: no token changes, and every module's rows are the right ones."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from support.toy import (
    HIDDEN,
    IMAGE,
    ByteTokenizer,
    ask,
    picture,
    run,
    talk,
    toy_engine,
    toy_rows,
)
from support.toy_chain import KINDS, chained_target

from foreglance import Message
from foreglance.drafters.mtp_chain import ChainDrafter
from foreglance.drafters.rows import RowMap
from foreglance.images import open_picture
from foreglance.prompt import ImageInput, MRope, OneAxis, Rows
from foreglance.sequence import Sequence

RULES = (MRope(), OneAxis())
WIDE, TALL = picture(2, 9, 40), picture(5, 3, 90)
rule_param = pytest.mark.parametrize("rule", RULES, ids=["mrope", "one-axis"])
policy_param = pytest.mark.parametrize("policy", ("see", "skip", "placeholder", "gap"))
CHATS = {
    "text": lambda salt: [Message.of("user", f"say {salt} or say {salt} again")],
    "one image": lambda salt: [Message.of("user", f"what is {salt} here?", [WIDE])],
    "two images": lambda salt: [Message.of("user", f"compare {salt}", [TALL, WIDE])],
    "image in turn 2": lambda salt: [
        Message.of("user", f"hello {salt}"),
        Message.of("assistant", "hello, hello"),
        Message.of("user", "and this?", [TALL]),
    ],
}
BARE = {
    "image at the very end": ("{salt}, see <image>", [TALL]),
    "image before the end": ("{salt}, see <image>x", [TALL]),
    "image at the very start": ("<image>{salt}", [WIDE]),
    "nothing but an image": ("<image>", [TALL]),
    "one row": ("s", []),
    "two rows": ("st", []),
}
SHAPES = (*CHATS, *BARE)
shape_param = pytest.mark.parametrize("shape", SHAPES)


def prompt(shape: str, salt: str, target, **options):
    """The request and its rows."""
    if shape in CHATS:
        request = talk(*CHATS[shape](salt), **options)
        return request, toy_engine(target).prepare(request)
    text, images = BARE[shape]
    inputs = [target.prepare(open_picture(image, 10**6)) for image in images]
    return ask(text, **options), toy_rows(target, ByteTokenizer().encode(text.format(salt=salt)), inputs)


@lru_cache
def alone(rule, shape: str, salt: str, temperature: float, seed: int):
    """Tokens with drafts off and nobody else in the engine."""
    request, rows = prompt(shape, salt, chained_target(rule), temperature=temperature, seed=seed)
    return run(toy_engine(chained_target(rule)), [request], [rows])[0].token_ids


@pytest.mark.case("D1", "A1")
@rule_param
@pytest.mark.parametrize("num_sequences", (1, 3))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("depth", (1, 2, 3, 5))
@shape_param
def test_a_chain_never_changes_a_token(shape, depth, temperature, num_sequences, rule):
    target = chained_target(rule)
    salts = ["red", "green, or not", "a very long name of something blue"][:num_sequences]
    pairs = [
        prompt(shape, salt, target, draft="mtp", depth=depth, temperature=temperature, seed=seed)
        for seed, salt in enumerate(salts)
    ]
    results = run(toy_engine(target), *map(list, zip(*pairs, strict=True)))
    for seed, (salt, result) in enumerate(zip(salts, results, strict=True)):
        assert result.error is None and result.draft.kind == "mtp" and result.draft.off_because is None
        assert len(result.timings.drafted) <= depth
        assert result.token_ids == alone(rule, shape, salt, temperature, seed)


@rule_param
@pytest.mark.parametrize("position_of", ("input", "hidden"))
@policy_param
@shape_param
def test_no_policy_changes_a_token_or_ends_drafts(policy, shape, position_of, rule):
    target = chained_target(rule, position_of=position_of)
    request, rows = prompt(shape, "red", target, draft="mtp", depth=5, policy=policy)
    (result,) = run(toy_engine(target), [request], [rows])
    assert result.draft.off_because is None and len(result.timings.drafted) > 1
    assert result.token_ids == alone(rule, shape, "red", 0.0, 0)


@rule_param
def test_depths_may_change_from_round_to_round(rule):
    """Automatic depth lets modules rest; they catch up with the rows that they missed."""
    target = chained_target(rule)
    for shape in SHAPES:
        request, rows = prompt(shape, "red", target, draft="mtp", depth="auto", max_tokens=60)
        plain, same = prompt(shape, "red", target, max_tokens=60)
        results = run(toy_engine(target), [request, plain], [rows, same])
        assert results[0].token_ids == results[1].token_ids


def test_every_module_guesses_right_and_wrong():
    """Otherwise the tests above prove nothing: each depth is drafted, and accepted more and less than always."""
    target = chained_target(OneAxis())
    many = [prompt("one image", salt, target, draft="mtp", depth=5, max_tokens=60)[0] for salt in "abcdef"]
    timings = [result.timings for result in run(toy_engine(target, slots=6), many)]
    for depth in range(5):
        drafted = sum(t.drafted[depth] for t in timings if depth < len(t.drafted))
        accepted = sum(t.accepted[depth] for t in timings if depth < len(t.accepted))
        assert 0 < accepted < drafted, depth


# What the modules are fed.


class Noted:
    """A module that notes, per sequence and row, what it was fed last and what it made of it."""

    def __init__(self, module):
        self.spec, self._module = module.spec, module
        self.rows: dict[int, dict[int, tuple]] = {}

    def forward(self, batch, caches):
        out = self._module.forward(batch, caches)
        for index, part in enumerate(batch.parts):
            at, first = batch.rows_of(index), caches[part.sequence].rows
            for i in range(part.num_rows):
                row = (batch.token_ids[at][i].item(), batch.hidden[at][i], part.positions.at(i), out[at][i])
                self.rows.setdefault(part.sequence, {})[first + i] = row
        return out

    def logits(self, hidden):
        return self._module.logits(hidden)


class NotedTarget:
    """A target that notes the states of committed rows, and whose modules are `Noted`."""

    def __init__(self, target):
        self.spec, self._target, self.states = target.spec, target, {}
        self.prepare, self.embed_image, self.logits = target.prepare, target.embed_image, target.logits
        self.head = type("Chain", (), {})()
        self.head.spec, self.head.modules = target.head.spec, tuple(Noted(m) for m in target.head.modules)

    def forward(self, batch, caches):
        out = self._target.forward(batch, caches)
        for index, part in enumerate(batch.parts):
            for i, state in enumerate(out[batch.rows_of(index)]):
                self.states.setdefault(part.sequence, {})[caches[part.sequence].rows + i] = state
        return out


@rule_param
@pytest.mark.parametrize("depth", (1, 2, 3, 5))
@pytest.mark.parametrize("shape", ("text", "one image", "image at the very end"))
def test_module_i_at_row_t_is_fed_the_state_before_it_and_input_t_1_i(shape, depth, rule):
    """After the last round, for all rows whose inputs were known then: guesses left no trace."""
    target = NotedTarget(chained_target(rule))
    request, rows = prompt(shape, "red", target, draft="mtp", depth=depth, max_tokens=20)
    (result,) = run(toy_engine(target), [request], [rows])
    tokens = [*np.where(rows.is_image, 0, rows.token_ids).tolist(), *result.token_ids]
    modules = target.head.modules
    for number, module in enumerate(modules[:depth]):
        shift = 1 + number
        noted = module.rows[0]
        settled = len(tokens) - 14  # before the last rounds, which guess less and leave the deeper modules behind
        assert settled > len(rows)
        for t in range(settled):
            token, state, position, _ = noted[t]
            before = target.states[0][t] if number == 0 else modules[number - 1].rows[0][t][3]
            assert token == tokens[t + shift], (number, t)
            torch.testing.assert_close(state, before, rtol=0, atol=1e-4)
            if rule.axes == 1:
                assert position == (t,)


def test_all_sequences_share_a_batch_in_each_module():
    target = NotedTarget(chained_target(OneAxis()))
    sizes = []
    for module in target.head.modules:
        module._module = Counting(module._module, sizes)
    many = [prompt("text", salt, target, draft="mtp", depth=3)[0] for salt in ("red", "green", "blue")]
    run(toy_engine(target), many)
    assert max(sizes) == 3


class Counting:
    def __init__(self, module, sizes):
        self._module, self._sizes, self.logits = module, sizes, module.logits

    def forward(self, batch, caches):
        self._sizes.append(len(batch.parts))
        return self._module.forward(batch, caches)


# Prefix reuse.


@pytest.mark.case("B11")
@rule_param
@pytest.mark.parametrize("depth", (3, 5))
@pytest.mark.parametrize("shared", (16, 32))
def test_prompts_that_share_a_grid_multiple_and_then_differ(shared, depth, rule):
    """Case B11: the last rows of a checkpoint must not depend on tokens behind it. The rows of every module after reuse
    are those of a cold run."""
    text = "a quick brown fox jumps over"
    first, second = (text[: shared - 9] + rest for rest in ("then it sleeps", "but why, oh why"))
    outcomes = []
    for warm in (False, True):
        target = NotedTarget(chained_target(rule))
        engine = toy_engine(target)
        rows = [toy_rows(target, ByteTokenizer().encode(f"<turn>user:  {words}")) for words in (first, second)]
        same = int((rows[0].token_ids[:40][: len(rows[1])] == rows[1].token_ids[: len(rows[0])][:40]).argmin())
        assert same == shared - 1 or same == shared, same
        rows = [extended(r, target, shared, same) for r in rows]
        if warm:
            run(engine, [ask("", draft="mtp", depth=depth)], [rows[0]])
        (result,) = run(engine, [ask("", draft="mtp", depth=depth)], [rows[1]])
        number = max(target.states)
        outcomes.append((result, [module.rows[number] for module in target.head.modules], len(rows[1])))
    (cold, cold_rows, n), (hot, hot_rows, _) = outcomes
    assert hot.timings.cached_rows == shared and cold.timings.cached_rows == 0
    assert hot.token_ids == cold.token_ids and hot.draft.off_because is None
    assert hot.timings.drafted == cold.timings.drafted and hot.timings.accepted == cold.timings.accepted
    for number, (warm_module, cold_module) in enumerate(zip(hot_rows, cold_rows, strict=True)):
        assert min(warm_module) == shared - 1 - number  # rows that depend on what differs are not part of the prefix
        for t in warm_module:
            if t < n:
                assert warm_module[t][0] == cold_module[t][0]
                torch.testing.assert_close(warm_module[t][3], cold_module[t][3], rtol=0, atol=1e-4)


def extended(rows: Rows, target, shared: int, same: int) -> Rows:
    """One more token in front if the prompts part one row too early."""
    return rows if same == shared else toy_rows(target, [*rows.token_ids[:1], 40, *rows.token_ids[1:]])


@pytest.mark.case("B1", "B11", "B14")
@rule_param
@policy_param
@pytest.mark.parametrize("depth", (1, 3, 5))
def test_a_conversation_that_goes_on_keeps_its_drafts(depth, policy, rule):
    """Turn 2 reuses turn 1 with its image, and the same prompt again reuses itself (cases B1, B11, B14)."""
    target = chained_target(rule)
    options = {"draft": "mtp", "depth": depth, "policy": policy}
    engine = toy_engine(target)
    opening = Message.of("user", "what is this, and why is it here?", [WIDE])
    run(engine, [talk(opening, **options)])
    turns = [opening, Message.of("assistant", "nobody knows"), Message.of("user", "go on", [TALL])]
    for messages in ((opening,), turns, turns):
        (again,) = run(engine, [talk(*messages, **options)])
        assert again.timings.cached_rows > 0
        assert again.draft.off_because is None and sum(again.timings.drafted) > 0
        (plain,) = run(toy_engine(target), [talk(*messages)])
        (cold,) = run(toy_engine(target), [talk(*messages, **options)])
        assert cold.token_ids == plain.token_ids
        assert again.token_ids == plain.token_ids


def test_memory_of_another_policy_does_not_serve():
    engine = toy_engine(chained_target(OneAxis()))
    run(engine, [ask("what is this, and why is it here?", [WIDE], draft="mtp", policy="see")])
    (other,) = run(engine, [ask("what is this, and why is it here?", [WIDE], draft="mtp", policy="skip")])
    (same,) = run(engine, [ask("what is this, and why is it here?", [WIDE], draft="mtp", policy="see")])
    assert other.timings.cached_rows == 0 and same.timings.cached_rows > 0


# Cancel and failure.


@pytest.mark.parametrize("steps", range(7))
def test_cancel_gives_every_module_s_rows_back(steps):
    target = chained_target(OneAxis())
    engine = toy_engine(target)
    gone = ask("a long question about this picture, please", [WIDE], draft="mtp", depth=5)
    stays = ask("another", [TALL], draft="mtp", depth=3)
    engine.add(gone)
    engine.add(stays)
    for _ in range(steps):
        engine.step()
    assert engine.cancel(gone.id)
    results = {}
    while not engine.is_idle:
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
        engine.check()
    assert results[gone.id].finish_reason == "cancelled"
    plain = run(toy_engine(target), [ask("another", [TALL])])[0]
    assert results[stays.id].token_ids == plain.token_ids
    again = ask("a long question about this picture, please", [WIDE], draft="mtp", depth=5)
    plain = ask("a long question about this picture, please", [WIDE])
    assert run(engine, [again])[0].token_ids == run(toy_engine(target), [plain])[0].token_ids


@pytest.mark.parametrize("broken", range(3))
def test_a_module_that_fails_costs_drafts_and_no_token(broken, monkeypatch):
    target = NotedTarget(chained_target(OneAxis()))
    engine = toy_engine(target)

    def fail(batch, caches):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(target.head.modules[broken], "forward", fail)
    (result,) = run(engine, [ask("what?", [WIDE], draft="mtp", depth=3)])
    assert "out of luck" in result.draft.off_because
    assert result.token_ids == run(toy_engine(chained_target(OneAxis())), [ask("what?", [WIDE])])[0].token_ids


# The row map with a shift, restated row by row.


def sequence_of(rule, kinds: str, generated: tuple[int, ...] = ()) -> Sequence:
    """A prompt from letters: t is a token, digits an image of so many columns and two rows."""
    tokens, images = [], []
    for letter in kinds:
        tokens.append(5 if letter == "t" else IMAGE)
        if letter != "t":
            images.append(ImageInput(f"{len(images)}", (2, int(letter))))
    target = chained_target(rule)
    rows = toy_rows(target, tokens, images)
    sequence = Sequence(0, ask(""), rows, rule, frozenset(), lambda _: "", 500)
    sequence.generated.extend(generated)
    sequence.prefilled = len(rows)
    return sequence


@rule_param
@pytest.mark.parametrize("shift", (1, 2, 3))
@pytest.mark.parametrize("position_of", ("input", "hidden"))
@policy_param
@pytest.mark.parametrize("kinds", ("t", "tt", "ttttt", "t2ttt", "2tt", "ttt3", "t2t1tt", "2", "tt1t3t"))
def test_rows_of_a_shifted_map(kinds, policy, position_of, shift, rule):
    generated, guesses = (7, 8, 9, 10), (11, 12)
    sequence = sequence_of(rule, kinds, generated)
    row_map = RowMap(sequence, policy, rule, position_of, IMAGE, shift)
    prompt_rows, n = sequence.rows, len(sequence.rows)
    is_image = [*prompt_rows.is_image, *[False] * 6]
    inputs = [*prompt_rows.token_ids, *generated, *guesses]
    last = len(inputs) - shift
    wanted = [t for t in range(last) if policy in ("see", "placeholder") or not any(is_image[t + 1 : t + 1 + shift])]
    whole = row_map.rows(0, last, guesses)
    assert whole.target_row.tolist() == wanted
    assert whole.token_ids.tolist() == [inputs[t + shift] for t in wanted]
    assert whole.is_image.tolist() == [policy == "see" and is_image[t + shift] for t in wanted]
    numbered = [t + shift if position_of == "input" else t for t in wanted]
    coords = sequence.positions(0, len(inputs)).coords
    if policy == "skip":
        expected = np.broadcast_to(np.arange(len(wanted)), (rule.axes, len(wanted)))
    elif policy == "gap":
        expected = coords[:, numbered]
    else:
        expected = coords[:, numbered] - coords[:1, numbered[:1]]
    np.testing.assert_array_equal(whole.positions.coords, expected)
    if policy != "gap":
        rule.check(None, whole.positions, whole.in_image)
    for cut in range(last + 1):  # in two pieces
        assert row_map.count(cut) == sum(t < cut for t in wanted)
        first, second = row_map.rows(0, cut, guesses), row_map.rows(cut, last, guesses)
        np.testing.assert_array_equal(
            np.concatenate([first.positions.coords, second.positions.coords], 1), whole.positions.coords
        )
    assert n == row_map.count(0) + n


def test_the_drafter_declares_what_it_has():
    drafter = ChainDrafter(chained_target(OneAxis()).head)
    assert len(drafter.stores) == len(KINDS) and drafter.wants_hidden and not drafter.reads_target
    assert chained_target(OneAxis()).head.spec.hidden_size == HIDDEN
