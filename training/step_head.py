"""The three draft modules of `tiny-step`, and their training on the frozen target.

Owns the modules' loss. Module k has its own keys and values, output norm and output head; at row t it reads the state
of module k - 1 at row t (the target's before its final norm, for the first) and the input of row t + 1 + k, image rows
included, and guesses the token after that. So all rows of a module are computed at once, as in a decoder, and the three
modules are one after the other, as at inference.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.step3p7 import modeling_step3p7 as step

from training.batches import Batch, batch_plan, collate
from training.model import IMAGE_PAD
from training.prepare import READ, VALIDATION, Shard
from training.schedule import Run, replace, single_thread
from training.step import NUM_MODULES, LargeBatch, Target, batches, views
from training.train_target import vocabulary_size

STEP_WEIGHTS = (1.0, 0.8, 0.6)
MODULE_LAYER = 1  # a layer of the trunk that is built as the modules are: sliding attention, no experts


class MtpModule(nn.Module):
    """One draft module; parameter names are those after `layers.N.` in a checkpoint."""

    def __init__(self, target: Target):
        super().__init__()
        config = target.model.config.text_config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = step.Step3p7RMSNorm(size, eps), step.Step3p7RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        layer = step.Step3p7DecoderLayer(config, MODULE_LAYER)
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        norm, output = step.Step3p7RMSNorm(size, eps), nn.Linear(size, config.vocab_size, bias=False)
        self.transformer = nn.ModuleDict({"shared_head": nn.ModuleDict({"norm": norm, "output": output})})
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        norm.load_state_dict(target.text.norm.state_dict())
        output.weight.data.copy_(target.embedding)

    def forward(self, embedded: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Inputs and states [b, n, hidden] to the module's states."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)[0]
        return x + self.mlp(self.post_attention_layernorm(x))

    def logits(self, state: Tensor) -> Tensor:
        head = self.transformer["shared_head"]
        return head["output"](head["norm"](state))


@torch.no_grad()
def read(target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """Input embeddings and the last states before the final norm, both [b, t, hidden]."""
    states = []
    hook = target.text.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    pictures = Shard.pictures(batch.seeds) if len(batch.seeds) else None
    if isinstance(batch, LargeBatch):
        pictures = np.concatenate([views(picture, batch.size) for picture in pictures])
    embedded = target.embed(batch.ids, None if pictures is None else target.image_rows(pictures))
    target.hidden(embedded)
    hook.remove()
    return embedded, states[0]


def module_rows(is_image: Tensor, module: int, policy: str, window: int) -> tuple[Tensor, Tensor | None]:
    """Positions [b, n] of a module's rows and which rows each of them sees (bool [b, 1, n, n], None: all before it).

    `is_image` [b, t] is of the target's rows. Modules 0 to k read the inputs t + 1 to t + 1 + k at row t; with
    `skip` the row exists only if none of them is an image row, and the rest is numbered without holes. A row that does
    not exist sees itself and is seen by none.
    """
    b, n = is_image.shape[0], is_image.shape[1] - 1
    kept = torch.ones(b, n, dtype=torch.bool)
    if policy == "skip":
        for ahead in range(1, module + 2):
            kept[:, : n + 1 - ahead] &= ~is_image[:, ahead:]
    positions = kept.cumsum(1) - kept.long()
    if kept.all() and n <= window:
        return positions, None
    distance = positions[:, :, None] - positions[:, None, :]
    row = torch.arange(n)
    sees = (row[:, None] >= row) & (distance < window) & kept[:, None, :]
    return positions, (sees | torch.eye(n, dtype=torch.bool))[:, None]


def module_loss(
    modules: nn.ModuleList, target: Target, batch: Batch, policy: str = "see"
) -> tuple[Tensor, list[float]]:
    """The weighted loss against the target's distribution, and each module's share of guesses equal to the target's."""
    embedded, state = read(target, batch)
    truth = target.text.norm(state)
    n = batch.ids.shape[1] - 1
    said = batch.labels > READ
    ahead = NUM_MODULES + 1
    embedded, truth = (F.pad(x, (0, 0, 0, ahead)) for x in (embedded, truth))
    said = F.pad(said, (0, ahead))
    is_image, window = batch.ids == IMAGE_PAD, target.model.config.text_config.sliding_window
    state, valid = state[:, :n], said[:, 1 : 1 + n]
    loss, agreed = torch.zeros(()), []
    for k, (module, weight) in enumerate(zip(modules, STEP_WEIGHTS, strict=True)):
        inputs = slice(1 + k, 1 + k + n)
        positions, sees = module_rows(is_image, k, policy, window)
        rotary = target.text.rotary_emb(embedded, positions, "sliding_attention")
        state = module(embedded[:, inputs], state, rotary, sees)
        valid = valid & said[:, 2 + k : 2 + k + n]
        wanted, drafted = target.logits(truth[:, inputs][valid]), module.logits(state[valid])
        loss = loss + weight * F.cross_entropy(drafted, wanted.softmax(-1))
        agreed.append((drafted.argmax(-1) == wanted.argmax(-1)).float().mean().item())
    return loss, agreed


def tensors_of(modules: nn.ModuleList, first: int, prefix: str) -> dict[str, Tensor]:
    """The modules' weights under their names in a checkpoint whose trunk has `first` layers."""
    return {
        f"{prefix}layers.{first + k}.{name}": weight.half().contiguous()
        for k, module in enumerate(modules)
        for name, weight in module.state_dict().items()
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="The modules' tensors (.safetensors); the checkpoint lies beside it.")],
    policy: Annotated[str, typer.Option(help="see, or skip: streams without image rows, for the control.")] = "see",
    start_from: Annotated[Path | None, typer.Option(help="Checkpoint whose modules a new run starts with.")] = None,
    seconds: Annotated[float, typer.Option(help="Training time, all starts together.")] = 900,
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
    vocab_size = vocabulary_size(data)
    model = Target(vocab_size).eval()
    model.load_state_dict(torch.load(target, weights_only=True)["module"])
    model.requires_grad_(False)
    modules = nn.ModuleList([MtpModule(model) for _ in range(NUM_MODULES)])
    if start_from is not None:
        modules.load_state_dict(torch.load(start_from, weights_only=True)["module"])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=learning_rate, weight_decay=0.02, betas=(0.9, 0.97))
    limits = {"steps": steps, "seconds": seconds, "warm_up": 100, "save_every": save_every}
    run = Run(out.with_suffix(".pt"), modules, optimizer, **limits)
    unseen = Shard(data / f"{VALIDATION}.npz")

    def report() -> None:
        plan = batch_plan(unseen.lengths, 3000, np.random.default_rng(0))
        with torch.no_grad():
            parts = [module_loss(modules, model, collate(unseen, chats), policy) for chats in plan[:8]]
        agreed = np.mean([shares for _, shares in parts], axis=0).round(4)
        loss = np.mean([loss.item() for loss, _ in parts])
        console.print(f"{policy} {run.step} {run.spent:.0f} s unseen {loss:.4f} agreed {agreed}", highlight=False)

    source = batches(data, rows, seed, run.step, vocab_size)
    for _ in run.numbers(report):
        run.descend(module_loss(modules, model, next(source), policy)[0])
    first = model.model.config.text_config.num_hidden_layers
    replace(out, lambda path: save_file(tensors_of(modules, first, "model."), path))


if __name__ == "__main__":
    typer.run(main)
