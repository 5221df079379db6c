"""From which holders of a cell a rank may get it: all of them, or those on its own host where there are any."""

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
    """Pools with fewer members, by item: member i of the new pool of an item is member `member[first[item] + i]` of its
    old one."""

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
    of = np.repeat(np.arange(heads.shape[0], dtype=np.int64), count)
    near = rank_host[pools.rank[edge]] == item_host[heads][of]
    some = np.bincount(of[near], minlength=heads.shape[0]) > 0
    kept = near | ~some[of]
    start = np.append(0, np.cumsum(np.bincount(of[kept], minlength=heads.shape[0])))
    number, narrowed = pool_sets(start, pools.rank[edge[kept]])
    return Narrowed(narrowed, number[kind], start[kind], (edge - pools.start[pool[heads]][of])[kept])


class Reach:
    """The pools that the ranks of instances draw on, from the sources' pools and the hosts of all ranks.

    `column` (instance ranks,) numbers the hosts on which the instances are, rank after rank, instance after instance,
    all 0 without hosts; `pools` are all that some host draws on.
    """

    def __init__(self, sources: Sources, worlds: list[int], hosts: Hosts | None) -> None:
        self._sources = sources
        self.first = np.append(0, np.cumsum(np.array(worlds, dtype=np.int64)))
        count = len(sources.pools)
        if hosts is None:
            self.column = np.zeros(int(self.first[-1]), dtype=np.int64)
            self.pools, self._pool, self._narrowed = sources.pools, np.arange(count, dtype=np.int64)[:, None], None
            return
        begin = int(hosts.first[1])
        distinct, self.column = np.unique(hosts.host[begin:], return_inverse=True)
        pool = np.repeat(np.arange(count, dtype=np.int64), distinct.shape[0])
        self._narrowed = same_host_first(sources.pools, pool, np.tile(distinct, count), hosts.host[:begin])
        self.pools, self._pool = self._narrowed.pools, self._narrowed.pool.reshape(count, distinct.shape[0])

    def columns(self, instance: int | IntArray, rank: IntArray) -> IntArray:
        """The host of ranks of an instance."""
        return np.asarray(self.column[self.first[instance] + rank])

    def hosts_of(self, instance: int) -> list[int]:
        """The hosts on which an instance is, ascending."""
        columns: list[int] = np.unique(self.column[self.first[instance] : self.first[instance + 1]]).tolist()
        return columns

    def pool(self, cell: IntArray, column: IntArray | int) -> IntArray:
        """The pool from which a rank on such a host gets a cell."""
        return np.asarray(self._pool[self._sources.pool[cell], column])

    def entry(self, cell: IntArray, column: IntArray | int, choice: IntArray) -> IntArray:
        """Where in `Sources.rank` member `choice` of that pool is."""
        if self._narrowed is not None:
            item = self._sources.pool[cell] * self._pool.shape[1] + column
            choice = self._narrowed.member[self._narrowed.first[item] + choice]
        return np.asarray(self._sources.start[cell] + choice)
