"""What is kept for other requests: the right rows, the longest beginning, never more bytes than allowed."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foreglance.cache.kv import KVSpec
from foreglance.cache.prefix import MAX_POINTS, NO_DRAFT, Border, Memory, PrefixCache, Waiting
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import CacheStore

WINDOW, GRID = 3, 4
SPECS = (KVSpec(1, 1), KVSpec(1, 1, WINDOW), RecurrentSpec(((1,),)))
ATTENTION = (KVSpec(1, 1), KVSpec(1, 1, WINDOW))
COLD, WARM = Border("chunk", True), Border("turn", False)


def state_of(identities):
    total = 0.0
    for identity in identities:
        total = (total * 3 + identity) % 9973
    return total


class Walker:
    """A sequence over a model whose cache says what its rows are: row i of every layer holds the identity of row i, and
    the recurrent state a hash of all rows. With `draft`, a draft whose rows lag one behind."""

    def __init__(self, draft=False, specs=SPECS):
        self.identities, self.passed, self.cold = [], [], True
        self._stores = [CacheStore(specs), *([CacheStore(specs)] if draft else [])]
        self._key = "mtp/see" if draft else NO_DRAFT
        for store in self._stores:
            store.open(0)

    def walk(self, more):
        self.identities += more
        for lag, store in enumerate(self._stores):
            rows, stop = store[0].rows, len(self.identities) - lag
            if stop > rows:
                store.reserve(0, stop - rows)
                for row in range(rows, stop):
                    value = torch.full((1, 1, 1), float(self.identities[row]))
                    store[0].layers[0].write(row, value, -value)
                    store[0].layers[1].write(row, value, -value)
                if len(store[0].layers) == 3:
                    store[0].layers[2].write(stop - rows, (torch.tensor([state_of(self.identities[:stop])]),))
                store.commit(0, stop - rows, (stop - 1,))
        return self

    def leave(self, cache, border=COLD):
        target, *drafts = (store[0] for store in self._stores)
        waiting = tuple(Waiting(draft.rows, torch.full((1, 2), float(self.identities[-1]))) for draft in drafts)
        memory = Memory(self._key, tuple(drafts), waiting)
        kept = cache.put(np.array(self.identities, np.int64), target, memory, border, self.passed)
        self.passed.append(len(self.identities))
        return kept


def left(cache, identities, borders=(), border=COLD, **options):
    """A walker that leaves rows at its borders and at its end."""
    walker, at = Walker(**options), 0
    for stop in (*borders, len(identities)):
        walker.walk(identities[at:stop]).leave(cache, COLD if stop in borders else border)
        at = stop
    return walker


def found(cache, identities, key=None):
    hit = cache.find(np.array(identities, np.int64), key)
    return None if hit is None else hit.rows


def holds(segments, identities, specs=SPECS):
    """Whether a model that goes on behind these segments sees just these rows."""
    store = CacheStore(specs)
    if not segments:
        return True
    store.adopt(0, segments)
    cache, n = store[0], len(identities)
    assert (cache.rows, cache.last) == (n, (n - 1,) if n else None)
    first = max(0, n - WINDOW + 1)
    assert cache.layers[0].read(0, n)[1].flatten().tolist() == [-x for x in identities]
    assert cache.layers[1].read(first, n)[0].flatten().tolist() == identities[first:]
    if len(specs) == 3:
        assert cache.layers[2].read()[0].item() == state_of(identities)
    return True


def test_the_longest_checkpoint_within_the_common_rows_is_taken():
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4, 5, 6], (2, 4))
    left(cache, [1, 2, 3, 9, 9, 9], (3,))
    assert found(cache, [1, 2, 3, 4, 5, 7, 7]) == 4
    assert found(cache, [1, 2, 3, 9, 5]) == 3
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == 6
    assert found(cache, [1, 9, 9]) is None
    assert found(cache, [8]) is None


@pytest.mark.case("B14")
def test_at_least_the_last_row_is_left_to_compute():
    """Case B14: its hidden state is needed."""
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4], (2,))
    assert found(cache, [1, 2, 3, 4]) == 2
    assert found(cache, [1, 2, 3, 4, 5]) == 4


def test_a_checkpoint_before_a_prompts_last_row_serves_that_prompt_alone():
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3], (2,), Border("prompt", True))
    assert found(cache, [1, 2, 3, 4]) == found(cache, [1, 2, 3, 5]) == 3
    assert found(cache, [1, 2, 3, 4, 5]) == 2, "its chunk would not end there"
    left(cache, [1, 2, 3], (2,))
    assert found(cache, [1, 2, 3, 4, 5]) == 3, "here another one's did"


def test_rows_without_the_needed_draft_memory_do_not_serve():
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3], draft=True)
    assert found(cache, [1, 2, 3, 4], "mtp/see") == 3
    assert found(cache, [1, 2, 3, 4], "mtp/skip") is None
    assert found(cache, [1, 2, 3, 4], None) == 3
    assert cache.find(np.array([1, 2, 3, 4]), None).drafts == ()


def test_common_rows_are_kept_once():
    cache = PrefixCache(1 << 20)
    left(cache, [*range(20), 50], (8, 20))
    before = cache.bytes_held
    left(cache, [*range(20), 60], (8, 20))
    one_row = cache.bytes_held - before
    left(cache, [*range(20), 60], (8, 20))
    assert cache.bytes_held == before + one_row and one_row < before / 4
    assert len(cache) == 4


def test_rows_are_shared_only_below_common_checkpoints():
    """Rows computed in other chunks are others in their last bits."""
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4, 5, 6], (3,))
    left(cache, [1, 2, 3, 4, 5, 6, 7], (4,))
    assert sorted(node.rows for node in cache.nodes() if len(node.path) == 1) == [3, 4]


def test_rows_that_were_somebodys_answer_are_no_beginning_of_cold_ones():
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4], (), WARM)
    left(cache, [1, 2, 3, 4, 5], (4,))
    assert sorted((node.rows, len(node.path)) for node in cache.nodes()) == [(4, 1), (4, 1), (5, 2)]
    assert cache.find(np.array([1, 2, 3, 4, 9]), None).cold, "of two that are as long the cold one is taken"


def test_a_draft_that_lags_behind_the_stored_rows_keeps_rows_of_its_own():
    """The same text may be drafted for at other times, so at one checkpoint a draft has more rows than at another."""
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4], (2,), draft=True)
    late = Walker(draft=True).walk([1, 2])
    late.leave(cache)
    late._stores[1].release(0)
    late._stores[1].open(0)
    target, draft = late._stores[0][0], late._stores[1][0]
    late.identities += [7]
    waiting = (Waiting(0, torch.zeros(3, 2)),)
    identities = np.array([1, 2, 7])
    late._stores[0].reserve(0, 1)
    for layer in target.layers[:2]:
        layer.write(2, torch.full((1, 1, layer.spec.head_size), 7.0), torch.full((1, 1, layer.spec.head_size), -7.0))
    target.layers[2].write(1, (torch.tensor([state_of([1, 2, 7])]),))
    late._stores[0].commit(0, 1, (2,))
    assert cache.put(identities, target, Memory("mtp/see", (draft,), waiting), COLD, [2])
    hit = cache.find(np.array([1, 2, 7, 8]), "mtp/see")
    assert hit.rows == 3 and holds(hit.target, [1, 2, 7]) and holds(hit.drafts[0], [])


def test_the_least_recently_used_goes_first():
    one = left(PrefixCache(1 << 20), [1] * 6)
    cache = PrefixCache(1 << 20)
    one.leave(cache)
    cache = PrefixCache(2 * cache.bytes_held)
    left(cache, [1] * 6)
    left(cache, [2] * 6)
    assert found(cache, [1] * 7) == 6
    left(cache, [3] * 6)
    assert [found(cache, [n] * 7) for n in (1, 2, 3)] == [6, None, 6]
    left(cache, [3] * 6 + [4] * 6, (6,))
    assert [found(cache, [n] * 7) for n in (1, 2, 3)] == [None, None, 6], "what it goes on from stays"


def test_what_does_not_fit_drives_nothing_out():
    cache = PrefixCache(1 << 20)
    left(cache, [1] * 6)
    cache.budget = cache.bytes_held
    assert not Walker().walk([2] * 40).leave(cache)
    assert found(cache, [1] * 7) == 6
    assert not Walker().walk([1]).leave(PrefixCache(0))


def test_where_checkpoints_are_dear_few_are_kept_and_no_row_is_lost():
    cache, walker = PrefixCache(1 << 20), Walker(draft=True)
    for n in range(40):
        walker.walk([n, n + 1, n]).leave(cache)
    (path,) = [node.path for node in cache.nodes() if not node.children]
    assert len(path) == MAX_POINTS
    assert cache.bytes_held == sum(node.point.num_bytes for node in path)
    rows = [node.rows for node in path]
    gaps = np.diff([0, *rows])
    assert rows[-1] == 120 and gaps[-1] == 3 and gaps[0] >= 20, "closer together the later they are"
    for stop in rows:
        hit = cache.find(np.array([*walker.identities[:stop], 99]), "mtp/see")
        assert hit.rows == stop and holds(hit.target, walker.identities[:stop])
        assert holds(hit.drafts[0], walker.identities[: stop - 1])
    plain, walker = PrefixCache(1 << 20), Walker(specs=ATTENTION)
    for n in range(40):
        walker.walk([n, n + 1, n]).leave(plain)
    assert len(plain) == 40, "attention alone needs no state to go on anywhere"
    hit = plain.find(np.array([*walker.identities[:60], 99]), None)
    assert holds(hit.target, walker.identities[:60], ATTENTION)


def test_a_conversation_that_fits_only_with_fewer_checkpoints_keeps_fewer():
    """What was first kept of it once stayed, and its end did not."""
    whole = Walker(draft=True).walk([1] * 24)
    one = PrefixCache(1 << 20)
    whole.leave(one)
    for spare, rows in ((0, [24]), (60, [22, 24]), (120, [16, 22, 24])):
        cache = PrefixCache(one.bytes_held + spare)
        left(cache, [9] * 5, draft=True)
        walker = Walker(draft=True)
        for n in range(12):
            assert walker.walk([1, 1]).leave(cache), n
            assert cache.bytes_held <= cache.budget
        hit = cache.find(np.array([1] * 24 + [2]), "mtp/see")
        assert hit.rows == 24 and holds(hit.target, [1] * 24) and holds(hit.drafts[0], [1] * 23)
        assert sorted(node.rows for node in cache.nodes()) == rows, "the later ones"
        assert not walker.walk([1] * 40).leave(cache) and len(cache) == len(rows), "too long by itself: nothing goes"


def test_a_checkpoint_that_two_conversations_share_is_not_thinned_out():
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4, 7], (4,))
    walker = Walker().walk([1, 2, 3, 4])
    walker.leave(cache)
    for n in range(30):
        walker.walk([n, n]).leave(cache)
    assert found(cache, [1, 2, 3, 4, 99]) == 4


def test_erasing_a_conversation_leaves_what_others_share():
    cache = PrefixCache(1 << 20)
    left(cache, [1, 2, 3, 4, 5], (3,))
    left(cache, [1, 2, 3, 9], (3,))
    assert cache.erase(np.array([1, 2, 3, 4, 5]), NO_DRAFT) == 2
    assert found(cache, [1, 2, 3, 4, 5, 6]) == 3 and found(cache, [1, 2, 3, 9, 9]) == 4
    assert cache.erase(np.array([1, 2, 3, 9]), NO_DRAFT) == 4
    assert (len(cache), cache.bytes_held) == (0, 0)
    assert cache.erase(np.array([1, 2, 3, 9]), NO_DRAFT) == 0


def test_a_conversation_that_was_taken_out_can_be_put_back():
    cache = PrefixCache(1 << 20)
    walker = left(cache, [1, 2, 3, 4, 5], (3,), draft=True)
    left(cache, [1, 2, 3, 9], (3,), draft=True)
    key, points = cache.path(np.array(walker.identities), "mtp/see")
    assert key == "mtp/see" and [point.rows for point in points] == [3, 5]
    other = PrefixCache(cache.bytes_held)
    assert other.restore(points, key) and other.restore(points, key), "twice is once"
    assert other.bytes_held == sum(point.num_bytes for point in points)
    hit = other.find(np.array([*walker.identities, 7]), "mtp/see")
    assert (
        hit.borders == (3, 5) and holds(hit.target, walker.identities) and holds(hit.drafts[0], walker.identities[:4])
    )
    assert not PrefixCache(other.bytes_held - 1).restore(points, key)


class Naive(RuleBasedStateMachine):
    """Conversations that share beginnings come and go; the tree against a list of what it says it holds."""

    def __init__(self):
        super().__init__()
        self.cache, self.walkers, self.newest = PrefixCache(2500), [], None

    @rule(draft=st.booleans())
    def begin(self, draft):
        self.walkers.append(Walker(draft))

    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=9), answer=st.booleans())
    def go_on(self, data, more, answer):
        """Prompt rows, with checkpoints on the grid; or an answer, behind which all is warm."""
        if not self.walkers:
            return
        walker = data.draw(st.sampled_from(self.walkers))
        if answer:
            walker.walk(more)
            walker.cold = False
            self.leave(walker, WARM)
            return
        for one in more:
            walker.walk([one])
            if len(walker.identities) % GRID == 0:
                self.leave(walker, Border("chunk", walker.cold))

    def leave(self, walker, border):
        if walker.leave(self.cache, border):
            self.newest = walker._key, list(walker.identities)

    @rule(more=st.lists(st.integers(1, 2), max_size=4), data=st.data(), needs_draft=st.booleans())
    def ask(self, more, data, needs_draft):
        """The longest of all that begin the prompt, with the rows that it says."""
        if not self.walkers:
            return
        prompt = data.draw(st.sampled_from(self.walkers)).identities[:] + more
        key = "mtp/see" if needs_draft else None
        points = self.points()
        beginnings = [len(ids) for own, ids in points if key in (None, own) and ids == prompt[: len(ids)]]
        longest = max((n for n in beginnings if n < len(prompt)), default=None)
        assert found(self.cache, prompt, key) == longest
        if longest:
            hit = self.cache.find(np.array(prompt, np.int64), key)
            assert holds(hit.target, prompt[:longest]) and len(hit.drafts) == needs_draft
            if needs_draft:
                assert holds(hit.drafts[0], prompt[: longest - 1])
                assert hit.waiting[0].states.flatten().tolist() == [prompt[longest - 1]] * 2

    @rule(data=st.data())
    def erase(self, data):
        if self.walkers:
            walker = data.draw(st.sampled_from(self.walkers))
            self.cache.erase(np.array(walker.identities, np.int64), walker._key)
            self.newest = None

    def points(self):
        """(key, identities) of every checkpoint, read off the tree."""
        return [
            (key, [int(x) for one in node.path for x in one.point.identities])
            for key, root in self.cache._roots.items()
            for node in below(root)
        ]

    @invariant()
    def never_more_than_the_budget(self):
        nodes = [node for root in self.cache._roots.values() for node in below(root)]
        assert len(nodes) == len(self.cache) and set(nodes) == set(self.cache.nodes())
        sizes = [node.point.num_bytes for node in nodes]
        assert self.cache.bytes_held == sum(sizes) <= self.cache.budget

    @invariant()
    def the_newest_is_there(self):
        assert self.newest is None or self.newest[1] in [ids for _, ids in self.points()]


def below(node):
    return [found for child in node.children for found in (child, *below(child))]


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize("budget", (0, 1, 10_000))
def test_a_cleared_cache_holds_nothing(budget):
    cache = PrefixCache(budget)
    left(cache, [1, 2, 3])
    cache.clear()
    assert (len(cache), cache.bytes_held, found(cache, [1, 2, 3, 4])) == (0, 0, None)
