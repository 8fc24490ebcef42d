"""The start-up self-test: what it takes is exact here, and it refuses what is not."""

import pytest
import torch
import torch.nn.functional as F

from foreglance.batch import TILE
from foreglance.ops import native, numerics, sources
from foreglance.ops.linear import PATHS, LinearPath
from foreglance.ops.native import NativeOps
from foreglance.ops.torch_ops import TorchOps

SHAPES = {(96, 64), (256, 64), (64, 128), (1000, 64)}
WIDTHS = {1, 2, 16, 64, 96, 100}


def plain_path():
    return LinearPath("plain", "fp32", lambda weight: weight.float().contiguous(), F.linear)


def order_of_summation_by_batch(x, weight):
    """What a plain product may do: another order of summation for one row than for several."""
    if len(x) == 1:
        return (x.unsqueeze(1) * weight).cumsum(-1)[..., -1]
    return F.linear(x, weight)


@pytest.mark.parametrize("weights", ("fp32", "fp16"))
def test_the_chosen_path_gives_a_row_the_same_bits_in_any_batch(weights):
    """Case D2: one row, k + 1 rows, other sequences' rows around it."""
    ops, report = numerics.choose(weights, SHAPES, WIDTHS)
    assert report.weights == weights and report.linear in str(report)
    generator = torch.Generator().manual_seed(5)
    for num_out, num_in in SHAPES:
        packed = ops.pack_linear(torch.randn(num_out, num_in, generator=generator))
        x = torch.randn(2 * TILE, num_in, generator=generator)
        alone = torch.cat([ops.linear(x[i : i + 1].clone(), packed, [(0, 1)]) for i in range(len(x))])
        for size in range(1, TILE + 1):
            for start in (0, 3, TILE):
                rows = x[start : start + size].clone()
                assert torch.equal(ops.linear(rows, packed, [(0, len(rows))]), alone[start : start + size])
        assert torch.equal(ops.linear(x, packed, [(0, TILE), (TILE, 2 * TILE)]), alone)


def test_a_path_whose_bits_depend_on_the_batch_is_refused(monkeypatch):
    bad = LinearPath("bad", "fp32", lambda weight: weight.float().contiguous(), order_of_summation_by_batch)
    assert not numerics.linear_is_exact(bad, (256, 64), torch.Generator().manual_seed(0))
    monkeypatch.setenv(numerics.SWITCH, "torch")
    monkeypatch.setattr(numerics, "PATHS", (bad, *PATHS))
    _, report = numerics.choose("fp32", SHAPES, WIDTHS)
    assert "bad" in report.refused and report.linear != "bad"
    assert "refused here: bad" in str(report)


def test_a_plain_matrix_product_is_refused_here():
    """What every engine without such a test uses. Some shape of a real model's size shows it on any known CPU."""
    shapes = [(n, k) for n in (64, 250, 1024) for k in (64, 256, 1000, 2048)]
    generator = torch.Generator().manual_seed(0)
    assert not all(numerics.linear_is_exact(plain_path(), shape, generator) for shape in shapes)


def test_a_kernel_that_is_missing_is_refused_and_not_an_error():
    def missing(weight):
        raise AttributeError("no such operator")

    path = LinearPath("missing", "fp32", missing, F.linear)
    assert not numerics.linear_is_exact(path, (8, 8), torch.Generator())


def test_without_compiled_kernels_the_report_says_what_is_lost(monkeypatch):
    monkeypatch.setattr(native, "_native", None)
    ops, report = numerics.choose("q8", SHAPES, WIDTHS)
    assert not isinstance(ops, NativeOps) and "without a compiler" in str(report)
    monkeypatch.setattr(native, "is_outdated", True)
    assert "install again" in str(numerics.choose("q8", SHAPES, WIDTHS)[1])
    monkeypatch.undo()
    assert "install again" not in str(numerics.choose("q8", SHAPES, WIDTHS)[1])


@pytest.mark.skipif(native.native_module() is None, reason="the package was installed without a compiler")
def test_kernels_of_other_sources_are_told_by_their_digest(tmp_path):
    """An extension that an older version left computed wrong values without a word."""
    assert native.native_module().sources == sources.digest()
    assert sources.digest(tmp_path) is None
    for file in sources.FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert sources.digest(tmp_path) == sources.digest()
    with (tmp_path / "kernels.h").open("a") as kernels:
        kernels.write("\n")
    assert sources.digest(tmp_path) != sources.digest()


def test_the_last_path_passes_by_construction():
    for weights in ("fp32", "fp16"):
        last = [path for path in PATHS if path.weights == weights][-1]
        assert all(numerics.linear_is_exact(last, shape, torch.Generator().manual_seed(1)) for shape in SHAPES)


def test_row_operations_that_fail_are_computed_one_row_at_a_time(monkeypatch):
    """torch's own silu computes the tail of a vector with other instructions than its body."""

    class Uneven(TorchOps):
        def rms_norm(self, x, weight, eps):
            def uneven(x):
                return F.rms_norm(x, x.shape[-1:], None, eps) * weight * (1 + 1e-6 * (len(x) > 1))

            return self._by_row(uneven, x)

    monkeypatch.setenv(numerics.SWITCH, "torch")
    monkeypatch.setattr(numerics, "TorchOps", Uneven)
    ops, report = numerics.choose("fp32", SHAPES, WIDTHS)
    assert report.rows_alone and "one row at a time" in str(report)
    assert numerics.rows_are_exact(ops, 64, torch.Generator().manual_seed(2))


@pytest.mark.parametrize("width", sorted(WIDTHS))
def test_row_operations_of_the_chosen_path_are_exact(width):
    ops, _ = numerics.choose("fp32", SHAPES, WIDTHS)
    assert numerics.rows_are_exact(ops, width, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("width", (1, 2, 3, 4))
def test_a_row_whose_weights_are_undefined_is_no_reason_to_go_row_by_row(width):
    """All scores of a narrow row may vanish, 0 / 0, with the same bits in every batch. A model with per-layer inputs of
    width 4 was computed row by row for that."""
    ops, _ = numerics.choose("fp32", SHAPES, WIDTHS)
    assert all(numerics.rows_are_exact(ops, width, torch.Generator().manual_seed(seed)) for seed in range(12))


def test_products_are_right_and_not_only_repeatable():
    generator = torch.Generator().manual_seed(1)
    for path in PATHS:
        weight, x = torch.randn(40, 32, generator=generator), torch.randn(7, 32, generator=generator)
        packed = path.pack_linear(weight)
        if path.weights in ("q8", "q4"):
            weight = packed.data.restored()
        tolerance = {"fp32": 1e-4, "fp16": 2e-2}.get(path.weights, 2e-1)  # quantised rows besides
        got = path.linear(x, packed, [(0, 3), (3, 7)])
        assert (got - x @ weight.t()).abs().max() < tolerance, path.name
