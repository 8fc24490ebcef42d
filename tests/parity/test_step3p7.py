"""The Step-3.7 target against transformers on tiny random checkpoints, and what a checkpoint folder may look like."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.checkpoints import edit_config, edited, load_weights
from support.step_checkpoints import IMAGE, MIXED, SPARSE, STEP_SIZES, StepCheckpoint, StepSizes, write_step3p7
from support.step_reference import CONVERSATIONS, CROP_ROWS, CUTS, SMALL, WHOLE_ROWS, Dialogue, pre_norm_states

from foreglance import Engine, Message, Request, RequestError, SamplingParams, Settings, Speculation
from foreglance.batch import Part, pack
from foreglance.cache.store import CacheStore
from foreglance.models import step3p7
from foreglance.models.base import ModelError
from foreglance.models.registry import load_model
from foreglance.prompt import Positions, Prompter

TOLERANCE = 1e-4
NUM_TOKENS = 16
PLANS = {
    "one chunk": itertools.repeat((10_000, True)),
    "chunks of 7": itertools.repeat((7, True)),
    "few rows": itertools.cycle([(1, False), (4, False), (16, False), (3, False)]),
    "chunks and few rows": itertools.cycle(
        [(9, True), (1, False), (2, False), (3, False), (20, True), (4, False), (5, False), (1, True)]
    ),
}
sizes_param = pytest.mark.parametrize("sizes", STEP_SIZES, ids=lambda sizes: sizes.name)
conversation_param = pytest.mark.parametrize("name", CONVERSATIONS)


def report(words: str, distance: float) -> None:
    print(f"\n  {words}: {distance:.2e}", end="")


@pytest.fixture(scope="session")
def step_of(tmp_path_factory) -> Callable[[StepSizes], StepCheckpoint]:
    made: dict[StepSizes, StepCheckpoint] = {}

    def get(sizes: StepSizes) -> StepCheckpoint:
        if sizes not in made:
            made[sizes] = write_step3p7(tmp_path_factory.mktemp(f"step-{sizes.name}"), sizes)
        return made[sizes]

    return get


@pytest.fixture(scope="session")
def engine_on(step_of) -> Callable[..., Engine]:
    """A fresh engine on a shared target."""
    loaded = {}

    def get(sizes: StepSizes, settings: Settings | None = None, weights: str = "fp32") -> Engine:
        if (sizes, weights) not in loaded:
            loaded[sizes, weights] = load_model(str(step_of(sizes).folder), Settings(weights=weights))
        one = loaded[sizes, weights]
        prompter = Prompter(one.tokenizer, one.target.spec.image_token, one.target.spec.rule, one.target.prepare)
        return Engine(one.target, prompter, settings)

    return get


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
    """States of every row by sequence."""
    batch = pack(parts, target.spec.inputs, store.held())
    for part in parts:
        store.reserve(part.sequence, part.num_rows)
    hidden = target.forward(batch, {part.sequence: store[part.sequence] for part in parts})
    for part in parts:
        store.commit(part.sequence, part.num_rows, part.positions.at(-1))
    return {part.sequence: hidden[batch.rows_of(i)] for i, part in enumerate(batch.parts)}


def states_of(target, rows, plan) -> torch.Tensor:
    """Every row's state, computed in the pieces (rows, chunk) of a plan."""
    store, at, out = CacheStore(target.spec.caches), 0, []
    with torch.inference_mode():
        images = [target.embed_image(image) for image in rows.images]
    store.open(0)
    for num_rows, chunk in plan:
        if at == len(rows):
            return torch.cat(out)
        stop = min(at + num_rows, len(rows))
        out.append(forward(target, store, [part_of(0, rows, at, stop, chunk, images)])[0])
        at = stop


def logits_of(target, rows, plan) -> torch.Tensor:
    with torch.inference_mode():
        return target.logits(states_of(target, rows, plan))


def answer(engine: Engine, messages, speculation: Speculation, **sampling):
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling
    return engine.generate(Request(messages, SamplingParams(**sampling), speculation))[0]


