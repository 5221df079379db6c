"""Which trainer rank sends what: cells of the trainer, who holds them, and a choice that keeps the busiest rank's load
low."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.columns import lex_sort, ranges, starts_of
from weightcast.transfer.layout import IntArray
from weightcast.transfer.regions import Cells, decompose
from weightcast.transfer.sides import Side

__all__ = ["Pools", "Sources", "deal", "find_sources", "pool_sets"]

_EXACT_SIZES = 64
"""Up to so many distinct weights in a pool are dealt each on its own; more are taken together by powers of two."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Distinct sets of ranks. Set i is `rank[start[i]:start[i + 1]]`, ascending."""

    start: IntArray
    rank: IntArray

    def __len__(self) -> int:
        return int(self.start.shape[0]) - 1


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


def find_sources(trainer: Side, label: Callable[[int], str]) -> Sources:
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


def deal(pools: Pools, pool: IntArray, weight: IntArray, world: int) -> IntArray:
    """Chooses a member of its pool for each item: its index in the pool (n,). Deterministic.

    `pool` (n,) is each item's pool, `weight` (n,) its bytes, > 0. Pools are served in order: those with fewer members
    first, because they have the least choice. Within a pool heavy items come first; items of one weight are dealt in
    contiguous runs, in their given order, such that the loads of the members rise to one level. So neighbours get one
    source, and what is far apart (equal boxes of different instances) gets different ones.
    """
    choice = np.zeros(pool.shape[0], dtype=np.int64)
    members = np.diff(pools.start)
    free = members[pool] > 1
    load = np.bincount(pools.rank[pools.start[pool[~free]]], weights=weight[~free], minlength=world)
    items = np.flatnonzero(free)
    if not items.size:
        return choice
    lightness = _classes(pool[items], weight[items])
    order, begins = lex_sort([pool[items], lightness])
    items = items[order]
    bounds = starts_of(begins)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = items[begin:end]
        which = int(pool[part[0]])
        ranks = pools.rank[pools.start[which] : pools.start[which + 1]]
        choice[part], load[ranks] = _fill(weight[part].astype(np.float64), load[ranks])
    return choice


def _classes(pool: IntArray, weight: IntArray) -> IntArray:
    """A number that falls as the weight rises: exact where a pool has few distinct weights, else by powers of two."""
    order, begins = lex_sort([pool, weight])
    distinct = np.bincount(pool[order[begins]], minlength=int(pool.max()) + 1)
    coarse = distinct[pool] > _EXACT_SIZES
    exponent = np.frexp(weight.astype(np.float64))[1].astype(np.int64)
    return np.where(coarse, -exponent, -weight)


def _fill(weight: np.ndarray, load: np.ndarray) -> tuple[IntArray, np.ndarray]:
    """Water-filling: items in contiguous runs over members whose loads become level; choices and new loads."""
    total = np.cumsum(weight)
    lowest = np.sort(load)
    levels = (total[-1] + np.cumsum(lowest)) / np.arange(1, load.shape[0] + 1)
    level = levels[int(np.flatnonzero(levels > lowest)[-1])]
    room = np.cumsum(np.maximum(level - load, 0.0))
    # An item goes to the member in whose run its middle lies; rounding may put the last one past the end.
    choice = np.minimum(np.searchsorted(room, total - weight / 2), np.flatnonzero(level > load)[-1])
    return choice, load + np.bincount(choice, weights=weight, minlength=load.shape[0])
