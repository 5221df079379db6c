"""Chooses the sources of a plan block by block, so that a change in one block leaves the choice in the others alone.

A block is what one instance receives of one layer. The load that other blocks put on each trainer rank is *expected*,
by sharing out the bytes of each pool of ranks. No expert placement changes that. Each block is then assigned by itself,
beside the load that is expected of the others.

The sum over the blocks comes near the best possible wherever a placement asks for about the same of every expert. The
planner looks at the sum, and assigns all blocks together where it does not.
"""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort
from weightcast.transfer.planner.waterfill import Pools

__all__ = ["deal_blocks", "fill", "turns"]

_EXACT_SIZES = 64
"""Up to so many distinct weights of one pool in a block are assigned one by one; more are joined by powers of two."""


def turns(blocks: IntArray, layers: int) -> IntArray:
    """(blocks,) numbers that say with which member of a pool each block `instance * layers + layer` begins.

    Each layer of an instance has another number, and so has the same layer of the next instance.
    """
    return np.asarray(blocks % layers + blocks // layers)


def deal_blocks(
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
        member = vessels.deal(load, weight[items[rows]], batches.group[rows] - group[0])
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

    def deal(self, load: FloatArray, weight: IntArray, group: IntArray) -> IntArray:
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
