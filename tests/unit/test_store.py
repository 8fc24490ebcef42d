"""`CacheStore` against plain lists: what is committed stays, what is not never was."""

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from foreglance.cache.kv import KV, KVSpec
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import PAGE, CacheFull, CacheStore, merge, segment_bytes

WINDOW, CAPACITY = 5, 10 * PAGE
SPECS = (KVSpec(1, 1), KVSpec(1, 1, WINDOW), RecurrentSpec(((1,),)))


def write(cache, values):
    """As a forward does: provisional rows, and a recurrent state that is the sum of all rows, after each."""
    total = cache.layers[2].read()[0]
    for i, value in enumerate(values):
        tensor = torch.full((1, 1, 1), float(value))
        for layer in cache.layers[:2]:
            layer.write(cache.rows + i, tensor, -tensor)
        total = total * 2 + value
        cache.layers[2].write(i + 1, (total,))


def contents(cache):
    full, window, recurrent = cache.layers
    last = max(0, cache.rows - WINDOW + 1)  # what the next row's window still sees
    keys, values = full.read(0, cache.rows)
    assert torch.equal(keys, -values)
    return keys.flatten().tolist(), window.read(last, cache.rows)[0].flatten().tolist(), recurrent.read()[0].item()


def model(rows):
    total = torch.zeros(1)
    for value in rows:
        total = total * 2 + value
    return [float(v) for v in rows], [float(v) for v in rows[max(0, len(rows) - WINDOW + 1) :]], total.item()


