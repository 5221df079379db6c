"""Who passes on what: chains and trees on the inference side in place of many sends of one box.

Boxes that several ranks receive alike form a group. Inside a host one rank, the head, receives the box and it goes on
over NVLink from rank to rank; between hosts it goes from head to head, so that a trainer rank sends it once. Heads are
dealt so that the NICs of a host's ranks receive alike. A chain loads each rank's links with what it receives anyway; a
tree is shorter but its inner ranks send more. Which shape, if any, the cost model of `topology` decides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, starts_of
from weightcast.transfer.planner.holders import deal, pool_sets

__all__ = ["DIRECT", "SHAPES", "RelayGroups", "depths"]

DIRECT = -1
"""Parent of an item that a trainer rank sends."""

SHAPES = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 2))
"""What is tried: to how many a rank passes a box on inside its host and between hosts; 0 means not at all."""


class RelayGroups:
    """Items (a box that a rank receives) that are alike, by group and host.

    `key` are columns (n,) that are equal for boxes alike, `rank` (n,) numbers the receivers of all instances, `host`
    (ranks,), `weight` (n,) bytes; `near` (n,) tells items that a trainer rank on the receiver's host holds: those
    always come from it.
    """

    def __init__(
        self,
        key: list[IntArray],
        rank: IntArray,
        host: IntArray,
        weight: IntArray,
        near: npt.NDArray[np.bool_],
    ) -> None:
        self._rank, self._host, self._weight, self._near = rank, host, weight, near
        order, begins = lex_sort(key)
        group = np.empty(rank.shape[0], dtype=np.int64)
        group[order] = np.cumsum(begins) - 1
        alike = np.flatnonzero(np.bincount(group)[group] > 1) if rank.size else order
        order, _ = lex_sort([group[alike], ~near[alike] + 0, host[rank[alike]], rank[alike]])
        self._item = alike[order]
        """Items that are not the only ones of their group, by (group, near first, host, rank)."""
        self._group = group[self._item]

    def parents(self, inside: int, between: int) -> IntArray:
        """(n,) for each item the item that it is passed on from, or DIRECT."""
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
        """Sets the parents of all but one item of a group and host; which items are heads."""
        item, host = self._item, self._host[self._rank[self._item]]
        begins = np.ones(item.shape[0], dtype=np.bool_)
        begins[1:] = (self._group[1:] != self._group[:-1]) | (host[1:] != host[:-1])
        begins |= self._near[item]
        start = starts_of(begins)
        count = np.diff(start)
        pool, pools = pool_sets(start, self._rank[item])
        # What arrives over NICs whatever the heads are: boxes of no group. Near ones come over NVLink.
        fixed = ~self._near
        fixed[item] = False
        load = np.bincount(self._rank[fixed], self._weight[fixed], self._host.shape[0]).astype(np.float64)
        near = self._near[item[start[:-1]]]
        weight = np.where(near, 0, self._weight[item[start[:-1]]])
        head = deal(pools, pool, weight, self._host.shape[0], load)
        place, run = np.arange(item.shape[0]), np.repeat(np.arange(count.shape[0]), count)
        step = (place - start[run] - head[run]) % count[run]
        source = start[run] + ((step - 1) // fan_out + head[run]) % count[run]
        passed = step > 0
        parent[item[passed]] = item[source[passed]]
        return ~passed

    def _between(self, parent: IntArray, heads: IntArray, fan_out: int) -> None:
        """Sets the parents of all heads of a group but one, or but those that are near a trainer rank."""
        group, item = self._group[heads], self._item[heads]
        begins = np.ones(heads.shape[0], dtype=np.bool_)
        begins[1:] = group[1:] != group[:-1]
        start = starts_of(begins)
        run = np.repeat(np.arange(start.shape[0] - 1), np.diff(start))
        near = np.bincount(run, weights=self._near[item], minlength=start.shape[0] - 1).astype(np.int64)
        far = np.diff(start) - near
        place = np.arange(heads.shape[0]) - start[run] - near[run]
        live = np.flatnonzero(place >= 0)
        run, place = run[live], place[live]
        # Turned from group to group, by about half a round, because the last ones of a tree send nothing.
        turned = run % 2 * (far[run] // 2) + run // 2
        step = (place - turned) % far[run]
        source = start[run] + near[run] + ((step - 1) // fan_out + turned) % far[run]
        source = np.where(step == 0, start[run], source)
        passed = (step > 0) | (near[run] > 0)
        parent[item[live[passed]]] = item[source[passed]]


def depths(parent: IntArray) -> IntArray:
    """(n,) how many hops each item is away from the trainer: 1 for those that it sends."""
    depth = np.ones(parent.shape[0], dtype=np.int64)
    above = parent
    # Each pass doubles how far up an item has counted.
    while (above != DIRECT).any():
        some = np.flatnonzero(above != DIRECT)
        up = above[some]
        depth[some] += depth[up]
        above = above.copy()
        above[some] = above[up]
    return depth
