"""The Qwen3.5 target against transformers on tiny random checkpoints, and what a checkpoint folder may look like."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.checkpoints import SIZES, TIED, UNTIED, edit_config, edited, load_weights
from support.qwen_reference import CONVERSATIONS, TALL, WIDE, Dialogue, hidden_states

from foreglance import Engine, Message, Request, RequestError, SamplingParams, Settings, Speculation
from foreglance.batch import Part, pack
from foreglance.cache.store import CacheStore
from foreglance.models import qwen3_5
from foreglance.models.base import ModelError
from foreglance.models.registry import auto_config, family_of, load_model
from foreglance.ops.numerics import choose

TOLERANCE = 1e-4
NUM_TOKENS = 24
PLANS = {
    "one chunk": itertools.repeat((10_000, True)),
    "chunks of 7": itertools.repeat((7, True)),
    "chunks and few rows": itertools.cycle(
        [(9, True), (1, False), (2, False), (3, False), (20, True), (4, False), (5, False), (1, True)]
    ),
}
sizes_param = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)
conversation_param = pytest.mark.parametrize("name", CONVERSATIONS)


def report(words: str, distance: float) -> None:
    print(f"\n  {words}: {distance:.2e}", end="")


def part_of(number: int, rows, start: int, stop: int, chunk: bool, images) -> Part:
    """Rows [start, stop) with their image embeddings."""
    image, offset = rows.image[start:stop], rows.offset[start:stop]
    embeds = [images[i][o : o + 1] for i, o in zip(image, offset, strict=True) if i >= 0]
    return Part(
        number,
        rows.token_ids[start:stop],
        image >= 0,
        rows.positions.part(start, stop),
        num_scored=stop - start,
        chunk=chunk,
        embeds=torch.cat(embeds) if embeds else None,
    )


@torch.inference_mode()
def forward(target, store: CacheStore, parts: list[Part]) -> dict[int, torch.Tensor]:
    """Logits of every row by sequence."""
    batch = pack(parts, target.spec.inputs, store.held())
    for part in parts:
        store.reserve(part.sequence, part.num_rows)
    hidden = target.forward(batch, {part.sequence: store[part.sequence] for part in parts})
    for part in parts:
        store.commit(part.sequence, part.num_rows, part.positions.at(-1))
    return {part.sequence: target.logits(hidden[batch.rows_of(i)]) for i, part in enumerate(batch.parts)}


def embed_all(target, rows) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [target.embed_image(image) for image in rows.images]


def logits_of(target, rows, plan) -> torch.Tensor:
    """Every row's logits, computed in the pieces (rows, chunk) of a plan."""
    store, images, at, out = CacheStore(target.spec.caches), embed_all(target, rows), 0, []
    store.open(0)
    for num_rows, chunk in plan:
        if at == len(rows):
            return torch.cat(out)
        stop = min(at + num_rows, len(rows))
        out.append(forward(target, store, [part_of(0, rows, at, stop, chunk, images)])[0])
        at = stop


def states_of(target, rows) -> torch.Tensor:
    """Every row's state, in one chunk."""
    store = CacheStore(target.spec.caches)
    store.open(0)
    batch = pack([part_of(0, rows, 0, len(rows), True, embed_all(target, rows))], target.spec.inputs, store.held())
    store.reserve(0, len(rows))
    with torch.inference_mode():
        return target.forward(batch, {0: store[0]})


