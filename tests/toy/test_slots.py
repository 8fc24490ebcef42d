"""Slots: what they hold, and conversations that go through a file as if they had never left, drafts included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.gemma import FULL_HEAD, PAIR, write_assistant, write_gemma4
from support.toy import ByteTokenizer, ask, picture, run, talk, toy_rows, toy_target
from support.toy_chain import chained_target

from foreglance import Engine, Message, RequestError, Settings
from foreglance.drafters.independent import IndependentDrafter
from foreglance.drafters.shared_cache import SharedCacheDrafter
from foreglance.images import open_picture
from foreglance.models import gemma4_assistant
from foreglance.models.registry import auto_config, load_model
from foreglance.prompt import MRope, OneAxis, Prompter

TOYS = {
    "hybrid": (lambda: toy_target(), "mtp"),
    "hybrid head": (lambda: toy_target(head_kinds=("sliding", "recurrent", "full")), "mtp"),
    "whole images, one axis": (lambda: toy_target(rule=OneAxis(), whole_images=True), "mtp"),
    "chained modules": (lambda: chained_target(MRope()), "mtp"),
    "no draft head": (lambda: toy_target(head_kinds=()), "ngram"),
    "second model": (lambda: toy_target(), "model"),
}


def toy(family, **settings) -> tuple[Engine, str]:
    """A fresh engine, as after a restart, and its kind of draft."""
    make, draft = TOYS[family]
    target, second = make(), toy_target(seed=3)
    factory = (lambda around: IndependentDrafter(second, around.target.spec.vocab_size)) if draft == "model" else None
    prompter = Prompter(ByteTokenizer(), 1, target.spec.rule, target.prepare)
    return Engine(target, prompter, Settings(**{"grid": 16, "slots": 3, **settings}), None, factory), draft


def turns(engine, draft, first=None):
    """The prompt of a first turn; with its answer given, of a second one that goes on with it."""
    ids = [5, 6, 1, *range(7, 40)]
    inputs = [engine.target.prepare(open_picture(picture(3, 6, 80), 10**6))]
    more = () if first is None else (*first.token_ids, 20, 21, 22)
    options = {"draft": draft, "depth": 3, "max_tokens": 21 if first is None else 40, "temperature": 0.5}
    return ask("-", **options), toy_rows(engine.target, [*ids, *more], inputs)


def one_turn(engine, draft, first=None):
    request, rows = turns(engine, draft, first)
    return run(engine, [request], [rows])[0]


def told(result):
    counts = result.timings
    return result.token_ids, counts.cached_rows, counts.drafted, counts.accepted


@pytest.mark.case("B4", "B5", "B6")
@pytest.mark.parametrize("family", TOYS)
def test_a_restored_conversation_goes_on_as_if_it_had_never_been_saved(family, tmp_path):
    """Case B9: token ids, and every count of guesses; also of a prompt that shares its first rows only."""
    engine, draft = toy(family)
    first = one_turn(engine, draft)
    saved = engine.save_slot(0, tmp_path / "one")
    assert saved.num_bytes == (tmp_path / "one").stat().st_size > 10_000
    never_saved = one_turn(engine, draft, first)
    assert never_saved.timings.cached_rows == saved.rows == first.timings.prompt_tokens + 20
    if draft == "mtp":
        assert 0 < sum(never_saved.timings.accepted) < sum(never_saved.timings.drafted)
    for slot in (0, 2):
        fresh, _ = toy(family)
        assert fresh.restore_slot(slot, tmp_path / "one") == saved
        assert told(one_turn(fresh, draft, first)) == told(never_saved)
    fresh, _ = toy(family)
    fresh.restore_slot(1, tmp_path / "one")
    again = one_turn(fresh, draft)
    assert again.token_ids == first.token_ids and again.timings.cached_rows == first.timings.prompt_tokens - 1
    assert (again.timings.drafted, again.timings.accepted) == (first.timings.drafted, first.timings.accepted)


@pytest.mark.parametrize("family", ("hybrid", "chained modules", "second model"))
def test_a_file_holds_every_bit(family, tmp_path):
    engine, draft = toy(family)
    one_turn(engine, draft)
    engine.save_slot(0, tmp_path / "one")
    fresh, _ = toy(family)
    fresh.restore_slot(0, tmp_path / "one")
    fresh.save_slot(0, tmp_path / "two")
    with safe_open(tmp_path / "one", "pt") as one, safe_open(tmp_path / "two", "pt") as two:
        assert one.metadata() == two.metadata() and set(one.keys()) == set(two.keys())
        assert all(torch.equal(one.get_tensor(name), two.get_tensor(name)) for name in one.keys())  # noqa: SIM118
    assert engine._prefixes.bytes_held == fresh._prefixes.bytes_held


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    checkpoint = write_gemma4(tmp_path_factory.mktemp("gemma"), PAIR)
    made = write_assistant(tmp_path_factory.mktemp("assistant"), FULL_HEAD, checkpoint)
    loaded = load_model(str(checkpoint.folder), Settings(weights="fp32"))
    return loaded, gemma4_assistant.load("the assistant", made.folder, auto_config(made.folder), loaded.target)


def test_a_draft_that_reads_the_targets_rows_goes_on_with_restored_ones(gemma, tmp_path):
    loaded, reader = gemma
    target = loaded.target

    def fresh() -> Engine:
        prompter = Prompter(loaded.tokenizer, target.spec.image_token, target.spec.rule, target.prepare)
        factory = lambda around: SharedCacheDrafter(reader, around.target_store)  # noqa: E731
        return Engine(target, prompter, Settings(grid=16, slots=2), None, factory)

    first = [Message.of("user", "where is the red square next to the blue circle?", [picture(4, 6, 90)])]
    options = {"draft": "assistant", "depth": 3, "max_tokens": 12, "ignore_eos": True}
    engine = fresh()
    (answer,) = run(engine, [talk(*first, **options)])
    saved = engine.save_slot(0, tmp_path / "one")
    rows = engine.prepare(talk(*first, **options))
    longer = replace(
        rows,
        token_ids=np.concatenate([rows.token_ids, answer.token_ids, [9, 10]]),
        image=np.concatenate([rows.image, [-1] * 14]),
        offset=np.concatenate([rows.offset, [0] * 14]),
        positions=type(rows.positions).run(0, len(rows) + 14, 1),
    )
    never_saved = run(engine, [talk(*first, **options)], [longer])[0]
    other = fresh()
    assert other.restore_slot(1, tmp_path / "one").rows == saved.rows
    restored = run(other, [talk(*first, **options)], [longer])[0]
    assert told(restored) == told(never_saved) and restored.timings.cached_rows == saved.rows


def test_slots_tell_what_they_hold():
    engine, _ = toy("hybrid")
    assert [info.state for info in engine.slots()] == ["idle"] * 3
    long, short = turns(engine, "mtp"), (ask("how are you?", draft="none"), None)
    engine.add_rows(*long)
    engine.add(short[0])
    engine.step()
    one, two, three = engine.slots(with_text=True)
    assert (one.state, one.request_id, one.prompt_rows, one.image_rows) == ("prefill", long[0].id, len(long[1]), 18)
    assert (one.rows, one.draft_rows, one.generated, one.draft.kind) == (16, 15, 0, "mtp")
    assert (two.state, two.request_id, two.rows, three.state) == ("prefill", short[0].id, 0, "idle")
    while engine._scheduler.running[1].in_prefill:
        engine.step()
    for _ in range(3):
        engine.step()
    one, two, _ = engine.slots(with_text=True)
    assert (one.state, two.state, two.draft.kind, two.draft_rows) == ("decoding", "decoding", "none", 0)
    assert one.rows == len(long[1]) + one.generated - 1 and sum(one.drafted) > 0 and one.steps > 2
    assert len(one.drafted) == len(one.accepted) == 3 and "how are you?" in two.text
    assert all(info.text is None for info in engine.slots())
    while not engine.is_idle:
        engine.step()
    ended, *_ = engine.slots()
    assert (ended.state, ended.generated, ended.rows) == ("idle", 21, len(long[1]) + 20)


def test_a_conversation_keeps_its_slot_and_others_take_empty_ones_first():
    engine, draft = toy("hybrid")
    run(engine, [ask("the first conversation")])
    first = one_turn(engine, draft)
    run(engine, [ask("and a third one, which is another")])
    assert [info.request_id is not None for info in engine.slots()] == [True] * 3
    request, rows = turns(engine, draft, first)
    run(engine, [request], [rows])
    assert engine.slots()[1].request_id == request.id
    other = ask("nothing like those before")
    run(engine, [other])
    assert engine.slots()[0].request_id == other.id, "the least recently used one is taken"


def test_a_conversation_that_had_to_go_holds_no_rows_and_cannot_be_saved(tmp_path):
    engine, draft = toy("hybrid")
    one_turn(engine, draft)
    engine, _ = toy("hybrid", prefix_cache_bytes=engine._prefixes.bytes_held)
    one_turn(engine, draft)
    run(engine, [ask(f"{number} and another conversation that needs the room", draft=draft) for number in (1, 2)])
    assert engine.slots()[0].rows == 0 and engine.slots()[0].prompt_rows > 0
    with pytest.raises(RequestError, match="slot 0 holds no rows") as error:
        engine.save_slot(0, tmp_path / "one")
    assert (error.value.param, error.value.code) == ("id_slot", "slot_empty")
    assert not list(tmp_path.iterdir())


def test_erasing_forgets_the_rows_that_no_other_conversation_shares():
    engine, draft = toy("hybrid")
    first = one_turn(engine, draft)
    rows = engine.slots()[0].rows
    assert engine.erase_slot(0) == rows and engine.erase_slot(0) == 0
    assert engine.slots()[0] == engine.slots()[0].__class__(0) and engine._prefixes.bytes_held == 0
    again = one_turn(engine, draft)
    assert again.timings.cached_rows == 0 and again.token_ids == first.token_ids


@pytest.mark.parametrize("act", ("save_slot", "restore_slot", "erase_slot"))
def test_a_slot_that_runs_or_is_not_there_is_left_alone(act, tmp_path):
    engine, draft = toy("hybrid")
    first = one_turn(engine, draft)
    engine.save_slot(0, tmp_path / "one")
    request, rows = turns(engine, draft, first)
    engine.add_rows(request, rows)
    engine.step()
    arguments = () if act == "erase_slot" else (tmp_path / "one",)
    for slot, code, words in ((0, "slot_busy", "runs a request"), (7, "slot_unknown", "no slot 7, only 0 to 2")):
        with pytest.raises(RequestError, match=words) as error:
            getattr(engine, act)(slot, *arguments)
        assert error.value.code == code
    while not engine.is_idle:
        engine.step()
    engine.check()


@pytest.mark.case("B15")
def test_a_cancelled_conversation_leaves_its_prompt_in_its_slot():
    engine, draft = toy("hybrid")
    request, rows = turns(engine, draft)
    engine.add_rows(request, rows)
    for _ in range(9):
        engine.step()
    engine.cancel(request.id)
    engine.step()
    info = engine.slots()[0]
    assert (info.state, info.rows, info.generated > 1) == ("idle", len(rows) - 1, True)


def test_states_that_a_draft_has_not_read_go_through_a_file(tmp_path):
    """Drafts that rest leave states waiting for many rows."""
    engine, draft = toy("chained modules")
    first = one_turn(engine, draft)
    engine.save_slot(0, tmp_path / "one")
    _, points = engine._prefixes.path(*_conversation(engine))
    assert any(len(one.states) > 1 for one in points[-1].waiting)
    fresh, _ = toy("chained modules")
    fresh.restore_slot(0, tmp_path / "one")
    _, restored = fresh._prefixes.path(*_conversation(fresh))
    for one, other in zip(points, restored, strict=True):
        assert all(torch.equal(a.states, b.states) for a, b in zip(one.waiting, other.waiting, strict=True))
    assert one_turn(fresh, draft, first).timings.acceptance == one_turn(engine, draft, first).timings.acceptance


def _conversation(engine):
    last = engine._slots.conversation_in(0)
    return last.identities, last.key
