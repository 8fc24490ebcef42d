"""Native kernels: right next to their torch twins, and a row has the same bits in any batch and on any thread count."""

import numpy as np
import pytest
import torch
from numpy._core._multiarray_umath import __cpu_features__
from support.kernels import twin

from foreglance.batch import Few, FewPart
from foreglance.cache.kv import KVSpec
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import CacheStore
from foreglance.ops import formats
from foreglance.ops.base import DeltaShape
from foreglance.ops.formats import FORMATS, quantise
from foreglance.ops.native import Gathered, NativeOps, Owned, native_module
from foreglance.request import SamplingParams
from foreglance.sampling import pick

native = native_module()
pytestmark = pytest.mark.skipif(native is None, reason="the package was installed without a compiler")
SETS = native.usable() if native is not None else []
WIDTHS = (1, 3, 16, 40, 64, 100, 192)


@pytest.fixture(params=SETS)
def instructions(request):
    native.use(request.param)
    yield request.param
    native.use(SETS[0])


@pytest.fixture(params=(1, 2))
def threads(request):
    native.threads(request.param)
    yield request.param
    native.threads(1)


def rows(n, width, seed=0):
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator) * torch.logspace(-3, 2, n).unsqueeze(-1)


def close(got, want, tolerance=1e-5):
    """Within `tolerance` of the largest value of a row."""
    got, want = got.reshape(len(want), -1), want.reshape(len(want), -1)
    most = want.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    assert got.shape == want.shape
    assert ((got - want).abs() / most).max() < tolerance


def same_bits(function, n=20):
    """`function` of a range of rows gives what the rows give alone."""
    whole = function(slice(0, n))
    for start, stop in [(i, i + 1) for i in range(n)] + [(0, m) for m in range(2, 17)] + [(n - 5, n)]:
        assert torch.equal(function(slice(start, stop)), whole[start:stop]), (start, stop)
    return whole


@pytest.mark.parametrize(
    "name, needed",
    [
        ("avx512", ("AVX512F", "AVX512BW", "AVX512VL", "AVX512DQ", "AVX512VNNI")),
        ("avx2", ("AVX2", "FMA3")),
        ("neon", ("ASIMDDP",)),
        ("portable", ()),
    ],
)
def test_an_instruction_set_is_usable_where_numpy_finds_it(name, needed):
    assert (name in SETS) == all(__cpu_features__[feature] for feature in needed)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (96, 64), (250, 1001), (5, 7), (130, 520)])
def test_products_are_those_of_the_twin(instructions, threads, weights, shape):
    ops, other = NativeOps(twin(weights), weights), twin(weights)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / shape[1] ** 0.5
    weight[: shape[0] // 3] *= 30  # scales are each group's own
    packed, x = ops.pack_linear(weight), rows(20, shape[1] + 3)[:, 1:-2]  # rows that lie apart in memory
    got = same_bits(lambda at: ops.linear(x[at], packed, [(0, at.stop - at.start)]))
    want = other.linear(x, other.pack_linear(weight), [(0, len(x))])
    close(got, want)


@pytest.mark.parametrize("bits, most", [(8, 0.008), (4, 0.095)])
def test_quantising_costs_what_its_bits_allow(bits, most):
    weight = torch.randn(64, 100, generator=torch.Generator().manual_seed(2))
    weight[3, :32] = 0
    weight[4, 5] = 1e-9
    restored = quantise(weight, bits).restored()
    assert (restored - weight).norm() / weight.norm() < most
    assert not restored[3, :32].any()


@pytest.mark.parametrize("bits", (8, 4))
def test_a_row_is_quantised_alike_among_many_and_alone(monkeypatch, bits):
    """A weight is quantised a few rows at a time."""
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(4))
    whole = quantise(weight, bits)
    monkeypatch.setattr(formats, "_AT_ONCE", 3 * 70)
    pieces = quantise(weight, bits)
    assert torch.equal(whole.values, pieces.values) and torch.equal(whole.scales, pieces.scales)


def test_weights_that_are_quantised_already_are_taken_as_they_are():
    weight = quantise(torch.randn(48, 64, generator=torch.Generator().manual_seed(3)), 8)
    x = rows(4, 64)
    for weights in FORMATS[:3]:
        ops = NativeOps(twin(weights), weights)
        close(ops.linear(x, ops.pack_linear(weight), [(0, 4)]), x @ weight.restored().t(), 0.02)


