"""A forward over few rows as a plan: the list of kernel calls that it makes, recorded once for each number of rows and
repeated by native code in one call.

The family's own forward is what is recorded, on buffers that the plan keeps. What changes from step to step is in
those buffers (token ids, positions, target states) and in the table that says where each sequence's rows lie; nothing
else in a plan depends on values. A forward that computes something outside `ops` cannot be recorded, which is noticed
(`NotRecordable`), and is run as it is. Prompt chunks and image rows are always run as they are.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreglance.batch import TILE, Batch, Few, Holder
from foreglance.models.base import Caches
from foreglance.ops.base import Ops, PackedLinear
from foreglance.ops.native import Gathered, Lines, NativeLinear, NativeOps, Owned

log = logging.getLogger(__name__)
PART_CELLS = 4  # of `Few.table`, for each part
MOST_GATHERED = 4096  # tokens that a sequence's context adds to those that a head guesses from


@runtime_checkable
class Planned(Protocol):
    """A model whose forward may be recorded."""

    plans: Plans


@runtime_checkable
class Guessing(Protocol):
    """A draft head whose guesses may be recorded. It may guess from a part of the vocabulary: `guess_ids` int64 [m],
    ascending, are the tokens whose logits [n, m] `guess_logits` gives; None: all. `output` is then what gives the
    logits of any token from the same states."""

    plans: Plans
    guess_ids: Tensor | None
    output: PackedLinear | None

    def guess_logits(self, hidden: Tensor) -> Tensor: ...


Forward = Callable[[Batch, Caches], Tensor]
# What makes no new numbers: views, and buffers that kernels fill.
VIEWS = {
    "aten::empty", "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::alias",
    "aten::detach", "aten::expand", "aten::permute", "aten::select", "aten::slice", "aten::split",
    "aten::split_with_sizes", "aten::squeeze", "aten::t", "aten::transpose", "aten::unsqueeze", "aten::unbind",
    "aten::as_strided", "aten::narrow", "aten::unflatten",
}  # fmt: skip


class NotRecordable(Exception):
    """A forward computes something that is no call of a kernel."""


class _OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "aten::contiguous" and args[0].is_contiguous():
            return args[0]
        if name not in VIEWS:
            raise NotRecordable(name)
        return func(*args, **(kwargs or {}))


@dataclass
class Record:
    """Calls as they are made, and the buffers that they use."""

    calls: list[tuple[int, tuple[int | float, ...]]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)

    def add(self, kernel: int, args: tuple[int | float, ...]) -> None:
        self.calls.append((kernel, args))

    def keep(self, buffer: Tensor) -> None:
        self.buffers.append(buffer)


@contextmanager
def recording(record: Record, *used: NativeOps) -> Iterator[None]:
    """Calls of these operations go into `record`. Raises `NotRecordable` if anything else is computed."""
    try:
        for ops in used:
            ops.recorder = record
        with _OnlyViews():
            yield
    finally:
        for ops in used:
            ops.recorder = None


class Plan:
    """The calls for `batch.num_rows` few rows, and the buffers for what changes."""

    def __init__(self, batch: Batch):
        self.token_ids = torch.empty(batch.num_rows, dtype=torch.int64)
        self.positions = torch.empty(batch.positions.shape, dtype=torch.int64)
        self.hidden = None if batch.hidden is None else torch.empty(batch.hidden.shape)
        self.table = np.zeros(1 + PART_CELLS * batch.num_rows, np.int64)
        self.record = Record()
        self.output: Tensor | None = None
        self.lines = Lines([])
        self.ids, self.coords = self.token_ids.numpy(), self.positions.numpy()
        self.cells = memoryview(self.table)
        self._id_cells, self.axes = memoryview(self.ids), [memoryview(axis) for axis in self.coords]
        self.hidden_address = 0 if self.hidden is None else self.hidden.data_ptr()

    def place(self, tokens: Sequence[int], coordinate: int, holder: Holder, behind: int = 0) -> None:
        """Rows of one sequence behind those of `holder` and `behind` more, the first at `coordinate` on every axis;
        `tokens` are the inputs of the first of them."""
        ids, table = self._id_cells, self.cells
        for row, token in enumerate(tokens):
            ids[row] = token
        for axis in self.axes:
            for row in range(len(axis)):
                axis[row] = coordinate + row
        table[0], table[1], table[2], table[3], table[4] = 1, 0, len(ids), holder.rows + behind, holder.addresses

    def load(self, batch: Batch, caches: Caches) -> None:
        """Put a batch's own values into the buffers."""
        self.ids[:] = batch.token_ids.numpy()
        self.coords[:] = batch.positions.numpy()
        if self.hidden is not None:
            self.hidden.copy_(batch.hidden)
        table, at = self.table, 1
        table[0] = len(batch.parts)
        for part, start in zip(batch.parts, batch.starts, strict=True):
            holder, num_rows = caches[part.sequence], part.num_rows
            holder.make_room(num_rows)
            before = holder.rows + holder.provisional - num_rows
            table[at : at + PART_CELLS] = start, num_rows, before, holder.addresses
            at += PART_CELLS

    def load_rows(self, rows: Sequence[Owed]) -> list[int]:
        """Put rows of sequences into the buffers; -> the place of each one's last row."""
        ids, axes, table = self._id_cells, self.axes, self.cells
        table[0], place, part, to, lasts = len(rows), 0, 1, self.hidden_address, []
        for holder, tokens, coordinate, states, *_ in rows:
            table[part], table[part + 1] = place, len(tokens)
            table[part + 2], table[part + 3] = holder.rows, holder.addresses
            part += PART_CELLS
            for number, token in enumerate(tokens):
                ids[place] = token
                for axis in axes:
                    axis[place] = coordinate + number
                place += 1
            move_rows(states, to)
            to += 4 * states.shape[0] * states.shape[1]
            lasts.append(place - 1)
        return lasts

    def bound(self, batch: Batch, few: Few) -> Batch:
        """The batch on this plan's buffers."""
        return replace(
            batch,
            token_ids=self.token_ids,
            positions=self.positions,
            hidden=self.hidden,
            _few=[Few(few.parts, self.table)],
        )


