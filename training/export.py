"""Writes a trained target and its draft head as one model folder, in the layout that model hubs use.
 Owns everything about that folder that is not weights: tokenizer settings, chat template, image
preprocessing, model card.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file

from training.cache_features import load_target
from training.model import (
    END_OF_TEXT,
    IM_END,
    MERGE_SIZE,
    PATCH_SIZE,
    SPECIAL_TOKENS,
    MtpHead,
)

HERE = Path(__file__).parent
TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": SPECIAL_TOKENS[IM_END],
    "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
    "unk_token": None,
    "extra_special_tokens": list(SPECIAL_TOKENS[1:]),
    "model_max_length": 2048,
}
# Any picture is brought to about 64 x 64 pixels, its aspect ratio kept, and so to about 16 image rows.
PREPROCESSOR_CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": MERGE_SIZE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 64 * 64, "longest_edge": 64 * 64},
}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="The model folder.")],
    head: Annotated[Path | None, typer.Option(help="Tensors of train_head; without it the head is random.")] = None,
) -> None:
    """Writes the folder in fp16, draft head included (transformers itself would leave `mtp.*` out)."""
    out.mkdir(parents=True, exist_ok=True)
    trained = load_target(data, target)
    model = trained.model.half()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = IM_END, END_OF_TEXT
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        config = json.loads((Path(folder) / "config.json").read_text())
        shutil.copyfile(Path(folder) / "generation_config.json", out / "generation_config.json")
    if head is not None:
        tensors |= load_file(head)
    else:
        torch.manual_seed(0)
        blank = MtpHead(model.config.text_config)
        tensors |= {f"mtp.{name}": weight.half() for name, weight in blank.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    write_json(out / "config.json", config)
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(out / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    shutil.copyfile(HERE / "chat_template.jinja", out / "chat_template.jinja")
    shutil.copyfile(HERE / "model_card.md", out / "README.md")
    size = (out / "model.safetensors").stat().st_size / 1e6
    num_weights = sum(tensor.numel() for tensor in tensors.values())
    print(f"{out}: {len(tensors)} tensors, {num_weights / 1e6:.2f} M weights, {size:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
