"""What earlier requests leave in main memory, and which of it a new request can begin with.

Owns a tree of rows, the choice among them, and a budget in bytes; not the tensors' meaning. A node is a checkpoint: the
rows since the one before, of the target and of the draft alike, and what it takes to go on behind them. Conversations
with a common beginning share its nodes:

    root -- [0, 256) -- [256, 290) an image ends -+- [290, 311) -- answer
                                                  +- [290, 340) -- answer -- next turn

A draft's rows depend on who drafts and on what it gets for an image, so each such `key` has a tree of its own; a
request that needs no draft memory can begin with the rows of any. Least recently used leaves go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from torch import Tensor

from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import LayerSpec, Segment, SequenceCache, merge

NO_DRAFT = ""  # the key of drafters without a memory
MAX_POINTS = 8  # checkpoints of one conversation, where each holds recurrent states

Kind = Literal["prompt", "turn", "chunk"]
RANK = {"prompt": 0, "turn": 1, "chunk": 2}


@dataclass(frozen=True)
class Border:
    """Where a checkpoint lies.

    kind  "chunk": at the end of a prompt chunk, so that any prompt goes on there as it would have; "prompt": before a
          prompt's last row, where another prompt would not end a chunk, so it serves the same prompt alone; "turn": at
          the end of an answer
    cold  the rows before it were computed as a cold run would, none of them as somebody's answer
    """

    kind: Kind
    cold: bool

    def serves(self, other: Border) -> bool:
        """Whether a checkpoint here makes one at `other`, of the same rows, superfluous."""
        return RANK[self.kind] >= RANK[other.kind] and (self.cold or not other.cold)


@dataclass(frozen=True)
class Waiting:
    """Target states [n, hidden] of rows from `first` on that a draft was given and has not read yet."""

    first: int
    states: Tensor

    @property
    def num_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()


@dataclass(frozen=True)
class Memory:
    """A drafter's state of one running sequence, the twin of the target's cache. Nothing here is copied.

    `caches` are its own rows, one for each of its stores, and `waiting` what waits for them. `inputs_from` is the first
    target row whose input it has yet to read; None: it reads none.
    """

    key: str = NO_DRAFT
    caches: tuple[SequenceCache, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    inputs_from: int | None = None


@dataclass(frozen=True)
class Point:
    """A checkpoint with the rows since the one before: `identities` [n], and `tracks` of the target and of each draft
    store. `waiting` and `inputs_from` are as in `Memory`."""

    identities: np.ndarray
    border: Border
    tracks: tuple[Segment, ...]
    waiting: tuple[Waiting, ...] = ()
    inputs_from: int | None = None

    @property
    def rows(self) -> int:
        return self.tracks[0].stop if self.tracks else 0

    @property
    def draft_rows(self) -> int:
        return self.tracks[1].stop if len(self.tracks) > 1 else 0

    @property
    def num_bytes(self) -> int:
        return self.identities.nbytes + sum(part.num_bytes for part in (*self.waiting, *self.tracks))


@dataclass(eq=False)
class Node:
    """A point in the tree; a root's has no rows."""

    point: Point
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.point.rows

    @property
    def path(self) -> list[Node]:
        """From the first rows on, without the root."""
        node, nodes = self, []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def stops(self, num_tracks: int) -> list[int]:
        """Row counts by track."""
        return [track.stop for track in self.point.tracks] or [0] * num_tracks

    @classmethod
    def root(cls) -> Node:
        return cls(Point(np.empty(0, np.int64), Border("chunk", True), ()))


@dataclass(frozen=True)
class Hit:
    """Stored rows that a request begins with: segments from row 0 on of the target and of each draft store. `borders`
    are the row counts of the checkpoints on the way; the rest is as in `Memory` and `Border`."""

    rows: int
    target: tuple[Segment, ...]
    drafts: tuple[tuple[Segment, ...], ...]
    waiting: tuple[Waiting, ...]
    inputs_from: int | None
    borders: tuple[int, ...]
    cold: bool


