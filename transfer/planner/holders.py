"""Which trainer rank sends what: cells of the trainer, who holds them, and a choice that keeps the busiest rank's load
low. `balance` says how low it can be; here whole boxes are dealt, and cut where whole ones are too large for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.algebra import Cells, decompose
from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges, volumes
from weightcast.transfer.boxes.slices import between_slices, boxes_of_runs
from weightcast.transfer.layout.joined import JoinedRanks
from weightcast.transfer.planner.waterfill import Pools, Wave, level, water_fill, waves

__all__ = ["Dealt", "Pools", "Sources", "deal", "deal_boxes", "find_sources", "pool_sets"]

_EXACT_SIZES = 64
"""Up to so many distinct weights in a pool are dealt each on its own; more are taken together by powers of two."""

_ENOUGH = 1.03
"""Boxes are cut when dealing whole ones leaves the busiest rank more than so many times the best possible."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The trainer's cells and their holders.

    Cell i is held by the entries `start[i]..start[i + 1] - 1` of `rank` and `region`, one a rank, ranks ascending: the
    same ranks in the same order as set `pool[i]` of `pools`.
    """

    cells: Cells
    start: IntArray
    rank: IntArray
    region: IntArray
    pool: IntArray
    pools: Pools


def find_sources(trainer: JoinedRanks, label: Callable[[int], str]) -> Sources:
    """Cells of the trainer's regions over all its ranks. A rank with several regions of a cell gives the
    first."""
    cells = decompose(trainer.tensor, trainer.offset, trainer.size, label)
    cell, rank = cells.cell, trainer.rank[cells.row]
    # Rows of a cell ascend, so its ranks do too and a rank's further regions follow its first.
    first = np.ones(cell.shape[0], dtype=np.bool_)
    first[1:] = (cell[1:] != cell[:-1]) | (rank[1:] != rank[:-1])
    kept = np.flatnonzero(first)
    rank = rank[kept]
    start = np.searchsorted(cell[kept], np.arange(len(cells) + 1))
    pool, pools = pool_sets(start, rank)
    return Sources(cells, start, rank, trainer.region[cells.row[kept]], pool, pools)


def pool_sets(start: IntArray, member: IntArray) -> tuple[IntArray, Pools]:
    """Groups equal lists: list i is `member[start[i]:start[i + 1]]`, not empty. Gives the pool of each list, and the
    pools.

    Pools are ordered by (members, first members ...).
    """
    count = np.diff(start)
    pool = np.empty(count.shape[0], dtype=np.int64)
    starts, members, made = [np.zeros(1, dtype=np.int64)], [member[:0]], 0
    for size in np.unique(count).tolist():
        lists = np.flatnonzero(count == size)
        table = member[ranges(start[lists], count[lists])].reshape(-1, size)
        # Whole runs of lists are alike; only one of each run needs sorting.
        new = np.ones(lists.shape[0], dtype=np.bool_)
        new[1:] = (table[1:] != table[:-1]).any(axis=1)
        heads = table[new]
        order, begins = lex_sort(list(heads.T))
        number = np.empty(order.shape[0], dtype=np.int64)
        number[order] = np.cumsum(begins) - 1
        pool[lists] = made + number[np.cumsum(new) - 1]
        distinct = heads[order[begins]]
        made += distinct.shape[0]
        starts.append(starts[-1][-1] + size * np.arange(1, distinct.shape[0] + 1))
        members.append(distinct.ravel())
    return pool, Pools(np.concatenate(starts), np.concatenate(members))


def deal(pools: Pools, pool: IntArray, weight: IntArray, world: int, fixed: FloatArray | None = None) -> IntArray:
    """Chooses a member of its pool for each item: its index in the pool (n,). Deterministic.

    `pool` (n,) is each item's pool, `weight` (n,) its bytes, > 0; `fixed` (world,) is what ranks have anyway. Within a
    pool heavy items come first; items of one weight are dealt in contiguous runs, in their given order, such that the
    loads rise to the level that is best for all pools together. So neighbours get one source, and what is far apart
    (equal boxes of different instances) gets different ones.
    """
    return _Dealer(pools, pool, weight, world, fixed).whole()


@dataclass(frozen=True, slots=True)
class Dealt:
    """Boxes with a source each, in the order of the items that they are or are parts of.

    `item` (m,), `choice` (m,) the index in the item's pool, `offset` and `size` (m, D).
    """

    item: IntArray
    choice: IntArray
    offset: IntArray
    size: IntArray


def deal_boxes(pools: Pools, pool: IntArray, boxes: tuple[IntArray, IntArray], itemsize: IntArray, world: int) -> Dealt:
    """Like `deal`, and cuts boxes between members where whole ones leave some rank much more than its share.

    `boxes` are offset and size (n, D), `itemsize` (n,) the bytes of an element.
    """
    offset, size = boxes
    dealer = _Dealer(pools, pool, volumes(size) * itemsize, world, None)
    choice = dealer.whole()
    whole = Dealt(np.arange(pool.shape[0], dtype=np.int64), choice, offset, size)
    if dealer.busiest(whole.item, choice, dealer.weight) <= _ENOUGH * dealer.bound:
        return whole
    item, choice, begin, end = dealer.cut(size, itemsize)
    run, inside, part_size = boxes_of_runs(np.take(size, item, axis=0), begin, end)
    item, choice = item[run], choice[run]
    made = Dealt(item, choice, np.take(offset, item, axis=0) + inside, part_size)
    better = dealer.busiest(item, choice, volumes(part_size) * itemsize[item])
    return made if better < dealer.busiest(whole.item, whole.choice, dealer.weight) else whole


class _Dealer:
    """Items to be dealt, and the level to deal them to."""

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
        """A member for each item."""
        pools, choice = self.pools, np.zeros(self.pool.shape[0], dtype=np.int64)
        order = list(waves(pools, self._total > 0))
        if not order:
            return choice
        # What a rank has at the end if all that is still to be dealt goes as shared out.
        load = self._fixed + np.bincount(pools.rank, weights=self._share, minlength=self.world)
        batches = _Batches(pools, order, self.pool, self.weight)
        for wave, turns in zip(order, batches.turns, strict=True):
            for turn in range(turns):
                some, items, start, weight = batches.take(turn, wave)
                sub = _some(wave, some)
                ranks = pools.rank[sub.edge]
                part = weight / self._total[sub.pool]
                count = np.diff(sub.start)
                # The rest of the pool's bytes stay shared out; this batch is dealt anew, which mends earlier roundings.
                load[ranks] -= self._share[sub.edge] * np.repeat(part, count)
                room = water_fill(weight, sub.start, load[ranks])
                chosen = _runs(self.weight[items], start, room, sub.start)
                choice[items] = chosen - np.repeat(sub.start[:-1], np.diff(start))
                load[ranks] += np.bincount(chosen, weights=self.weight[items], minlength=ranks.shape[0])
        return choice

    def cut(self, size: IntArray, itemsize: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Deals each pool's items in their order in exact shares: item, member, and the run `begin..end` of the item's
        box in row-major order, ordered by item and run."""
        pools = self.pools
        order, _ = lex_sort([self.pool])
        weight = self.weight[order]
        first = pools.start[self.pool[order]]
        last = pools.start[self.pool[order] + 1] - 1
        # Shares of a pool add up to its items, so that one running sum places items and shares of all pools alike; the
        # sums are taken per pool, because rounding would carry a large pool's error into a small one.
        end = _running(weight, self.pool[order], self._total)
        begin = end - weight
        edge_pool = np.repeat(np.arange(len(pools), dtype=np.int64), np.diff(pools.start))
        edge_end = _running(self._share, edge_pool, self._total)
        # A cut may be so far from where it should be: twice that for each of its pools is what a rank has too much.
        crowd = np.bincount(pools.rank, weights=self._share > 0, minlength=self.world).max()
        least = 0.02 * self.bound / max(crowd, 1.0)
        low = np.clip(np.searchsorted(edge_end, begin + np.minimum(least, weight / 2), side="left"), first, last)
        high = np.clip(np.searchsorted(edge_end, end - np.minimum(least, weight / 2), side="left"), low, last)
        middle = np.clip(np.searchsorted(edge_end, end - weight / 2, side="left"), first, last)
        low, high = np.where(weight > least, low, middle), np.where(weight > least, high, middle)
        parts = high - low + 1
        edge = ranges(low, parts)
        row = np.repeat(np.arange(order.shape[0], dtype=np.int64), parts)
        item = order[row]
        to = volumes(size)[item]
        inner = np.flatnonzero(edge < high[row])
        some = item[inner]
        place = (edge_end[edge[inner]] - begin[row[inner]]) / itemsize[some]
        cuts = between_slices(place, np.take(size, some, axis=0), least / itemsize[some])
        to[inner] = np.clip(cuts, 0, to[inner])
        since = np.where(edge == low[row], 0, np.append(0, to[:-1]))
        kept = np.flatnonzero(to > since)
        back, _ = lex_sort([item[kept], edge[kept]])
        kept = kept[back]
        return item[kept], edge[kept] - pools.start[self.pool[item[kept]]], since[kept], to[kept]