@sizes_param
def test_the_state_that_the_head_is_fed_is_behind_the_final_norm(checkpoint_of, engine_of, sizes):
    """HIDDEN_FROM; `load` takes the other convention too, which changes no logit of the target."""
    checkpoint, messages = checkpoint_of(sizes), CONVERSATIONS["one image"]
    dialogue, rows = Dialogue(checkpoint, messages), engine_of(sizes).prepare(Request(messages))
    normed = hidden_states(checkpoint, dialogue.inputs)
    assert qwen3_5.HIDDEN_FROM == "post_norm"
    assert float((states_of(engine_of(sizes).target, rows) - normed).abs().max()) < TOLERANCE
    config = auto_config(checkpoint.folder)
    family = family_of(config.model_type)
    ops, _ = choose("fp32", *family.shapes_of(config.to_dict()))
    other = family.load("other", checkpoint.folder, config, ops, 512, frozenset({2}), hidden_from="pre_norm")
    states = states_of(other, rows)
    assert float((states - normed).abs().max()) > 1000 * TOLERANCE
    with torch.inference_mode():
        assert float((other.logits(states) - dialogue.logits).abs().max()) < TOLERANCE


def answer(engine: Engine, messages, speculation: Speculation, **sampling):
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling
    return engine.generate(Request(messages, SamplingParams(**sampling), speculation))[0]


@sizes_param
@conversation_param
@pytest.mark.parametrize("plan", PLANS)
def test_logits_of_every_row_are_those_of_transformers(checkpoint_of, engine_of, sizes, name, plan):
    engine, expected = engine_of(sizes), Dialogue(checkpoint_of(sizes), CONVERSATIONS[name]).logits
    got = logits_of(engine.target, engine.prepare(Request(CONVERSATIONS[name])), iter(PLANS[plan]))
    assert got.shape == expected.shape
    distance = float((got - expected).abs().max())
    report(f"{sizes.name}, {name}, {plan} (logits from {expected.min():.1f} to {expected.max():.1f})", distance)
    assert expected.std() > 0.5
    assert distance < TOLERANCE


@sizes_param
def test_logits_hold_when_sequences_share_a_batch(checkpoint_of, engine_of, sizes):
    """Few rows of one sequence next to chunks of others, with images in both."""
    engine = engine_of(sizes)
    target, store = engine.target, CacheStore(engine.target.spec.caches)
    names = ("two images", "one image", "text")
    rows = [engine.prepare(Request(CONVERSATIONS[name])) for name in names]
    images, got = [embed_all(target, r) for r in rows], [[] for _ in rows]
    for number in range(3):
        store.open(number)
    at = [0, 0, 0]
    for pieces in ([(11, True), (3, False), (40, True)], [(4, False), (50, True), (2, False)], [(99, True)] * 3):
        parts = []
        for number, (num_rows, chunk) in enumerate(pieces):
            stop = min(at[number] + num_rows, len(rows[number]))
            if stop > at[number]:
                parts.append(part_of(number, rows[number], at[number], stop, chunk, images[number]))
            at[number] = stop
        for number, logits in forward(target, store, parts).items():
            got[number].append(logits)
    for number, name in enumerate(names):
        expected = Dialogue(checkpoint_of(sizes), CONVERSATIONS[name]).logits[: at[number]]
        distance = float((torch.cat(got[number]) - expected).abs().max())
        report(f"{sizes.name}, {name} in a shared batch", distance)
        assert distance < TOLERANCE


