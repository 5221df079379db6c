"""Chooses the sources of a plan block by block, so that a change in one block leaves the choice in the others alone.

A block is what one instance receives of one layer. What the other blocks put on each trainer rank is *expected* from
numbers that no expert placement changes, by sharing out the bytes of each pool of ranks; then each block is dealt by
itself, beside what is expected of the others. The sum over the blocks comes near the best possible wherever a placement
asks for about the same of every expert; the planner looks at the sum, and deals all blocks together where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.transfer.columns import lex_sort
from weightcast.transfer.layout import IntArray
from weightcast.transfer.sources import Pools

__all__ = ["Expected", "FloatArray", "deal_blocks", "others_load", "shared_pools", "water_level"]

FloatArray = npt.NDArray[np.float64]

_EXACT_SIZES = 64
"""Up to so many distinct weights of one pool in a block are dealt each on its own; more are taken together by powers of
two."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes that blocks are expected to ask for: `alone` (blocks, world) of ranks that alone hold them, `shared`
    (blocks, pools) of each pool with more than one member, in the order of `shared_pools`, in about `items` boxes of
    one size."""

    alone: FloatArray
    shared: FloatArray
    items: FloatArray

    def of(self, blocks: IntArray) -> Expected:
        """Some blocks."""
        return Expected(self.alone[blocks], self.shared[blocks], self.items[blocks])


def shared_pools(pools: Pools) -> IntArray:
    """Pools with more than one member."""
    return np.flatnonzero(np.diff(pools.start) > 1)


def water_level(pools: Pools, weight: FloatArray, world: int) -> FloatArray:
    """(world,) loads when the `weight` (pools,) of each pool is shared out in fractions, pools with fewer members
    first."""
    count = np.diff(pools.start)
    alone = np.flatnonzero(count == 1)
    load = np.bincount(pools.rank[pools.start[alone]], weights=weight[alone], minlength=world).astype(np.float64)
    for pool in np.flatnonzero((count > 1) & (weight > 0)).tolist():
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        load[ranks] += _fill(weight[pool : pool + 1], load[None, ranks])[0]
    return load


def others_load(pools: Pools, expected: Expected) -> FloatArray:
    """(blocks, world) what is expected on each rank of all blocks but one, for each.

    Pools are served one after the other. Of a pool first the blocks with fewer boxes than ranks are dealt, box by box,
    to the ranks in turn. The rest rises to one level on top of that, and each block with more boxes uses all ranks
    alike, so that it can make up for what its map asks of them. Where boxes leave a rank below the level of fractions
    it counts as level: each block would fill the same gap.
    """
    own = expected.alone.copy()
    load = own.sum(axis=0)
    level = load.copy()
    for column, pool in enumerate(shared_pools(pools).tolist()):
        weight, items = expected.shared[:, column], expected.items[:, column]
        if not weight.any():
            continue
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        level[ranks] += _fill(weight.sum()[None], level[None, ranks])[0]
        few = np.flatnonzero((weight > 0) & (items < ranks.shape[0]))
        if few.size:
            count = np.maximum(np.rint(items[few]), 1.0).astype(np.int64)
            block, box = np.repeat(few, count), np.repeat(weight[few] / count, count)
            turn = np.cumsum(_fill(weight[few].sum()[None], load[None, ranks])[0])
            rank = ranks[np.minimum(np.searchsorted(turn, np.cumsum(box) - box / 2), ranks.shape[0] - 1)]
            np.add.at(own, (block, rank), box)
            np.add.at(load, rank, box)
        many = np.setdiff1d(np.flatnonzero(weight), few)
        if many.size:
            room = _fill(weight[many].sum()[None], load[None, ranks])[0]
            own[np.ix_(many, ranks)] += weight[many, None] * (room / weight[many].sum())
            load[ranks] += room
    others: FloatArray = np.rint(np.maximum(np.maximum(load, level) - own, 0.0))
    return others


def deal_blocks(
    pools: Pools, pool: IntArray, weight: IntArray, block: IntArray, others: FloatArray, number: IntArray
) -> IntArray:
    """Chooses a member of its pool for each item: its index in the pool (n,). Blocks do not look at one another.

    `pool`, `weight` (bytes, > 0) and `block` are (n,); `others` (blocks, world) is the load that the ranks have from
    elsewhere, `number` (blocks,) that of the block in the plan. Within a block pools are served in their order, heavy
    items first; items of one weight are dealt in contiguous runs, in their given order, such that the loads of the
    members rise to one level. The block's number says which member is the first, so that what does not come out even
    goes to another one in each block.
    """
    choice = np.zeros(pool.shape[0], dtype=np.int64)
    blocks, world = others.shape
    free = np.diff(pools.start)[pool] > 1
    alone = np.flatnonzero(~free)
    rank = pools.rank[pools.start[pool[alone]]]
    own = np.bincount(block[alone] * world + rank, weights=weight[alone], minlength=blocks * world)
    load = others.ravel() + own
    items = np.flatnonzero(free)
    if not items.size:
        return choice
    batches = _Batches(pools, pool[items], weight[items], block[items])
    for turn in range(len(batches)):
        rows, group = batches.take(turn)
        vessels = _Vessels(pools, batches.pool[group], batches.block[group] * world, number[batches.block[group]])
        chosen = vessels.deal(load, weight[items[rows]], batches.group[rows] - group[0])
        choice[items[rows]] = chosen
    return choice


class _Batches:
    """Items of one block, pool and weight class are a group; groups that share no rank in a block have one turn.

    `pool` and `block` are those of each group, groups ordered by turn; `group` is that of each item.
    """

    def __init__(self, pools: Pools, pool: IntArray, weight: IntArray, block: IntArray) -> None:
        key = block * len(pools) + pool
        order, begins = lex_sort([key, _lightness(key, weight)])
        heads = order[begins]
        number = np.arange(heads.shape[0], dtype=np.int64)
        new = np.append(True, key[heads[1:]] != key[heads[:-1]])
        ordinal = number - np.maximum.accumulate(np.where(new, number, 0))
        turn = _waves(pools)[pool[heads]] * (int(ordinal.max()) + 1) + ordinal
        by_turn, begins_turn = lex_sort([turn])
        heads = heads[by_turn]
        self.pool, self.block = pool[heads], block[heads]
        place = np.empty_like(by_turn)
        place[by_turn] = number
        self.group = np.empty_like(order)
        self.group[order] = place[np.cumsum(begins) - 1]
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
    """The members of some pools, one pool a row, each row begun at another member and filled up with nobody."""

    def __init__(self, pools: Pools, pool: IntArray, base: IntArray, first: IntArray) -> None:
        count = np.diff(pools.start)[pool][:, None]
        column = np.arange(int(count.max()), dtype=np.int64)
        self.real = column < count
        self.member = (column + first[:, None]) % count
        self.place = base[:, None] + pools.rank[pools.start[pool][:, None] + self.member]

    def deal(self, load: FloatArray, weight: IntArray, group: IntArray) -> IntArray:
        """The member for each item; items come ordered by group. Adds what they weigh to `load`."""
        groups, width = self.place.shape
        budget = np.bincount(group, weights=weight, minlength=groups).astype(np.int64)
        room = _fill(budget.astype(np.float64), np.where(self.real, load[self.place], np.inf))
        # Twice the bytes, as whole numbers, so that the middle of an item is exact whatever else is dealt beside it.
        edge = np.minimum(np.floor(2 * np.cumsum(room, axis=1)).astype(np.int64), 2 * budget[:, None])
        last = width - 1 - (room[:, ::-1] > 0).argmax(axis=1)
        edge = np.where(np.arange(width) >= last[:, None], 2 * budget[:, None], edge)
        base = 2 * (np.cumsum(budget + 1) - (budget + 1))
        end = np.cumsum(weight)
        middle = 2 * (end - (np.cumsum(budget) - budget)[group]) - weight
        vessel = np.searchsorted((base[:, None] + edge).ravel(), base[group] + middle)
        added = np.bincount(vessel, weights=weight, minlength=groups * width)
        load[self.place[self.real]] += added[self.real.ravel()]
        return np.asarray(self.member.ravel()[vessel])


def _fill(budget: FloatArray, load: FloatArray) -> FloatArray:
    """Water-filling: how much each vessel (groups, k) takes of its group's budget so that loads rise to one level.

    Each row is worked out by itself, to the last bit.
    """
    low = np.sort(load, axis=1)
    levels = (budget[:, None] + np.cumsum(low, axis=1)) / np.arange(1, load.shape[1] + 1)
    last = load.shape[1] - 1 - (levels > low)[:, ::-1].argmax(axis=1)
    level = levels[np.arange(load.shape[0]), last]
    taken: FloatArray = np.maximum(level[:, None] - load, 0.0)
    return taken


def _lightness(key: IntArray, weight: IntArray) -> IntArray:
    """A number that falls as the weight rises: exact where a key has few distinct weights, else by powers of two."""
    order, begins = lex_sort([key, weight])
    heads = order[begins]
    distinct = np.bincount(np.unique(key[heads], return_inverse=True)[1])
    if distinct.max() <= _EXACT_SIZES:
        return -weight
    crowded = np.unique(key[heads])[distinct > _EXACT_SIZES]
    exponent = np.frexp(weight.astype(np.float64))[1].astype(np.int64)
    return np.where(np.isin(key, crowded), -exponent, -weight)


def _waves(pools: Pools) -> IntArray:
    """(pools,) a turn for each pool with more than one member such that pools with a common rank keep their order."""
    wave = np.zeros(len(pools), dtype=np.int64)
    free = np.zeros(int(pools.rank.max(initial=-1)) + 1, dtype=np.int64)
    for pool in shared_pools(pools).tolist():
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        wave[pool] = free[ranks].max()
        free[ranks] = wave[pool] + 1
    return wave
