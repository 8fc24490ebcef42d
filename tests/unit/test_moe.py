"""Mixture of experts: routing and the sum over experts against a plain loop, and a row's bits in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foreglance.ops import numerics
from foreglance.ops.linear import PATHS
from foreglance.ops.torch_ops import TorchOps

HIDDEN, INNER, EXPERTS = 24, 16, 7


def ops(rows_alone: bool = False) -> TorchOps:
    return TorchOps(next(path for path in PATHS if path.name == "rows" and path.weights == "fp32"), rows_alone)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_best_experts_are_chosen_and_their_weights_add_up_to_one(scoring, biased):
    logits, bias = draw(40, EXPERTS), 2 * draw(EXPERTS, seed=1) if biased else None
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    chosen, weights = ops().route(logits, bias, 3, scoring)
    ranked = scores if bias is None else scores + bias
    torch.testing.assert_close(ranked.gather(1, chosen), ranked.topk(3).values)
    share = scores.gather(1, chosen)
    torch.testing.assert_close(weights, share / share.sum(1, keepdim=True))


def mixture(limit: float | None, rows_alone: bool = False):
    """-> (what is computed, the plain loop); both map (x, chosen, weights, blocks) to rows."""
    gate_up, down, it = draw(EXPERTS, 2 * INNER, HIDDEN), draw(EXPERTS, HIDDEN, INNER, seed=1), ops(rows_alone)
    packed = [[it.pack_linear(weight) for weight in weights] for weights in (gate_up, down)]

    def loop(x, chosen, weights):
        out = torch.zeros(len(x), HIDDEN)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row], weights[row], strict=True):
                gate, up = (gate_up[expert] @ x[row]).chunk(2)
                gate = F.silu(gate)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                out[row] += weight * (down[expert] @ (gate * up))
        return out

    return lambda x, chosen, weights, blocks: it.experts(x, chosen, weights, *packed, limit, blocks), loop


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("rows_alone", [False, True])
def test_each_row_is_the_weighted_sum_of_its_experts(limit, rows_alone):
    compute, loop = mixture(limit, rows_alone)
    x = draw(60, HIDDEN, seed=2)
    chosen, weights = ops().route(draw(60, EXPERTS, seed=3), None, 3, "sigmoid")
    got = compute(x, chosen, weights, [(0, 16), (16, 20), (20, 60)])
    torch.testing.assert_close(got, loop(x, chosen, weights), rtol=1e-5, atol=1e-4)


def test_a_row_has_the_same_bits_whoever_chose_the_same_experts():
    compute, _ = mixture(None)
    x = draw(16, HIDDEN, seed=2) * torch.logspace(-3, 2, 16).unsqueeze(-1)
    chosen, weights = ops().route(draw(16, EXPERTS, seed=3), None, 2, "sigmoid")
    alone = torch.cat([compute(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1], [(0, 1)]) for i in range(16)])
    for size in range(1, 17):
        assert torch.equal(compute(x[:size], chosen[:size], weights[:size], [(0, size)]), alone[:size])


def test_the_self_test_notices_bits_that_depend_on_the_batch():
    class Larger(TorchOps):
        """Another last bit in larger batches."""

        def experts(self, x, chosen, weights, gate_up, down, limit, blocks):
            out = super().experts(x, chosen, weights, gate_up, down, limit, blocks)
            return out + (torch.finfo(out.dtype).eps * out if len(x) > 3 else 0)

    generator = torch.Generator().manual_seed(0)
    path = next(path for path in PATHS if path.name == "rows" and path.weights == "fp32")
    assert numerics.experts_are_exact(TorchOps(path), HIDDEN, INNER, generator)
    assert not numerics.experts_are_exact(Larger(path), HIDDEN, INNER, generator)