@sizes_param
@conversation_param
@pytest.mark.parametrize("plan", PLANS)
def test_logits_of_every_row_are_those_of_transformers(step_of, engine_on, sizes, name, plan):
    engine, expected = engine_on(sizes), Dialogue(step_of(sizes), CONVERSATIONS[name]).logits
    got = logits_of(engine.target, engine.prepare(Request(CONVERSATIONS[name])), iter(PLANS[plan]))
    assert got.shape == expected.shape
    distance = float((got - expected).abs().max())
    report(f"{sizes.name}, {name}, {plan} (logits from {expected.min():.1f} to {expected.max():.1f})", distance)
    assert expected.std() > 0.5
    assert distance < TOLERANCE


@conversation_param
def test_a_row_has_the_same_bits_alone_and_in_every_batch(engine_on, name):
    """Few rows one by one, in threes and in tiles, on a prefix that was one chunk: experts are grouped by rows."""
    for sizes in (MIXED, SPARSE):
        engine = engine_on(sizes)
        rows, start = engine.prepare(Request(CONVERSATIONS[name])), 20
        ways = [
            states_of(engine.target, rows, itertools.chain([(start, True)], itertools.repeat((size, False))))
            for size in (1, 3, 16)
        ]
        assert torch.equal(ways[0], ways[1])
        assert torch.equal(ways[0], ways[2])


@conversation_param
def test_prompt_tokens_and_image_rows_are_the_template_written_out_by_hand(step_of, engine_on, name):
    rows = engine_on(MIXED).prepare(Request(CONVERSATIONS[name]))
    dialogue = Dialogue(step_of(MIXED), CONVERSATIONS[name])
    assert rows.token_ids.tolist() == dialogue.token_ids
    assert rows.is_image.tolist() == [token == IMAGE for token in dialogue.token_ids]
    per_image = [rows * columns * CROP_ROWS + WHOLE_ROWS for rows, columns in (CUTS[id(p)] for p in dialogue.pictures)]
    assert [image.num_rows for image in rows.images] == per_image
    for index, count in enumerate(per_image):
        assert rows.offset[rows.image == index].tolist() == list(range(count))


@conversation_param
def test_positions_count_rows(engine_on, name):
    """transformers numbers rows 0, 1, 2 ... whatever they hold."""
    engine = engine_on(MIXED)
    rows = engine.prepare(Request(CONVERSATIONS[name]))
    np.testing.assert_array_equal(rows.positions.coords, np.arange(len(rows))[None])
    assert engine.target.spec.rule.following(rows.positions.at(-1)) == len(rows)


@sizes_param
def test_image_embeddings_are_those_of_the_tower(step_of, engine_on, sizes):
    engine = engine_on(sizes)
    for name in CONVERSATIONS:
        rows = engine.prepare(Request(CONVERSATIONS[name]))
        with torch.inference_mode():
            ours = [engine.target.embed_image(image) for image in rows.images]
        for mine, theirs in zip(ours, Dialogue(step_of(sizes), CONVERSATIONS[name]).images, strict=True):
            distance = float((mine - theirs).abs().max())
            report(f"{sizes.name}, {name}, embeddings {tuple(theirs.shape)}", distance)
            assert mine.shape == theirs.shape
            assert distance < TOLERANCE
            assert theirs.std(0).mean() > 0.02, "rows of the picture must differ"


def test_identities_tell_pictures_apart_and_runs_of_one_picture(engine_on):
    """A prefix may be reused over an image only if it is the same picture; separators are tokens."""
    engine = engine_on(MIXED)
    rows = engine.prepare(Request(CONVERSATIONS["one image with crops"]))
    ids = rows.identities()
    assert len(set(ids[rows.is_image].tolist())) == rows.num_image_rows
    assert (ids[rows.is_image] < 0).all() and (ids[~rows.is_image] >= 0).all()
    other = engine.prepare(Request((Message.of("user", "see ", [SMALL.resize((100, 70))]),)))
    assert not set(ids[rows.is_image].tolist()) & set(other.identities()[other.is_image].tolist())