@dataclass(frozen=True)
class Guess:
    """What guessing for a sequence begins with: where its rows lie, the position [axes] of its next row, the state
    [1, h] of its last one, what was guessed from that (None: nothing yet), how it picks, and tokens of its own."""

    holder: Holder
    position: np.ndarray
    hidden: Tensor
    token: int | None
    temperature: float
    seed: int
    index: int
    own: Gathered | None = None


class Owed(NamedTuple):
    """Rows of a sequence behind its prompt that a draft head lacks: where they will lie, their tokens, the coordinate
    of the first one on every axis, the states [rows, h] that they are fed; and how guesses from the last of them are
    picked, as in `Guess`."""

    holder: Holder
    tokens: Sequence[int]
    coordinate: int
    states: Tensor
    temperature: float
    seed: int
    index: int
    own: Gathered | None = None


def owned(head: Guessing, num_rows: int) -> Owned | None:
    """Room for what sequences add to the tokens that a head guesses from; None if it guesses from all."""
    if head.guess_ids is None or not isinstance(head.output, NativeLinear):
        return None
    return Owned(num_rows, head.output, MOST_GATHERED)


def record_guess(
    ops: NativeOps,
    head: Guessing,
    hidden: Tensor,
    token_ids: Tensor,
    picks: np.ndarray,
    cells: np.ndarray,
    own: Owned | None,
) -> Record:
    """Logits of rows [n, h] and their picks, as `NativeOps.pick_rows` makes them."""
    record = Record()
    with recording(record, ops):
        scores = head.guess_logits(hidden)
        ops.pick_rows(scores, token_ids, picks, cells, head.guess_ids)
        if own is not None and head.guess_ids is not None:
            ops.pick_own(scores, ops.linear_own(hidden, own), own, token_ids, picks, cells, head.guess_ids)
    return record


