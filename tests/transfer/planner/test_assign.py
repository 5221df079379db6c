"""Blocks are dealt by themselves, and still add up to nearly the best possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from map_support import Model

from weightcast.transfer.planner.assign import assign_blocks
from weightcast.transfer.planner.expected import Expected, others_load, shared_pools
from weightcast.transfer.planner.planner import make_plan
from weightcast.transfer.planner.waterfill import Pools, level


def pools_of(*ranks: list[int]) -> Pools:
    return Pools(np.cumsum([0] + [len(r) for r in ranks]), np.array([r for some in ranks for r in some]))


def test_a_block_looks_at_what_is_expected_of_the_others():
    pools, item = pools_of([0, 1]), np.zeros(1, dtype=np.int64)
    for others, chosen in (([0.0, 0.0], 0), ([5.0, 0.0], 1), ([5.0, 9.0], 0)):
        assert assign_blocks(pools, item, np.array([4]), item, np.array([others]), item).tolist() == [chosen]


def test_heavy_items_first_and_runs_in_their_order():
    pools, zeros = pools_of([0, 1]), np.zeros(5, dtype=np.int64)
    choice = assign_blocks(pools, zeros, np.array([2, 2, 2, 2, 8]), zeros, np.zeros((1, 2)), zeros[:1])
    assert choice.tolist() == [1, 1, 1, 1, 0]


def test_pools_with_one_member_count():
    pools = pools_of([1], [0, 1])
    choice = assign_blocks(
        pools,
        np.array([0, 1]),
        np.array([3, 3]),
        np.zeros(2, dtype=np.int64),
        np.zeros((1, 2)),
        np.zeros(1, dtype=np.int64),
    )
    assert choice.tolist() == [0, 0]


def test_what_does_not_come_out_even_goes_to_another_member_in_each_block():
    pools, block = pools_of([0, 1, 2]), np.repeat(np.arange(3), 4)
    choice = assign_blocks(pools, np.zeros_like(block), np.full(12, 5), block, np.zeros((3, 3)), np.arange(3))
    assert np.bincount(choice).tolist() == [4, 4, 4]


def test_blocks_with_one_box_each_take_the_ranks_in_turn():
    pools = pools_of([0, 1, 2])
    expected = Expected(np.zeros((3, 3)), np.full((3, 1), 6.0), np.ones((3, 1)))
    assert others_load(pools, expected).tolist() == [[0, 6, 6], [6, 0, 6], [6, 6, 0]]


def test_blocks_with_many_boxes_use_all_ranks():
    pools = pools_of([0, 1, 2])
    expected = Expected(np.zeros((2, 3)), np.full((2, 1), 6.0), np.full((2, 1), 100.0))
    assert others_load(pools, expected).tolist() == [[2, 2, 2], [2, 2, 2]]


def test_a_gap_that_boxes_leave_is_not_offered_to_every_block():
    pools = pools_of([0, 1, 2])
    expected = Expected(np.zeros((2, 3)), np.full((2, 1), 6.0), np.array([[1.0], [100.0]]))
    assert others_load(pools, expected).tolist() == [[4, 0, 4], [1, 6, 1]]


def random_items(rng: np.random.Generator, blocks: int, world: int) -> tuple:
    count = int(rng.integers(1, 6))
    drawn = [rng.choice(world, rng.integers(1, world + 1), replace=False) for _ in range(count)]
    ranks = sorted({tuple(sorted(some.tolist())) for some in drawn}, key=lambda some: (len(some), some))
    n = int(rng.integers(1, 200))
    sizes = rng.integers(1, 1 << int(rng.integers(1, 30)), 200 if rng.random() < 0.3 else 3)
    return (
        pools_of(*map(list, ranks)),
        rng.integers(0, len(ranks), n),
        rng.choice(sizes, n),
        rng.integers(0, blocks, n),
        rng.integers(0, 100, (blocks, world)).astype(float),
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_each_block_by_itself_gives_the_same(seed: int):
    rng = np.random.default_rng(seed)
    blocks, world = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    pools, pool, weight, block, others = random_items(rng, blocks, world)
    number = rng.integers(0, 1000, blocks)
    choice = assign_blocks(pools, pool, weight, block, others, number)
    assert (choice >= 0).all()
    assert (choice < np.diff(pools.start)[pool]).all()
    for which in range(blocks):
        own = np.flatnonzero(block == which)
        if own.size:
            one = slice(which, which + 1)
            alone = assign_blocks(pools, pool[own], weight[own], np.zeros_like(own), others[one], number[one])
            assert alone.tolist() == choice[own].tolist()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_a_block_is_level_where_pools_share_no_rank(seed: int):
    """With nothing else to look at, a block is level to within its largest item."""
    rng = np.random.default_rng(seed)
    world, items = int(rng.integers(1, 9)), int(rng.integers(1, 60))
    cuts = np.flatnonzero(rng.random(world - 1) < 0.4) + 1 if world > 1 else np.zeros(0, dtype=np.int64)
    pools = pools_of(*(ranks.tolist() for ranks in np.split(np.arange(world), cuts)))
    pool, weight = rng.integers(0, len(pools), items), rng.choice([5, 10, 13, 40], items)
    zeros = np.zeros(items, dtype=np.int64)
    choice = assign_blocks(pools, pool, weight, zeros, np.zeros((1, world)), rng.integers(0, 9, 1))
    _, best = level(pools, np.bincount(pool, weights=weight, minlength=len(pools)), world)
    busiest = np.bincount(pools.rank[pools.start[pool] + choice], weights=weight, minlength=world).max()
    assert busiest <= best + weight.max()


def test_shared_pools_are_those_with_a_choice():
    assert shared_pools(pools_of([0], [0, 1], [2], [0, 1, 2])).tolist() == [1, 3]


@pytest.mark.parametrize("model", [Model(16, 16, ep=4), Model(16, 16, pp=2, ep=4, dp=2), Model(16, 16, shards=4, dp=3)])
@pytest.mark.parametrize("instances", [1, 3])
def test_layers_add_up_to_nearly_the_best(model, instances):
    rng = np.random.default_rng(0)
    maps = [model.random_maps(rng, 8, 8) for _ in range(instances)]
    made = make_plan(model.trainer(), {f"rollout-{i}": model.instance(one) for i, one in enumerate(maps)})
    _, best = level(made.reach.pools, made.asked.sum(axis=0), made.sent.shape[1])
    o = made.plan.operations
    sends = o.take(np.flatnonzero(o.kind == 0))
    busiest = np.bincount(sends.src_rank, weights=sends.size.prod(axis=1) * 2).max()
    assert made.balanced
    assert busiest == made.sent.sum(axis=0).max()
    assert busiest <= 1.05 * best
