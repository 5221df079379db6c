"""Assigns boxes to their holders so that the busiest rank's load is low: block by block, or all together.

Block by block, a change in one block leaves the choice in the others alone.

A block is what one instance receives of one layer. The load that other blocks put on each trainer rank is *expected*,
by sharing out the bytes of each pool of ranks. No expert placement changes that. Each block is then assigned by itself,
beside the load that is expected of the others.

The sum over the blocks comes near the best possible wherever a placement asks for about the same of every expert. The
planner looks at the sum, and assigns all blocks together where it does not: then `waterfill` says how low the load can
be, whole boxes are assigned, and boxes are cut where whole ones are too large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges, volumes
from weightcast.transfer.boxes.slices import between_slices, boxes_of_runs
from weightcast.transfer.planner.waterfill import Pools, Wave, level, water_fill, waves

__all__ = ["Assigned", "assign", "assign_blocks", "assign_boxes", "fill", "turns"]

_EXACT_SIZES = 64
"""Up to so many distinct weights of one pool in a block are assigned one by one; more are joined by powers of two."""
_ENOUGH = 1.03
"""Boxes are cut when whole ones leave the busiest rank more than so many times the best possible."""


def turns(blocks: IntArray, layers: int) -> IntArray:
    """(blocks,) numbers that say with which member of a pool each block `instance * layers + layer` begins.

    Each layer of an instance has another number, and so has the same layer of the next instance.
    """
    return np.asarray(blocks % layers + blocks // layers)


def assign_blocks(
    pools: Pools, pool: IntArray, weight: IntArray, block: IntArray, others: FloatArray, number: IntArray
) -> IntArray:
    """Chooses a member of its pool for each item: its index in the pool (n,). Blocks do not look at one another.

    `pool`, `weight` (bytes, > 0) and `block` are (n,). `others` (blocks, world) is the load that the ranks have from
    elsewhere; `number` (blocks,) is from `turns`. Within a block pools are served in their order, heavy items first.
    Items of one weight are assigned in contiguous runs, in their given order, such that the loads of the members rise
    to one level. The block's number says which member is the first. So what does not come out even goes to another
    member in each block.
    """
    choice = np.zeros(pool.shape[0], dtype=np.int64)
    blocks, world = others.shape
    has_choice = np.diff(pools.start)[pool] > 1
    lone_items = np.flatnonzero(~has_choice)
    rank = pools.rank[pools.start[pool[lone_items]]]
    fixed_load = np.bincount(block[lone_items] * world + rank, weights=weight[lone_items], minlength=blocks * world)
    load = others.ravel() + fixed_load
    items = np.flatnonzero(has_choice)
    if not items.size:
        return choice
    batches = _Batches(pools, pool[items], weight[items], block[items])
    for turn in range(len(batches)):
        rows, group = batches.take(turn)
        vessels = _Vessels(pools, batches.pool[group], batches.block[group] * world, number[batches.block[group]])
        member = vessels.assign(load, weight[items[rows]], batches.group[rows] - group[0])
        choice[items[rows]] = member
    return choice


class _Batches:
    """Groups of items by turn: items of one block, pool and weight class are a group.

    Groups that share no rank in a block have one turn. `pool` and `block` are those of each group, ordered by turn;
    `group` is that of each item.
    """

    def __init__(self, pools: Pools, pool: IntArray, weight: IntArray, block: IntArray) -> None:
        key = block * len(pools) + pool
        order, begins = lex_sort([key, _lightness(key, weight)])
        heads = order[begins]
        number = np.arange(heads.shape[0], dtype=np.int64)
        key_starts = np.append(True, key[heads[1:]] != key[heads[:-1]])
        ordinal = number - np.maximum.accumulate(np.where(key_starts, number, 0))
        turn = _waves(pools)[pool[heads]] * (int(ordinal.max()) + 1) + ordinal
        by_turn, begins_turn = lex_sort([turn])
        heads = heads[by_turn]
        self.pool, self.block = pool[heads], block[heads]
        position = np.empty_like(by_turn)
        position[by_turn] = number
        self.group = np.empty_like(order)
        self.group[order] = position[np.cumsum(begins) - 1]
        self._rows, _ = lex_sort([self.group])
        self._first = np.append(np.flatnonzero(begins_turn), heads.shape[0])
        self._first_row = np.searchsorted(self.group[self._rows], self._first)

    def __len__(self) -> int:
        return int(self._first.shape[0]) - 1

    def take(self, turn: int) -> tuple[IntArray, IntArray]:
        """The items of a turn, ordered by group, and its groups."""
        rows = self._rows[self._first_row[turn] : self._first_row[turn + 1]]
        return rows, np.arange(self._first[turn], self._first[turn + 1])


class _Vessels:
    """The members of some pools, one pool a row. A row starts at member `first` and is padded; `real` masks members."""

    def __init__(self, pools: Pools, pool: IntArray, base: IntArray, first: IntArray) -> None:
        count = np.diff(pools.start)[pool][:, None]
        column = np.arange(int(count.max()), dtype=np.int64)
        self.real = column < count
        self.member = (column + first[:, None]) % count
        self.place = base[:, None] + pools.rank[pools.start[pool][:, None] + self.member]

    def assign(self, load: FloatArray, weight: IntArray, group: IntArray) -> IntArray:
        """The member for each item; items come ordered by group. Adds what they weigh to `load`."""
        groups, width = self.place.shape
        budget = np.bincount(group, weights=weight, minlength=groups).astype(np.int64)
        room = fill(budget.astype(np.float64), np.where(self.real, load[self.place], np.inf))
        # Twice the bytes, as whole numbers, so that the middle of an item is exact whatever is assigned beside it.
        edge = np.minimum(np.floor(2 * np.cumsum(room, axis=1)).astype(np.int64), 2 * budget[:, None])
        last = width - 1 - (room[:, ::-1] > 0).argmax(axis=1)
        edge = np.where(np.arange(width) >= last[:, None], 2 * budget[:, None], edge)
        base = 2 * (np.cumsum(budget + 1) - (budget + 1))
        end = np.cumsum(weight)
        middle = 2 * (end - (np.cumsum(budget) - budget)[group]) - weight
        vessel = np.searchsorted((base[:, None] + edge).ravel(), base[group] + middle)
        vessel_bytes = np.bincount(vessel, weights=weight, minlength=groups * width)
        load[self.place[self.real]] += vessel_bytes[self.real.ravel()]
        return np.asarray(self.member.ravel()[vessel])


def fill(budget: FloatArray, load: FloatArray) -> FloatArray:
    """Water-filling: (groups, k) amounts that vessels take of their group's budget so that loads rise to one level.

    Each row is worked out by itself, to the last bit.
    """
    low = np.sort(load, axis=1)
    levels = (budget[:, None] + np.cumsum(low, axis=1)) / np.arange(1, load.shape[1] + 1)
    last = load.shape[1] - 1 - (levels > low)[:, ::-1].argmax(axis=1)
    level = levels[np.arange(load.shape[0]), last]
    amounts: FloatArray = np.maximum(level[:, None] - load, 0.0)
    return amounts


def assign(pools: Pools, pool: IntArray, weight: IntArray, world: int, fixed: FloatArray | None = None) -> IntArray:
    """Chooses a member of its pool for each item: its index in the pool (n,). Deterministic.

    `pool` (n,) is each item's pool, `weight` (n,) its bytes, > 0; `fixed` (world,) is what ranks have anyway. Within a
    pool heavy items come first. Items of one weight are assigned in contiguous runs, in their given order. Loads rise
    to the level that is best for all pools together. So neighbours get one source, and equal boxes of
    different instances, which are far apart, get different ones.
    """
    return _Assigner(pools, pool, weight, world, fixed).whole()


@dataclass(frozen=True, slots=True)
class Assigned:
    """Boxes with a source each, in the order of the items that they are, or are parts of.

    `item` (m,), `choice` (m,) the index in the item's pool, `offset` and `size` (m, D).
    """

    item: IntArray
    choice: IntArray
    offset: IntArray
    size: IntArray


def assign_boxes(
    pools: Pools, pool: IntArray, boxes: tuple[IntArray, IntArray], itemsize: IntArray, world: int
) -> Assigned:
    """Assigns boxes like `assign`, and cuts them between members where that leaves some rank much more than its share.

    `boxes` are offset and size (n, D), `itemsize` (n,) the bytes of an element.
    """
    offset, size = boxes
    dealer = _Assigner(pools, pool, volumes(size) * itemsize, world, None)
    choice = dealer.whole()
    whole_boxes = Assigned(np.arange(pool.shape[0], dtype=np.int64), choice, offset, size)
    if dealer.busiest(whole_boxes.item, choice, dealer.weight) <= _ENOUGH * dealer.bound:
        return whole_boxes
    item, choice, start, end = dealer.cut(size, itemsize)
    run, inner_offset, part_size = boxes_of_runs(np.take(size, item, axis=0), start, end)
    item, choice = item[run], choice[run]
    cut_boxes = Assigned(item, choice, np.take(offset, item, axis=0) + inner_offset, part_size)
    cut_load = dealer.busiest(item, choice, volumes(part_size) * itemsize[item])
    return cut_boxes if cut_load < dealer.busiest(whole_boxes.item, whole_boxes.choice, dealer.weight) else whole_boxes


class _Assigner:
    """Items to assign, and the level to which they raise loads."""

    def __init__(self, pools: Pools, pool: IntArray, weight: IntArray, world: int, fixed: FloatArray | None) -> None:
        self.pools, self.pool, self.weight, self.world = pools, pool, weight.astype(np.float64), world
        self._fixed = np.zeros(world) if fixed is None else fixed
        self._total: FloatArray = np.bincount(pool, weights=self.weight, minlength=len(pools)).astype(np.float64)
        self._share, self.bound = level(pools, self._total, world, self._fixed)

    def busiest(self, item: IntArray, choice: IntArray, weight: npt.NDArray[np.generic]) -> float:
        """The largest load when parts of items go to these members."""
        rank = self.pools.rank[self.pools.start[self.pool[item]] + choice]
        return float((self._fixed + np.bincount(rank, weights=weight, minlength=self.world)).max(initial=0.0))

    def whole(self) -> IntArray:
        """(n,) the member that sends each item whole."""
        pools, choice = self.pools, np.zeros(self.pool.shape[0], dtype=np.int64)
        order = list(waves(pools, self._total > 0))
        if not order:
            return choice
        # A rank's load at the end, if all that is not assigned yet goes as shared out.
        load = self._fixed + np.bincount(pools.rank, weights=self._share, minlength=self.world)
        batches = _WaveBatches(pools, order, self.pool, self.weight)
        for wave, turns in zip(order, batches.turns, strict=True):
            for turn in range(turns):
                places, items, start, weight = batches.take(turn, wave)
                sub = _some(wave, places)
                ranks = pools.rank[sub.edge]
                part = weight / self._total[sub.pool]
                count = np.diff(sub.start)
                # The rest of the pool's bytes stay shared out. This batch is assigned anew, to mend earlier roundings.
                load[ranks] -= self._share[sub.edge] * np.repeat(part, count)
                room = water_fill(weight, sub.start, load[ranks])
                vessel = _runs(self.weight[items], start, room, sub.start)
                choice[items] = vessel - np.repeat(sub.start[:-1], np.diff(start))
                load[ranks] += np.bincount(vessel, weights=self.weight[items], minlength=ranks.shape[0])
        return choice

    def cut(self, size: IntArray, itemsize: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Assigns each pool's items in their order in exact shares. Returns parts, ordered by item and run.

        A part is an item, a member, and the begin and end of a run of the item's box in row-major order.
        """
        pools = self.pools
        order, _ = lex_sort([self.pool])
        weight = self.weight[order]
        first = pools.start[self.pool[order]]
        last = pools.start[self.pool[order] + 1] - 1
        # Shares of a pool add up to its items, so one running sum places items and shares of all pools alike. Sums are
        # taken per pool, because rounding would carry a large pool's error into a small one.
        end = _running(weight, self.pool[order], self._total)
        start = end - weight
        edge_pool = np.repeat(np.arange(len(pools), dtype=np.int64), np.diff(pools.start))
        edge_end = _running(self._share, edge_pool, self._total)
        # A cut may be so far from its exact place. For each of its pools a rank then has up to twice that too much.
        crowd = np.bincount(pools.rank, weights=self._share > 0, minlength=self.world).max()
        tolerance = 0.02 * self.bound / max(crowd, 1.0)
        low = np.clip(np.searchsorted(edge_end, start + np.minimum(tolerance, weight / 2), side="left"), first, last)
        high = np.clip(np.searchsorted(edge_end, end - np.minimum(tolerance, weight / 2), side="left"), low, last)
        middle = np.clip(np.searchsorted(edge_end, end - weight / 2, side="left"), first, last)
        low, high = np.where(weight > tolerance, low, middle), np.where(weight > tolerance, high, middle)
        parts = high - low + 1
        edge = ranges(low, parts)
        row = np.repeat(np.arange(order.shape[0], dtype=np.int64), parts)
        item = order[row]
        run_end = volumes(size)[item]
        inner_parts = np.flatnonzero(edge < high[row])
        inner_item = item[inner_parts]
        cut_point = (edge_end[edge[inner_parts]] - start[row[inner_parts]]) / itemsize[inner_item]
        cuts = between_slices(cut_point, np.take(size, inner_item, axis=0), tolerance / itemsize[inner_item])
        run_end[inner_parts] = np.clip(cuts, 0, run_end[inner_parts])
        run_start = np.where(edge == low[row], 0, np.append(0, run_end[:-1]))
        rows = np.flatnonzero(run_end > run_start)
        row_order, _ = lex_sort([item[rows], edge[rows]])
        rows = rows[row_order]
        return item[rows], edge[rows] - pools.start[self.pool[item[rows]]], run_start[rows], run_end[rows]