@conversation_param
def test_prompt_tokens_are_the_template_written_out_by_hand(checkpoint_of, engine_of, name):
    rows = engine_of(TIED).prepare(Request(CONVERSATIONS[name]))
    dialogue = Dialogue(checkpoint_of(TIED), CONVERSATIONS[name])
    assert rows.token_ids.tolist() == dialogue.token_ids
    assert [image.grid for image in rows.images] == dialogue.grids
    if dialogue.pictures:
        per_image = (dialogue.inputs["image_grid_thw"].prod(-1) // 4).tolist()
        assert [image.num_rows for image in rows.images] == per_image
        assert rows.num_image_rows == sum(per_image)
    for index, image in enumerate(rows.images):
        assert rows.offset[rows.image == index].tolist() == list(range(image.num_rows))


@conversation_param
def test_positions_are_those_of_get_rope_index(checkpoint_of, engine_of, name):
    rows = engine_of(TIED).prepare(Request(CONVERSATIONS[name]))
    checkpoint = checkpoint_of(TIED)
    inputs = Dialogue(checkpoint, CONVERSATIONS[name]).inputs
    kinds = inputs.get("mm_token_type_ids", torch.zeros_like(inputs["input_ids"]))
    expected, delta = checkpoint.model.model.get_rope_index(inputs["input_ids"], kinds, inputs.get("image_grid_thw"))
    np.testing.assert_array_equal(rows.positions.coords, expected[:, 0].numpy())
    following = engine_of(TIED).target.spec.rule.following(rows.positions.at(-1))
    assert following == len(rows) + int(delta)


@sizes_param
def test_image_embeddings_are_those_of_the_tower(checkpoint_of, engine_of, sizes):
    engine = engine_of(sizes)
    for name in ("one image", "two images", "two turns"):
        rows = engine.prepare(Request(CONVERSATIONS[name]))
        expected = Dialogue(checkpoint_of(sizes), CONVERSATIONS[name]).images
        for ours, theirs in zip(embed_all(engine.target, rows), expected, strict=True):
            distance = float((ours - theirs).abs().max())
            report(f"{sizes.name}, {name}, embeddings {tuple(theirs.shape)}", distance)
            assert ours.shape == theirs.shape
            assert distance < TOLERANCE
            assert theirs.std(0).mean() > 0.05, "rows of the picture must differ"


@sizes_param
@conversation_param
def test_greedy_text_is_that_of_generate_with_drafts_off_and_on(checkpoint_of, engine_of, sizes, name):
    expected = Dialogue(checkpoint_of(sizes), CONVERSATIONS[name]).greedy(NUM_TOKENS)
    assert len(expected) == NUM_TOKENS
    engine = engine_of(sizes, Settings(grid=16))
    for speculation in (Speculation("none"), Speculation("mtp", 1), Speculation("mtp", 4), Speculation("ngram", 3)):
        result = answer(engine, CONVERSATIONS[name], speculation)
        assert list(result.token_ids) == expected, speculation
        assert (sum(result.timings.drafted) > 0) or speculation.draft != "mtp"
    engine.check()


HALF = replace(UNTIED, name="half", stored=torch.float16)


@pytest.mark.parametrize("sizes", [HALF, UNTIED], ids=["stored as fp16", "stored as fp32"])
@conversation_param
def test_fp16_weights_cost_their_rounding_and_nothing_else(checkpoint_of, engine_of, sizes, name):
    """Weights that fp16 can hold give the logits of fp32; others move by what rounding them moves."""
    engine = engine_of(sizes, weights="fp16")
    expected = Dialogue(checkpoint_of(sizes), CONVERSATIONS[name]).logits
    got = logits_of(engine.target, engine.prepare(Request(CONVERSATIONS[name])), iter(PLANS["chunks and few rows"]))
    distance, root = float((got - expected).abs().max()), float((got - expected).square().mean().sqrt())
    report(f"fp16 weights, stored as {sizes.stored}, {name}: root mean square {root:.1e}, largest", distance)
    if sizes is HALF:
        assert distance < TOLERANCE
    else:
        assert TOLERANCE < root < 0.01 * expected.std()


@conversation_param
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token_with_fp16_weights(engine_of, name, temperature):
    engine = engine_of(UNTIED, Settings(grid=16), weights="fp16")
    off = answer(engine, CONVERSATIONS[name], Speculation("none"), temperature=temperature)
    for depth in (1, 3, 5):
        on = answer(engine, CONVERSATIONS[name], Speculation("mtp", depth), temperature=temperature)
        assert on.token_ids == off.token_ids
        assert sum(on.timings.drafted) > 0


LAYER = "model.language_model.layers.1"
CHANGED = (
    "model.language_model.embed_tokens.weight",
    "model.language_model.norm.weight",
    "lm_head.weight",
    f"{LAYER}.linear_attn.A_log",
    f"{LAYER}.linear_attn.conv1d.weight",
    f"{LAYER}.linear_attn.in_proj_qkv.weight",
    "model.language_model.layers.3.self_attn.q_proj.weight",
    "model.language_model.layers.3.self_attn.k_norm.weight",
    f"{LAYER}.mlp.down_proj.weight",
    "model.visual.merger.linear_fc1.bias",
    "model.visual.blocks.1.attn.qkv.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.layers.0.self_attn.o_proj.weight",
)


def load(folder):
    return load_model(str(folder), Settings(weights="fp32"))


@pytest.mark.parametrize("name", CHANGED)
def test_a_tensor_that_is_missing_or_misshaped_is_named(checkpoint_of, tmp_path, name):
    def widen(state):
        state[name] = torch.cat([state[name], state[name]])

    source = checkpoint_of(UNTIED).folder
    shown = "embed_tokens.weight" if "embed_tokens" in name else name  # the trunk is found by it
    with pytest.raises(ModelError, match=shown.replace(".", r"\.")):
        load(edited(source, tmp_path / "missing", lambda state: state.pop(name)))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(edited(source, tmp_path / "wide", widen))


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.9.mlp.up_proj.weight",
        f"{LAYER}.linear_attn.extra.weight",
        "model.visual.blocks.7.norm1.weight",
        "mtp.layers.1.mlp.up_proj.weight",
        "unknown.weight",
    ],
)
def test_a_tensor_that_is_left_over_is_named(checkpoint_of, tmp_path, name):
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(edited(checkpoint_of(UNTIED).folder, tmp_path / "more", lambda state: state.update({name: torch.ones(3)})))


