"""Cells of the trainer, and the pools of ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.algebra import Cells, decompose
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges
from weightcast.transfer.layout.joined import JoinedRanks
from weightcast.transfer.planner.waterfill import Pools

__all__ = ["Sources", "find_sources", "pool_sets"]


@dataclass(frozen=True, slots=True)
class Sources:
    """The trainer's cells and their holders.

    Cell i is held by the entries `start[i]..start[i + 1] - 1` of `rank` and `region`: one entry a rank, ranks
    ascending. They are the ranks of set `pool[i]` of `pools`, in the same order.
    """

    cells: Cells
    start: IntArray
    rank: IntArray
    region: IntArray
    pool: IntArray
    pools: Pools


def find_sources(trainer: JoinedRanks, label: Callable[[int], str]) -> Sources:
    """Cells of the trainer's regions over all its ranks. A rank with several regions of a cell gives the first."""
    cells = decompose(trainer.tensor, trainer.offset, trainer.size, label)
    cell, rank = cells.cell, trainer.rank[cells.row]
    # Rows of a cell ascend, so its ranks do too and a rank's further regions follow its first.
    first = np.ones(cell.shape[0], dtype=np.bool_)
    first[1:] = (cell[1:] != cell[:-1]) | (rank[1:] != rank[:-1])
    entries = np.flatnonzero(first)
    rank = rank[entries]
    start = np.searchsorted(cell[entries], np.arange(len(cells) + 1))
    pool, pools = pool_sets(start, rank)
    return Sources(cells, start, rank, trainer.region[cells.row[entries]], pool, pools)


def pool_sets(start: IntArray, member: IntArray) -> tuple[IntArray, Pools]:
    """Groups equal lists into pools. Returns the pool of each list, and the pools.

    List i is `member[start[i]:start[i + 1]]`, not empty. Pools are ordered by (number of members, members).
    """
    count = np.diff(start)
    pool = np.empty(count.shape[0], dtype=np.int64)
    starts, members, pool_count = [np.zeros(1, dtype=np.int64)], [member[:0]], 0
    for size in np.unique(count).tolist():
        lists = np.flatnonzero(count == size)
        table = member[ranges(start[lists], count[lists])].reshape(-1, size)
        # Whole runs of lists are alike; only one of each run needs sorting.
        run_starts = np.ones(lists.shape[0], dtype=np.bool_)
        run_starts[1:] = (table[1:] != table[:-1]).any(axis=1)
        heads = table[run_starts]
        order, begins = lex_sort(list(heads.T))
        number = np.empty(order.shape[0], dtype=np.int64)
        number[order] = np.cumsum(begins) - 1
        pool[lists] = pool_count + number[np.cumsum(run_starts) - 1]
        sets = heads[order[begins]]
        pool_count += sets.shape[0]
        starts.append(starts[-1][-1] + size * np.arange(1, sets.shape[0] + 1))
        members.append(sets.ravel())
    return pool, Pools(np.concatenate(starts), np.concatenate(members))
