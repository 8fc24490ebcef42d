"""Writes trained models of the other families as model folders, in the layout that model hubs use.

Owns what of such a folder is not weights: the shared tokenizer with a family's own image tags, the chat template with
its placeholder, image preprocessing, model card. Token ids are the same in all of them.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn

from training.export import TOKENIZER_CONFIG, write_json
from training.families import family_module
from training.model import END_OF_TEXT, IM_END, IMAGE_PAD, SPECIAL_TOKENS, VIDEO_PAD, VISION_END, VISION_START
from training.train_target import vocabulary_size

HERE = Path(__file__).parent
PLACE = "".join(SPECIAL_TOKENS[i] for i in (VISION_START, IMAGE_PAD, VISION_END))  # in the shared chat template
# A family's own names of the special tokens, and what it adds after the shared vocabulary.
TAGS = {
    "step": {VISION_START: "<im_start>", VISION_END: "<im_end>", IMAGE_PAD: "<im_patch>"},
    "gemma": {VISION_START: "<|image>", VISION_END: "<image|>", IMAGE_PAD: "<|image|>", VIDEO_PAD: "<|video|>"},
    "text": {},
}
ADDED = {"step": ("<patch_start>", "<patch_end>", "<patch_newline>"), "gemma": (), "text": ()}
TEMPLATES = {"gemma": "chat_template_gemma.jinja"}  # tool calls are written in the family's own way
PREPROCESSORS = {
    "step": {
        "image_processor_type": "Step3p7ImageProcessor",
        "size": {"height": 64, "width": 64},
        "patch_size": 64,
        "max_image_size": 128,
        "vision_patch_size": 4,
        "downsampler_stride": 4,
        "resample": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "gemma": {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 16,
        "do_normalize": False,
        "rescale_factor": 1 / 255,
        "resample": 3,
    },
}


def special_tokens(family: str) -> list[str]:
    return [TAGS[family].get(i, token) for i, token in enumerate(SPECIAL_TOKENS)]


def write_tokenizer(family: str, data: Path, out: Path) -> None:
    """The shared tokenizer under a family's names. Ids stay, added ones follow the shared vocabulary."""
    tokenizer = json.loads((data / "tokenizer.json").read_text())
    vocab, special = tokenizer["model"]["vocab"], special_tokens(family)
    for entry in tokenizer["added_tokens"]:
        old, entry["content"] = entry["content"], special[entry["id"]]
        del vocab[old]
        vocab[entry["content"]] = entry["id"]
    for i, token in enumerate(ADDED[family], vocabulary_size(data)):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": i, "content": token})
    tokenizer["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    write_json(out / "tokenizer.json", tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} if TAGS[family] else {}
    extra = {"extra_special_tokens": [*special[1:], *ADDED[family]]}
    write_json(out / "tokenizer_config.json", {**TOKENIZER_CONFIG, **settings, **extra})


def write_texts(family: str, name: str, data: Path, out: Path) -> None:
    """All files but config and weights."""
    write_tokenizer(family, data, out)
    template = (HERE / TEMPLATES.get(family, "chat_template.jinja")).read_text()
    if family != "text":
        assert template.count(PLACE) == 1
        place = special_tokens(family)[IMAGE_PAD]
        (out / "chat_template.jinja").write_text(template.replace(PLACE, place))
        if name != "tiny-gemma-assistant":
            write_json(out / "preprocessor_config.json", PREPROCESSORS[family])
    else:
        (out / "chat_template.jinja").write_text(template)
    shutil.copyfile(HERE / "cards" / f"{name}.md", out / "README.md")


def write_model(model: nn.Module, out: Path, more: dict[str, torch.Tensor], settings: dict) -> None:
    """Config and fp16 weights in the published names; `more` are tensors that the class itself would leave out."""
    model = model.half()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = IM_END, END_OF_TEXT
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors") | more
        config = json.loads((Path(folder) / "config.json").read_text())
        generation = json.loads((Path(folder) / "generation_config.json").read_text())
    save_file({name: tensors[name] for name in sorted(tensors)}, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", generation | settings)
    size = (out / "model.safetensors").stat().st_size / 1e6
    num_weights = sum(tensor.numel() for tensor in tensors.values())
    print(f"{out}: {len(tensors)} tensors, {num_weights / 1e6:.2f} M weights, {size:.2f} MB")


def main(
    family: Annotated[str, typer.Option(help="step, gemma or text.")],
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="The model folder; the assistant of gemma goes beside it.")],
    head: Annotated[Path | None, typer.Option(help="Tensors of step_head, or checkpoint of gemma_assistant.")] = None,
) -> None:
    """Writes the folder, and a second one for the assistant of gemma."""
    trained = family_module(family).Target(vocabulary_size(data))
    trained.load_state_dict(torch.load(target, weights_only=True)["module"])
    out.mkdir(parents=True, exist_ok=True)
    if family == "gemma" and head is not None:
        from training.gemma_assistant import Assistant

        assistant = Assistant(trained)
        assistant.load_state_dict(torch.load(head, weights_only=True)["module"])
        beside = out.with_name(f"{out.name}-assistant")
        beside.mkdir(exist_ok=True)
        write_model(assistant.model, beside, {}, {"num_assistant_tokens": 3})
        write_texts(family, beside.name, data, beside)
    modules = load_file(head) if family == "step" and head is not None else {}
    write_model(trained.model, out, modules, {})
    write_texts(family, out.name, data, out)


if __name__ == "__main__":
    typer.run(main)