@sizes_param
def test_the_state_that_a_head_is_fed_is_before_the_final_norm(step_of, engine_on, sizes):
    """HIDDEN_FROM; the switch to the other convention is `Conventions`."""
    messages = CONVERSATIONS["one image without crops"]
    dialogue, engine = Dialogue(step_of(sizes), messages), engine_on(sizes)
    rows = engine.prepare(Request(messages))
    assert step3p7.HIDDEN_FROM == "pre_norm"
    got = states_of(engine.target, rows, iter(PLANS["one chunk"]))
    assert float((got - pre_norm_states(step_of(sizes), dialogue.inputs)).abs().max()) < TOLERANCE
    post = load_with(step_of(sizes).folder, step3p7.Conventions(hidden_from="post_norm"))
    got = states_of(post, rows, iter(PLANS["one chunk"]))
    assert float((got - dialogue.normed).abs().max()) < TOLERANCE
    assert float((post.logits(got) - dialogue.logits).abs().max()) < TOLERANCE


def load_with(folder, conventions):
    from foreglance.ops.numerics import choose

    config = step3p7.read_config(folder)
    ops, _ = choose("fp32", *step3p7.shapes_of(config.to_dict()))
    return step3p7.load("other", folder, config, ops, 512, frozenset({2}), conventions=conventions)


@sizes_param
@pytest.mark.parametrize("name", ["text", "one image with crops", "two turns"])
def test_greedy_text_is_that_of_generate_with_drafts_off_and_on(step_of, engine_on, sizes, name):
    expected = Dialogue(step_of(sizes), CONVERSATIONS[name]).greedy(NUM_TOKENS)
    assert len(expected) == NUM_TOKENS
    engine = engine_on(sizes, Settings(grid=16))
    for speculation in (Speculation("none"), Speculation("mtp", 1), Speculation("mtp", 3), Speculation("ngram", 3)):
        result = answer(engine, CONVERSATIONS[name], speculation)
        assert list(result.token_ids) == expected, speculation
        assert (sum(result.timings.drafted) > 0) or speculation.draft != "mtp"
        assert result.draft.off_because is None or speculation.draft == "none"
    engine.check()


@conversation_param
def test_fp16_weights_cost_their_rounding_and_nothing_else(step_of, engine_on, name):
    half = replace(SPARSE, name="half", stored=torch.float16)
    engine, expected = engine_on(half, weights="fp16"), Dialogue(step_of(half), CONVERSATIONS[name]).logits
    got = logits_of(engine.target, engine.prepare(Request(CONVERSATIONS[name])), iter(PLANS["chunks and few rows"]))
    assert float((got - expected).abs().max()) < TOLERANCE


CHANGED = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.1.moe.gate.weight",
    "model.layers.1.moe.router_bias",
    "model.layers.1.moe.up_proj.weight",
    "model.layers.3.share_expert.down_proj.weight",
    "model.layers.2.self_attn.g_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "vision_model.transformer.resblocks.1.attn.in_proj_weight",
    "vision_model.vit_downsampler2.bias",
    "vit_large_projector.weight",
    "model.layers.5.eh_proj.weight",
    "model.layers.6.hnorm.weight",
    "model.layers.7.mlp.up_proj.weight",
)
TOWER_NAMES = {
    "vision_model.transformer.resblocks.1.attn.in_proj_weight": "layers.1.self_attn",
    "vision_model.vit_downsampler2.bias": "downsampler2.bias",
    "vit_large_projector.weight": "_projector.weight",  # its published names differ in what stands before
}


def load(folder):
    return load_model(str(folder), Settings(weights="fp32")).target


