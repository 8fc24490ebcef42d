"""Which finished conversation serves a new request."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreglance.cache.prefix import Point, PrefixCache, Stored, common_prefix
from foreglance.cache.store import Checkpoint

ids = st.lists(st.integers(0, 2), max_size=12)


def stored(identities, *rows, key="none"):
    points = tuple(Point(Checkpoint(n, None, ()), key, None) for n in rows)
    return Stored(np.array(identities, np.int64), None, points)


def found(cache, identities, key=None):
    hit = cache.find(np.array(identities, np.int64), key)
    return hit and hit.point.checkpoint.rows


@given(ids, ids)
def test_common_prefix_is_where_two_lists_first_differ(one, other):
    length = common_prefix(np.array(one, np.int64), np.array(other, np.int64))
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_the_longest_point_within_the_common_rows_is_taken():
    cache = PrefixCache(4)
    cache.put(stored([1, 2, 3, 4, 5, 6], 2, 4, 6))
    cache.put(stored([1, 2, 3, 9, 9, 9], 3, 6))
    assert found(cache, [1, 2, 3, 4, 5, 7, 7]) == 4
    assert found(cache, [1, 2, 3, 9, 5]) == 3
    assert found(cache, [1, 9, 9]) is None
    assert found(cache, [8]) is None


def test_at_least_the_last_row_is_left_to_compute():
    """Case B14: its hidden state is needed."""
    cache = PrefixCache(4)
    cache.put(stored([1, 2, 3, 4], 2, 4))
    assert found(cache, [1, 2, 3, 4]) == 2
    assert found(cache, [1, 2, 3, 4, 5]) == 4


def test_a_point_without_the_needed_draft_memory_does_not_serve():
    cache = PrefixCache(4)
    cache.put(stored([1, 2, 3], 2, key="mtp/see"))
    assert found(cache, [1, 2, 3, 4], "mtp/see") == 2
    assert found(cache, [1, 2, 3, 4], "mtp/skip") is None
    assert found(cache, [1, 2, 3, 4], None) == 2


def test_the_least_recently_used_goes_first():
    cache = PrefixCache(2)
    cache.put(stored([1, 1, 1], 2))
    cache.put(stored([2, 2, 2], 2))
    assert found(cache, [1, 1, 1]) == 2
    cache.put(stored([3, 3, 3], 2))
    assert [found(cache, [n] * 3) for n in (1, 2, 3)] == [2, None, 2]
    assert len(cache) == 2


def test_nothing_is_kept_without_slots_or_points():
    cache = PrefixCache(0)
    cache.put(stored([1, 2], 1))
    assert len(cache) == 0
    cache = PrefixCache(2)
    cache.put(stored([1, 2]))
    assert len(cache) == 0
