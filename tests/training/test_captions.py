"""The wording: an answer tells exactly what its scene holds, in words that can be read back."""

import random
import re

import numpy as np
import pytest

from foreglance.bench.scenes import COUNTS, HELD_OUT_SEED, content_words, sample_scene
from training import captions
from training.evaluate import facts, read_caption
from training.prepare import chat_text, image_seeds


@pytest.mark.parametrize("seed", range(100))
def test_a_caption_tells_every_item_in_order_and_nothing_else(seed):
    scene = sample_scene(random.Random(seed))
    said, whole = read_caption(captions.caption(random.Random(seed), scene))
    assert said == [facts(item) for item in scene.items]
    assert whole == {"count": COUNTS[len(scene.shapes)], "background": scene.background}


def test_free_choices_never_use_a_content_word():
    """A draft that guesses a colour must have seen it; a free "orange" would blur the measurement."""
    content = {word.lower() for word in content_words()}
    for template in (captions._OPENING, captions._ITEM, captions._WRITING, captions._PLACE, captions._REMARK):
        choices = captions._CHOICE.findall(template)
        assert not content & {word for choice in choices for word in choice.replace("|", " ").split()}


def test_the_same_scene_is_told_in_many_ways():
    scene = sample_scene(random.Random(3))
    assert len({captions.caption(random.Random(seed), scene) for seed in range(50)}) == 50


def test_about_a_quarter_of_a_caption_is_content():
    told_words = {word.lower() for word in content_words()}
    words = content = 0
    for seed in range(200):
        text = captions.caption(random.Random(seed), sample_scene(random.Random(seed)))
        words += len(text.split())
        content += sum(word in told_words for word in re.findall(r"[a-z]+|\d", text.lower()))
    assert 0.2 < content / words < 0.35


@pytest.mark.parametrize("seed", range(100))
def test_an_answer_names_only_what_a_question_about_the_scene_can_mean(seed):
    rng = random.Random(seed)
    scene = sample_scene(rng)
    ask, answer = captions.question(rng, scene, " in the second image")
    assert "second image" in ask and "@" not in ask and "$" not in ask + answer
    assert answer.endswith(".")


@pytest.mark.parametrize("kind", ["shape", "number", "word"])
def test_one_thing_alone_is_drawn_and_told_as_it_stands_in_its_scene(kind):
    (seed,) = image_seeds(captions.Chats(random.Random(kind), range(500), alone=1.0, alone_kinds=(kind,)).draw())
    scene, picture = captions.training_scene(seed)
    whole, _ = captions.training_scene(-1 - seed)
    assert [item.kind for item in scene.items] == [kind]
    assert scene.items[0] in whole.items and scene.background == whole.background
    cells = np.asarray(picture, int).reshape(4, 16, 4, 16, 3).transpose(0, 2, 1, 3, 4).reshape(16, -1)
    marked = set(np.flatnonzero(np.ptp(cells, axis=1) > np.ptp(cells, axis=1).min()))
    cell = scene.items[0].cell
    assert marked == ({cell, cell + 1} if kind == "word" else {cell})


def test_chats_alternate_and_keep_to_the_seeds_that_they_were_given():
    chats = captions.Chats(random.Random(0), range(HELD_OUT_SEED, HELD_OUT_SEED + 50))
    counts = {"system": 0, "several images": 0, "late image": 0, "text only": 0}
    for _ in range(1500):
        chat = chats.draw()
        roles = [message["role"] for message in chat]
        counts["system"] += roles[0] == "system"
        roles = roles[1:] if roles[0] == "system" else roles
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        seeds = image_seeds(chat)
        assert all(HELD_OUT_SEED <= seed < HELD_OUT_SEED + 50 for seed in seeds)
        counts["several images"] += len(seeds) > 1
        counts["text only"] += not seeds
        counts["late image"] += bool(seeds) and "<|image_pad|>" not in chat_text(chat).split("<|im_start|>user")[1]
    assert 110 < counts["system"] < 200
    assert 100 < counts["several images"] < 260
    assert 60 < counts["late image"] < 200
    assert 150 < counts["text only"] < 350