@pytest.mark.parametrize("name", CHANGED)
def test_a_tensor_that_is_missing_or_misshaped_is_named(step_of, tmp_path, name):
    def widen(state):
        state[name] = torch.cat([state[name], state[name]])

    source = step_of(MIXED).folder
    shown = "embed_tokens.weight" if "embed_tokens" in name else TOWER_NAMES.get(name, name)
    with pytest.raises(ModelError, match=shown.replace(".", r"\.")):
        load(edited(source, tmp_path / "missing", lambda state: state.pop(name)))
    with pytest.raises(ModelError, match=TOWER_NAMES.get(name, name).replace(".", r"\.")):
        load(edited(source, tmp_path / "wide", widen))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.moe.gate_proj.weight_scale_inv",
        "model.layers.0.mlp.extra.weight",
        "model.layers.6.shared_head.head.weight",
        "vision_model.transformer.resblocks.7.ln_1.weight",
        "unknown.weight",
    ],
)
def test_a_tensor_that_is_left_over_is_named(step_of, tmp_path, name):
    shown = "layers.7.layernorm_before.weight" if "resblocks" in name else name
    with pytest.raises(ModelError, match=shown.replace(".", r"\.")):
        load(edited(step_of(MIXED).folder, tmp_path / "more", lambda state: state.update({name: torch.ones(3)})))


def renamed(*pairs: tuple[str, str]):
    def change(state):
        for name in list(state):
            tensor, new = state.pop(name), name
            for old, other in pairs:
                new = new.replace(old, other)
            state[new] = tensor

    return change


SPELLINGS = {
    "inside a VLM": [("model.layers", "language_model.model.layers"), ("model.norm", "language_model.model.norm"),
                     ("model.embed", "language_model.model.embed"), ("lm_head", "language_model.lm_head")],
    "as the library names it": [("model.layers", "model.language_model.layers"),
                                ("model.norm", "model.language_model.norm"),
                                ("model.embed", "model.language_model.embed"), ("vision_model.", "model.vision_model."),
                                ("vit_large_projector", "model.multi_modal_projector")],
    "heads without transformer": [("transformer.shared_head", "shared_head")],
}  # fmt: skip


def head_logits(target, module: int) -> torch.Tensor:
    state = torch.randn(3, target.spec.hidden_size, generator=torch.Generator().manual_seed(module))
    with torch.inference_mode():
        return target.head.modules[module].logits(state)


@pytest.mark.case("E3")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_published_spelling_is_read(step_of, tmp_path, engine_on, spelling):
    """Case E3: a head under another prefix must not get lost in silence."""
    folder = edited(step_of(MIXED).folder, tmp_path / "renamed", renamed(*SPELLINGS[spelling]))
    assert set(load_weights(folder)) != set(load_weights(step_of(MIXED).folder))
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    assert engine.target.head.spec.num_modules == 3
    rows = engine.prepare(Request(CONVERSATIONS["one image with crops"]))
    got = logits_of(engine.target, rows, iter(PLANS["one chunk"]))
    expected = Dialogue(step_of(MIXED), CONVERSATIONS["one image with crops"]).logits
    assert float((got - expected).abs().max()) < TOLERANCE
    for module in range(3):
        assert torch.equal(head_logits(engine.target, module), head_logits(engine_on(MIXED).target, module))


def test_the_library_s_own_names_of_experts_and_tower_are_read(step_of, tmp_path):
    """A checkpoint written from the model's state dict, without the published renaming."""
    checkpoint = step_of(MIXED)

    def change(state):
        mtp = {name: tensor for name, tensor in state.items() if name.startswith(("model.layers.5", "model.layers.6"))}
        state.clear()
        state.update({name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()})
        state.update({name.replace("model.", "model.language_model."): tensor for name, tensor in mtp.items()})

    target = load(edited(checkpoint.folder, tmp_path / "plain", change))
    assert target.head.spec.num_modules == 2
    dialogue = Dialogue(checkpoint, CONVERSATIONS["two images"])
    prompter = Prompter(
        load_model(str(checkpoint.folder), Settings()).tokenizer, IMAGE, target.spec.rule, target.prepare
    )
    rows = Engine(target, prompter).prepare(Request(CONVERSATIONS["two images"]))
    assert float((logits_of(target, rows, iter(PLANS["one chunk"])) - dialogue.logits).abs().max()) < TOLERANCE


