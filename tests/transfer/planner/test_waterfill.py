"""Levels of load against the exact optimum, which is the largest mean that any set of ranks cannot avoid."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.planner import waterfill as balance
from weightcast.transfer.planner.waterfill import SLACK, Pools, level, water_fill


def pools_of(sets: list[list[int]]) -> Pools:
    return Pools(np.cumsum([0] + [len(s) for s in sets]), np.array([r for s in sets for r in s], dtype=np.int64))


def optimum(sets: list[list[int]], weight: list[float], world: int, fixed: list[float]) -> float:
    """By Hall's theorem for flows: max over all sets of ranks of what only they can carry, by head."""
    return max(
        (sum(w for s, w in zip(sets, weight, strict=True) if set(s) <= set(ranks)) + sum(fixed[r] for r in ranks)) / n
        for n in range(1, world + 1)
        for ranks in itertools.combinations(range(world), n)
    )


def random_sets(rng: random.Random, world: int) -> list[list[int]]:
    """Overlapping, not nested sets."""
    return [sorted(rng.sample(range(world), rng.randint(1, world))) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize(
    ("sets", "weight", "fixed", "loads"),
    [
        ([[0, 1]], [8], [0, 0], [4, 4]),
        ([[0, 1]], [2], [5, 1], [5, 3]),
        ([[0], [0, 1]], [6, 6], [0, 0], [6, 6]),
        ([[0, 1], [1, 2]], [9, 3], [0, 0, 0], [4.5, 4.5, 3]),
        ([[0, 1], [1, 2], [2, 3]], [12, 0, 0], [0, 0, 0, 0], [6, 6, 0, 0]),
        ([[0, 1], [1, 2], [2, 3]], [12, 2, 2], [0, 0, 0, 0], [6, 6, 2, 2]),
        ([[2]], [7], [0, 0, 0], [0, 0, 7]),
        ([], [], [3, 0], [3, 0]),
    ],
)
def test_levels(sets, weight, fixed, loads):
    share, bound = level(pools_of(sets), np.array(weight, dtype=float), len(fixed), np.array(fixed))
    got = np.array(fixed) + np.bincount([r for s in sets for r in s], weights=share, minlength=len(fixed))
    assert got == pytest.approx(loads, rel=2 * SLACK)
    assert bound == pytest.approx(max(loads), rel=SLACK)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 12]))
def test_the_busiest_rank_is_the_best_possible(seed, sweeps):
    """By water-filling with a proof, and by the flow alone."""
    rng = random.Random(seed)
    world = rng.randint(1, 7)
    sets = random_sets(rng, world)
    weight = [rng.choice([0, 1, 5, rng.random() * 100]) for _ in sets]
    fixed = [rng.choice([0, 0, rng.random() * 50]) for _ in range(world)]
    best = optimum(sets, weight, world, fixed)
    if sweeps:
        share, bound = level(pools_of(sets), np.array(weight, dtype=float), world, np.array(fixed, dtype=float))
    else:
        start = np.zeros(sum(map(len, sets)))
        start[np.cumsum([0, *map(len, sets)])[:-1]] = weight
        load = np.array(fixed, dtype=float)
        np.add.at(load, [s[0] for s in sets], weight)
        share, bound = balance._Flow(pools_of(sets), start, load).settle(load.mean())
    member = [r for s in sets for r in s]
    of = [i for i, s in enumerate(sets) for _ in s]
    got = np.array(fixed) + np.bincount(member, weights=share, minlength=world)
    assert (share >= 0).all()
    assert np.bincount(of, weights=share, minlength=len(sets)) == pytest.approx(weight)
    assert got.max() <= best * (1 + 1.5 * SLACK) + 1e-9
    assert bound <= best * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("world", [20, 60])
def test_a_long_chain_of_pools_needs_the_flow(world):
    """Each pool shares a rank with the next and one end has more than its share: sweeps pass on a little at a time."""
    sets = [[i, i + 1] for i in range(world - 1)]
    weight, fixed = np.full(world - 1, 20.0 * world), np.zeros(world)
    fixed[0] = 5.0 * world
    share, bound = level(pools_of(sets), weight, world, fixed)
    load = fixed + np.bincount([r for s in sets for r in s], weights=share, minlength=world)
    best = (weight.sum() + fixed.sum()) / world
    assert load.max() <= best * (1 + SLACK)
    assert bound <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("budget", "start", "load", "taken"),
    [
        ([4.0], [0, 2], [0.0, 2.0], [3.0, 1.0]),
        ([1.0], [0, 2], [0.0, 2.0], [1.0, 0.0]),
        ([1.0, 6.0], [0, 1, 4], [9.0, 5.0, 1.0, 3.0], [1.0, 0.0, 4.0, 2.0]),
        ([0.0, 2.0], [0, 2, 4], [1.0, 2.0, 3.0, 3.0], [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_water_fill(budget, start, load, taken):
    assert water_fill(np.array(budget), np.array(start), np.array(load)).tolist() == taken