def _running(weight: FloatArray, group: IntArray, total: FloatArray) -> FloatArray:
    """Running sums in rows sorted by group, every group beginning at the sum of the totals before it."""
    sums = np.cumsum(weight)
    base = np.append(0.0, np.cumsum(total))[:-1]
    first = np.searchsorted(group, np.arange(total.shape[0]))
    start_sum = np.append(0.0, sums)[first]
    group_sums: FloatArray = sums - start_sum[group] + base[group]
    return group_sums


def _some(wave: Wave, some: IntArray) -> Wave:
    """The wave with only the pools at places `some`."""
    if some.shape[0] == wave.pool.shape[0]:
        return wave
    count = np.diff(wave.start)[some]
    return Wave(wave.pool[some], np.append(0, np.cumsum(count)), wave.edge[ranges(wave.start[:-1][some], count)])


def _runs(weight: FloatArray, start: IntArray, room: FloatArray, room_start: IntArray) -> IntArray:
    """Assigns groups of items in contiguous runs to rooms as large together as the group. Returns each item's room.

    Group i has items `start[i]..start[i + 1] - 1` and the rooms `room_start[i]..room_start[i + 1] - 1`.
    """
    group = np.repeat(np.arange(start.shape[0] - 1), np.diff(start))
    room_group = np.repeat(np.arange(start.shape[0] - 1), np.diff(room_start))
    total: FloatArray = np.add.reduceat(weight, start[:-1])
    ends = _running(room, room_group, total)
    # An item goes to the room in which its middle lies; rounding may put the last one past the end.
    room_of_item = np.searchsorted(ends, _running(weight, group, total) - weight / 2)
    usable_room = np.where(room > 0, np.arange(room.shape[0]), -1)
    return np.clip(room_of_item, room_start[:-1][group], np.maximum.reduceat(usable_room, room_start[:-1])[group])