def test_a_tied_checkpoint_may_hold_its_head_twice_but_not_another_one(checkpoint_of, tmp_path):
    """In either spelling; what is refused is two matrices of which the config says that they are one."""
    source = checkpoint_of(TIED)
    for number, name in enumerate(("lm_head.weight", "language_model.lm_head.weight")):

        def twice(state, name=name):
            state[name] = state["model.language_model.embed_tokens.weight"].clone()

        target = load(edited(source.folder, tmp_path / f"twice {number}", twice)).target
        assert target.head is not None
        other = {name: torch.ones(TIED.vocab, TIED.hidden)}
        with pytest.raises(ModelError, match=rf"ties the output head .* {name} is another matrix"):
            load(edited(source.folder, tmp_path / f"other {number}", lambda state, other=other: state.update(other)))


def without(prefix: str):
    def change(state):
        for name in [name for name in state if name.startswith(prefix)]:
            del state[name]

    return change


def renamed(old: str, new: str):
    def change(state):
        for name in [name for name in state if name.startswith(old)]:
            state[new + name.removeprefix(old)] = state.pop(name)

    return change


@pytest.mark.case("C7", "E2")
def test_without_mtp_tensors_drafts_are_off_and_the_report_says_why(checkpoint_of, tmp_path):
    """The config still promises a head, as in converted checkpoints."""
    folder = edited(checkpoint_of(TIED).folder, tmp_path / "headless", without("mtp."))
    assert json.loads((folder / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    result = answer(engine, CONVERSATIONS["one image"], Speculation())
    assert list(result.token_ids) == Dialogue(checkpoint_of(TIED), CONVERSATIONS["one image"]).greedy(NUM_TOKENS)
    assert result.draft.kind == "none"
    assert "no draft head" in result.draft.off_because
    with pytest.raises(RequestError, match="no such head") as error:
        answer(engine, CONVERSATIONS["text"], Speculation("mtp"))
    assert (error.value.param, error.value.code) == ("draft", "draft_unavailable")
    assert engine.is_idle


@pytest.mark.case("E2")
@pytest.mark.parametrize("promised", [None, 0, 1])
def test_mtp_tensors_decide_whatever_the_config_promises(checkpoint_of, tmp_path, promised):
    def change(values):
        values["text_config"].pop("mtp_num_hidden_layers")
        if promised is not None:
            values["text_config"]["mtp_num_hidden_layers"] = promised

    folder = edit_config(edited(checkpoint_of(TIED).folder, tmp_path / "copy", lambda state: None), change)
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    assert engine.target.head is not None
    result = answer(engine, CONVERSATIONS["one image"], Speculation("mtp", 2))
    assert sum(result.timings.drafted) > 0
    assert load(edited(folder, tmp_path / "headless", without("mtp."))).target.head is None


def test_a_head_of_two_layers_is_refused(checkpoint_of, tmp_path):
    folder = edited(checkpoint_of(TIED).folder, tmp_path / "two", lambda state: None)
    edit_config(folder, lambda values: values["text_config"].update(mtp_num_hidden_layers=2))
    with pytest.raises(ModelError, match="2 layers"):
        load(folder)


@pytest.mark.case("E3")
@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model.model."])
def test_every_published_prefix_of_the_trunk_is_read(checkpoint_of, tmp_path, prefix):
    folder = edited(checkpoint_of(TIED).folder, tmp_path / "renamed", renamed("model.language_model.", prefix))
    assert any(name.startswith(f"{prefix}layers.0.") for name in load_weights(folder))
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    for name in ("text", "two images"):
        rows = engine.prepare(Request(CONVERSATIONS[name]))
        got = logits_of(engine.target, rows, iter(PLANS["one chunk"]))
        expected = Dialogue(checkpoint_of(TIED), CONVERSATIONS[name]).logits
        assert float((got - expected).abs().max()) < TOLERANCE


@pytest.mark.case("E3")
@pytest.mark.parametrize("prefix", ["language_model.mtp.", "model.language_model.mtp."])
def test_a_head_under_the_text_model_is_found(checkpoint_of, tmp_path, prefix):
    """Case E3: a head that conversions moved is not silently missing."""
    folder = edited(checkpoint_of(TIED).folder, tmp_path / "moved", renamed("mtp.", prefix))
    engine = Engine.load(str(folder), Settings(weights="fp32", try_drafts=False))
    moved = answer(engine, CONVERSATIONS["one image"], Speculation("mtp", 3))
    plain = answer(Engine.load(str(checkpoint_of(TIED).folder)), CONVERSATIONS["one image"], Speculation("mtp", 3))
    assert moved.timings.accepted == plain.timings.accepted and moved.token_ids == plain.token_ids


def test_a_folder_without_embeddings_says_where_they_were_sought(checkpoint_of, tmp_path):
    folder = edited(checkpoint_of(TIED).folder, tmp_path / "odd", renamed("model.language_model.", "trunk."))
    with pytest.raises(ModelError, match=r"no embed_tokens\.weight under model\.language_model"):
        load(folder)


def text_only(checkpoint, folder, whole_config: bool):
    """No tower: with the config of the whole model, or with that of the text model alone."""

    def change(state):
        without("model.visual.")(state)
        if not whole_config:
            renamed("model.language_model.", "model.")(state)

    edited(checkpoint.folder, folder, change)
    (folder / "preprocessor_config.json").unlink()
    if not whole_config:
        values = json.loads((folder / "config.json").read_text())["text_config"]
        (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.case("E2")
@pytest.mark.parametrize("whole_config", [True, False], ids=["whole config", "text config"])
def test_a_text_only_checkpoint_serves_text_and_refuses_images_in_words(checkpoint_of, tmp_path, whole_config):
    engine = Engine.load(
        str(text_only(checkpoint_of(TIED), tmp_path / "blind", whole_config)), Settings(weights="fp32")
    )
    result = answer(engine, CONVERSATIONS["text"], Speculation("mtp", 3))
    assert list(result.token_ids) == Dialogue(checkpoint_of(TIED), CONVERSATIONS["text"]).greedy(NUM_TOKENS)
    with pytest.raises(RequestError, match="image") as error:
        engine.add(Request((Message.of("user", "what?", [WIDE, TALL]),)))
    assert (error.value.param, error.value.code) == ("image", "images_unsupported")
    assert engine.is_idle
