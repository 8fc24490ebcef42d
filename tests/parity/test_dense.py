"""The dense text decoders against transformers on tiny random checkpoints, and what their folders may look like."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from support.checkpoints import edit_config, edited
from support.dense import (
    ALL,
    GEMMA3,
    GEMMA3_UNTIED,
    LLAMA,
    LLAMA_BIASED,
    QWEN3,
    QWEN3_SLIDING,
    ROPES,
    VOCAB,
    DenseCheckpoint,
    write_dense,
)
from transformers import AutoTokenizer

from foreglance import Engine, Message, Request, RequestError, SamplingParams, Settings, Speculation
from foreglance.batch import Part, pack
from foreglance.cache.store import CacheStore
from foreglance.models.base import ModelError
from foreglance.models.registry import load_model
from foreglance.prompt import Positions

TOLERANCE = 1e-4
NUM_ROWS = 150
TEXT = torch.randint(7, VOCAB, (NUM_ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
PLANS = {
    "one chunk": itertools.repeat((10_000, True)),
    "chunks of 13": itertools.repeat((13, True)),
    "few rows": itertools.cycle([(n, False) for n in (1, 2, 16, 3, 7)]),
    "chunks and few rows": itertools.cycle([(9, True), (1, False), (3, False), (20, True), (5, False), (1, True)]),
}
each_type = pytest.mark.parametrize("sizes", (LLAMA, QWEN3, GEMMA3), ids=lambda sizes: sizes.config.model_type)


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory) -> Callable[..., DenseCheckpoint]:
    made = {}

    def get(sizes) -> DenseCheckpoint:
        if sizes.name not in made:
            made[sizes.name] = write_dense(tmp_path_factory.mktemp("dense") / "tiny", sizes)
        return made[sizes.name]

    return get


def load(folder, weights="fp32"):
    return load_model(str(folder), Settings(weights=weights)).target


@torch.inference_mode()
def logits_of(target, texts: dict[int, list[int]], plan: Iterable[tuple[int, bool]], shift: int = 0) -> dict:
    """Every row's logits by sequence, in the pieces of a plan; `shift`: others take another piece at the same time."""
    store, pieces = CacheStore(target.spec.caches), list(itertools.islice(plan, 400))
    at, out = dict.fromkeys(texts, 0), {number: [] for number in texts}
    for number in texts:
        store.open(number)
    for step in range(len(pieces)):
        parts = []
        for number, text in texts.items():
            size, chunk = pieces[(step + shift * number) % len(pieces)]
            start, stop = at[number], min(at[number] + size, len(text))
            if stop > start:
                ids = np.array(text[start:stop], np.int64)
                run = Positions.run(start, stop - start, 1)
                parts.append(Part(number, ids, np.zeros(stop - start, bool), run, stop - start, chunk))
                at[number] = stop
        if not parts:
            break
        batch = pack(parts, target.spec.inputs, store.held())
        for part in parts:
            store.reserve(part.sequence, part.num_rows)
        hidden = target.forward(batch, {part.sequence: store[part.sequence] for part in parts})
        for index, part in enumerate(batch.parts):
            store.commit(part.sequence, part.num_rows, part.positions.at(-1))
            out[part.sequence].append(target.logits(hidden[batch.rows_of(index)]))
    return {number: torch.cat(pieces) for number, pieces in out.items()}


def distance_to(checkpoint: DenseCheckpoint, plan: str) -> float:
    expected = checkpoint.logits(TEXT)
    got = logits_of(load(checkpoint.folder), {0: TEXT}, PLANS[plan])[0]
    assert got.shape == expected.shape and expected.std() > 0.3
    distance = float((got - expected).abs().max())
    print(f"\n  {checkpoint.sizes.name}, {plan} (logits to {expected.abs().max():.1f}): {distance:.2e}", end="")
    return distance


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sizes", ALL, ids=lambda sizes: sizes.name)
def test_logits_of_every_row_are_those_of_transformers(checkpoint_of, sizes, plan):
    assert distance_to(checkpoint_of(sizes), plan) < TOLERANCE