def _running(weight: FloatArray, group: IntArray, total: FloatArray) -> FloatArray:
    """Running sums in rows sorted by group, every group beginning at the sum of the totals before it."""
    sums = np.cumsum(weight)
    base = np.append(0.0, np.cumsum(total))[:-1]
    first = np.searchsorted(group, np.arange(total.shape[0]))
    before = np.append(0.0, sums)[first]
    running: FloatArray = sums - before[group] + base[group]
    return running


def _some(wave: Wave, some: IntArray) -> Wave:
    """Only these pools of a wave."""
    if some.shape[0] == wave.pool.shape[0]:
        return wave
    count = np.diff(wave.start)[some]
    return Wave(wave.pool[some], np.append(0, np.cumsum(count)), wave.edge[ranges(wave.start[:-1][some], count)])


def _runs(weight: FloatArray, start: IntArray, room: FloatArray, room_start: IntArray) -> IntArray:
    """Deals groups of items in contiguous runs over rooms as large together as the group: the room of each item.

    Group i has items `start[i]..start[i + 1] - 1` and the rooms `room_start[i]..room_start[i + 1] - 1`.
    """
    group = np.repeat(np.arange(start.shape[0] - 1), np.diff(start))
    room_group = np.repeat(np.arange(start.shape[0] - 1), np.diff(room_start))
    total: FloatArray = np.add.reduceat(weight, start[:-1])
    ends = _running(room, room_group, total)
    # An item goes to the room in which its middle lies; rounding may put the last one past the end.
    chosen = np.searchsorted(ends, _running(weight, group, total) - weight / 2)
    has = np.where(room > 0, np.arange(room.shape[0]), -1)
    return np.clip(chosen, room_start[:-1][group], np.maximum.reduceat(has, room_start[:-1])[group])