@pytest.mark.parametrize("width", WIDTHS)
def test_row_operations_are_those_of_the_twin(instructions, threads, width):
    ops, other = NativeOps(twin("fp32"), "fp32"), twin("fp32")
    generator = torch.Generator().manual_seed(4)
    weight, x = torch.randn(width, generator=generator), rows(20, 2 * width)
    left, right = x[:, :width], x[:, width:]
    cases = {
        "rms_norm": lambda o, at: o.rms_norm(left[at], weight, 1e-6),
        "gated_rms_norm": lambda o, at: o.gated_rms_norm(left[at], right[at], weight, 1e-6),
        "silu_mul": lambda o, at: o.silu_mul(x[at]),
        "limited silu_mul": lambda o, at: o.silu_mul(x[at], 1.5),
        "gelu_mul": lambda o, at: o.gelu_mul(x[at]),
        "sigmoid_mul": lambda o, at: o.sigmoid_mul(left[at], right[at]),
        "softcap": lambda o, at: o.softcap(left[at], 30.0),
        "l2_norm": lambda o, at: o.l2_norm(left[at], 1e-6),
        "log decay": lambda o, at: o.delta_gates(left[at], right[at], weight, weight)[0],
        "beta": lambda o, at: o.delta_gates(left[at], right[at], weight, weight)[1],
        "route": lambda o, at: o.route(left[at] / 10, weight, min(2, width), "sigmoid")[1],
        "route by softmax": lambda o, at: o.route(left[at] / 10, None, min(2, width), "softmax")[1],
    }
    for case in cases.values():
        got = same_bits(lambda at, case=case: case(ops, at))
        close(got, case(other, slice(0, 20)))


def test_heads_have_weights_gates_and_angles_of_their_own(instructions, threads):
    ops, other = NativeOps(twin("fp32"), "fp32"), twin("fp32")
    x, weight = rows(20, 6 * 24).view(20, 6, 24), rows(6, 24, 1)
    gate, angle = rows(20, 6, 2), rows(20, 8, 3)
    cases = [
        lambda o, at: o.rms_norm(x[at, 1:], weight[1:], 1e-6),
        lambda o, at: o.sigmoid_mul(x[at], gate[at].unsqueeze(-1)),
        lambda o, at: o.rotary(x[at, :4], angle[at].cos(), angle[at].sin()),
    ]
    for case in cases:
        close(same_bits(lambda at, case=case: case(ops, at)), case(other, slice(0, 20)))


@pytest.mark.parametrize("kind", (torch.float32, torch.float16, torch.bfloat16))
def test_embeddings_are_exact(instructions, threads, kind):
    ops, table = NativeOps(twin("fp32"), "fp32"), rows(50, 33).to(kind)
    table[0, :3] = torch.tensor([6e-8, -0.0, float("inf")]).to(kind)
    ids = torch.tensor([0, 49, 7, 7])
    assert torch.equal(ops.embedding(table, ids), table[ids].float())


@pytest.mark.parametrize("weights", FORMATS)
def test_experts_are_those_of_the_twin(instructions, threads, weights):
    ops, other = NativeOps(twin(weights), weights), twin(weights)
    generator = torch.Generator().manual_seed(6)
    gate_up = [torch.randn(2 * 40, 64, generator=generator) / 8 for _ in range(4)]
    down = [torch.randn(64, 40, generator=generator) / 6 for _ in range(4)]
    x = rows(20, 64)
    chosen, weights_of = other.route(torch.randn(20, 4, generator=generator), None, 2, "softmax")

    def mixture(o, at, gate):
        packed = [[o.pack_linear(w) for w in side] for side in (gate_up, down)]
        return o.experts(x[at], chosen[at], weights_of[at], *packed, 3.0, [(0, at.stop - at.start)], gate)

    for gate in ("silu", "gelu"):
        got = same_bits(lambda at, gate=gate: mixture(ops, at, gate))
        close(got, mixture(other, slice(0, 20), gate), 2e-2 if weights in ("q8", "q4") else 1e-5)


def test_bits_do_not_depend_on_the_number_of_threads():
    ops = NativeOps(twin("fp32"), "fp32")
    weight, x = ops.pack_linear(rows(300, 512, 7)), rows(9, 512)
    outs = []
    for count in (1, 2, 3):
        native.threads(count)
        outs.append((ops.linear(x, weight, []), ops.rms_norm(x, x[0], 1e-6)))
    native.threads(1)
    for out in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(out, outs[0], strict=True))


