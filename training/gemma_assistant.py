"""The draft model of `tiny-gemma`, and its training on the frozen target.

Owns the assistant's loss. It has no keys and values: its layers read those of the target's last sliding and last full
layer that has its own. When it drafts from row t, the token of row t + 1 is known and its keys are not; every depth
reads the target's rows up to t and is numbered t + 1. So all rows draft at once, each depth on the output of the one
before.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from training.batches import Batch, batch_plan, collate, endless
from training.gemma import Target, temper
from training.model import END_OF_TEXT, IM_END
from training.prepare import READ, VALIDATION, Shard
from training.schedule import Run, single_thread
from training.train_target import vocabulary_size

DRAFT_STEPS = 3
STEP_WEIGHTS = (1.0, 0.8, 0.6)


def make_config(vocab_size: int, target: dict) -> Gemma4AssistantConfig:
    """The configuration of `tiny-gemma-assistant`; sizes of keys and values, windows and rotary are the target's."""
    same = ("num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "max_position_embeddings")
    text = {
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": 0,
        "hidden_size": 128,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "global_head_dim": next(iter(target["per_layer_config"].values()))["head_dim"],
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        **{name: target[name] for name in same},
    }
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target["hidden_size"], tie_word_embeddings=True)


class Assistant(nn.Module):
    """transformers' class, and one draft step of all rows."""

    def __init__(self, target: Target):
        super().__init__()
        text = target.model.config.text_config
        self.model = Gemma4AssistantForCausalLM(make_config(text.vocab_size, text.to_dict()))
        temper(self.model)

    def step(self, embedded: Tensor, hidden: Tensor, shared: dict, masks: dict) -> tuple[Tensor, Tensor]:
        """Scaled embeddings and states [b, n, hidden] to logits and the states for the next step."""
        n = embedded.shape[1]
        out = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([embedded, hidden], dim=-1)),
            attention_mask=masks,
            position_ids=torch.arange(1, n + 1)[None],
            shared_kv_states=shared,
            logits_to_keep=torch.arange(n),
            use_cache=False,
        ).last_hidden_state
        return self.model.lm_head(out), self.model.post_projection(out)


def assistant_loss(assistant: Assistant, target: Target, batch: Batch) -> tuple[Tensor, list[float]]:
    """The weighted loss against the target's distribution, and by depth the share of guesses equal to the target's."""
    with torch.no_grad():
        rows = target.image_rows(Shard.pictures(batch.seeds)) if len(batch.seeds) else None
        inputs = target.embed(batch.ids, rows)
        truth, shared = target.run(inputs)
    n = batch.ids.shape[1] - 1
    row = torch.arange(n)
    before = row[:, None] >= row
    near = before & (row[:, None] - row < target.model.config.text_config.sliding_window)
    masks = {"full_attention": before[None, None], "sliding_attention": near[None, None]}
    shared = {kind: (keys[:, :, :n], values[:, :, :n]) for kind, (keys, values) in shared.items()}
    embedded, states = (F.pad(x, (0, 0, 0, DRAFT_STEPS)) for x in (inputs.embedded, truth))
    said = F.pad(batch.labels > READ, (0, DRAFT_STEPS + 1))
    hidden, valid = truth[:, :n], said[:, 1 : 1 + n]
    loss, agreed = torch.zeros(()), []
    for k, weight in enumerate(STEP_WEIGHTS):
        at = slice(1 + k, 1 + k + n)
        logits, hidden = assistant.step(embedded[:, at], hidden, shared, masks)
        valid = valid & said[:, 2 + k : 2 + k + n]
        wanted, drafted = target.logits(states[:, at][valid]), logits[valid]
        loss = loss + weight * F.cross_entropy(drafted, wanted.softmax(-1))
        agreed.append((drafted.argmax(-1) == wanted.argmax(-1)).float().mean().item())
    return loss, agreed


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="The assistant's checkpoint; a run that finds it goes on from it.")],
    start_from: Annotated[Path | None, typer.Option(help="Checkpoint whose assistant a new run starts with.")] = None,
    seconds: Annotated[float, typer.Option(help="Training time, all starts together.")] = 720,
    steps: Annotated[int, typer.Option(help="Upper limit of steps.")] = 100_000,
    rows: int = 2048,
    learning_rate: float = 2e-3,
    save_every: float = 120,
    seed: int = 2,
    threads: int = 1,
) -> None:
    """Trains until the time or the steps are used up. The target runs along, frozen."""
    single_thread(threads)
    torch.manual_seed(0)
    console = Console(width=160)
    model = Target(vocabulary_size(data)).eval()
    model.load_state_dict(torch.load(target, weights_only=True)["module"])
    model.requires_grad_(False)
    assistant = Assistant(model)
    if start_from is not None:
        assistant.load_state_dict(torch.load(start_from, weights_only=True)["module"])
    optimizer = torch.optim.AdamW(assistant.parameters(), lr=learning_rate, weight_decay=0.02, betas=(0.9, 0.97))
    limits = {"steps": steps, "seconds": seconds, "warm_up": 100, "save_every": save_every}
    run = Run(out, assistant, optimizer, **limits)
    unseen = Shard(data / f"{VALIDATION}.npz")

    def report() -> None:
        plan = batch_plan(unseen.lengths, 3000, np.random.default_rng(0))
        with torch.no_grad():
            parts = [assistant_loss(assistant, model, collate(unseen, chats)) for chats in plan[:8]]
        agreed = np.mean([shares for _, shares in parts], axis=0).round(4)
        loss = np.mean([loss.item() for loss, _ in parts])
        console.print(f"{run.step} {run.spent:.0f} s unseen {loss:.4f} agreed {agreed}", highlight=False)

    source = endless(data, rows, seed, skip=run.step)
    for _ in run.numbers(report):
        run.descend(assistant_loss(assistant, model, next(source))[0])


if __name__ == "__main__":
    typer.run(main)