@pytest.mark.case("E3")
@pytest.mark.parametrize("lost", ["norm", "output"])
def test_a_module_without_a_norm_or_head_takes_the_target_s(step_of, tmp_path, lost):
    """Case E3; another module keeps its own."""
    name = f"model.layers.6.transformer.shared_head.{lost}.weight"
    whole, target = (
        load(step_of(MIXED).folder),
        load(edited(step_of(MIXED).folder, tmp_path / "lost", lambda state: state.pop(name))),
    )
    assert torch.equal(head_logits(target, 0), head_logits(whole, 0))
    assert not torch.allclose(head_logits(target, 1), head_logits(whole, 1), atol=0.01)
    if lost == "output":
        output, own = target.head.modules[1]._output, whole.head.modules[1]._output
        assert torch.equal(output.norm, own.norm) and output.weight is target.output.weight
    else:
        assert torch.equal(target.head.modules[1]._output.norm, target.output.norm)


def test_a_module_s_own_embedding_is_read_where_it_has_one(step_of, tmp_path):
    """A table whose rows lie one further gives the guesses that the token before gives from the target's."""

    def further(state):
        state["model.layers.6.embed_tokens.weight"] = state["model.embed_tokens.weight"].roll(1, 0)

    whole, target = load(step_of(MIXED).folder), load(edited(step_of(MIXED).folder, tmp_path / "own", further))
    for module, shift in ((0, 0), (1, 1), (2, 0)):
        theirs = module_state(whole.head.modules[module], 40)
        assert torch.equal(module_state(target.head.modules[module], 40 + shift), theirs)
        assert not torch.allclose(module_state(target.head.modules[module], 41 - shift), theirs, atol=0.01)


def module_state(module, token: int) -> torch.Tensor:
    """A module's state [1, h] of one row at position 0."""
    store, hidden = CacheStore(module.spec.caches), torch.linspace(-1, 1, module.spec.hidden_size)[None]
    store.open(0)
    positions = Positions.run(0, 1, module.spec.rule.axes)
    part = Part(0, np.array([token]), np.zeros(1, bool), positions, 1, False, None, hidden)
    batch = pack([part], module.spec.inputs(), store.held())
    store.reserve(0, 1)
    with torch.inference_mode():
        return module.forward(batch, {0: store[0]})


@pytest.mark.case("E1", "E2", "E3")
@pytest.mark.parametrize("declared", ["text", "top", "nowhere", "zero"])
@pytest.mark.parametrize("padded", [True, False], ids=["48", "45"])
def test_lists_with_and_without_mtp_entries_are_read_wherever_the_number_stands(step_of, tmp_path, declared, padded):
    """Cases E1, E2 and E3: tensors decide whether there is a head."""

    def change(values):
        text = values["text_config"]
        number = text.pop("num_nextn_predict_layers")
        if declared == "text":
            text["num_nextn_predict_layers"] = number
        if declared == "top":
            values["num_nextn_predict_layers"] = number
        if declared == "zero":
            text["num_nextn_predict_layers"] = 0
        if not padded:
            for name in step3p7.LAYER_LISTS:
                if name in text:
                    text[name] = text[name][: text["num_hidden_layers"]]

    folder = edit_config(edited(step_of(MIXED).folder, tmp_path / "copy", lambda state: None), change)
    target = load(folder)
    assert target.head.spec == load(step_of(MIXED).folder).head.spec
    assert len(target.spec.caches) == len(MIXED.layers)
    headless = edited(
        folder, tmp_path / "headless", lambda state: drop(state, "model.layers.5", "model.layers.6", "model.layers.7")
    )
    assert load(headless).head is None


def drop(state, *prefixes: str) -> None:
    for name in [name for name in state if name.startswith(prefixes)]:
        del state[name]


def test_without_lists_the_heads_of_a_module_tell_its_kind(step_of, tmp_path):
    """The first module's query heads are those of a full layer here."""

    def change(values):
        text = values["text_config"]
        for name in step3p7.LAYER_LISTS:
            if name in text:
                text[name] = text[name][: text["num_hidden_layers"]]

    source = step_of(replace(MIXED, name="full-mtp", mtp="FS")).folder
    target = load(edit_config(edited(source, tmp_path / "copy", lambda state: None), change))
    assert [module.spec.caches[0].window for module in target.head.modules] == [None, MIXED.window]