SPECS = (KVSpec(2, 24), KVSpec(2, 24, 20), RecurrentSpec(((3, 2 * 2 * 16 + 4 * 88), (4, 16, 88))))
HOW = DeltaShape(2, 4, 16, 88, 1e-6)  # of every width of vector some columns
CHANNELS = SPECS[2].shapes[0][1]
CONV = torch.randn(CHANNELS, 4, generator=torch.Generator().manual_seed(9))
HELD = {0: 150, 1: 37}  # rows of two sequences
STEPS = (({0: 5, 1: 3}, {0: 3, 1: 2}), ({0: 1, 1: 16}, {0: 1, 1: 0}), ({0: 2, 1: 2}, {0: 2, 1: 1}))  # rows, kept rows


def held_rows():
    """A store whose sequences hold rows and states."""
    store, generator = CacheStore(SPECS), torch.Generator().manual_seed(8)
    for sequence, count in HELD.items():
        store.open(sequence)
        store.reserve(sequence, count)
        for layer in store[sequence].layers[:2]:
            layer.write(0, *torch.randn(2, count, 2, 24, generator=generator))
        state = tuple(torch.randn(shape, generator=generator) for shape in SPECS[2].shapes)
        store[sequence].layers[2].write(count, state)
        store.commit(sequence, count, (count,))
    return store


def few_of(store, counts):
    parts, start = [], 0
    for sequence, count in counts.items():
        store.reserve(sequence, count)
        for layer in store[sequence].recurrent:
            layer.make_room(count)
        parts.append(FewPart(start, count, store[sequence].rows, store[sequence]))
        start += count
    return Few.of(parts)


def inputs_of_step(number, count):
    generator = torch.Generator().manual_seed(100 + number)
    fused = torch.randn(count, 8 * 24, generator=generator).view(count, 8, 24)  # query, keys and values lie together
    mixed = torch.randn(count, CHANNELS, generator=generator)
    gates = torch.rand(2, count, 4, generator=generator)
    return fused, mixed, -gates[0], gates[1]


def computed(ops, store, counts, fused, mixed, decay, beta):
    few, outs = few_of(store, counts), []
    for layer in (0, 1):
        ops.write_few(few, layer, fused[:, 4:6], fused[:, 6:])
        outs.append(ops.attend_few(few, layer, fused[:, :4], 24**-0.5))
    return [*outs, ops.delta_few(few, 2, mixed, decay, beta, CONV, HOW)]


def test_rows_over_caches_are_those_of_the_twin_and_of_rows_alone(instructions, threads):
    """Several steps of two sequences with roll-back, on a cache of all rows, a window and a recurrent state."""
    ops, other = NativeOps(twin("fp32"), "fp32"), twin("fp32")
    together, plain, alone = held_rows(), held_rows(), held_rows()
    for number, (counts, kept) in enumerate(STEPS):
        inputs = inputs_of_step(number, sum(counts.values()))
        got = computed(ops, together, counts, *inputs)
        for mine, twins in zip(got, computed(other, plain, counts, *inputs), strict=True):
            close(mine, twins)
        first = 0
        for sequence, count in counts.items():
            for i in range(kept[sequence]):
                row = slice(first + i, first + i + 1)
                single = computed(ops, alone, {sequence: 1}, *(part[row].clone() for part in inputs))
                assert all(torch.equal(a, b[row]) for a, b in zip(single, got, strict=True))
                alone.commit(sequence, 1, (1,))
            first += count
        for store in (together, plain):
            for sequence, keep in kept.items():
                store.commit(sequence, keep, (1,))
    for sequence in HELD:
        states = [store[sequence].layers[2].read() for store in (together, plain, alone)]
        for mine, twins, one in zip(*states, strict=True):
            close(mine, twins)
            assert torch.equal(mine, one)


def test_a_state_is_the_same_by_whatever_steps_it_was_reached(instructions, threads):
    """Long enough for steps to be repeated, states to be renewed, and inputs and steps to be moved to the front."""
    ops, rng = NativeOps(twin("fp32"), "fp32"), np.random.default_rng(5)
    together, alone = held_rows(), held_rows()
    for number in range(40):
        count = int(rng.integers(1, 9))
        keep = int(rng.integers(0, count + 1))
        _, *inputs = inputs_of_step(number, count)
        got = ops.delta_few(few_of(together, {0: count}), 2, *inputs, CONV, HOW)
        for i in range(keep):
            row = [part[i : i + 1].clone() for part in inputs]
            assert torch.equal(ops.delta_few(few_of(alone, {0: 1}), 2, *row, CONV, HOW)[0], got[i]), (number, i)
            alone.commit(0, 1, (1,))
        together.commit(0, keep, (1,))
        if number % 13 == 12:
            states = [store[0].layers[2].read() for store in (together, alone)]
            assert all(torch.equal(mine, other) for mine, other in zip(*states, strict=True))
    together[0].layers[2].load(0, together[0].layers[2].save(0))
    assert torch.equal(together[0].layers[2].read()[1], alone[0].layers[2].read()[1])