class ChainPlan:
    """A draft head's guesses: logits and picks of the last rows, and then its forward of one more row per sequence
    before logits and picks, as often as there are guesses to make."""

    def __init__(self, ops: NativeOps, plan: Plan, head: Guessing, deepest: int):
        assert plan.output is not None and plan.hidden is not None
        n = len(plan.token_ids)
        self._ops, self.plan = ops, plan
        self._picks = np.zeros((deepest, n), np.int64)
        self._cells = np.zeros(1 + 3 * n, np.int64)
        self._floats = self._cells.view(np.float64)
        self._pick_cells, self._temperatures = memoryview(self._cells), memoryview(self._floats)
        self._own, onward = owned(head, n), Record()
        self.states = torch.empty(plan.hidden.shape)  # where those are collected that `guess` begins with
        with recording(onward, ops):
            ops.copied(plan.output, plan.hidden)
            ops.advance(self._cells, Few((), plan.table), plan.positions)
        picking = record_guess(ops, head, plan.hidden, plan.token_ids, self._picks, self._cells, self._own)
        self._buffers = picking.buffers
        self._pick = Lines(picking.calls, "first guess", n)
        copied, advanced = onward.calls
        self._grow = Lines([*plan.record.calls, copied, *picking.calls, advanced], "one guess more", n)
        self.recorded = self._pick, self._grow

    def run(self, guesses: Sequence[Guess], depth: int) -> tuple[np.ndarray, Tensor]:
        """-> tokens int64 [depth, n], and the states [n, h] of the rows that the last ones were picked from. All
        guesses begin alike: with a token, or all without."""
        plan, cells, first = self.plan, self._cells, guesses[0].token is None
        assert plan.hidden is not None
        table, cells[0], plan.table[0] = plan.table, 0, len(guesses)
        for i, one in enumerate(guesses):
            plan.ids[i] = one.token or 0
            plan.coords[:, i] = one.position
            plan.hidden[i] = one.hidden[0]
            table[1 + 4 * i : 5 + 4 * i] = i, 1, one.holder.rows, one.holder.addresses
            self._floats[1 + 3 * i] = one.temperature
            cells[2 + 3 * i : 4 + 3 * i] = signed(one.seed), one.index
            if self._own is not None:
                self._own.set(i, one.own)
        if first:
            self._ops.run(self._pick)
            cells[0] = 1
        self._ops.run(self._grow, depth - first)
        return self._picks[:depth].copy(), plan.hidden.clone()

    def guess(self, rows: Sequence[Owed], depth: int) -> list[list[int]]:
        """-> `depth` guesses behind each of these rows, from the states that lie in the plan's buffer."""
        cells, temperatures, table, part, pick = self._pick_cells, self._temperatures, self.plan.cells, 1, 1
        cells[0], table[0] = 0, len(rows)
        for row, (holder, tokens, coordinate, _, temperature, seed, index, own) in enumerate(rows):
            count = len(tokens)
            for axis in self.plan.axes:
                axis[row] = coordinate + count
            table[part], table[part + 1] = row, 1
            table[part + 2], table[part + 3] = holder.rows + count, holder.addresses
            temperatures[pick], cells[pick + 1], cells[pick + 2] = temperature, signed(seed), index
            part += PART_CELLS
            pick += 3
            if self._own is not None:
                self._own.set(row, own)
        self._ops.run(self._pick)
        cells[0] = 1
        if depth > 1:
            self._ops.run(self._grow, depth - 1)
        return self._picks[:depth].T.tolist()


def signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


class CatchUpPlan:
    """Rows of a few sequences through a draft head, a tile of them at a time, and guesses from the last row of each.
    `tiles`: a plan for each tile, and how many sequences it takes."""

    def __init__(self, ops: NativeOps, tiles: Sequence[tuple[Plan, int]], chain: ChainPlan):
        self._ops, self._tiles, self._chain, self.axes = ops, tiles, chain, len(chain.plan.coords)

    def run(self, rows: Sequence[Owed], depth: int) -> list[list[int]]:
        """-> `depth` guesses of each. Nothing is committed."""
        chain, first = self._chain, 0
        to, size = chain.states.data_ptr(), 4 * chain.states.shape[1]
        for plan, count in self._tiles:
            assert plan.output is not None
            lasts = plan.load_rows(rows[first : first + count])
            self._ops.run(plan.lines)
            made = plan.output.data_ptr()
            for last in lasts:
                ctypes.memmove(to, made + size * last, size)
                to += size
            first += count
        ctypes.memmove(chain.plan.hidden_address, chain.states.data_ptr(), size * len(rows))
        return chain.guess(rows, depth)


