"""Assigns boxes to their holders so that the busiest rank's load is low.

`waterfill` says how low the load can be. Whole boxes are assigned first, and cut where whole ones are too large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges, volumes
from weightcast.transfer.boxes.slices import between_slices, boxes_of_runs
from weightcast.transfer.planner.waterfill import Pools, Wave, level, water_fill, waves

__all__ = ["Assigned", "assign", "assign_boxes"]

_EXACT_SIZES = 64
"""Up to so many distinct weights of one pool are assigned one by one; more are joined by powers of two."""
_ENOUGH = 1.03
"""Boxes are cut when whole ones leave the busiest rank more than so many times the best possible."""


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
    assigner = _Assigner(pools, pool, volumes(size) * itemsize, world, None)
    choice = assigner.whole()
    whole_boxes = Assigned(np.arange(pool.shape[0], dtype=np.int64), choice, offset, size)
    whole_load = assigner.busiest(whole_boxes.item, choice, assigner.weight)
    if whole_load <= _ENOUGH * assigner.bound:
        return whole_boxes
    item, choice, start, end = assigner.cut(size, itemsize)
    run, inner_offset, part_size = boxes_of_runs(np.take(size, item, axis=0), start, end)
    item, choice = item[run], choice[run]
    cut_boxes = Assigned(item, choice, np.take(offset, item, axis=0) + inner_offset, part_size)
    cut_load = assigner.busiest(item, choice, volumes(part_size) * itemsize[item])
    return cut_boxes if cut_load < whole_load else whole_boxes


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
        batches = _Batches(pools, order, self.pool, self.weight)
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


class _Batches:
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