@pytest.mark.case("D15")
@pytest.mark.parametrize("sizes", ROPES, ids=lambda sizes: sizes.name)
def test_rope_scalings_are_those_of_transformers(checkpoint_of, sizes):
    """Case D15: target and draft are loaded by the same code, so both get it."""
    assert distance_to(checkpoint_of(sizes), "chunks and few rows") < TOLERANCE


@pytest.mark.parametrize("sizes", ALL, ids=lambda sizes: sizes.name)
def test_logits_hold_when_sequences_share_a_batch(checkpoint_of, sizes):
    checkpoint = checkpoint_of(sizes)
    texts = {0: TEXT[:90], 1: TEXT[20:130], 2: TEXT[5:60]}
    got = logits_of(load(checkpoint.folder), texts, PLANS["chunks and few rows"], shift=1)
    for number, text in texts.items():
        assert float((got[number] - checkpoint.logits(text)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("weights", ("fp32", "fp16"))
@pytest.mark.parametrize("sizes", ALL, ids=lambda sizes: sizes.name)
def test_a_row_has_the_same_bits_whatever_its_batch(checkpoint_of, sizes, weights):
    """Few rows one by one, five at a time, and next to two other sequences: what makes drafts exact."""
    target, texts = load(checkpoint_of(sizes).folder, weights), {0: TEXT[:60], 1: TEXT[20:80], 2: TEXT[5:50]}
    alone = logits_of(target, {0: texts[0]}, itertools.repeat((1, False)))[0]
    assert torch.equal(logits_of(target, {0: texts[0]}, itertools.repeat((5, False)))[0], alone)
    assert torch.equal(logits_of(target, texts, itertools.repeat((5, False)))[0], alone)


@each_type
def test_greedy_text_is_that_of_generate_with_and_without_drafts(checkpoint_of, sizes):
    checkpoint = checkpoint_of(sizes)
    engine = Engine.load(str(checkpoint.folder), Settings(weights="fp32", grid=16))
    messages = (Message.of("system", "the picture"), Message.of("user", "where does the red square stand? " * 3))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    rows = engine.prepare(Request(messages))
    checkpoint.model.generation_config.eos_token_id = None
    inputs = torch.from_numpy(rows.token_ids)[None]
    with torch.inference_mode():
        text = checkpoint.model.generate(inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
    for speculation in (Speculation("none"), Speculation("ngram", 3), Speculation("ngram", 7)):
        (result,) = engine.generate(Request(messages, params, speculation))
        assert list(result.token_ids) == text[len(rows) :].tolist()
    (result,) = engine.generate(Request(messages, params))
    assert result.draft.kind == "none" and result.draft.off_because


@each_type
def test_a_text_model_refuses_images_in_words(checkpoint_of, sizes):
    from support.qwen_reference import WIDE

    engine = Engine.load(str(checkpoint_of(sizes).folder), Settings(weights="fp32"))
    with pytest.raises(RequestError, match="takes no images") as error:
        engine.add(Request((Message.of("user", "what?", [WIDE]),)))
    assert (error.value.param, error.value.code) == ("image", "images_unsupported")
    assert engine.is_idle


CHANGED = [
    (LLAMA, "lm_head.weight"),
    (LLAMA, "model.norm.weight"),
    (LLAMA, "model.layers.2.self_attn.k_proj.weight"),
    (LLAMA_BIASED, "model.layers.1.self_attn.o_proj.bias"),
    (LLAMA_BIASED, "model.layers.1.mlp.up_proj.bias"),
    (QWEN3, "model.layers.0.self_attn.q_norm.weight"),
    (QWEN3_SLIDING, "model.layers.0.self_attn.v_proj.bias"),
    (GEMMA3, "model.layers.3.post_feedforward_layernorm.weight"),
    (GEMMA3_UNTIED, "model.layers.6.pre_feedforward_layernorm.weight"),
]


@pytest.mark.parametrize(("sizes", "name"), CHANGED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_tensor_that_is_missing_or_misshaped_is_named(checkpoint_of, tmp_path, sizes, name):
    def widen(state):
        state[name] = torch.cat([state[name], state[name]])

    source = checkpoint_of(sizes).folder
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(edited(source, tmp_path / "missing", lambda state: state.pop(name)))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(edited(source, tmp_path / "wide", widen))


LEFT_OVER = [
    (LLAMA, "model.layers.0.self_attn.q_proj.bias"),
    (LLAMA, "model.layers.0.self_attn.q_norm.weight"),
    (QWEN3, "model.layers.0.pre_feedforward_layernorm.weight"),
    (GEMMA3, "model.layers.4.mlp.up_proj.weight"),
]


@pytest.mark.parametrize(("sizes", "name"), LEFT_OVER, ids=lambda value: value if isinstance(value, str) else "")
def test_a_tensor_that_is_left_over_is_named(checkpoint_of, tmp_path, sizes, name):
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(edited(checkpoint_of(sizes).folder, tmp_path / "more", lambda state: state.update({name: torch.ones(3)})))


@each_type
def test_rotary_frequencies_in_an_old_checkpoint_are_ignored(checkpoint_of, tmp_path, sizes):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    load(edited(checkpoint_of(sizes).folder, tmp_path / "old", lambda state: state.update(more)))


@pytest.mark.parametrize("sizes", (QWEN3, GEMMA3), ids=lambda sizes: sizes.name)
def test_a_tied_checkpoint_may_hold_its_head_twice_but_not_another_one(checkpoint_of, tmp_path, sizes):
    """Published Qwen3 checkpoints of small sizes hold it twice."""
    source = checkpoint_of(sizes)

    def twice(state):
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    got = logits_of(load(edited(source.folder, tmp_path / "twice", twice)), {0: TEXT}, PLANS["one chunk"])[0]
    assert float((got - source.logits(TEXT)).abs().max()) < TOLERANCE
    other = {"lm_head.weight": torch.ones(VOCAB, 64, dtype=sizes.stored)}
    with pytest.raises(ModelError, match=r"lm_head\.weight is another"):
        load(edited(source.folder, tmp_path / "other", lambda state: state.update(other)))


@pytest.mark.parametrize("prefix", ("", "language_model.model."))
def test_every_published_prefix_of_the_trunk_is_read(checkpoint_of, tmp_path, prefix):
    def rename(state):
        for name in list(state):
            if name.startswith("model."):
                state[prefix + name.removeprefix("model.")] = state.pop(name)
            elif prefix:
                state[f"language_model.{name}"] = state.pop(name)

    source = checkpoint_of(LLAMA)
    target = load(edited(source.folder, tmp_path / "renamed", rename))
    got = logits_of(target, {0: TEXT}, PLANS["one chunk"])[0]
    assert float((got - source.logits(TEXT)).abs().max()) < TOLERANCE


REFUSED = [
    (LLAMA, {"hidden_act": "relu"}, "activation 'relu' is not supported"),
    (LLAMA, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (
        LLAMA,
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        "'chunked_attention' is unknown",
    ),
    (LLAMA, {"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "no sliding_window"),
]


@pytest.mark.parametrize(
    ("sizes", "change", "word"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_the_forward_does_not_do_is_refused_in_words(checkpoint_of, tmp_path, sizes, change, word):
    folder = edited(checkpoint_of(sizes).folder, tmp_path / "odd", lambda state: None)
    with pytest.raises(ModelError, match=word):
        load(edit_config(folder, lambda values: values.update(change)))


@pytest.mark.parametrize("special", (True, False))
def test_only_special_words_may_lie_beyond_the_vocabulary(checkpoint_of, tmp_path, special):
    """Published text models of Gemma-3 keep the image placeholder of their larger siblings, one id beyond the table."""
    folder = edited(checkpoint_of(GEMMA3).folder, tmp_path / "more", lambda state: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<filler {n}>" for n in range(VOCAB - len(tokenizer))])
    tokenizer.add_tokens(["<soft>"], special_tokens=special)
    assert tokenizer.get_vocab()["<soft>"] == VOCAB
    tokenizer.save_pretrained(folder)
    if not special:
        with pytest.raises(ModelError, match="do not belong together"):
            load(folder)
        return
    engine = Engine.load(str(folder), Settings(weights="fp32"))
    texts = ("what is <soft> here?", "what is here?")
    requests = [Request((Message.of("user", text),), SamplingParams(max_tokens=4, ignore_eos=True)) for text in texts]
    odd, plain = engine.generate(requests)
    assert odd.finish_reason == "error" and f"token id {VOCAB} is outside" in odd.error
    assert (plain.finish_reason, len(plain.token_ids)) == ("length", 4)
