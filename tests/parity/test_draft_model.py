"""Second models from checkpoint folders: which pairs draft, which are refused, and that no pair changes a token."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.checkpoints import TIED, edited, write_qwen3_5
from support.dense import GEMMA3, LLAMA, QWEN3, write_dense
from support.qwen_reference import CONVERSATIONS
from transformers import AutoTokenizer

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.models.base import ModelError
from foreglance.models.registry import load_model
from foreglance.models.weights import Weights

SETTINGS = Settings(weights="fp32", grid=16, context=300)
NARROW = replace(LLAMA, name="narrow", options=(*LLAMA.options, ("vocab_size", 304)), num_shards=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    made = {sizes.name: write_dense(root / sizes.name, sizes).folder for sizes in (LLAMA, QWEN3, GEMMA3, NARROW)}
    return made | {"qwen3_5": write_qwen3_5(root / "qwen3_5", TIED).folder}


def generate(engine, name, draft="none", depth=3, temperature=0.0):
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=3)
    (result,) = engine.generate(Request(CONVERSATIONS[name], params, Speculation(draft, depth)))
    engine.check()
    return result


PAIRS = [
    ("qwen3_5", "llama"),
    ("qwen3_5", "gemma3 text"),
    ("qwen3_5", "narrow"),
    ("qwen3_5", "qwen3_5"),
    ("qwen3", "qwen3_5"),
    ("narrow", "qwen3"),
]


@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=" with ".join)
def test_a_draft_model_changes_no_token(folders, target, draft):
    engine = Engine.load(str(folders[target]), SETTINGS, draft_model=str(folders[draft]))
    for name in CONVERSATIONS if target == "qwen3_5" else ("text",):
        for temperature in (0.0, 0.9):
            plain = generate(engine, name, temperature=temperature)
            for depth in (1, 5):
                result = generate(engine, name, "auto", depth, temperature)
                assert result.token_ids == plain.token_ids
                assert (result.draft.kind, result.draft.model) == ("model", folders[draft].name)
                assert result.draft.off_because is None and sum(result.timings.drafted) > 0


@pytest.mark.case("A24")
@pytest.mark.parametrize("name", ("qwen3_5", "qwen3", "gemma3 text"))
def test_a_model_is_a_perfect_draft_of_itself_on_text(folders, name):
    """Case A24: an M-RoPE model as text draft has equal axes; its recurrent layers and windows stand where they ought
    to after every round."""
    engine = Engine.load(str(folders[name]), SETTINGS, draft_model=str(folders[name]))
    assert generate(engine, "text", "model", 4).timings.acceptance == 1.0
    assert generate(engine, "text", "model", 4, temperature=0.9).timings.acceptance == 1.0


def test_the_drafts_own_head_and_images_are_left_alone(folders):
    """The target's head can still be asked for by name."""
    engine = Engine.load(str(folders["qwen3_5"]), SETTINGS, draft_model=str(folders["llama"]))
    assert generate(engine, "one image", "mtp").draft.kind == "mtp"
    twin = engine.with_target(engine.target)
    assert generate(twin, "one image", "auto").draft.kind == "model"


@pytest.mark.parametrize(("name", "head"), [("tiny-qwen", "mtp."), ("tiny-step", "layers.6."), ("tiny-gemma", "tower")])
def test_tower_and_head_of_a_draft_are_not_read(name, head, monkeypatch):
    """Of a model with images only the text decoder drafts: no time and no memory for the rest."""
    read, take, take_all = [], Weights.take, Weights.take_all
    monkeypatch.setattr(
        Weights, "take", lambda self, name, *shape, **kinds: read.append(name) or take(self, name, *shape, **kinds)
    )
    monkeypatch.setattr(Weights, "take_all", lambda self, prefix: read.append(prefix) or take_all(self, prefix))
    for text_only in (False, True):
        read.clear()
        target = load_model(name, Settings(), text_only=text_only).target
        assert (target.vision is None) == text_only
        assert any(head in tensor for tensor in read) != text_only
        assert target.head is None or not text_only


def with_words(source, folder, change):
    edited(source, folder, lambda state: None)
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values["model"]["vocab"])
    path.write_text(json.dumps(values))
    return folder


def test_equal_sizes_with_other_words_are_refused(folders, tmp_path):
    def swap(vocab):
        one, other = "a", "b"
        vocab[one], vocab[other] = vocab[other], vocab[one]

    draft = with_words(folders["llama"], tmp_path / "swapped", swap)
    with pytest.raises(ModelError, match=r"swapped .* cannot draft for target qwen3_5") as error:
        Engine.load(str(folders["qwen3_5"]), SETTINGS, draft_model=str(draft))
    assert "'a'" in str(error.value) and "'b'" in str(error.value)


def test_one_word_more_is_refused_before_weights_are_read(folders, tmp_path):
    folder = edited(folders["llama"], tmp_path / "longer", lambda state: state.clear())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="'<more>'"):
        Engine.load(str(folders["qwen3_5"]), SETTINGS, draft_model=str(folder))


def test_a_shorter_context_of_the_draft_is_said_aloud(folders, tmp_path, caplog):
    folder = edited(folders["llama"], tmp_path / "short", lambda state: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    engine = Engine.load(str(folders["qwen3_5"]), SETTINGS, draft_model=str(folder))
    assert "short holds 64 rows" in caplog.text
    assert generate(engine, "text", "auto").token_ids == generate(engine, "text").token_ids
