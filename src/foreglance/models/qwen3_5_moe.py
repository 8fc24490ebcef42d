"""Qwen3.5 / 3.6 mixture of experts: the dense family with another feed-forward part, in trunk and MTP block.

Each row goes through its `num_experts_per_tok` experts (softmax over all, the chosen ones' weights add up to one) and
through a shared expert behind a sigmoid gate. Source: transformers 5.24 `models/qwen3_5_moe`.

Published checkpoints hold the trunk's experts fused (`experts.gate_up_proj` [experts, 2 i, h], gate before up, and
`experts.down_proj` [experts, h, i], neither with a `.weight`) and the MTP block's one by one
(`experts.N.gate_proj.weight` ...). Either spelling is read in either place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreglance.batch import Batch
from foreglance.models import qwen3_5
from foreglance.models.loader import Loader
from foreglance.models.moe import Experts, Routing, expert_shapes
from foreglance.models.qwen3_5 import GatedMlp, Variant
from foreglance.ops.base import PackedLinear

FAMILY = "qwen3_5_moe"


class MoeMlp:
    """Routed experts plus the gated shared one."""

    def __init__(self, load: Loader, text: dict[str, Any]):
        hidden, count = text["hidden_size"], text["num_experts"]
        gate_up, down = _experts(load.at("experts"), count, hidden, text["moe_intermediate_size"])
        routing = Routing(text["num_experts_per_tok"], "softmax")
        self._ops = load.ops
        self._experts = Experts(load.ops, load.tensor("gate.weight", count, hidden), None, gate_up, down, routing)
        self._shared = GatedMlp(load.at("shared_expert"), hidden, text["shared_expert_intermediate_size"])
        self._shared_gate = load.linear({"shared_expert_gate": 1}, hidden)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        gate = self._ops.linear(x, self._shared_gate, batch.blocks)
        shared = self._shared(x, batch)
        gated = self._ops.sigmoid_mul(shared.unsqueeze(1), gate.unsqueeze(1)).squeeze(1)  # one gate for a row
        return self._ops.add(self._experts(x, batch), gated)


def _experts(load: Loader, count: int, hidden: int, inner: int) -> tuple[list[PackedLinear], list[PackedLinear]]:
    """gate_up [2 i, h] and down [h, i] of each, from either spelling."""
    if "0.gate_proj.weight" not in load:
        return (
            load.packed_each(["gate_up_proj"], lambda: load.tensor("gate_up_proj", count, 2 * inner, hidden)),
            load.packed_each(["down_proj"], lambda: load.tensor("down_proj", count, hidden, inner)),
        )
    gates, ups, downs = ([f"{i}.{name}_proj.weight" for i in range(count)] for name in ("gate", "up", "down"))
    pairs = list(zip(gates, ups, strict=True))
    return (
        load.packed_each(
            [*gates, *ups], lambda: (torch.cat([load.tensor(name, inner, hidden) for name in pair]) for pair in pairs)
        ),
        load.packed_each(downs, lambda: (load.tensor(name, hidden, inner) for name in downs)),
    )


def _shapes(text: dict[str, Any]) -> tuple[set[tuple[int, int]], set[int]]:
    hidden, inner, shared = text["hidden_size"], text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    shapes = expert_shapes(hidden, inner, text["num_experts"])
    return shapes | {(2 * shared, hidden), (hidden, shared), (1, hidden)}, {inner, shared}


MOE = Variant(FAMILY, MoeMlp, _shapes)
shapes_of = partial(qwen3_5.shapes_of, variant=MOE)
load = partial(qwen3_5.load, variant=MOE)
