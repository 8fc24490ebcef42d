"""The Gemma-4 target against transformers on tiny random checkpoints: each kind of layer, images, what is skipped."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from support.checkpoints import VIDEO, edit_config, edited
from support.gemma import (
    CONVERSATIONS,
    DENSE,
    MIXED,
    SHARED_WHOLE,
    SIZES,
    SMALL,
    WINDOW,
    GemmaDialogue,
    GemmaSizes,
    picture,
    pixels_of,
    write_gemma4,
    write_processor,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from foreglance import Engine, Request, RequestError, SamplingParams, Settings, Speculation
from foreglance.batch import Part, pack
from foreglance.cache.store import CacheStore
from foreglance.images import open_picture
from foreglance.models import attention
from foreglance.models.base import ModelError
from foreglance.models.gemma4_vision import Recipe
from foreglance.models.registry import load_model
from foreglance.prompt import Prompter

TOLERANCE = 1e-4
sizes_param = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)
conversation_param = pytest.mark.parametrize("name", CONVERSATIONS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(checkpoint, loaded) of sizes, made once."""
    found = {}

    def get(sizes: GemmaSizes):
        if sizes not in found:
            checkpoint = write_gemma4(tmp_path_factory.mktemp("gemma"), sizes)
            found[sizes] = checkpoint, load_model(str(checkpoint.folder), Settings(weights="fp32"))
        return found[sizes]

    return get


def engine_of(loaded, settings: Settings | None = None) -> Engine:
    target = loaded.target
    prompter = Prompter(loaded.tokenizer, target.spec.image_token, target.spec.rule, target.prepare)
    return Engine(target, prompter, settings)


class Run:
    """Rows of one prompt through a target, in pieces."""

    def __init__(self, target, rows):
        self.target, self.rows, self.store, self.at = target, rows, CacheStore(target.spec.caches), 0
        self.store.open(0)
        with torch.inference_mode():
            self._images = [target.embed_image(image) for image in rows.images]

    def part(self, stop: int, chunk: bool, num_scored: int | None = None) -> Part:
        image, offset = self.rows.image[self.at : stop], self.rows.offset[self.at : stop]
        embeds = [self._images[i][o : o + 1] for i, o in zip(image, offset, strict=True) if i >= 0]
        return Part(
            0,
            self.rows.token_ids[self.at : stop],
            image >= 0,
            self.rows.positions.part(self.at, stop),
            num_scored=stop - self.at if num_scored is None else num_scored,
            chunk=chunk,
            embeds=torch.cat(embeds) if embeds else None,
        )

    @torch.inference_mode()
    def hidden(self, stop: int, chunk: bool, num_scored: int | None = None) -> torch.Tensor:
        """States [rows, h] of the next rows."""
        part = self.part(stop, chunk, num_scored)
        batch = pack([part], self.target.spec.inputs, self.store.held())
        self.store.reserve(0, part.num_rows)
        hidden = self.target.forward(batch, {0: self.store[0]})
        self.store.commit(0, part.num_rows, part.positions.at(-1))
        self.at = stop
        return hidden

    def logits(self, stop: int, chunk: bool) -> torch.Tensor:
        return self.target.logits(self.hidden(stop, chunk))


def whole(rows) -> list[tuple[int, bool]]:
    return [(len(rows), True)]


def around_images(rows, size: int = 7) -> list[tuple[int, bool]]:
    """Chunks of `size` rows; a border that would fall inside an image moves behind it."""
    stops, at = [], 0
    while at < len(rows):
        at = min(at + size, len(rows))
        while at < len(rows) and rows.image[at] >= 0 and rows.image[at] == rows.image[at - 1]:
            at += 1
        stops.append((at, True))
    return stops


def with_few_rows(rows) -> list[tuple[int, bool]]:
    """Chunks up to behind the last image, then runs of one to five few rows."""
    images = np.flatnonzero(rows.is_image)
    at = max(int(images[-1]) + 1 if len(images) else 0, 9)
    stops = [(stop, chunk) for stop, chunk in around_images(rows) if stop < at] + [(at, True)]
    for size in itertools.cycle((1, 3, 5, 2, 4)):
        if at == len(rows):
            return stops
        at = min(at + size, len(rows))
        stops.append((at, False))


