"""Native picks: a row's token depends on its logits, temperature, seed and number, and on nothing around it."""

import pytest
import torch
from support.kernels import twin

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.batch import TILE
from foreglance.models.base import tiles_of
from foreglance.models.picks import Picker, Wanted
from foreglance.ops.native import NativeOps, native_module, run_by
from foreglance.ops.numerics import kernels_are_native
from foreglance.sampling import pick

pytestmark = pytest.mark.skipif(not kernels_are_native(), reason="native kernels are missing or switched off")
WIDTH, VOCAB = 8, 3001


def head():
    """An output head in which every token below 1000 has twins of the same logits, also across blocks of a kernel."""
    ops, weight = NativeOps(twin("fp32"), "fp32"), torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    weight[1000:2000] = weight[2000:3000] = weight[:1000]
    packed = ops.pack_linear(weight)
    return ops, lambda hidden: ops.linear(hidden, packed, tiles_of(len(hidden), TILE))


@pytest.mark.parametrize("temperature", (0.0, 0.05, 0.8, 3.0))
def test_a_row_has_one_pick_whatever_path_it_takes(temperature):
    """Alone or among others, from a recorded head, from one that is run as it is, and from logits that are there."""
    ops, logits = head()
    hidden = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=temperature, seed=2**64 - 5)
    want = [pick(row, params, i, (), ()) for i, row in enumerate(logits(hidden).numpy())]
    assert any(token >= 1000 for token in want) == bool(temperature)  # ties go to the first twin
    picker = Picker(ops, logits, WIDTH)
    for num_rows in (1, 3, TILE, TILE + 4):
        for at in range(0, 40, num_rows):
            own = slice(at, min(at + num_rows, 40))
            wanted = [Wanted(params, at, 1), Wanted(params, at + 1, own.stop - at - 1)]
            for found in (picker(hidden[own], wanted), picker.among(logits(hidden[own]), wanted)):
                assert found == want[own]


def test_a_head_that_computes_outside_the_kernels_is_run_as_it_is():
    ops, logits = head()
    hidden, params = torch.randn(2, WIDTH), SamplingParams(temperature=0.5)
    doubled = Picker(ops, lambda hidden: logits(hidden) * 2, WIDTH)
    want = [pick(row, params, i, (), ()) for i, row in enumerate((logits(hidden) * 2).numpy())]
    repeated = []
    with run_by(lambda *run: repeated.append(run)):
        assert doubled(hidden, [Wanted(params, 0, 2)]) == want
    assert not repeated


@pytest.mark.parametrize("instructions", native_module().usable() if native_module() else ())
@pytest.mark.parametrize("temperature", (0.0, 0.05, 0.8))
def test_the_largest_sum_is_found_where_no_largest_logit_lies(instructions, temperature):
    """Vocabularies of every remainder of a block, with one token that the others cannot reach, or logits alike."""
    ops, params = NativeOps(twin("fp32"), "fp32"), SamplingParams(temperature=temperature, seed=3)
    picker = Picker(ops, lambda hidden: hidden, WIDTH)
    in_use = native_module().using()
    native_module().use(instructions)
    try:
        for vocab in (*range(1, 70), 255, 256, 257, 511, 700, 5000):
            rows = torch.zeros(2, vocab)
            rows[1, (7 * vocab) // 11] = 200.0
            want = [pick(row, params, i, (), ()) for i, row in enumerate(rows.numpy())]
            assert picker.among(rows, [Wanted(params, 0, 2)]) == want
    finally:
        native_module().use(in_use)


def test_tokens_do_not_depend_on_what_others_ask_for():
    """Beside a request that needs its logits in Python, the picks of the others come from the same kernel."""
    engine = Engine.load("tiny-qwen", Settings(weights="fp32", slots=3, prefix_cache_bytes=0, try_drafts=False))

    def ask(depth, **sampling):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=7, **sampling)
        return Request.from_prompt("Hello!", sampling=params, speculation=Speculation(depth=depth))

    alone = [engine.generate(ask(depth))[0].token_ids for depth in (0, 3)]
    beside = engine.generate([ask(0), ask(2, top_k=5), ask(4, logprobs=2)])
    assert alone[0] == alone[1] == beside[0].token_ids == beside[2].token_ids
    assert len(set(alone[0])) > 5