class _WaveBatches:
    """Items by wave, weight class and pool: the order in which they are assigned."""

    def __init__(self, pools: Pools, order: list[Wave], pool: IntArray, weight: FloatArray) -> None:
        position = np.full(len(pools), -1, dtype=np.int64)
        pool_wave = np.zeros(len(pools), dtype=np.int64)
        for number, wave in enumerate(order):
            position[wave.pool] = np.arange(wave.pool.shape[0])
            pool_wave[wave.pool] = number
        items = np.flatnonzero(position[pool] >= 0)
        lightness = _lightness(pool[items], weight[items].astype(np.int64))
        rows, begins = lex_sort([pool[items], lightness])
        # The classes of a pool in turn: the first of each is turn 0.
        heads = np.flatnonzero(begins)
        head_pool = pool[items[rows[heads]]]
        first = np.searchsorted(head_pool, head_pool)
        head_turn = np.arange(heads.shape[0]) - first
        turn = np.empty(items.shape[0], dtype=np.int64)
        turn[rows] = head_turn[np.cumsum(begins) - 1]
        item_pool = pool[items]
        rows, begins = lex_sort([pool_wave[item_pool], turn, position[item_pool]])
        self._items, self._weight = items[rows], weight
        self._start = np.append(np.flatnonzero(begins), rows.shape[0])
        heads = rows[begins]
        self._place = position[item_pool[heads]]
        self._key = pool_wave[item_pool[heads]] * (int(turn.max(initial=0)) + 1) + turn[heads]
        self._stride = int(turn.max(initial=0)) + 1
        self._wave = {id(wave): number for number, wave in enumerate(order)}
        top = np.zeros(len(order), dtype=np.int64)
        np.maximum.at(top, pool_wave[item_pool], turn + 1)
        self.turns: list[int] = top.tolist()

    def take(self, turn: int, wave: Wave) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        """The pools of the wave (places in it) that have such a class, their items, and their bytes in this class.

        The items are ordered by pool; the third array says at which each pool's begin.
        """
        key = self._wave[id(wave)] * self._stride + turn
        first_head, end_head = np.searchsorted(self._key, [key, key + 1])
        bounds = self._start[first_head : end_head + 1]
        items = self._items[bounds[0] : bounds[-1]]
        start = bounds - bounds[0]
        return self._place[first_head:end_head], items, start, np.add.reduceat(self._weight[items], start[:-1])


def _lightness(key: IntArray, weight: IntArray) -> IntArray:
    """A number that falls as the weight rises: exact where a key has few distinct weights, else by powers of two."""
    order, begins = lex_sort([key, weight])
    heads = order[begins]
    weights_per_key = np.bincount(np.unique(key[heads], return_inverse=True)[1])
    if weights_per_key.max() <= _EXACT_SIZES:
        return -weight
    crowded_keys = np.unique(key[heads])[weights_per_key > _EXACT_SIZES]
    exponent = np.frexp(weight.astype(np.float64))[1].astype(np.int64)
    return np.where(np.isin(key, crowded_keys), -exponent, -weight)


def _waves(pools: Pools) -> IntArray:
    """(pools,) a turn for each pool with more than one member such that pools with a common rank keep their order."""
    wave = np.zeros(len(pools), dtype=np.int64)
    next_wave = np.zeros(int(pools.rank.max(initial=-1)) + 1, dtype=np.int64)
    for pool in np.flatnonzero(np.diff(pools.start) > 1).tolist():
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        wave[pool] = next_wave[ranks].max()
        next_wave[ranks] = wave[pool] + 1
    return wave