class _Batches:
    """Items by wave, weight class and pool: the order in which they are dealt."""

    def __init__(self, pools: Pools, order: list[Wave], pool: IntArray, weight: FloatArray) -> None:
        place = np.full(len(pools), -1, dtype=np.int64)
        wave_of = np.zeros(len(pools), dtype=np.int64)
        for number, wave in enumerate(order):
            place[wave.pool] = np.arange(wave.pool.shape[0])
            wave_of[wave.pool] = number
        items = np.flatnonzero(place[pool] >= 0)
        lightness = _classes(pool[items], weight[items].astype(np.int64))
        rows, begins = lex_sort([pool[items], lightness])
        # The classes of a pool in turn: the first of each is turn 0.
        heads = np.flatnonzero(begins)
        of_head = pool[items[rows[heads]]]
        first = np.searchsorted(of_head, of_head)
        turn_of_head = np.arange(heads.shape[0]) - first
        turn = np.empty(items.shape[0], dtype=np.int64)
        turn[rows] = turn_of_head[np.cumsum(begins) - 1]
        which = pool[items]
        rows, begins = lex_sort([wave_of[which], turn, place[which]])
        self._items, self._weight = items[rows], weight
        self._start = np.append(np.flatnonzero(begins), rows.shape[0])
        heads = rows[begins]
        self._place = place[which[heads]]
        self._key = wave_of[which[heads]] * (int(turn.max(initial=0)) + 1) + turn[heads]
        self._stride = int(turn.max(initial=0)) + 1
        self._wave = {id(wave): number for number, wave in enumerate(order)}
        top = np.zeros(len(order), dtype=np.int64)
        np.maximum.at(top, wave_of[which], turn + 1)
        self.turns: list[int] = top.tolist()

    def take(self, turn: int, wave: Wave) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        """The pools of the wave (places in it) that have such a class; their items, where each pool's begin, and the
        pools' weights in this class."""
        key = self._wave[id(wave)] * self._stride + turn
        begin, end = np.searchsorted(self._key, [key, key + 1])
        bounds = self._start[begin : end + 1]
        items = self._items[bounds[0] : bounds[-1]]
        start = bounds - bounds[0]
        return self._place[begin:end], items, start, np.add.reduceat(self._weight[items], start[:-1])


def _classes(pool: IntArray, weight: IntArray) -> IntArray:
    """A number that falls as the weight rises: exact where a pool has few distinct weights, else by powers of two."""
    order, begins = lex_sort([pool, weight])
    distinct = np.bincount(pool[order[begins]], minlength=int(pool.max(initial=0)) + 1)
    coarse = distinct[pool] > _EXACT_SIZES
    exponent = np.frexp(weight.astype(np.float64))[1].astype(np.int64)
    return np.where(coarse, -exponent, -weight)