@pytest.mark.parametrize("temperature", (0.0, 0.05, 0.8, 3.0))
def test_picks_are_those_of_sampling(instructions, threads, temperature):
    ops, generator = NativeOps(twin("fp32"), "fp32"), torch.Generator().manual_seed(11)
    logits = torch.randn(6, 1000, generator=generator) * 3
    logits[1, 7] = logits[1, 900] = 40.0  # a tie goes to the lower id
    picks, cells = np.zeros((2, 6), np.int64), np.zeros(19, np.int64)
    for row in range(6):
        cells.view(np.float64)[1 + 3 * row] = temperature
        cells[2 + 3 * row : 4 + 3 * row] = 2**40 + row, 10 * row
    tokens = torch.empty(6, dtype=torch.int64)
    for number in range(2):
        cells[0] = number
        ops.pick_rows(logits, tokens, picks, cells)
        for row in range(6):
            params = SamplingParams(temperature=temperature, seed=2**40 + row)
            want = pick(logits[row].numpy(), params, 10 * row + number, (), ())
            assert picks[number, row] == tokens[row] == want


@pytest.mark.parametrize("temperature", (0.0, 0.05, 0.8, 3.0))
@pytest.mark.parametrize("weights", FORMATS)
def test_own_outputs_of_a_row_join_those_of_all(instructions, threads, weights, temperature):
    """Each row picks from every third token and from others of its own, none, a few or more than are kept: as
    `sampling` does from the whole row, in which the rest has no chance."""
    ops, generator = NativeOps(twin(weights), weights), torch.Generator().manual_seed(13)
    weight = torch.randn(700, 40, generator=generator)
    weight[450:475] = weight[400:425]  # ties go to the lower id
    packed, ids, hidden = ops.pack_linear(weight), torch.arange(0, 700, 3), rows(5, 40) * 2
    part = ops.pack_linear(weight[ids])
    own, gathered = Owned(5, packed, 64), [None]
    for row, numbers in enumerate(([], [1], [474, 424, 1, 2], [*range(1, 600, 3), 452, 401]), 1):
        gathered.append(Gathered(packed, 64))
        for start in range(0, len(numbers), 7 + row):
            gathered[row].add(np.array(numbers[start : start + 7 + row]))
            own.set(row, gathered[row])
        assert set(gathered[row].numbers.tolist()) == set(numbers[-64:])
    blocks = [(0, 5)]
    scores, whole = ops.linear(hidden, part, blocks), ops.linear(hidden, packed, blocks)
    own_scores = ops.linear_own(hidden, own)
    full = torch.full((5, 700), float("-inf"))
    full[:, ids] = scores
    for row, some in enumerate(gathered):
        if some is not None:
            at = torch.from_numpy(some.numbers)
            assert torch.equal(own_scores[row, : len(some)], whole[row, at])
            assert torch.equal(ops.linear(hidden[row : row + 1], some.weight, [(0, 1)])[0], whole[row, at])
            full[row, at] = whole[row, at]
    picks, cells, tokens = np.zeros((2, 5), np.int64), np.zeros(16, np.int64), torch.empty(5, dtype=torch.int64)
    for row in range(5):
        cells.view(np.float64)[1 + 3 * row] = temperature
        cells[2 + 3 * row : 4 + 3 * row] = 2**40 + row, 10 * row
    for number in range(2):
        cells[0] = number
        ops.pick_rows(scores, tokens, picks, cells, ids)
        ops.pick_own(scores, own_scores, own, tokens, picks, cells, ids)
        for row in range(5):
            params = SamplingParams(temperature=temperature, seed=2**40 + row)
            want = pick(full[row].numpy(), params, 10 * row + number, (), ())
            assert picks[number, row] == tokens[row] == want, row


def test_angles_are_rows_of_the_table_and_never_lie_beyond_it(instructions, threads):
    ops, table = NativeOps(twin("fp32"), "fp32"), torch.arange(40.0).view(10, 4)
    axis_of, positions = torch.tensor([0, 1, 2, 0]), torch.tensor([[0, 3, 9, 12], [1, 4, 9, 9], [2, 5, 9, 1000]])
    cos, sin = ops.angles(table, -table, axis_of, positions)
    want, _ = twin("fp32").angles(table, -table, axis_of, positions.clamp(max=9))
    assert torch.equal(cos, want) and torch.equal(sin, -want)
