"""One pair whose instances differ in tensor, expert and pipeline parallelism, in dtype and in placement."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import PairLayout, Ranks, judge

from weightcast.transfer.layout.tables import Region, TensorSpec
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.topology import Hosts, Topology

LAYERS, EXPERTS, HIDDEN, INNER = 4, 6, 12, 8
SPECS = {
    "embed": TensorSpec((24, HIDDEN), "float32"),
    **{f"layers.{n}.{name}": TensorSpec((HIDDEN, HIDDEN), "float32") for n in range(LAYERS) for name in ("qkv", "o")},
    **{f"layers.{n}.norm": TensorSpec((HIDDEN,), "float32") for n in range(LAYERS)},
    **{
        f"layers.{n}.experts.{e}.{name}": TensorSpec((INNER, HIDDEN) if name == "up" else (HIDDEN, INNER), "float32")
        for n in range(LAYERS)
        for e in range(EXPERTS)
        for name in ("up", "down")
    },
}


def part(name: str, rank: int, world: int, dim: int, slot: int = -1) -> Region:
    """Shard of a tensor in ceil chunks, the last of which may be short or empty."""
    shape = SPECS[name].shape
    step = -(-shape[dim] // world)
    low, high = min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])
    offset = tuple(low if d == dim else 0 for d in range(len(shape)))
    return Region(name, offset, tuple(high - low if d == dim else n for d, n in enumerate(shape)), slot)


def whole(name: str, slot: int = -1) -> Region:
    return part(name, 0, 1, 0, slot)


def ranks_of(pipeline: int, tensor: int, maps: list[list[int]], expert_tensor: int = 1) -> Ranks:
    """Stages x tensor-parallel ranks. Of each layer's map a rank of a stage has an even run of slots, each of them cut
    `expert_tensor` ways inside."""
    world = []
    for stage in range(pipeline):
        layers = range(LAYERS * stage // pipeline, LAYERS * (stage + 1) // pipeline)
        for rank in range(tensor):
            rows = [part("embed", rank, tensor, 0)] if stage == 0 else []
            for n in layers:
                rows += [part(f"layers.{n}.qkv", rank, tensor, 0), part(f"layers.{n}.o", rank, tensor, 1)]
                rows.append(whole(f"layers.{n}.norm"))
                group, place = divmod(rank, expert_tensor)
                per_rank = len(maps[n]) // (tensor // expert_tensor)
                for slot in range(per_rank):
                    name = f"layers.{n}.experts.{maps[n][group * per_rank + slot]}"
                    rows += [
                        part(f"{name}.up", place, expert_tensor, 0, slot),
                        part(f"{name}.down", place, expert_tensor, 1, slot),
                    ]
            world.append(rows)
    return world


def placement(seed: int, slots: int) -> list[list[int]]:
    """Every expert in a slot, the others anywhere: also twice on one rank."""
    rng = random.Random(seed)
    maps = []
    for _ in range(LAYERS):
        one = [*range(EXPERTS), *(rng.randrange(EXPERTS) for _ in range(slots - EXPERTS))]
        rng.shuffle(one)
        maps.append(one)
    return maps


def casts(dtype: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec(spec.shape, dtype) for name, spec in SPECS.items() if len(spec.shape) == 2}


def pair(seed: int = 0) -> PairLayout:
    plain = [list(range(EXPERTS))] * LAYERS
    return PairLayout(
        SPECS,
        # Two copies of pipeline 2 x expert-parallel 3, with experts of one copy cut in the other.
        [*ranks_of(2, 3, plain), *ranks_of(1, 4, plain, 2)],
        {
            "tp2": ranks_of(1, 2, placement(seed, 8)),
            "tp4-ep2-etp2": ranks_of(1, 4, placement(seed + 1, 10), 2),
            "pp2-tp2": ranks_of(2, 2, placement(seed + 2, 6)),
            "pp4": ranks_of(4, 1, placement(seed + 3, 9)),
            "tp2-again": ranks_of(1, 2, placement(seed, 8)),
            "float8": ranks_of(1, 3, placement(seed + 4, 9)),
        },
        {name: casts("bfloat16") for name in ("tp2", "tp4-ep2-etp2", "pp2-tp2", "tp2-again")}
        | {"float8": casts("float8_e4m3fn")},
    )


def needed(layout: PairLayout) -> int:
    """Elements that ranks need, each once however many of their regions hold it."""
    return sum(
        len({(r.tensor, p) for r in rows for p in points(r)}) for ranks in layout.instances.values() for rows in ranks
    )


def points(region: Region) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for low, count in zip(region.offset, region.size, strict=True):
        places = [(*place, low + i) for place in places for i in range(count)]
    return places


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
def test_instances_that_differ_in_everything(relays, ranks_per_host):
    layout = pair()
    trainer, instances = layout.tables()
    hosts = Hosts.packed([len(trainer), *map(len, instances.values())], ranks_per_host)
    topology = Topology(nic_gbps=100, nvlink_gbps=900) if relays else None
    plan = plan_transfer(trainer, instances, required=list(SPECS), hosts=hosts, topology=topology)
    counts = judge(layout, plan)
    assert counts["elements"] == needed(layout)
    assert counts["copies"] > 0
    assert (counts["relays"] > 0) == relays


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans(), st.booleans())
def test_any_placements(seed, ranks_per_host, colocated, between):
    layout = pair(seed)
    trainer, instances = layout.tables()
    hosts = Hosts.packed([len(trainer), *map(len, instances.values())], ranks_per_host, colocated=colocated)
    topology = Topology(nic_gbps=100, nvlink_gbps=900, latency_us=0.01, between_instances=between)
    for options in ({}, {"hosts": hosts}, {"hosts": hosts, "topology": topology}):
        judge(layout, plan_transfer(trainer, instances, **options))