class Stores(RuleBasedStateMachine):
    """Sequences are opened, grow by provisional rows of which some are kept, go back, are copied and released."""

    ids, marks, cuts = Bundle("ids"), Bundle("marks"), Bundle("cuts")

    def __init__(self):
        super().__init__()
        self.store, self.rows, self.next = CacheStore(SPECS, CAPACITY), {}, 0

    @rule(target=ids)
    def open(self):
        self.next += 1
        self.store.open(self.next)
        self.rows[self.next] = []
        return self.next

    @rule(sequence=ids, values=st.lists(st.integers(0, 9), min_size=1, max_size=40), data=st.data())
    def forward(self, sequence, values, data):
        if sequence not in self.rows:
            return
        pages = sum(-(-len(rows) // PAGE) for other, rows in self.rows.items() if other != sequence)
        fits = pages + -(-(len(self.rows[sequence]) + len(values)) // PAGE) <= CAPACITY // PAGE
        if not fits:
            with pytest.raises(CacheFull, match=f"sequence {sequence} needs {len(values)} rows"):
                self.store.reserve(sequence, len(values))
            return
        self.store.reserve(sequence, len(values))
        write(self.store[sequence], values)
        with pytest.raises(ValueError, match="cannot keep"):
            self.store.commit(sequence, len(values) + 1, (0,))
        keep = data.draw(st.integers(0, len(values)))
        self.rows[sequence] += values[:keep]
        self.store.commit(sequence, keep, (len(self.rows[sequence]) - 1,))

    @rule(sequence=ids, values=st.lists(st.integers(0, 9), min_size=1, max_size=9))
    def forward_that_is_never_committed(self, sequence, values):
        """The step failed; the next reserve forgets its rows."""
        if sequence in self.rows and self.store.pages_held + 1 <= CAPACITY // PAGE:
            self.store.reserve(sequence, len(values))
            write(self.store[sequence], values)
            self.store.commit(sequence, 0, None)

    @rule(target=marks, sequence=ids)
    def checkpoint(self, sequence):
        if sequence not in self.rows:
            return multiple()
        return sequence, self.store.checkpoint(sequence), list(self.rows[sequence])

    @rule(mark=marks)
    def restore(self, mark):
        sequence, checkpoint, rows = mark
        if sequence in self.rows and self.rows[sequence][: len(rows)] == rows:
            self.store.restore(sequence, checkpoint)
            self.rows[sequence] = list(rows)

    @rule(target=cuts, sequence=ids)
    def cut(self, sequence):
        """The first segment of a sequence."""
        if sequence not in self.rows:
            return multiple()
        return [self.cut_from(sequence, 0)], list(self.rows[sequence])

    @rule(target=cuts, cut=cuts, sequence=ids, merged=st.booleans())
    def cut_behind(self, cut, sequence, merged):
        """The segment behind others, or merged into the last of them."""
        segments, rows = cut
        if sequence not in self.rows or self.rows[sequence][: len(rows)] != rows:
            return multiple()
        behind = self.cut_from(sequence, len(rows))
        copies = [replace(segment, layers=list(segment.layers)) for segment in segments]
        own = [*copies[:-1], merge(copies[-1], behind, SPECS)] if merged else [*copies, behind]
        assert own[-1].num_bytes == segment_bytes(SPECS, own[-1].stop - own[-1].start)
        return own, list(self.rows[sequence])

    def cut_from(self, sequence, start):
        cache = self.store[sequence]
        segment = cache.cut(start)
        assert segment.num_bytes == cache.cut_bytes(start) == segment_bytes(SPECS, cache.rows - start)
        return segment

    @rule(target=ids, cut=cuts)
    def adopt(self, cut):
        segments, rows = cut
        if self.store.pages_held + -(-len(rows) // PAGE) > CAPACITY // PAGE:
            return multiple()
        self.next += 1
        self.store.adopt(self.next, segments)
        self.rows[self.next] = list(rows)
        return self.next

    @rule(sequence=consumes(ids))
    def release(self, sequence):
        if sequence in self.rows:
            self.store.release(sequence)
            del self.rows[sequence]
        with pytest.raises(KeyError, match=f"sequence {sequence} holds nothing"):
            self.store.release(sequence)

    @invariant()
    def holds_exactly_what_was_kept(self):
        self.store.check()
        assert len(self.store) == len(self.rows)
        for sequence, rows in self.rows.items():
            cache = self.store[sequence]
            assert (cache.rows, cache.last) == (len(rows), (len(rows) - 1,) if rows else None)
            assert contents(cache) == model(rows)
        assert self.store.pages_held == sum(-(-len(rows) // PAGE) for rows in self.rows.values())
        held = self.store.held()
        assert {sequence: held[sequence].rows for sequence in held} == {s: len(rows) for s, rows in self.rows.items()}


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)


def test_opening_a_sequence_twice_is_an_error():
    store = CacheStore(SPECS)
    store.open(1)
    with pytest.raises(ValueError, match="open already"):
        store.open(1)


def test_running_out_changes_nothing_and_says_what_to_do():
    store = CacheStore(SPECS, 2 * PAGE)
    for sequence in (1, 2):
        store.open(sequence)
    store.reserve(1, PAGE + 1)
    with pytest.raises(CacheFull, match="2 of 2 pages of 64 rows are held; run fewer"):
        store.reserve(2, 1)
    assert (store[2].rows, store[2].provisional, store.pages_held) == (0, 0, 2)
    store.commit(1, 0, None)
    store.reserve(2, 1)
    assert store.pages_total == 2 and 1 in store and 3 not in store


def test_check_finds_rows_that_were_left_provisional():
    store = CacheStore(SPECS)
    store.open(1)
    store.reserve(1, 2)
    with pytest.raises(AssertionError, match="2 provisional"):
        store.check()


def test_segments_that_lack_rows_are_refused():
    store = CacheStore(SPECS)
    store.open(1)
    store.reserve(1, 3)
    write(store[1], [1, 2, 3])
    store.commit(1, 3, (2,))
    with pytest.raises(ValueError, match="3 rows lack 2 of them"):
        store.adopt(2, [store[1].cut(2)])


def test_heads_begin_at_the_same_alignment_whatever_the_capacity_is():
    """Buffers grow in steps of 64 rows, so that kernels see a row in the same way in short and in long buffers."""
    layer = KV(KVSpec(2, 16))
    for rows in (1, 70, 300, 2000):
        layer.reserve(0, rows)
        keys, _ = layer.read(0, rows)
        assert keys.stride(0) % (64 * 16) == 0 and keys.stride(1) == 16
