"""Holders from which a rank may get a cell: all of them, or those on its own host where there are any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges
from weightcast.transfer.planner.holders import Sources, pool_sets
from weightcast.transfer.planner.topology import Hosts
from weightcast.transfer.planner.waterfill import Pools

__all__ = ["Narrowed", "Reach", "same_host_first"]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Pools with fewer members, by item.

    Member i of the new pool of an item is member `member[first[item] + i]` of its old one.
    """

    pools: Pools
    pool: IntArray
    first: IntArray
    member: IntArray


def same_host_first(pools: Pools, pool: IntArray, item_host: IntArray, rank_host: IntArray) -> Narrowed:
    """Leaves to each item only those members of its pool that are on its host, where there are any.

    `pool` and `item_host` are (n,), `rank_host` (world,).
    """
    order, begins = lex_sort([pool, item_host])
    kind = np.empty(pool.shape[0], dtype=np.int64)
    kind[order] = np.cumsum(begins) - 1
    heads = order[begins]
    count = np.diff(pools.start)[pool[heads]]
    edge = ranges(pools.start[pool[heads]], count)
    edge_kind = np.repeat(np.arange(heads.shape[0], dtype=np.int64), count)
    same_host = rank_host[pools.rank[edge]] == item_host[heads][edge_kind]
    has_holder = np.bincount(edge_kind[same_host], minlength=heads.shape[0]) > 0
    member_mask = same_host | ~has_holder[edge_kind]
    start = np.append(0, np.cumsum(np.bincount(edge_kind[member_mask], minlength=heads.shape[0])))
    number, narrow_pools = pool_sets(start, pools.rank[edge[member_mask]])
    return Narrowed(narrow_pools, number[kind], start[kind], (edge - pools.start[pool[heads]][edge_kind])[member_mask])


class Reach:
    """The pools that the ranks of instances draw on, from the sources' pools and the hosts of all ranks.

    `worlds` count the ranks of each party. `column` (instance ranks,) numbers the hosts on which the instances are,
    rank after rank, instance after instance. Without hosts all are 0. `pools` are all that some host draws on.
    """

    def __init__(self, sources: Sources, worlds: list[int], hosts: Hosts | None) -> None:
        self._sources = sources
        # Columns are those of instance ranks alone.
        self.first = np.cumsum(np.array([0, *worlds], dtype=np.int64)) - worlds[0]
        count = len(sources.pools)
        if hosts is None:
            self.column = np.zeros(int(self.first[-1]), dtype=np.int64)
            self.pools, self._pool, self._narrowed = sources.pools, np.arange(count, dtype=np.int64)[:, None], None
            return
        trainer_ranks = int(hosts.first[1])
        host_numbers, self.column = np.unique(hosts.host[trainer_ranks:], return_inverse=True)
        pool = np.repeat(np.arange(count, dtype=np.int64), host_numbers.shape[0])
        self._narrowed = same_host_first(sources.pools, pool, np.tile(host_numbers, count), hosts.host[:trainer_ranks])
        self.pools, self._pool = self._narrowed.pools, self._narrowed.pool.reshape(count, host_numbers.shape[0])

    def columns(self, party: int, rank: IntArray) -> IntArray:
        """The host numbers (columns) of ranks of an instance."""
        return np.asarray(self.column[self.first[party] + rank])

    def pool(self, cell: IntArray, column: IntArray) -> IntArray:
        """The pool from which a rank on such a host gets a cell."""
        return np.asarray(self._pool[self._sources.pool[cell], column])

    def entry(self, cell: IntArray, column: IntArray, choice: IntArray) -> IntArray:
        """The entry of `Sources.rank` that is member `choice` of that pool."""
        if self._narrowed is not None:
            item = self._sources.pool[cell] * self._pool.shape[1] + column
            choice = self._narrowed.member[self._narrowed.first[item] + choice]
        return np.asarray(self._sources.start[cell] + choice)