class PrefixCache:
    """The trees, within `budget` bytes of tensors; 0 keeps nothing."""

    def __init__(self, budget: int):
        self.budget = budget
        self.bytes_held = 0
        self._roots: dict[str, Node] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()  # least recently used first, a node before its parent

    def __len__(self) -> int:
        """Number of checkpoints."""
        return len(self._order)

    def nodes(self) -> Iterator[Node]:
        """The checkpoints, the least recently used first."""
        return iter(self._order)

    def find(self, identities: np.ndarray, key: str | None) -> Hit | None:
        """The longest stored beginning of a prompt of these rows; at least its last one is left to compute, since its
        hidden state is needed. `key` is that of the draft memory that is needed; None: none is."""
        roots = list(self._roots.values()) if key is None else [self._roots[key]] if key in self._roots else []
        found = [
            node
            for root in roots
            for node in _along(root, identities[:-1])
            if node.point.border.kind != "prompt" or node.rows == len(identities) - 1
        ]
        if not found:
            return None
        best = max(found, key=lambda node: (node.rows, node.point.border.cold))
        self._touch(best)
        return _hit([node.point for node in best.path], with_draft=key is not None)

    def path(self, identities: np.ndarray, key: str) -> tuple[str, list[Point]]:
        """The checkpoints of a conversation, from the first on, as far as they are still here, and the key of the tree
        that they are in: one without draft memory may have found its rows in any."""
        key, node = self._deepest(identities, key)
        return key, [node.point for node in node.path]

    def put(
        self, identities: np.ndarray, target: SequenceCache, memory: Memory, border: Border, passed: Collection[int]
    ) -> bool:
        """Keep what a sequence has computed so far, unless it is here already; -> whether the budget allows it.

        `identities` are those of all its rows. `passed` are the row counts of its own checkpoints: rows up to one of
        them are shared with others that passed it too.
        """
        if not self.budget:
            return False
        if memory.key == NO_DRAFT and self._use(identities, border):
            return True
        caches = target, *memory.caches
        parent = self._parent(identities, memory.key, border, {*passed, target.rows}, caches)
        self._touch(parent)
        if parent.rows == target.rows:
            if RANK[border.kind] > RANK[parent.point.border.kind]:
                parent.point = replace(parent.point, border=Border(border.kind, parent.point.border.cold))
            return True
        specs = [[layer.spec for layer in cache.layers] for cache in caches]
        states = sum(one.num_bytes for one in memory.waiting)

        def size(node: Node) -> int:
            pairs = zip(caches, node.stops(len(caches)), strict=True)
            return identities[node.rows :].nbytes + states + sum(cache.cut_bytes(start) for cache, start in pairs)

        parent = self._shorten(parent, size, specs)
        if not self._make_room(size(parent), parent):
            return False
        waiting = tuple(Waiting(one.first, one.states.to("cpu", copy=True)) for one in memory.waiting)
        tracks = tuple(cache.cut(start) for cache, start in zip(caches, parent.stops(len(caches)), strict=True))
        point = Point(identities[parent.rows :].copy(), border, tracks, waiting, memory.inputs_from)
        self._thin(self._add(parent, point), specs)
        return True

    def restore(self, points: Many[Point], key: str) -> bool:
        """Put a conversation back that `path` gave; -> whether the budget allows it. If not, nothing changes."""
        if sum(point.num_bytes for point in points) > self.budget:
            return False
        node = self._roots.setdefault(key, Node.root())
        for point in points:
            known = next((child for child in node.children if _same(child.point, point)), None)
            if known is None:
                self._make_room(point.num_bytes, node)
                known = self._add(node, point)
            node = known
            self._touch(node)
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._order.clear()
        self.bytes_held = 0

    def erase(self, identities: np.ndarray, key: str) -> int:
        """Forget the checkpoints of a conversation that no other one shares; -> how many rows."""
        gone = 0
        for node in reversed(self._deepest(identities, key)[1].path):
            if node.children:
                break
            gone += len(node.point.identities)
            self._drop(node)
        return gone

    def _deepest(self, identities: np.ndarray, key: str) -> tuple[str, Node]:
        keys = [one for one in self._roots if key in (NO_DRAFT, one)]
        found = ((one, node) for one in keys for node in _along(self._roots[one], identities))
        return max(found, key=lambda pair: pair[1].rows, default=(key, Node.root()))

    def _parent(
        self, identities: np.ndarray, key: str, border: Border, passed: Collection[int], caches: Many[SequenceCache]
    ) -> Node:
        """The deepest node whose rows, and those of all nodes above it, are just what the sequence computed itself."""

        def shared(node: Node) -> bool:
            pairs = zip(node.point.tracks, caches, strict=True)
            fits = all(track.stop <= cache.rows for track, cache in pairs)
            return node.rows in passed and fits and (node.point.border.cold or not border.cold)

        root = self._roots.setdefault(key, Node.root())
        return max(_along(root, identities, shared), key=lambda node: node.rows, default=root)

    def _use(self, identities: np.ndarray, border: Border) -> bool:
        """Whether some tree has this checkpoint; if so, it has been used."""
        for root in self._roots.values():
            for node in _along(root, identities):
                if node.rows == len(identities) and node.point.border.serves(border):
                    self._touch(node)
                    return True
        return False

    def _touch(self, node: Node) -> None:
        for one in reversed(node.path):
            self._order[one] = None
            self._order.move_to_end(one)

    def _make_room(self, size: int, parent: Node) -> bool:
        """Drop leaves until `size` more bytes fit; what leads to `parent` stays. If they cannot fit, drop nothing."""
        if size + sum(node.point.num_bytes for node in parent.path) > self.budget:
            return False
        self._touch(parent)
        while self.bytes_held + size > self.budget:
            self._drop(next(iter(self._order)))
        return True

    def _add(self, parent: Node, point: Point) -> Node:
        node = Node(point, parent)
        parent.children.append(node)
        self.bytes_held += point.num_bytes
        self._touch(node)
        return node

    def _drop(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        node.parent.children.remove(node)
        del self._order[node]
        self.bytes_held -= node.point.num_bytes

    def _thin(self, newest: Node, specs: Many[Many[LayerSpec]]) -> None:
        """Where checkpoints are dear, keep few of a conversation's own, the closer together the later they are."""
        if not any(isinstance(spec, RecurrentSpec) for track in specs for spec in track):
            return
        while len(own := [node for node in newest.path if len(node.children) < 2]) > MAX_POINTS:
            self._merge(_least(own, newest.rows), specs)

    def _shorten(self, parent: Node, size: Callable[[Node], int], specs: Many[Many[LayerSpec]]) -> Node:
        """Where a conversation with all its checkpoints is more than the budget, and with fewer is not, keep fewer;
        -> where it goes on from. `size` is what is to be added behind a node."""
        if size(Node.root()) > self.budget:
            return parent
        while size(parent) + sum(node.point.num_bytes for node in parent.path) > self.budget:
            if own := [node for node in parent.path if len(node.children) == 1]:
                self._merge(_least(own, parent.rows + 1), specs)
            elif parent.parent is None or parent.children:
                break
            else:
                before, parent = parent, parent.parent
                self._drop(before)
        return parent

    def _merge(self, node: Node, specs: Many[Many[LayerSpec]]) -> None:
        """Let a node's only child take over its rows: one checkpoint less, and no row."""
        (child,), parent = node.children, node.parent
        assert parent is not None
        self.bytes_held -= node.point.num_bytes + child.point.num_bytes
        pairs = zip(node.point.tracks, child.point.tracks, specs, strict=True)
        tracks = tuple(merge(*three) for three in pairs)
        identities = np.concatenate([node.point.identities, child.point.identities])
        child.point = replace(child.point, identities=identities, tracks=tracks)
        child.parent = parent
        del self._order[node]
        parent.children[parent.children.index(node)] = child
        self.bytes_held += child.point.num_bytes


def _least(nodes: Many[Node], end: int) -> Node:
    """Of nodes with one child, the one whose loss leaves the smallest gap, as seen from row `end`."""

    def loss(node: Node) -> float:
        assert node.parent is not None
        return (node.children[0].rows - node.parent.rows) / (end - node.rows)

    return min((node for node in nodes if node.children), key=loss)


def _along(root: Node, identities: np.ndarray, may: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Nodes below a root whose rows are the first ones of `identities`; with `may`, no further than it allows."""
    below = [root]
    while below:
        node = below.pop()
        for child in node.children:
            mine = child.point.identities
            theirs = identities[node.rows : node.rows + len(mine)]
            if len(theirs) == len(mine) and theirs[-1] == mine[-1] and np.array_equal(theirs, mine) and may(child):
                below.append(child)
                yield child


def _same(one: Point, other: Point) -> bool:
    stops = [[track.stop for track in point.tracks] for point in (one, other)]
    return one.border == other.border and stops[0] == stops[1] and np.array_equal(one.identities, other.identities)


def _hit(points: Many[Point], with_draft: bool) -> Hit:
    last = points[-1]
    target, *drafts = zip(*(point.tracks for point in points), strict=True)
    return Hit(
        last.rows,
        target,
        tuple(drafts) if with_draft else (),
        last.waiting if with_draft else (),
        last.inputs_from if with_draft else None,
        tuple(point.rows for point in points),
        last.border.cold,
    )
