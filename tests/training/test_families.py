"""What training adds to transformers' classes of Step-3.7 and Gemma-4 gives the numbers that the plain way gives."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training import families, folders, gemma, step, text
from training.batches import collate
from training.captions import Chats
from training.gemma_assistant import Assistant
from training.loud_rows import widen
from training.model import IMAGE_PAD
from training.prepare import Encoder, Shard, chat_text, train_tokenizer
from training.step_head import MtpModule, module_rows, read

VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    chats = Chats(random.Random(0))
    return train_tokenizer([chat_text(chats.draw(), 0) for _ in range(300)], VOCAB)


@pytest.fixture(scope="module")
def shard(tmp_path_factory, tokenizer) -> Shard:
    path = tmp_path_factory.mktemp("data") / "train-000.npz"
    chats = Chats(random.Random(1))
    Shard.write(path, [chats.draw() for _ in range(60)], Encoder(tokenizer))
    return Shard(path)


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """With weights of a size at which a wrong row shows."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return module.eval()


@pytest.fixture(scope="module")
def stepping() -> step.Target:
    torch.manual_seed(0)
    return shaken(step.Target(VOCAB))


@pytest.fixture(scope="module")
def gemming() -> gemma.Target:
    torch.manual_seed(0)
    return shaken(gemma.Target(VOCAB))


def with_images(shard: Shard, num: int) -> int:
    return next(i for i in range(len(shard)) if len(shard.chat(i)[2]) == num)


