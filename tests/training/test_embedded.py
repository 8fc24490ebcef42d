"""The embedded model as a stranger would load it: transformers' Auto classes, no network, no torchvision."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from foreglance.bench.scenes import HELD_OUT_SEED, scene_from_seed
from training.evaluate import Captioner, chat_about, facts, read_caption
from training.prepare import chat_text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "foreglance" / "embedded" / "tiny-qwen"
SKIP_HEAD = ROOT / "tests" / "data" / "tiny-qwen-skip-head.safetensors"


def shapes(path: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(path, "np") as tensors:
        return {
            name: (tensors.get_slice(name).get_shape(), tensors.get_slice(name).get_dtype())
            for name in tensors.keys()  # noqa: SIM118 - a safetensors file is no dict
        }


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner(FOLDER)


def test_the_folder_is_small_and_whole():
    tensors = shapes(FOLDER / "model.safetensors")
    assert (FOLDER / "model.safetensors").stat().st_size < 12_000_000
    assert {dtype for _, dtype in tensors.values()} == {"F16"}
    assert sum(name.startswith("mtp.") for name in tensors) == 15
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    vocab_size, hidden_size = tensors["model.language_model.embed_tokens.weight"][0]
    assert (vocab_size % 32, hidden_size) == (0, 192)


def test_the_control_head_fits_the_model():
    own = {name: shape for name, shape in shapes(FOLDER / "model.safetensors").items() if name.startswith("mtp.")}
    assert shapes(SKIP_HEAD) == own


def test_the_chat_template_writes_chats_as_training_did(captioner):
    chat = [
        {"role": "system", "content": "Be helpful and honest."},
        {"role": "user", "content": [{"type": "text", "text": "Two: "}, {"type": "image"}, {"type": "image"}]},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "And now?"},
    ]
    render = captioner.tokenizer.apply_chat_template
    assert render(chat, tokenize=False) == chat_text(chat, rows_per_image=1)
    asked = render(chat, tokenize=False, add_generation_prompt=True)
    assert asked == chat_text(chat, rows_per_image=1) + "<|im_start|>assistant\n"
    linked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "<|vision_start|><|image_pad|><|vision_end|>" in render(linked, tokenize=False)


def test_captions_of_unseen_scenes_are_right(captioner):
    drawn = [scene_from_seed(HELD_OUT_SEED + 900_000 + i) for i in range(8)]
    answers = captioner.answer([chat_about("Describe the image.")] * 8, [[picture] for _, picture in drawn])
    right = total = 0
    for (scene, _), answer in zip(drawn, answers, strict=True):
        assert 50 <= len(answer) <= 110
        said, _ = read_caption(captioner.tokenizer.decode(answer))
        for item, told in zip(scene.items, said, strict=True):
            truth = facts(item)
            right += sum(told[name] == truth[name] for name in truth)
            total += len(truth)
    assert right / total > 0.9