@runtime_checkable
class ReadingAtOnce(Protocol):
    """A draft model without a cache, whose guesses may be recorded."""

    def plan(self, num_rows: int, axes: int, holder: Holder) -> ReaderPlan | None: ...

    def forward_few(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, few: Few) -> Tensor: ...

    def logits(self, state: Tensor) -> Tensor: ...

    def chained(self, state: Tensor) -> Tensor: ...


class Reading(NamedTuple):
    """What a sequence's guesses begin with: its target's cache, of which all rows are seen; the token behind those, at
    `coordinate` on every axis; the target's states [rows, h], of which the last is fed; how it picks, and the number of
    the first guess."""

    holder: Holder
    token: int
    coordinate: int
    states: Tensor
    temperature: float
    seed: int
    index: int


class ReaderPlan:
    """Guesses for `num_rows` sequences by a model that reads its target's cache: forward, logits, pick, and on to the
    next, which has the same position and sees the same rows. Raises `NotRecordable`.

    `used`: all operations that it uses; `width` that of the target's states; `holder`: any cache to record on.
    """

    def __init__(
        self,
        used: Sequence[NativeOps],
        model: ReadingAtOnce,
        num_rows: int,
        axes: int,
        width: int,
        deepest: int,
        holder: Holder,
    ):
        self._ops, self._width = used[0], width
        ids, positions = np.zeros(num_rows, np.int64), np.zeros((axes, num_rows), np.int64)
        picks, cells = np.zeros((deepest, num_rows), np.int64), np.zeros(1 + 3 * num_rows, np.int64)
        table, still = np.zeros(1 + PART_CELLS * num_rows, np.int64), torch.empty(axes, 0, dtype=torch.int64)
        hidden, self._nothing = torch.zeros(num_rows, width), np.zeros(1, np.int64)
        table[0], table[1::PART_CELLS], table[2::PART_CELLS] = num_rows, np.arange(num_rows), 1
        table[3::PART_CELLS], table[4::PART_CELLS] = holder.rows - 1, holder.addresses
        self._hidden, self._record = hidden.data_ptr(), Record()
        self._ids, self._positions = memoryview(ids), [memoryview(axis) for axis in positions]
        self._table, self._picks = memoryview(table), picks
        self._cells, self._temperatures = memoryview(cells), memoryview(cells.view(np.float64))
        tokens, places = torch.from_numpy(ids), torch.from_numpy(positions)
        with recording(self._record, *used):
            state = model.forward_few(tokens, hidden, places, Few((), table))
            scores = model.logits(state)
            self._ops.pick_rows(scores, tokens, picks, cells)
            self._ops.copied(model.chained(state), hidden)
            self._ops.advance(cells, Few((), self._nothing), still)
        self._record.buffers += tokens, places, hidden
        self._kept = table, cells
        self._lines = Lines(self._record.calls, "one guess", num_rows)

    def run(self, sequences: Sequence[Reading], depth: int) -> list[list[int]]:
        """-> guesses down to `depth` of each."""
        table, cells, temperatures = self._table, self._cells, self._temperatures
        cells[0] = 0
        for row, (holder, token, coordinate, states, temperature, seed, index) in enumerate(sequences):
            self._ids[row] = token
            for axis in self._positions:
                axis[row] = coordinate
            move_row(states, self._hidden + 4 * self._width * row)
            # a row of its own counts as seen (`attend_rows`), so the last one that is there stands in for it
            table[PART_CELLS * row + 3], table[PART_CELLS * row + 4] = holder.rows - 1, holder.addresses
            temperatures[3 * row + 1] = temperature
            cells[3 * row + 2], cells[3 * row + 3] = signed(seed), index
        self._ops.run(self._lines, depth)
        return self._picks[:depth].T.tolist()


def move_row(states: Tensor, address: int) -> None:
    """The last of float32 rows [rows, h] to where a plan keeps one."""
    rows = states.contiguous()
    size = 4 * rows.shape[1]
    ctypes.memmove(address, rows.data_ptr() + (rows.shape[0] - 1) * size, size)