def test_one_module_is_an_ordinary_head(step_of, tmp_path):
    folder = edited(
        step_of(MIXED).folder, tmp_path / "one", lambda state: drop(state, "model.layers.6", "model.layers.7")
    )
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    assert engine.target.head.spec.num_modules == 1
    result = answer(engine, CONVERSATIONS["one image with crops"], Speculation("mtp", 3))
    assert list(result.token_ids) == Dialogue(step_of(MIXED), CONVERSATIONS["one image with crops"]).greedy(NUM_TOKENS)
    assert sum(result.timings.drafted) > 0


def test_a_placeholder_beyond_the_vocabulary_never_reaches_a_table(step_of, tmp_path):
    """The class defaults are 151679 and 128815: as text it would read past the embedding."""
    folder = edit_config(
        edited(step_of(MIXED).folder, tmp_path / "high", lambda state: None),
        lambda values: values.update(image_token_id=MIXED.vocab + 7),
    )
    target = load(folder)
    rows = load_rows(step_of(MIXED).folder, target, "one image with crops")
    assert rows.token_ids.max() == MIXED.vocab + 7
    expected = Dialogue(step_of(MIXED), CONVERSATIONS["one image with crops"]).logits
    assert float((logits_of(target, rows, iter(PLANS["one chunk"])) - expected).abs().max()) < TOLERANCE
    assert 0 <= target.head.spec.placeholder < MIXED.vocab
    prompter = Prompter(load_model(str(folder), Settings()).tokenizer, IMAGE, target.spec.rule, target.prepare)
    for policy in ("see", "skip", "placeholder", "gap"):
        engine = Engine(target, prompter, Settings(grid=16))
        request = Request(CONVERSATIONS["text"], SamplingParams(max_tokens=6), Speculation("mtp", 3, policy))
        engine.add_rows(request, rows)
        events = [event for _ in range(60) for event in engine.step()]
        assert engine.is_idle and events[-1].result.draft.off_because is None


def load_rows(folder, target, name):
    """A conversation's rows with the placeholder of `target`."""
    tokenizer = load_model(str(folder), Settings()).tokenizer
    rows = Engine(target, Prompter(tokenizer, IMAGE, target.spec.rule, load(folder).prepare)).prepare(
        Request(CONVERSATIONS[name])
    )
    return replace(rows, token_ids=np.where(rows.is_image, target.spec.image_token, rows.token_ids))


def test_a_checkpoint_without_a_tower_refuses_images_in_words(step_of, tmp_path):
    folder = edited(step_of(MIXED).folder, tmp_path / "blind", lambda state: drop(state, "vision_model", "vit_large"))
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    result = answer(engine, CONVERSATIONS["text"], Speculation("mtp", 3))
    assert list(result.token_ids) == Dialogue(step_of(MIXED), CONVERSATIONS["text"]).greedy(NUM_TOKENS)
    with pytest.raises(RequestError, match="image") as error:
        engine.add(Request((Message.of("user", "what?", [SMALL]),)))
    assert (error.value.param, error.value.code) == ("image", "images_unsupported")


def test_a_tokenizer_without_the_tags_is_refused(step_of, tmp_path):
    folder = edited(step_of(MIXED).folder, tmp_path / "untagged", lambda state: None)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["added_tokens"] = [t for t in text["added_tokens"] if t["content"] != "<patch_newline>"]
    text["model"]["vocab"].pop("<patch_newline>")
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ModelError, match="<patch_newline>"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"gating": "per-channel"},
        {"attention_bias": True},
        {"layer_types": ["linear_attention"] * 5},
        {"sliding_window": None},
    ],
    ids=str,
)
def test_what_no_published_checkpoint_has_is_refused(step_of, change):
    text = step3p7.read_config(step_of(MIXED).folder).to_dict()["text_config"]
    with pytest.raises(ModelError):
        step3p7.Shape.of(text | change)
