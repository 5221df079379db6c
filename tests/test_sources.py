"""Pools of holders, and how bytes are dealt to them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.sources import Pools, deal, pool_sets


def loads(pools: list[list[int]], items: list[tuple[int, int]], world: int) -> np.ndarray:
    """Bytes by rank when items (pool, weight) are dealt."""
    made = Pools(np.cumsum([0] + [len(p) for p in pools]), np.array([r for p in pools for r in p]))
    pool, weight = (np.array(column, dtype=np.int64) for column in zip(*items, strict=True))
    choice = deal(made, pool, weight, world)
    assert all(0 <= c < len(pools[p]) for c, p in zip(choice, pool, strict=True))
    return np.bincount([pools[p][c] for c, p in zip(choice, pool, strict=True)], weights=weight, minlength=world)


def test_equal_lists_are_one_pool():
    start, member = np.array([0, 2, 3, 5, 7, 8]), np.array([0, 2, 1, 0, 2, 1, 2, 0])
    pool, pools = pool_sets(start, member)
    assert pool.tolist() == [2, 1, 2, 3, 0]
    assert [pools.rank[a:b].tolist() for a, b in itertools.pairwise(pools.start.tolist())] == [[0], [1], [0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("pools", "items", "expected"),
    [
        ([[0, 1]], [(0, 4)] * 4, [8, 8]),
        ([[0, 1, 2, 3]], [(0, 4)] * 4, [4, 4, 4, 4]),
        ([[0, 1]], [(0, 5), (0, 4), (0, 1)], [5, 5]),
        ([[0], [0, 1]], [(0, 6), (1, 2), (1, 2), (1, 2)], [6, 6]),
        ([[0, 1], [0, 1, 2]], [(1, 3), (0, 3), (0, 3)], [3, 3, 3]),
        ([[1]], [(0, 7)], [0, 7]),
    ],
)
def test_loads_rise_to_one_level(pools, items, expected):
    assert loads(pools, items, len(expected)).tolist() == expected


def test_neighbours_share_a_source_and_far_items_do_not():
    pools = Pools(np.array([0, 4]), np.array([0, 1, 2, 3]))
    assert deal(pools, np.zeros(8, dtype=np.int64), np.full(8, 5), 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_many_different_weights_are_dealt_evenly():
    rng = random.Random(1)
    items = [(0, rng.randint(1, 10**6)) for _ in range(3000)]
    got = loads([list(range(8))], items, 8)
    assert got.max() <= 1.005 * got.mean()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_near_the_optimum_on_nested_pools(seed):
    """Data-parallel groups are nested or disjoint; the busiest rank is within a piece of the best possible."""
    rng = random.Random(seed)
    pools = [[0], [1], [2], [0, 1], [2, 3], [0, 1, 2, 3]]
    items = [(rng.randrange(len(pools)), rng.choice([1, 2, 4, 8])) for _ in range(rng.randint(1, 40))]
    total = {p: sum(w for q, w in items if set(pools[q]) <= set(p)) for p in map(tuple, pools)}
    best = max(weight / len(p) for p, weight in total.items())
    assert loads(pools, items, 4).max() <= best + max(w for _, w in items)
