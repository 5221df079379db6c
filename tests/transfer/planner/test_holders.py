"""Pools of holders, and how bytes are dealt to them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.boxes.slices import between_slices, boxes_of_runs
from weightcast.transfer.planner.assign import assign, assign_boxes
from weightcast.transfer.planner.holders import pool_sets
from weightcast.transfer.planner.locality import same_host_first
from weightcast.transfer.planner.waterfill import Pools


def loads(pools: list[list[int]], items: list[tuple[int, int]], world: int) -> np.ndarray:
    """Bytes by rank when items (pool, weight) are dealt."""
    made = Pools(np.cumsum([0] + [len(p) for p in pools]), np.array([r for p in pools for r in p]))
    pool, weight = (np.array(column, dtype=np.int64) for column in zip(*items, strict=True))
    choice = assign(made, pool, weight, world)
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
    assert assign(pools, np.zeros(8, dtype=np.int64), np.full(8, 5), 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


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


def sent_by_rank(pools: list[list[int]], items: list[tuple[int, tuple[int, ...]]], world: int) -> np.ndarray:
    """Elements by rank when boxes (pool, size) are dealt, and cut where need be; the parts of a box tile it."""
    made = Pools(np.cumsum([0] + [len(p) for p in pools]), np.array([r for p in pools for r in p]))
    pool, size = np.array([p for p, _ in items]), np.array([s for _, s in items])
    offset = np.arange(size.size).reshape(size.shape)
    dealt = assign_boxes(made, pool, (offset, size), np.ones(len(items), dtype=np.int64), world)
    assert (np.diff(dealt.item) >= 0).all()
    loads = np.zeros(world)
    for i, (p, extent) in enumerate(items):
        parts = np.flatnonzero(dealt.item == i)
        whole = np.zeros(extent, dtype=int)
        for row in parts:
            low = dealt.offset[row] - offset[i]
            whole[tuple(slice(a, a + n) for a, n in zip(low, dealt.size[row], strict=True))] += 1
            loads[pools[p][dealt.choice[row]]] += dealt.size[row].prod()
        assert (whole == 1).all()
        # A part is at most two boxes in each dimension but the first, whose slices are whole but for its ends.
        assert len(parts) <= len(pools[p]) * (2 * (np.array(extent) > 1).sum() - 1)
    return loads


@pytest.mark.parametrize(
    ("pools", "items", "expected"),
    [
        ([[0, 1]], [(0, (8, 4))], [16, 16]),
        ([[0, 1, 2, 3]], [(0, (100, 2)), (0, (100, 2)), (0, (100, 2))], [150, 150, 150, 150]),
        ([[0], [0, 1]], [(0, (10, 1)), (1, (30, 1))], [20, 20]),
        ([[0, 1]], [(0, (8, 4)), (0, (8, 4))], [32, 32]),
    ],
)
def test_boxes_are_cut_between_holders(pools, items, expected):
    assert sent_by_rank(pools, items, len(expected)).tolist() == expected


@pytest.mark.parametrize(
    ("size", "holders"),
    [((64, 1000), 100), ((256, 40, 40), 200), ((384, 70), 256), ((20, 20, 20), 12), ((63, 63), 40), ((3, 1000), 2)],
)
def test_a_box_is_cut_as_fine_as_balance_needs(size, holders):
    """Whatever dimension comes first: slices of one that are much of a share are themselves cut."""
    got = sent_by_rank([list(range(holders))], [(0, size)], holders)
    assert got.max() <= 1.05 * got.mean()


def test_boxes_of_published_size_are_cut_fine_too():
    for size, holders in (((256, 4096, 4096), 200), ((64, 1_000_000), 100), ((384, 7168), 256), ((1, 5_000_000), 3)):
        pools = Pools(np.array([0, holders]), np.arange(holders))
        boxes = np.zeros((1, len(size)), dtype=np.int64), np.array([size])
        dealt = assign_boxes(pools, np.zeros(1, dtype=np.int64), boxes, np.full(1, 2), holders)
        sent = np.bincount(dealt.choice, weights=dealt.size.prod(axis=1), minlength=holders)
        assert sent.sum() == np.prod(size)
        assert sent.max() <= 1.05 * sent.mean()
        # Each part is at most three boxes, each of them one run of memory.
        for part in dealt.size.tolist():
            cut = next(dim for dim, extent in enumerate(part) if extent > 1)
            assert part[cut + 1 :] == list(size[cut + 1 :])
        assert np.bincount(dealt.choice).max() <= 3


def test_cuts_lie_between_slices_where_these_are_fine_enough():
    """Ten matrices of 7168 rows among 31 ranks, 2312.3 rows for each: no part begins or ends inside a row."""
    pools = Pools(np.array([0, 31]), np.arange(31))
    boxes = np.zeros((10, 2), dtype=np.int64), np.array([(7168, 2048)] * 10)
    dealt = assign_boxes(pools, np.zeros(10, dtype=np.int64), boxes, np.full(10, 2), 31)
    assert (dealt.size[:, 1] == 2048).all()
    assert len(dealt.size) <= 10 + 30


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_runs_are_tiled_by_boxes_in_their_order(seed):
    rng = random.Random(seed)
    size = np.array([[rng.randint(1, 6) for _ in range(3)] for _ in range(4)])
    volume = size.prod(axis=1)
    slack = np.array([rng.random() * 20 for _ in volume])
    places = sorted(rng.random() for _ in range(5))
    exact = [np.array(places) * volume[i] for i in range(4)]
    cuts = [between_slices(exact[i], size[[i] * 5], slack[[i] * 5]) for i in range(4)]
    for i in range(4):
        assert (np.diff(cuts[i]) >= 0).all()
        assert (np.abs(cuts[i] - exact[i]) <= np.maximum(slack[i], 0.5)).all()
    ends = [np.clip([0, *cut, n], 0, n) for cut, n in zip(cuts, volume, strict=True)]
    runs = [(i, a, b) for i, end in enumerate(ends) for a, b in itertools.pairwise(end.tolist()) if b > a]
    of, begin, end = np.array(runs).T
    run, offset, extent = boxes_of_runs(size[of], begin, end)
    assert (np.diff(run) >= 0).all()
    for i, (a, b) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        number = np.arange(volume[of[i]]).reshape(size[of[i]])
        boxes = zip(offset[run == i].tolist(), extent[run == i].tolist(), strict=True)
        got = [number[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel() for box in boxes]
        assert np.concatenate(got).tolist() == list(range(a, b))
        assert len(got) <= 5


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_busiest_rank_sends_at_most_5_percent_more_than_the_best_possible(seed):
    """For overlapping, not nested sets of holders, with boxes of which one is more than the share."""
    rng = random.Random(seed)
    world = rng.randint(1, 7)
    pools = sorted({tuple(sorted(rng.sample(range(world), rng.randint(1, world)))) for _ in range(rng.randint(1, 8))})
    items = [
        (rng.randrange(len(pools)), (rng.choice([64, 100, 256, 999]), rng.choice([1, 1, 2, 8])))
        for _ in range(rng.randint(1, 30))
    ]
    best = max(
        sum(int(np.prod(s)) for p, s in items if set(pools[p]) <= set(ranks)) / n
        for n in range(1, world + 1)
        for ranks in itertools.combinations(range(world), n)
    )
    assert sent_by_rank([list(p) for p in pools], items, world).max() <= 1.05 * best


def test_same_host_holders_come_first():
    pools = Pools(np.array([0, 4, 6]), np.array([0, 1, 2, 3, 0, 2]))
    host = np.array([7, 7, 8, 9])
    narrowed = same_host_first(pools, np.array([0, 0, 0, 0, 1, 1]), np.array([7, 8, 9, 5, 8, 9]), host)
    made = []
    for item in range(6):
        start = narrowed.pools.start[narrowed.pool[item] : narrowed.pool[item] + 2]
        ranks = narrowed.pools.rank[start[0] : start[1]].tolist()
        old = narrowed.member[narrowed.first[item] :][: len(ranks)].tolist()
        made.append((ranks, old))
    assert made == [
        ([0, 1], [0, 1]),
        ([2], [2]),
        ([3], [3]),
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([2], [1]),
        ([0, 2], [0, 1]),
    ]