PLANS = {"one chunk": whole, "chunks around images": around_images, "chunks and few rows": with_few_rows}


def report(words: str, distance: float) -> None:
    print(f"\n  {words}: {distance:.2e}", end="")


def logits_of(target, rows, plan) -> torch.Tensor:
    run = Run(target, rows)
    return torch.cat([run.logits(stop, chunk) for stop, chunk in plan(rows)])


def rows_of(loaded, name: str):
    return engine_of(loaded).prepare(Request(CONVERSATIONS[name]))


@pytest.mark.case("A16", "A18")
@sizes_param
@conversation_param
@pytest.mark.parametrize("plan", PLANS)
def test_logits_of_every_row_are_those_of_transformers(made, sizes, name, plan):
    """Cases A16, A18: prompts longer than the window, image blocks, chunk borders around images."""
    checkpoint, loaded = made(sizes)
    expected = GemmaDialogue(checkpoint, CONVERSATIONS[name]).logits
    rows = rows_of(loaded, name)
    got = logits_of(loaded.target, rows, PLANS[plan])
    assert got.shape == expected.shape and len(rows) > 2 * WINDOW
    distance = float((got - expected).abs().max())
    report(f"{sizes.name}, {name}, {plan} (logits from {expected.min():.1f} to {expected.max():.1f})", distance)
    assert expected.std() > 0.5
    assert distance < TOLERANCE


@pytest.mark.parametrize("sizes", [DENSE, SHARED_WHOLE], ids=lambda sizes: sizes.name)
def test_a_placeholder_without_a_picture_is_padding(made, sizes):
    """Of a video, say, in a prompt of token ids: neither its embedding nor its per-layer input is its own."""
    checkpoint, loaded = made(sizes)
    dialogue = GemmaDialogue(checkpoint, CONVERSATIONS["text"], (VIDEO, 70, VIDEO, 71))
    rows = engine_of(loaded).prepare(Request((), prompt=tuple(dialogue.token_ids)))
    for plan in PLANS.values():
        assert float((logits_of(loaded.target, rows, plan) - dialogue.logits).abs().max()) < TOLERANCE


@sizes_param
@conversation_param
def test_prompt_tokens_and_positions_are_those_written_out_by_hand(made, sizes, name):
    checkpoint, loaded = made(sizes)
    rows, dialogue = rows_of(loaded, name), GemmaDialogue(checkpoint, CONVERSATIONS[name])
    assert rows.token_ids.tolist() == dialogue.token_ids
    np.testing.assert_array_equal(rows.positions.coords, np.arange(len(rows))[None])
    assert [image.num_rows for image in rows.images] == [pixels_of(image)[2] for image in dialogue.pictures]
    for index, image in enumerate(rows.images):
        places = np.flatnonzero(rows.image == index)
        assert rows.offset[places].tolist() == list(range(image.num_rows))
        assert np.array_equal(places, np.arange(places[0], places[-1] + 1)), "an image lies in one piece"


@sizes_param
def test_image_embeddings_are_those_of_the_padded_tower(made, sizes):
    checkpoint, loaded = made(sizes)
    for name in ("one image", "two images", "two turns"):
        rows, dialogue = rows_of(loaded, name), GemmaDialogue(checkpoint, CONVERSATIONS[name])
        for image, theirs in zip(rows.images, dialogue.images, strict=True):
            with torch.inference_mode():
                ours = loaded.target.embed_image(image)
            distance = float((ours - theirs).abs().max())
            report(f"{sizes.name}, {name}, embeddings {tuple(theirs.shape)}", distance)
            assert ours.shape == theirs.shape and distance < TOLERANCE
            assert theirs.std(0).mean() > 0.05, "rows of the picture must differ"