def move_rows(states: Tensor, address: int) -> None:
    """float32 rows [rows, h] to where a plan keeps them."""
    ctypes.memmove(address, states.contiguous().data_ptr(), 4 * states.shape[0] * states.shape[1])


def tiled(counts: Sequence[int]) -> list[slice]:
    """Runs of sequences whose rows together fit a tile, each as long as it can be."""
    if sum(counts) <= TILE:
        return [slice(0, len(counts))]
    runs, start, total = [], 0, 0
    for at, count in enumerate(counts):
        if total and total + count > TILE:
            runs.append(slice(start, at))
            start, total = at, 0
        total += count
    return [*runs, slice(start, len(counts))]


class Plans:
    """A family's forward, recorded where that can be done. `read_as`: tokens that it takes for others; who calls it has
    put those in their place."""

    def __init__(self, ops: Ops, forward: Forward, read_as: Mapping[int, int] | None = None):
        self.read_as = read_as or {}
        self.ops = ops if isinstance(ops, NativeOps) else None
        self._forward = forward
        self._plans: dict[int, Plan] = {}
        self._chains: dict[int, ChainPlan | None] = {}
        self._met: set[int] = set()
        self.refused: str | None = None  # what the forward computes that no kernel does

    def __call__(self, batch: Batch, caches: Caches) -> Tensor:
        num_rows = batch.num_rows
        if (
            self.ops is None
            or self.refused is not None
            or num_rows > TILE
            or batch.num_few != num_rows
            or batch.image_rows is not None
        ):
            return self._forward(batch, caches)
        plan = self._plans.get(num_rows)
        if plan is None:
            if num_rows in self._met:
                return self._recorded(self.ops, batch, caches)
            self._met.add(num_rows)  # run once as it is, so that what kernels make of weights is there
            return self._forward(batch, caches)
        plan.load(batch, caches)
        self.ops.run(plan.lines)
        for part in batch.parts:
            caches[part.sequence].filled(part.num_rows)
        assert plan.output is not None
        return plan.output.clone()

    def plan(self, num_rows: int) -> Plan | None:
        """None while the forward of so many rows is not recorded."""
        return self._plans.get(num_rows)

    def recorded(self) -> Iterator[Lines]:
        """All recorded calls: of forwards, and of guesses with them."""
        yield from (plan.lines for plan in self._plans.values())
        yield from (lines for chain in self._chains.values() if chain is not None for lines in chain.recorded)

    def catch_up(self, counts: Sequence[int], head: Guessing, deepest: int) -> CatchUpPlan | None:
        """The plan of so many rows of each sequence and guesses from the last; None as long as a part of it is not
        recorded."""
        chain, tiles = self.chain(len(counts), head, deepest), []
        if chain is None or self.ops is None:
            return None
        for part in tiled(counts):
            plan = self._plans.get(sum(counts[part]))
            if plan is None:
                return None
            tiles.append((plan, part.stop - part.start))
        return CatchUpPlan(self.ops, tiles, chain)

    def chain(self, num_rows: int, head: Guessing, deepest: int) -> ChainPlan | None:
        """The plan of guesses for `num_rows` sequences; None while their forward is not recorded, or if logits cannot
        be."""
        plan = self._plans.get(num_rows)
        if plan is None or self.ops is None:
            return None
        if num_rows not in self._chains:
            try:
                self._chains[num_rows] = ChainPlan(self.ops, plan, head, deepest)
            except NotRecordable as error:
                log.info("guesses are not recorded: logits compute %s outside the kernels", error)
                self._chains[num_rows] = None
        return self._chains[num_rows]

    def _recorded(self, ops: NativeOps, batch: Batch, caches: Caches) -> Tensor:
        plan, few = Plan(batch), batch.few(caches)
        plan.load(batch, caches)
        try:
            with recording(plan.record, ops):
                plan.output = self._forward(plan.bound(batch, few), caches)
        except NotRecordable as error:
            self.refused = str(error)
            log.info("a forward is not recorded: it computes %s outside the kernels", error)
            return self._forward(batch, caches)
        plan.lines = Lines(plan.record.calls, "forward", batch.num_rows)
        self._plans[batch.num_rows] = plan
        return plan.output.clone()