@pytest.mark.parametrize("size", step.LARGE)
@torch.no_grad()
def test_crops_stand_where_the_published_processor_puts_them(shard, stepping, size):
    plain = collate(step._LargeShard(shard, step.crop_ids(size, VOCAB)), np.array([with_images(shard, 1)]))
    batch = step.LargeBatch(plain.ids, plain.labels, plain.positions, plain.seeds, size)
    columns, rows = step.LARGE[size]
    assert (batch.ids == VOCAB).sum() == columns * rows == (batch.ids == VOCAB + 1).sum()
    assert (batch.ids == VOCAB + 2).sum() == rows - 1
    seen = step.views(Shard.pictures(batch.seeds)[0], size)
    out = stepping.model(
        input_ids=batch.ids,
        pixel_values=step.normalize(seen[-1:]),
        pixel_values_local=step.normalize(seen[:-1]),
        num_local_patches=[columns * rows],
    )
    torch.testing.assert_close(stepping.logits(batch.hidden(stepping)), out.logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_module_reads_only_what_is_known_when_it_drafts(shard, stepping):
    """Module k may use inputs up to row t + 1 + k; those behind must not change what it makes of row t."""
    torch.manual_seed(1)
    modules = [shaken(MtpModule(stepping)) for _ in range(step.NUM_MODULES)]
    embedded, state = read(stepping, collate(shard, np.array([with_images(shard, 1)])))
    n, start = 24, 11

    def chain(embedded: torch.Tensor) -> list[torch.Tensor]:
        states, rotary = [state[:, :n]], stepping.text.rotary_emb(embedded, torch.arange(n)[None], "sliding_attention")
        for k, module in enumerate(modules):
            states.append(module(embedded[:, 1 + k : 1 + k + n], states[-1], rotary, None))
        return states[1:]

    for k, known in enumerate(chain(embedded)):
        changed = embedded.clone()
        changed[:, start + 2 + k :] += 1
        torch.testing.assert_close(chain(changed)[k][:, : start + 1], known[:, : start + 1])
        assert not torch.allclose(chain(changed)[k][:, start + 1], known[:, start + 1])


@torch.no_grad()
def test_a_module_trained_without_image_rows_is_the_module_on_a_stream_that_has_none(shard, stepping):
    """Masked rows and positions without holes give what the shortened stream gives, and other than with the rows."""
    torch.manual_seed(2)
    module = shaken(MtpModule(stepping))
    batch = collate(shard, np.array([with_images(shard, 1)]))
    embedded, state = read(stepping, batch)
    n, window = batch.ids.shape[1] - 1, 256
    is_image = batch.ids == IMAGE_PAD
    for k in range(step.NUM_MODULES):
        inputs = F.pad(embedded, (0, 0, 0, step.NUM_MODULES))[:, 1 + k : 1 + k + n]

        def run(policy: str, k: int = k, inputs: torch.Tensor = inputs) -> torch.Tensor:
            positions, sees = module_rows(is_image, k, policy, window)
            rotary = stepping.text.rotary_emb(embedded, positions, "sliding_attention")
            return module(inputs, state[:, :n], rotary, sees)

        ahead = F.pad(is_image[0], (0, step.NUM_MODULES))
        kept = torch.tensor([not ahead[t + 1 : t + 2 + k].any() for t in range(n)])
        assert (~kept).sum() == 16 + k
        rotary = stepping.text.rotary_emb(embedded, torch.arange(int(kept.sum()))[None], "sliding_attention")
        short = module(inputs[:, kept], state[:, :n][:, kept], rotary, None)
        torch.testing.assert_close(run("skip")[:, kept], short, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(run("see")[:, kept], short, atol=1e-2)


def test_words_are_drawn_apart_to_the_distance_asked_for_and_nothing_else_moves():
    torch.manual_seed(3)
    embedding, tokens = torch.randn(30, 16), [4, 9, 11, 25]
    before = embedding.clone()
    offsets = widen(embedding, tokens, 3.0)
    near = before[tokens].mean(0)
    torch.testing.assert_close((embedding[tokens] - near).norm(dim=-1), torch.full((4,), 3.0))
    torch.testing.assert_close(offsets.T + embedding[tokens].mean(0), embedding[tokens])
    others = [i for i in range(30) if i not in tokens]
    assert torch.equal(embedding[others], before[others])


@torch.no_grad()
def test_image_blocks_and_logits_equal_transformers_with_several_images(shard, gemming):
    ids, _, seeds = shard.chat(with_images(shard, 2))
    token_ids = torch.from_numpy(ids.astype(np.int64))[None]
    patches, places = gemma.pixel_patches(Shard.pictures(seeds))
    types = (token_ids == IMAGE_PAD).int()
    out = gemming.model(
        input_ids=token_ids, pixel_values=patches, image_position_ids=places, mm_token_type_ids=types
    ).logits
    inputs = gemming.embed(token_ids, gemming.image_rows(Shard.pictures(seeds)))
    torch.testing.assert_close(gemming.logits(gemming.hidden(inputs)), out, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_assistant_drafts_from_all_rows_as_it_does_from_one(shard, gemming):
    torch.manual_seed(1)
    assistant = shaken(Assistant(gemming))
    batch = collate(shard, np.array([with_images(shard, 1)]))
    inputs = gemming.embed(batch.ids, gemming.image_rows(Shard.pictures(batch.seeds)))
    truth, shared = gemming.run(inputs)
    n, row = batch.ids.shape[1] - 3, 30
    sees = (torch.arange(n)[:, None] >= torch.arange(n))[None, None]
    masks = {"full_attention": sees, "sliding_attention": sees}
    cut = {kind: (keys[:, :, :n], values[:, :, :n]) for kind, (keys, values) in shared.items()}
    first, state = assistant.step(inputs.embedded[:, 1 : 1 + n], truth[:, :n], cut, masks)
    second, _ = assistant.step(inputs.embedded[:, 2 : 2 + n], state, cut, masks)

    known = {kind: (keys[:, :, : row + 1], values[:, :, : row + 1]) for kind, (keys, values) in shared.items()}
    state = truth[:, row : row + 1]
    for k, together in enumerate((first, second), 1):
        joined = torch.cat([inputs.embedded[:, row + k : row + k + 1], state], dim=-1)
        place = torch.tensor([[row + 1]])  # the same at every depth
        out = assistant.model(inputs_embeds=joined, position_ids=place, shared_kv_states=known)
        torch.testing.assert_close(out.logits[:, 0], together[:, row], rtol=1e-4, atol=1e-4)
        state = out.last_hidden_state


def test_a_text_batch_has_the_chats_without_image_rows(shard):
    i = with_images(shard, 2)
    ids, _, _ = shard.chat(i)
    batch = text.collate(shard, np.array([i]))
    assert batch.ids.shape[1] == len(ids) - 32
    assert not len(batch.seeds)
    assert torch.isfinite(batch.hidden(text.Target(VOCAB))).all()


@pytest.mark.parametrize("family", ["step", "gemma", "text"])
def test_all_folders_have_the_same_token_ids(tmp_path, tokenizer, family):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "model"
    out.mkdir()
    folders.write_texts(family, f"tiny-{family}", tmp_path, out)
    families.family_module(family).make_config(VOCAB).save_pretrained(out)
    named = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    rendered = named.apply_chat_template(chat, tokenize=False)
    expected = tokenizer.encode(chat_text(chat, rows_per_image=1)).ids
    if family != "text":  # the tags around an image's rows come with its layout
        expected = [token for token in expected if token not in (3, 4)]
    assert named(rendered, add_special_tokens=False).input_ids == expected
    assert named.eos_token_id == 2
    assert len(named) == tokenizer.get_vocab_size() + len(folders.ADDED[family])
