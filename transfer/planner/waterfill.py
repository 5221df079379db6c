"""The lowest level to which the loads of ranks can rise: bytes shared out among sets of ranks, in fractions.

A pool is a set of ranks any of which can send the pool's bytes. Water-filling pool after pool gives the best possible
maximum where pools are nested or disjoint. Repeated, it comes near the best elsewhere. The level reached is compared
with a proven lower bound. Where that leaves a gap, a maximum flow closes it: bytes move along shortest paths from ranks
above the bound to ranks below it. So the level is always the best possible within `SLACK`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges

__all__ = ["SLACK", "Pools", "Wave", "level", "water_fill", "waves"]


SLACK = 1e-3
"""Distance by which a level may stay above the best possible, as a fraction of it."""

_SWEEPS = 12


@dataclass(frozen=True, slots=True)
class Pools:
    """Distinct sets of ranks. Set i is `rank[start[i]:start[i + 1]]`, ascending."""

    start: IntArray
    rank: IntArray

    def __len__(self) -> int:
        return int(self.start.shape[0]) - 1


@dataclass(frozen=True, slots=True)
class Wave:
    """Pools without a common rank, so that all of them can be filled at once.

    `edge` are their rows of `Pools.rank`; pool `pool[i]` has `edge[start[i]:start[i + 1]]`.
    """

    pool: IntArray
    start: IntArray
    edge: IntArray


def waves(pools: Pools, used: npt.NDArray[np.bool_]) -> Iterator[Wave]:
    """Waves of the `used` pools with more than one member, those with fewer members first.

    The waves are as few as keep that order among pools that share a rank.
    """
    members = np.diff(pools.start)
    candidates = np.flatnonzero(used & (members > 1))
    order, _ = lex_sort([members[candidates], candidates])
    candidates = candidates[order]
    turn = np.zeros(candidates.shape[0], dtype=np.int64)
    next_turn = np.zeros(int(pools.rank.max(initial=-1)) + 1, dtype=np.int64)
    for i, pool in enumerate(candidates.tolist()):
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        turn[i] = next_turn[ranks].max()
        next_turn[ranks] = turn[i] + 1
    for number in range(int(turn.max(initial=-1)) + 1):
        pool = candidates[turn == number]
        count = members[pool]
        yield Wave(pool, np.append(0, np.cumsum(count)), ranges(pools.start[pool], count))


def water_fill(budget: FloatArray, start: IntArray, load: FloatArray) -> FloatArray:
    """(e,) amounts that vessels take of their group's budget when loads rise to one level in every group.

    Group i has `budget[i]` and the vessels `start[i]..start[i + 1] - 1`, at least one, of `load` (e,).
    """
    count = np.diff(start)
    group = np.repeat(np.arange(count.shape[0]), count)
    order = np.lexsort((load, group))
    sorted_load = load[order]
    total = np.cumsum(sorted_load)
    start_total = np.where(start[:-1] > 0, total[start[:-1] - 1], 0.0)
    position = np.arange(load.shape[0]) - start[group] + 1
    # The level if exactly the `position` lowest vessels of the group take something. It is true for the last vessel
    # that it exceeds.
    levels = (budget[group] + total - start_total[group]) / position
    last = np.maximum.reduceat(np.where(levels > sorted_load, position, 1), start[:-1])
    height = levels[start[:-1] + last - 1]
    amounts: FloatArray = np.maximum(height[group] - load, 0.0)
    return amounts


def level(pools: Pools, weight: FloatArray, world: int, fixed: FloatArray | None = None) -> tuple[FloatArray, float]:
    """Shares `weight` (pools,) of each pool out among its members such that the busiest rank has as little as possible.

    `fixed` (world,) is what ranks have anyway. Returns what each row of `pools.rank` takes, and a lower bound of the
    busiest rank's load, for any way of sharing.
    """
    members = np.diff(pools.start)
    lone_pools = np.flatnonzero(members == 1)
    share = np.zeros(pools.rank.shape[0])
    share[pools.start[lone_pools]] = weight[lone_pools]
    base = np.zeros(world) if fixed is None else fixed.astype(np.float64)
    load = base + np.bincount(pools.rank, weights=share, minlength=world)
    if not load.size:
        return share, 0.0
    order = list(waves(pools, weight > 0))
    bound = 0.0
    for _ in range(_SWEEPS):
        for wave in order:
            ranks = pools.rank[wave.edge]
            load[ranks] -= share[wave.edge]
            amounts = water_fill(weight[wave.pool], wave.start, load[ranks])
            share[wave.edge] = amounts
            load[ranks] += amounts
        bound = max(bound, _bound(pools, weight, load, base))
        if load.max() <= bound * (1 + SLACK):
            return share, bound
    return _Flow(pools, share, load).settle(bound)


def _bound(pools: Pools, weight: FloatArray, load: FloatArray, base: FloatArray) -> float:
    """The best of some lower bounds: what only the ranks above a level can send, divided by the number of ranks."""
    by_load = np.argsort(-load, kind="stable")
    lowest = np.minimum.reduceat(load[pools.rank], pools.start[:-1])
    by_pool = np.argsort(-lowest, kind="stable")
    pool_sum = np.append(0.0, np.cumsum(weight[by_pool]))
    base_sum = np.append(0.0, np.cumsum(base[by_load]))
    # A little below each load, so that ranks at one level but for rounding fall into one set.
    heights = load[by_load] * (1 - SLACK / 2)
    heads = np.searchsorted(-load[by_load], -heights, side="right")
    pools_inside = np.searchsorted(-lowest[by_pool], -heights, side="right")
    return float(((base_sum[heads] + pool_sum[pools_inside]) / heads).max())


class _Flow:
    """Moves bytes between ranks that share a pool."""

    def __init__(self, pools: Pools, share: FloatArray, load: FloatArray) -> None:
        self._share, self._load = share.tolist(), load.tolist()
        self._rank = pools.rank.tolist()
        self._edges = [range(a, b) for a, b in zip(pools.start[:-1].tolist(), pools.start[1:].tolist(), strict=True)]
        self._of_rank: list[list[tuple[int, int]]] = [[] for _ in self._load]
        for pool, edges in enumerate(self._edges):
            for edge in edges:
                self._of_rank[self._rank[edge]].append((edge, pool))

    def settle(self, bound: float) -> tuple[FloatArray, float]:
        """Moves bytes until no rank is above the bound. Returns the shares and the bound.

        Where nothing can be moved away from some ranks, their mean load is the bound.
        """
        while True:
            limit = bound * (1 + SLACK / 2)
            heavy_ranks = [rank for rank, load in enumerate(self._load) if load > limit]
            if not heavy_ranks:
                return np.array(self._share), bound
            ranks = self._relieve(heavy_ranks, limit)
            if ranks is not None:
                bound = sum(self._load[rank] for rank in ranks) / len(ranks)

    def _relieve(self, over: list[int], limit: float) -> set[int] | None:
        """Moves bytes along a shortest path from a rank above the limit to one below.

        Without such a path it returns all ranks that the ranks `over` reach.
        """
        steps: dict[int, tuple[int, int, int]] = {}
        reached_ranks, queue, visited_pools = set(over), deque(over), set[int]()
        while queue:
            rank = queue.popleft()
            for edge, pool in self._of_rank[rank]:
                if pool in visited_pools or self._share[edge] <= 0:
                    continue
                visited_pools.add(pool)
                for target_edge in self._edges[pool]:
                    target = self._rank[target_edge]
                    if target in reached_ranks:
                        continue
                    reached_ranks.add(target)
                    steps[target] = (rank, edge, target_edge)
                    if self._load[target] < limit * (1 - 1e-12):
                        self._push(target, steps, limit)
                        return None
                    queue.append(target)
        return reached_ranks

    def _push(self, end: int, came: dict[int, tuple[int, int, int]], limit: float) -> None:
        path, rank = [], end
        while rank in came:
            rank, edge, target_edge = came[rank]
            path.append((edge, target_edge))
        amount = min(limit - self._load[end], self._load[rank] - limit, *(self._share[edge] for edge, _ in path))
        for edge, target_edge in path:
            self._share[edge] -= amount
            self._share[target_edge] += amount
        self._load[rank] -= amount
        self._load[end] += amount
