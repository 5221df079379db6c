"""Relays in chains and trees on the inference side, in place of many sends of one box.

Boxes that several ranks receive alike form a group. Inside a host one rank, the head, receives the box, which goes on
over NVLink from rank to rank. Between hosts it goes from head to head, so that a trainer rank sends it once. Heads are
assigned so that the NICs of a host's ranks receive alike. A chain loads each rank's links with what it receives anyway.
A tree is shorter, but its inner ranks send more. The cost model of `topology` chooses a shape, or none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, starts_of
from weightcast.transfer.planner.assign import assign
from weightcast.transfer.planner.holders import pool_sets

__all__ = ["DIRECT", "SHAPES", "RelayGroups", "depths"]

DIRECT = -1
"""Parent of an item that a trainer rank sends."""

SHAPES = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 2))
"""Shapes to try: to how many a rank passes a box on inside its host and between hosts; 0 means not at all."""


class RelayGroups:
    """Items (a box that a rank receives) that are alike, by group and host.

    `key` are columns (n,) that are equal for boxes alike. `rank` (n,) numbers the receivers of all instances, `host` is
    (ranks,), `weight` (n,) bytes. `near` (n,) marks items that a trainer rank on the receiver's host holds: those
    always come from it.
    """

    def __init__(
        self, key: list[IntArray], rank: IntArray, host: IntArray, weight: IntArray, near: npt.NDArray[np.bool_]
    ) -> None:
        self._rank, self._host, self._weight, self._near = rank, host, weight, near
        order, begins = lex_sort(key)
        group = np.empty(rank.shape[0], dtype=np.int64)
        group[order] = np.cumsum(begins) - 1
        members = np.flatnonzero(np.bincount(group)[group] > 1) if rank.size else order
        order, _ = lex_sort([group[members], ~near[members] + 0, host[rank[members]], rank[members]])
        self._item = members[order]
        """Items that are not the only ones of their group, by (group, near first, host, rank)."""
        self._group = group[self._item]

    def parents(self, inside: int, between: int) -> IntArray:
        """(n,) the item from which each item is passed on, or DIRECT."""
        parent = np.full(self._rank.shape[0], DIRECT, dtype=np.int64)
        if not self._item.size:
            return parent
        heads = np.ones(self._item.shape[0], dtype=np.bool_)
        if inside:
            heads = self._inside(parent, inside)
        if between:
            self._between(parent, np.flatnonzero(heads), between)
        return parent

    def _inside(self, parent: IntArray, fan_out: int) -> npt.NDArray[np.bool_]:
        """Sets the parents of all but one item of a group and host. Returns a mask of the heads."""
        item, host = self._item, self._host[self._rank[self._item]]
        begins = np.ones(item.shape[0], dtype=np.bool_)
        begins[1:] = (self._group[1:] != self._group[:-1]) | (host[1:] != host[:-1])
        begins |= self._near[item]
        start = starts_of(begins)
        count = np.diff(start)
        pool, pools = pool_sets(start, self._rank[item])
        # Boxes of no group arrive over NICs, whatever the heads are. Near ones come over NVLink.
        ungrouped = ~self._near
        ungrouped[item] = False
        load = np.bincount(self._rank[ungrouped], self._weight[ungrouped], self._host.shape[0]).astype(np.float64)
        run_near = self._near[item[start[:-1]]]
        weight = np.where(run_near, 0, self._weight[item[start[:-1]]])
        head = assign(pools, pool, weight, self._host.shape[0], load)
        position, run = np.arange(item.shape[0]), np.repeat(np.arange(count.shape[0]), count)
        step = (position - start[run] - head[run]) % count[run]
        source = start[run] + ((step - 1) // fan_out + head[run]) % count[run]
        is_relay = step > 0
        parent[item[is_relay]] = item[source[is_relay]]
        return ~is_relay

    def _between(self, parent: IntArray, heads: IntArray, fan_out: int) -> None:
        """Sets the parents of all heads of a group but one, or but those that are near a trainer rank."""
        group, item = self._group[heads], self._item[heads]
        begins = np.ones(heads.shape[0], dtype=np.bool_)
        begins[1:] = group[1:] != group[:-1]
        start = starts_of(begins)
        run = np.repeat(np.arange(start.shape[0] - 1), np.diff(start))
        near_count = np.bincount(run, weights=self._near[item], minlength=start.shape[0] - 1).astype(np.int64)
        far_count = np.diff(start) - near_count
        position = np.arange(heads.shape[0]) - start[run] - near_count[run]
        far_heads = np.flatnonzero(position >= 0)
        run, position = run[far_heads], position[far_heads]
        # Shifted from group to group by about half a round, because the last ones of a tree send nothing.
        shift = run % 2 * (far_count[run] // 2) + run // 2
        step = (position - shift) % far_count[run]
        source = start[run] + near_count[run] + ((step - 1) // fan_out + shift) % far_count[run]
        source = np.where(step == 0, start[run], source)
        is_relay = (step > 0) | (near_count[run] > 0)
        parent[item[far_heads[is_relay]]] = item[source[is_relay]]


def depths(parent: IntArray) -> IntArray:
    """(n,) number of hops of each item from the trainer: 1 for those that it sends."""
    depth = np.ones(parent.shape[0], dtype=np.int64)
    ancestor = parent
    # Each pass doubles the hops that an item has counted.
    while (ancestor != DIRECT).any():
        items = np.flatnonzero(ancestor != DIRECT)
        item_ancestor = ancestor[items]
        depth[items] += depth[item_ancestor]
        ancestor = ancestor.copy()
        ancestor[items] = ancestor[item_ancestor]
    return depth
