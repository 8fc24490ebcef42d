"""The other embedded models as a stranger would load them: transformers' classes, no network, no torchvision."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from foreglance.bench.scenes import HELD_OUT_SEED, scene_from_seed
from training.captioners import open_captioner
from training.evaluate import chat_about, facts, read_caption

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "src" / "foreglance" / "embedded"
SKIP_MODULES = ROOT / "tests" / "data" / "tiny-step-skip-modules.safetensors"


def tensors(name: str | Path) -> dict[str, list[int]]:
    with safe_open(EMBEDDED / name / "model.safetensors" if isinstance(name, str) else name, "np") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - a safetensors file is no dict
        assert {part.get_dtype() for part in slices.values()} == {"F16"}
        return {key: part.get_shape() for key, part in slices.items()}


@pytest.mark.parametrize("name", ["tiny-step", "tiny-gemma", "tiny-gemma-assistant", "tiny-text"])
def test_the_folder_is_small_and_whole(name):
    folder = EMBEDDED / name
    assert (folder / "model.safetensors").stat().st_size < 12_000_000
    assert tensors(name)
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= files
    assert "@" not in (folder / "README.md").read_text()


def test_three_modules_stand_behind_the_trunk_of_tiny_step():
    names = tensors("tiny-step")
    text = json.loads((EMBEDDED / "tiny-step" / "config.json").read_text())["text_config"]
    first = text["num_hidden_layers"]
    assert text["num_nextn_predict_layers"] == len(text["mtp_layer_types"]) == 3
    for k in range(3):
        own = {name.removeprefix(f"model.layers.{first + k}.") for name in names if f".{first + k}." in name}
        assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "self_attn.g_proj.weight"} <= own
        assert {"transformer.shared_head.norm.weight", "transformer.shared_head.output.weight"} <= own


def test_the_control_modules_fit_tiny_step():
    own = {name: shape for name, shape in tensors("tiny-step").items() if re.match(r"model\.layers\.[678]\.", name)}
    assert tensors(SKIP_MODULES) == own


def test_the_assistant_has_queries_only_and_fits_its_target():
    names = tensors("tiny-gemma-assistant")
    assert not any("k_proj" in name or "v_proj" in name for name in names)
    hidden = tensors("tiny-gemma")["model.language_model.embed_tokens.weight"][1]
    assert names["pre_projection.weight"][1] == 2 * hidden
    assert names["post_projection.weight"][0] == hidden


@pytest.mark.parametrize(("name", "share"), [("tiny-step", 0.98), ("tiny-gemma", 0.98)])
def test_captions_of_unseen_scenes_are_right(name, share):
    captioner = open_captioner(EMBEDDED / name)
    drawn = [scene_from_seed(HELD_OUT_SEED + 900_000 + i) for i in range(8)]
    answers = captioner.answer([chat_about("Describe the image.")] * 8, [[picture] for _, picture in drawn])
    right = total = 0
    for (scene, _), answer in zip(drawn, answers, strict=True):
        said, _ = read_caption(captioner.tokenizer.decode(answer))
        for item, told in zip(scene.items, said, strict=False):
            truth = facts(item)
            right += sum(told.get(key) == truth[key] for key in truth)
        total += sum(len(facts(item)) for item in scene.items)
    assert right / total > share


def test_tiny_text_answers_small_talk():
    captioner = open_captioner(EMBEDDED / "tiny-text")
    (answer,) = captioner.answer([[{"role": "user", "content": "Do you like blue?"}]], [[]])
    said = captioner.tokenizer.decode(answer)
    assert 15 < len(answer) < 80
    assert said[0].isupper() and said.endswith(".") and "color" in said