@pytest.mark.case("A18")
@pytest.mark.parametrize("sizes", [DENSE, SHARED_WHOLE], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("fault", ["causal", "all layers"])
def test_the_tolerance_would_notice_a_wrong_image_mask(made, sizes, fault, monkeypatch):
    """Image rows that see no later ones, or that see them on full layers too (case A18)."""
    checkpoint, loaded = made(sizes)
    mask = attention.causal_mask
    if fault == "causal":
        monkeypatch.setattr(attention, "causal_mask", lambda n, before, window, image=None: mask(n, before, window))
    else:
        rows = rows_of(loaded, "two images")
        monkeypatch.setattr(
            attention, "causal_mask", lambda n, before, window, image=None: mask(n, before, window, rows.is_image)
        )
    expected = GemmaDialogue(checkpoint, CONVERSATIONS["two images"]).logits
    got = logits_of(loaded.target, rows_of(loaded, "two images"), whole)
    assert float((got - expected).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("sizes", [SMALL, SHARED_WHOLE], ids=lambda sizes: sizes.name)
@conversation_param
def test_only_scored_rows_go_through_layers_that_share_caches(made, sizes, name):
    """And their states have the bits that they have when all rows go through."""
    _, loaded = made(sizes)
    rows = rows_of(loaded, name)
    for borders in ([len(rows)], [len(rows) // 2, len(rows)]):
        if sizes.whole_images and len(borders) > 1 and rows.image[borders[0]] >= 0:
            continue
        run, every = Run(loaded.target, rows), Run(loaded.target, rows)
        for stop in borders:
            last = stop == len(rows)
            hidden, full = run.hidden(stop, True, int(last)), every.hidden(stop, True)
            assert hidden[:-1].isnan().all() and bool(hidden[-1].isnan().any()) != last
            assert not full.isnan().any()
            if last:
                assert float((hidden[-1] - full[-1]).abs().max()) < TOLERANCE


def test_a_row_has_the_same_bits_with_and_without_others(made):
    """Few rows of one sequence at once and one by one, for every kind of layer."""
    for sizes in SIZES:
        _, loaded = made(sizes)
        rows = rows_of(loaded, "two images")
        stops = with_few_rows(rows)
        first = next(stop for stop, chunk in reversed(stops) if chunk)
        one_by_one = [(stop, True) for stop, chunk in stops if chunk] + [
            (at, False) for at in range(first + 1, len(rows) + 1)
        ]
        together = logits_of(loaded.target, rows, lambda _, stops=stops: stops)
        alone = logits_of(loaded.target, rows, lambda _, stops=one_by_one: stops)
        assert torch.equal(together, alone), sizes.name


@sizes_param
@conversation_param
def test_greedy_text_is_that_of_transformers(made, sizes, name):
    checkpoint, loaded = made(sizes)
    engine = engine_of(loaded, Settings(grid=16))
    request = Request(CONVERSATIONS[name], SamplingParams(max_tokens=8, ignore_eos=True), Speculation("none"))
    result = engine.generate(request)[0]
    more: tuple[int, ...] = ()
    for token in result.token_ids:
        logits = GemmaDialogue(checkpoint, CONVERSATIONS[name], more).logits[-1]
        assert logits[token] > logits.max() - TOLERANCE
        more += (token,)
    engine.check()


@pytest.mark.parametrize("size", [(64, 64), (50, 33), (7, 300), (640, 9), (480, 641), (16, 16)])
@pytest.mark.parametrize("tokens", [70, 280])
def test_pixels_and_patches_are_those_of_the_published_processor(size, tokens):
    image = picture(*size, seed=sum(size))
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=tokens, patch_size=4, pooling_kernel_size=2)(
        images=[image], return_tensors="np"
    )
    recipe = Recipe(patch_size=4, pooling_kernel_size=2, max_soft_tokens=tokens)
    patches, places = recipe.patches(recipe.pixels(image))
    assert len(patches) == 4 * theirs["num_soft_tokens_per_image"][0]
    np.testing.assert_array_equal(patches, theirs["pixel_values"][0, : len(patches)])
    np.testing.assert_array_equal(places, theirs["image_position_ids"][0, : len(patches)])
    assert (theirs["image_position_ids"][0, len(patches) :] == -1).all()


def test_patches_are_the_numpy_restatement():
    """Pixel (y, x, c) of patch (row, column) by plain indexing, and normalisation where a processor asks for it."""
    recipe = Recipe(4, 2, 12, do_normalize=True, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.6, 0.7))
    image = picture(16, 24, 5)
    patches, places = recipe.patches(recipe.pixels(image))
    pixels = np.asarray(image.resize(recipe.size_of(16, 24)[::-1], PIL.Image.Resampling.BICUBIC)) / 255
    pixels = (pixels - (0.1, 0.2, 0.3)) / (0.5, 0.6, 0.7)
    for patch, (x, y) in zip(patches, places, strict=True):
        expected = [pixels[4 * y + dy, 4 * x + dx, c] for dy in range(4) for dx in range(4) for c in range(3)]
        np.testing.assert_allclose(patch, expected, atol=1e-6)


def test_a_processor_without_resizing_refuses_what_does_not_fit(made, tmp_path):
    checkpoint, _ = made(DENSE)
    folder = edited(checkpoint.folder, tmp_path / "model", lambda state: None)
    write_processor(folder, do_resize=False)
    target = load_model(str(folder), Settings(weights="fp32")).target
    assert target.prepare(open_picture(picture(16, 24, 1), 10**6)).grid == (2, 3)
    with pytest.raises(RequestError, match="30x16 pixels"):
        target.prepare(open_picture(picture(16, 30, 1), 10**6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_activation": "relu"}, "relu"),
        ({"use_bidirectional_attention": "all"}, "vision"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_kv_shared_layers": 5}, "shares the cache"),
        ({"vocab_size_per_layer_input": 300}, "per-layer inputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_not_served_is_refused(made, tmp_path, change, words):
    checkpoint, _ = made(SHARED_WHOLE)
    folder = edited(checkpoint.folder, tmp_path / "model", lambda state: None)
    edit_config(folder, lambda values: values["text_config"].update(change))
    with pytest.raises((ModelError, ValueError), match=words):
        load_model(str(folder), Settings(weights="fp32"))


def test_tensors_that_published_checkpoints_hold_too_are_left_aside(made, tmp_path):
    """Audio, keys of layers that share a cache, a second output head; a tensor that belongs nowhere is named."""
    checkpoint, loaded = made(SMALL)
    more = {
        "model.audio_tower.layers.0.weight": torch.zeros(2),
        "model.embed_audio.embedding_projection.weight": torch.zeros(2),
        "model.language_model.layers.7.self_attn.k_proj.weight": torch.zeros(2),
        "lm_head.weight": torch.zeros(2),
    }
    folder = edited(checkpoint.folder, tmp_path / "more", lambda state: state.update(more))
    rows = rows_of(loaded, "one image")
    target = load_model(str(folder), Settings(weights="fp32")).target
    assert torch.equal(logits_of(target, rows, whole), logits_of(loaded.target, rows, whole))
    odd = {"model.language_model.layers.0.self_attn.gate.weight": torch.zeros(2)}
    folder = edited(checkpoint.folder, tmp_path / "odd", lambda state: state.update(odd))
    with pytest.raises(ModelError, match=r"left over: model\.language_model\.layers\.0\.self_attn\.gate"):
        load_model(str(folder), Settings(weights="fp32"))


def test_experts_count(made):
    """The mixture is no ornament: another router gives other logits."""
    checkpoint, loaded = made(MIXED)
    rows, target = rows_of(loaded, "text"), loaded.target
    expected = GemmaDialogue(checkpoint, CONVERSATIONS["text"]).logits
    weight = checkpoint.model.model.language_model.layers[0].router.per_expert_scale
    kept = weight.clone()
    weight.copy_(kept.roll(1))
    try:
        other = GemmaDialogue(replace(checkpoint), CONVERSATIONS["text"]).logits
    finally:
        weight.copy_(kept)
    assert float((logits_of(target, rows, whole) - expected).abs().max()) < TOLERANCE
    assert float((other - expected).abs().max()) > 100 * TOLERANCE
