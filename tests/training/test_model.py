"""The pieces that training adds to transformers' classes give the numbers that the plain way gives."""

import copy
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from foreglance.bench.scenes import sample_scene
from training.batches import batch_plan, collate
from training.captions import Chats
from training.draft_rows import draft_rows
from training.model import (
    IM_END,
    IMAGE_PAD,
    MtpHead,
    Target,
    batch_pictures,
    mrope_positions,
    pixel_rows,
)
from training.prepare import READ, Encoder, Shard, chat_text, train_tokenizer
from training.warm_vision import PROBES, cell_labels


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    chats = Chats(random.Random(0))
    return train_tokenizer([chat_text(chats.draw(), 0) for _ in range(300)], 512)


@pytest.fixture(scope="module")
def shard(tmp_path_factory, tokenizer) -> Shard:
    path = tmp_path_factory.mktemp("data") / "train-000.npz"
    chats = Chats(random.Random(1))
    Shard.write(path, [chats.draw() for _ in range(120)], Encoder(tokenizer))
    return Shard(path)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    return Target(512).eval()


@pytest.fixture
def plain_vision_attention(monkeypatch):
    """Undoes what `batch_pictures` does to transformers' class."""
    monkeypatch.setattr(qwen.Qwen3_5VisionAttention, "forward", qwen.Qwen3_5VisionAttention.forward)


def test_only_answers_are_learnt_their_end_token_included(tokenizer):
    encoder = Encoder(tokenizer)
    chat = [
        {"role": "user", "content": "What color is it?"},
        {"role": "assistant", "content": "It is red."},
    ]
    ids, labels = encoder.encode(chat)
    said = tokenizer.decode(ids[labels > READ].tolist(), skip_special_tokens=False)
    assert said == "It is red.<|im_end|>"
    assert ids[np.flatnonzero(labels)[-1]] == IM_END


def test_batches_hold_every_chat_once_and_stay_within_their_rows(shard):
    plan = batch_plan(shard.lengths, 2048, np.random.default_rng(0))
    assert sorted(np.concatenate(plan)) == list(range(len(shard)))
    assert all(len(chats) * shard.lengths[chats].max() <= 2048 for chats in plan if len(chats) > 1)


@pytest.mark.usefixtures("plain_vision_attention")
def test_positions_and_logits_equal_transformers_with_several_images(shard, target):
    chats = np.array([i for i in range(len(shard)) if len(shard.chat(i)[2]) >= 2][:3])
    plain = []
    for i in chats:
        ids, _, seeds = shard.chat(int(i))
        token_ids = torch.from_numpy(ids.astype(np.int64))[None]
        pixels, grid = pixel_rows(Shard.pictures(seeds))
        types = (token_ids == IMAGE_PAD).int()
        positions, _ = target.model.model.get_rope_index(token_ids, types, grid)
        assert np.array_equal(positions[:, 0].numpy(), mrope_positions(ids))
        with torch.no_grad():
            out = target.model(input_ids=token_ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=types)
        plain.append(out.logits[0])
    batch_pictures()
    with torch.no_grad():
        together = target.logits(collate(shard, chats).hidden(target))
    for row, alone in enumerate(plain):
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_parallel_draft_steps_equal_drafting_row_by_row(target):
    """If a chain saw first-step rows behind its own start, training would look better than drafting is."""
    torch.manual_seed(1)
    head = MtpHead(target.model.config.text_config).eval()
    for weight in head.parameters():
        weight.add_(torch.randn_like(weight) * 0.1)
    n, steps, hidden_size = 20, 3, 192
    embedded, hidden = torch.randn(1, n + steps - 1, hidden_size), torch.randn(1, n, hidden_size)
    positions = torch.arange(n + steps - 1).expand(3, 1, -1)
    rotary = target.text.rotary_emb

    parallel, earlier, state = [], [], hidden
    for step in range(steps):
        rows = slice(step, step + n)
        state = head.step(embedded[:, rows], state, rotary(state, positions[:, :, rows]), earlier)
        parallel.append(state)

    start = 13
    layer = copy.deepcopy(head.layers[0])
    layer.self_attn.config._attn_implementation = "eager"
    states = hidden[:, : start + 1]
    for step in range(steps):
        known = start + 1 + step
        joined = torch.cat([head.pre_fc_norm_embedding(embedded[:, :known]), head.pre_fc_norm_hidden(states)], dim=-1)
        mask = torch.full((known, known), float("-inf")).triu(1)[None, None]
        out = layer(head.fc(joined), position_embeddings=rotary(joined, positions[:, :, :known]), attention_mask=mask)
        drafted = head.norm(out)[:, -1:]
        torch.testing.assert_close(drafted[:, 0], parallel[step][:, start], rtol=1e-4, atol=1e-5)
        states = torch.cat([states, drafted], dim=1)


def test_draft_rows_by_policy():
    ids = np.array([1, 7, 3, *[IMAGE_PAD] * 16, 4, 8, 9])
    inputs, positions = draft_rows(ids, "see")
    assert list(inputs) == list(range(1, len(ids)))
    assert positions[:, 2:18].tolist() == (3 + np.stack([np.zeros(16), *np.divmod(np.arange(16), 4)])).tolist()
    assert positions[:, 18:].tolist() == [[7, 8, 9]] * 3
    inputs, positions = draft_rows(ids, "skip")
    assert list(inputs) == [1, 2, 19, 20, 21]
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert draft_rows(ids, "gap")[1].tolist() == [[1, 2, 7, 8, 9]] * 3


def test_cell_labels_name_the_items_of_a_scene():
    scene = sample_scene(random.Random(5))
    labels = cell_labels(scene)
    occupied = np.flatnonzero(labels[:, list(PROBES).index("order")] >= 0)
    assert [item.cell for item in scene.items] == list(occupied)
