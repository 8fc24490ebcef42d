"""After `commit(keep)` every layer goes on bit for bit as if only the kept prefix had ever been."""

import numpy as np
import pytest
import torch
from support.toy import CACHES, HIDDEN, VOCAB, WINDOW, Stack, toy_ops

from foreglance.batch import InputSpec, Part, pack
from foreglance.cache.store import CacheStore
from foreglance.models.layers import embed_rows
from foreglance.prompt import MRope, Positions

KINDS = {**{kind: (kind,) for kind in CACHES}, "all": tuple(CACHES)}
HEAD_WIDTHS = (None, HIDDEN)  # a target, and a draft head that is fed a hidden state with each row
LENGTHS = (5, WINDOW + 20, 2 * 64 + 1)  # within the window, beyond it, and beyond several compactions


class Bench:
    """A stack of layers of some kinds with a store: the caches of a target or of a draft head."""

    def __init__(self, kinds, hidden_width=None):
        self.store = CacheStore([CACHES[kind] for kind in kinds])
        self._spec = InputSpec(VOCAB, HIDDEN, hidden_width, MRope())
        self._stack = Stack(kinds, MRope(), torch.Generator().manual_seed(1))
        self._table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))

    def forward(self, sequence, tokens, chunk=False):
        """Provisional rows for tokens; -> [rows, hidden]."""
        start, count = self.store[sequence].rows, len(tokens)
        hidden = None
        if self._spec.hidden_width:
            hidden = torch.stack([self._table[(int(t) * 7 + 3) % VOCAB] for t in tokens])
        image, positions = np.zeros(count, bool), Positions.run(start, count, 3)
        part = Part(sequence, np.array(tokens), image, positions, count, chunk, hidden=hidden)
        batch = pack([part], self._spec, self.store.held())
        self.store.reserve(sequence, count)
        x = embed_rows(toy_ops(), self._table, batch)
        return self._stack(x if hidden is None else x + batch.hidden, batch, {sequence: self.store[sequence]})

    def commit(self, sequence, keep):
        last = self.store[sequence].rows + keep - 1
        self.store.commit(sequence, keep, (last,) * 3)

    def write(self, sequence, tokens):
        """Rows one by one, each kept."""
        out = []
        for token in tokens:
            out.append(self.forward(sequence, [token]))
            self.commit(sequence, 1)
        return torch.cat(out) if out else None


def tokens_of(count, salt=0):
    return [(5 * i + 3 * salt + i * i) % (VOCAB - 3) + 3 for i in range(count)]


@pytest.mark.parametrize("hidden_width", HEAD_WIDTHS, ids=["target", "draft"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_forward_after_commit_equals_forward_of_the_kept_prefix_from_scratch(kinds, length, hidden_width):
    drafts, after = tokens_of(6, salt=1), tokens_of(4, salt=2)
    bench, scratch = Bench(kinds, hidden_width), Bench(kinds, hidden_width)
    scratch.store.open(0)
    scratch.write(0, tokens_of(length))  # row by row, never a row that is not kept
    for keep in range(len(drafts) + 1):
        scratch.write(0, drafts[max(keep - 1, 0) : keep])
        want = scratch.forward(0, after)
        scratch.commit(0, 0)
        bench.store.open(keep)
        for start in range(0, length, 16):
            rows = tokens_of(length)[start : start + 16]
            bench.forward(keep, rows)
            bench.commit(keep, len(rows))
        bench.forward(keep, drafts)
        bench.commit(keep, keep)
        assert bench.store[keep].rows == scratch.store[0].rows == length + keep
        assert torch.equal(bench.forward(keep, after), want)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_many_rows_at_once_equal_rows_one_by_one(kinds):
    bench = Bench(kinds)
    bench.store.open(0)
    bench.store.open(1)
    rows = tokens_of(60)
    together = []
    for start in range(0, 60, 12):
        together.append(bench.forward(0, rows[start : start + 12]))
        bench.commit(0, 12)
    assert torch.equal(torch.cat(together), bench.write(1, rows))


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_rounds_of_drafts_leave_what_single_rows_leave(kinds):
    """Long enough that the window is compacted between rounds, with every kept count in turn."""
    bench, kept = Bench(kinds), []
    bench.store.open(0)
    bench.store.open(1)
    for round_number in range(40):
        drafts, keep = tokens_of(7, salt=round_number), round_number % 8
        bench.forward(0, drafts)
        bench.commit(0, min(keep, 7))
        kept += drafts[:keep]
    bench.write(1, kept)
    after = tokens_of(5, salt=9)
    assert torch.equal(bench.forward(0, after), bench.forward(1, after))


@pytest.mark.parametrize("first_chunk", (1, 17, 40))
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_restoring_a_checkpoint_forgets_every_later_row(kinds, first_chunk):
    bench = Bench(kinds)
    bench.store.open(0)
    bench.forward(0, tokens_of(first_chunk), chunk=True)
    bench.commit(0, first_chunk)
    mark = bench.store.checkpoint(0)
    after = tokens_of(5, salt=3)
    want = bench.forward(0, after)
    bench.commit(0, 0)
    for salt in range(2):
        bench.write(0, tokens_of(40, salt))  # beyond the window, so that its rows are overwritten or dropped
        bench.store.restore(0, mark)
        assert bench.store[0].rows == first_chunk and bench.store[0].last == (first_chunk - 1,) * 3
        assert torch.equal(bench.forward(0, after), want)
        bench.commit(0, 0)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_copy_goes_on_alone(kinds):
    """`adopt` what was cut earlier, in pieces, after the source went on: neither sees the other's rows."""
    bench = Bench(kinds)
    bench.store.open(0)
    cuts = []
    for start, stop in ((0, 9), (9, 13), (13, 30)):
        bench.write(0, tokens_of(30)[start:stop])
        cuts.append(bench.store[0].cut(start))
    bench.write(0, tokens_of(50, salt=1))
    bench.store.adopt(1, cuts)
    bench.store.open(2)
    bench.write(2, tokens_of(30))
    assert bench.store[1].rows == 30 and bench.store[1].last == (29, 29, 29)
    mine = tokens_of(40, salt=2)
    assert torch.equal(bench.write(1, mine), bench.write(2, mine))
    bench.store.open(3)
    bench.write(3, [*tokens_of(30), *tokens_of(50, salt=1)])
    after = tokens_of(4, salt=4)
    assert torch.equal(bench.forward(0, after), bench.forward(3, after))


def test_a_prompt_chunk_is_kept_whole_or_not_at_all_by_recurrent_layers():
    bench = Bench(("recurrent",))
    bench.store.open(0)
    bench.forward(0, tokens_of(20), chunk=True)
    with pytest.raises(ValueError, match="no state after 7 of 20 rows"):
        bench.commit(0, 7)
    bench.forward(0, tokens_of(20), chunk=True)
    bench.commit(0, 0)
    assert bench.store[0].rows == 0


def test_a_window_keeps_a_bounded_number_of_rows():
    bench = Bench(("sliding",))
    bench.store.open(0)
    bench.write(0, tokens_of(300))
    (layer,) = bench.store[0].layers
    keys, _ = layer.read(0, 300)
    assert WINDOW <= keys.shape[1] < 200
