"""Boxes are assigned such that no trainer rank sends much more than the best possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from map_support import Model

from weightcast.transfer.layout.joined import join_pair
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.proof.operations import check_plan
from weightcast.transfer.planner.assign import assign
from weightcast.transfer.planner.holders import find_sources
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.receives import bind
from weightcast.transfer.planner.topology import Hosts, Topology
from weightcast.transfer.planner.waterfill import Pools, level


def pools_of(*ranks: list[int]) -> Pools:
    return Pools(np.cumsum([0] + [len(r) for r in ranks]), np.array([r for members in ranks for r in members]))


def test_heavy_items_first_and_runs_in_their_order():
    pools, zeros = pools_of([0, 1]), np.zeros(5, dtype=np.int64)
    assert assign(pools, zeros, np.array([2, 2, 2, 2, 8]), 2).tolist() == [1, 1, 1, 1, 0]


def test_pools_with_one_member_count():
    assert assign(pools_of([1], [0, 1]), np.array([0, 1]), np.array([3, 3]), 2).tolist() == [0, 0]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_loads_are_level_where_pools_share_no_rank(seed: int):
    """To within the largest item."""
    rng = np.random.default_rng(seed)
    world, items = int(rng.integers(1, 9)), int(rng.integers(1, 60))
    cuts = np.flatnonzero(rng.random(world - 1) < 0.4) + 1 if world > 1 else np.zeros(0, dtype=np.int64)
    pools = pools_of(*(ranks.tolist() for ranks in np.split(np.arange(world), cuts)))
    pool, weight = rng.integers(0, len(pools), items), rng.choice([5, 10, 13, 40], items)
    choice = assign(pools, pool, weight, world)
    _, best = level(pools, np.bincount(pool, weights=weight, minlength=len(pools)).astype(float), world)
    busiest = np.bincount(pools.rank[pools.start[pool] + choice], weights=weight, minlength=world).max()
    assert busiest <= best + weight.max()


@pytest.mark.parametrize("model", [Model(16, 16, ep=4), Model(16, 16, pp=2, ep=4, dp=2), Model(16, 16, shards=4, dp=3)])
@pytest.mark.parametrize("instances", [1, 3])
def test_the_busiest_rank_sends_nearly_the_best(model: Model, instances: int):
    rng = np.random.default_rng(0)
    sides = {f"rollout-{i}": model.instance(model.random_maps(rng, 8, 8)) for i in range(instances)}
    plan = plan_transfer(model.trainer(), sides)
    assert sent(plan).max() <= 1.05 * least(model.trainer(), sides)


def test_maps_that_one_layer_cannot_make_up_for():
    """All redundant slots of layer 0 on one expert: only the sources of layer 1 can make up for it."""
    model = Model(layers=2, experts=4, ep=4, dp=2)
    skewed = np.array([[0, 0], [0, 1], [0, 2], [0, 3]])
    even = np.array([[0, 1], [1, 2], [2, 3], [3, 0]])
    sides = {"a": model.instance([skewed, even])}
    assert sent(plan_transfer(model.trainer(), sides)).max() <= 1.05 * least(model.trainer(), sides)


def sent(plan: TransferPlan) -> np.ndarray:
    """Bytes by trainer rank."""
    sends = plan.operations.take(plan.operations.kind == Kind.SEND)
    return np.bincount(sends.src_rank, weights=sends.size.prod(axis=1) * 2, minlength=plan.trainer.world)


def least(trainer: list, sides: dict) -> float:
    """The least bytes that the busiest rank can send, boxes cut as one likes."""
    pair = join_pair(trainer, sides)
    sources = find_sources(pair.trainer, str)
    total = np.zeros(len(sources.pools))
    for side in pair.instances:
        receives = bind(side, sources.cells, len(pair.tensors), str)
        pool = sources.pool[receives.cell]
        total += np.bincount(pool, receives.size[receives.sends].prod(axis=1) * 2, minlength=total.shape[0])
    return level(sources.pools, total, pair.trainer.world)[1]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_random_maps_on_random_hosts(seed: int):
    """Whatever the maps, hosts and network: a plan that is proved."""
    rng = np.random.default_rng(seed)
    shape = rng.choice([1, 2, 4], 4).tolist()
    model = Model(int(rng.integers(1, 4)), 8, *shape[:3], shards=int(rng.choice([1, 3])))
    ep, tp, redundant = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2])), int(rng.choice([0, 4, 8]))
    maps = [model.random_maps(rng, ep, redundant) for _ in range(int(rng.integers(1, 4)))]
    dtypes = rng.choice(["bfloat16", "float32"], len(maps)).tolist()
    sides = {f"rollout-{i}": model.instance(maps[i], tp, dtype) for i, dtype in enumerate(dtypes)}
    trainer = model.trainer()
    worlds = [len(trainer), *map(len, sides.values())]
    hosts = Hosts.packed(worlds, int(rng.integers(1, 4)), colocated=rng.random() < 0.6)
    topology = Topology(nic_gbps=1.0, nvlink_gbps=30.0) if rng.random() < 0.3 else None
    for terms in ({}, {"hosts": hosts, "topology": topology}):
        check_plan(plan_transfer(trainer, sides, check=False, **terms), trainer, sides)
