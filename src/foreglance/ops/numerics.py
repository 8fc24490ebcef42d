"""The start-up self-test: which kernels give a row the same bits whatever its batch, on this machine, now.

Which ones do depends on processor, torch build and thread count, so it is measured and not assumed: random rows in
batches of 1 to `TILE`, for each weight shape of the model and each row operation. The first path that passes is taken;
the last one computes row by row and passes by construction.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foreglance.batch import TILE
from foreglance.ops.linear import PATHS, LinearPath
from foreglance.ops.native import NativeOps, missing, native_module
from foreglance.ops.torch_ops import TorchOps

SWITCH = "FOREGLANCE_KERNELS"  # environment variable: "torch" leaves the native kernels aside
MAX_TEST_ROWS = 8192  # output rows of a weight that the test multiplies


@dataclass(frozen=True)
class SelfTest:
    """What was chosen and why, in words for `foreglance` to print."""

    weights: str
    linear: str
    rows_alone: bool
    threads: int
    refused: tuple[str, ...]
    missing: str | None = None  # why the package has no native kernels

    def __str__(self) -> str:
        text = f"{self.weights} weights through {self.linear}"
        if self.rows_alone:
            text += ", row operations one row at a time"
        text += f" ({self.threads} thread{'s' if self.threads > 1 else ''}; same bits in batches of 1 to {TILE})"
        text += f"; refused here: {', '.join(self.refused)}" if self.refused else ""
        return text if self.missing is None else f"{text}; {self.missing}"


def kernels_are_native() -> bool:
    """Whether the compiled kernels are there and not switched off."""
    return native_module() is not None and os.environ.get(SWITCH, "native") != "torch"


def choose(
    weights: str,
    shapes: Iterable[tuple[int, int]],
    widths: Iterable[int],
    experts: Iterable[tuple[int, int]] = (),
    draft_weights: str = "same",
) -> tuple[TorchOps, SelfTest]:
    """Test the native kernels, then torch's paths, for weights of one format and take the first that passes.

    shapes: (out, in) of the model's weights; widths: of its rows, heads and gates; experts: (hidden, inner) of a
    mixture's experts; draft_weights: the format of draft heads, where native kernels run.
    """
    generator = torch.Generator().manual_seed(0)
    shapes, widths, experts = sorted(set(shapes)), sorted(set(widths)), sorted(set(experts))
    candidates = [path for path in PATHS if path.weights == weights]

    def rows_and_experts_are_exact(ops: TorchOps) -> bool:
        return all(rows_are_exact(ops, width, generator) for width in widths) and all(
            experts_are_exact(ops, *sizes, generator) for sizes in experts
        )

    refused = []
    native = native_module() if kernels_are_native() else None
    if native is not None:
        native.threads(torch.get_num_threads())
        ops = NativeOps(TorchOps(candidates[-1]), weights, None if draft_weights == "same" else draft_weights)
        if all(linear_is_exact(ops, shape, generator) for shape in shapes) and rows_and_experts_are_exact(ops):
            return ops, SelfTest(weights, ops.name, False, torch.get_num_threads(), ())
        refused.append(ops.name)
    for path in candidates[:-1]:
        if all(linear_is_exact(path, shape, generator) for shape in shapes):
            break
        refused.append(path.name)
    else:
        path = candidates[-1]
    rows_alone = not rows_and_experts_are_exact(TorchOps(path))
    report = SelfTest(weights, path.name, rows_alone, torch.get_num_threads(), tuple(refused), missing())
    return TorchOps(path, rows_alone), report


def linear_is_exact(path: LinearPath | TorchOps, shape: tuple[int, int], generator: torch.Generator) -> bool:
    num_out, num_in = min(shape[0], MAX_TEST_ROWS), shape[1]
    try:
        packed = path.pack_linear(torch.randn(num_out, num_in, generator=generator) / num_in**0.5)
        return _same_bits(lambda x: path.linear(x, packed, [(0, len(x))]), num_in, generator)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False  # this build of torch lacks the kernel


def rows_are_exact(ops: TorchOps, width: int, generator: torch.Generator) -> bool:
    weight = torch.randn(width, generator=generator)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.rms_norm(x, weight, 1e-6),
        lambda x: ops.gated_rms_norm(x, x, weight, 1e-6),
        lambda x: ops.silu_mul(torch.cat([x, x], -1)),
        lambda x: ops.gelu_mul(torch.cat([x, x], -1)),
        lambda x: ops.silu_mul(torch.cat([x, x], -1), 1.0),
        lambda x: ops.sigmoid_mul(x, x),
        lambda x: ops.sigmoid_mul(x.unsqueeze(1), x[:, None, :1])[:, 0],
        lambda x: ops.route(x, weight, min(2, width), "sigmoid")[1],
        lambda x: ops.route(x, None, min(2, width), "softmax")[1],
        lambda x: ops.softcap(x, 30.0),
        lambda x: ops.l2_norm(x, 1e-6),
        lambda x: ops.delta_gates(x, x, weight, weight)[0],
        lambda x: ops.delta_gates(x, x, weight, weight)[1],
        torch.exp,
    ]
    return all(_same_bits(function, width, generator) for function in functions)


def experts_are_exact(ops: TorchOps, hidden: int, inner: int, generator: torch.Generator) -> bool:
    """Four experts of which each row takes two, so that groups of every size occur."""
    router = torch.randn(hidden, 4, generator=generator)
    gate_up = [ops.pack_linear(torch.randn(2 * inner, hidden, generator=generator) / hidden**0.5) for _ in range(4)]
    down = [ops.pack_linear(torch.randn(hidden, inner, generator=generator) / inner**0.5) for _ in range(4)]

    def mixture(x: Tensor) -> Tensor:
        logits = torch.stack([(row.unsqueeze(-1) * router).sum(0) for row in x])
        return ops.experts(x, *ops.route(logits, None, 2, "sigmoid"), gate_up, down, 7.0, [(0, len(x))])

    return _same_bits(mixture, hidden, generator)


def _same_bits(function: Callable[[Tensor], Tensor], width: int, generator: torch.Generator) -> bool:
    """Rows of very different size, alone and in every batch size at both ends of the tile, must agree bit for bit."""
    x = torch.randn(TILE, width, generator=generator) * torch.logspace(-3, 2, TILE).unsqueeze(-1)
    alone = torch.cat([function(x[i : i + 1].clone()) for i in range(TILE)])
    for size in range(2, TILE + 1):
        for start in {0, TILE - size}:
            got, want = function(x[start : start + size].clone()), alone[start : start + size]
            if not torch.equal(got.contiguous().view(torch.int32), want.view(torch.int32)):  # the bits: NaN == NaN
                return False
    return True
