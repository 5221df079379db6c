"""Chains and trees of relays, same-host sources, and that the cost model never finds them slower than direct sends."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_support import judge, random_pair, tables_of

from weightcast.offline.simulate import simulate
from weightcast.transfer.boxes.algebra import intersect
from weightcast.transfer.errors import LayoutError, PlanError
from weightcast.transfer.layout.tables import Region, TensorSpec
from weightcast.transfer.plan import stages
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.proof.operations import check_plan
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.relay_trees import DIRECT, RelayGroups, depths
from weightcast.transfer.planner.topology import Hosts, Link, Topology, link_bytes, link_seconds, read_topology

SPECS = {f"w{i}": TensorSpec((64, 64), "bfloat16") for i in range(8)}
WHOLE = [Region(name, (0, 0), (64, 64)) for name in SPECS]
BOX = 64 * 64 * 2


def plan_of(trainer: int, instances: list[int], hosts: Hosts | None, topology: Topology | None) -> TransferPlan:
    """All ranks hold all tensors."""
    return plan_transfer(
        tables_of(SPECS, [WHOLE] * trainer),
        {f"i{i}": tables_of(SPECS, [WHOLE] * world) for i, world in enumerate(instances)},
        hosts=hosts,
        topology=topology,
    )


def loads(plan: TransferPlan, hosts: Hosts) -> np.ndarray:
    o = plan.operations
    nbytes = o.size.prod(axis=1) * 2
    return link_bytes(hosts, hosts.number(o.src_party, o.src_rank), hosts.number(o.dst_party, o.dst_rank), nbytes)


def seconds(plan: TransferPlan, hosts: Hosts, topology: Topology) -> float:
    return float(link_seconds(topology, hosts, loads(plan, hosts)).max())


def test_without_a_topology_there_are_no_relays():
    for hosts in (None, Hosts.packed([2, 4], 8)):
        assert (plan_of(2, [4], hosts, None).operations.kind == Kind.SEND).all()


def test_inside_a_host_each_box_comes_over_one_nic_and_goes_on_over_nvlink():
    hosts = Hosts.packed([1, 4], 4)
    plan = plan_of(1, [4], hosts, Topology(nic_gbps=400, nvlink_gbps=3600))
    got = loads(plan, hosts)
    assert got[Link.NIC_OUT].tolist() == [8 * BOX, 0, 0, 0, 0]
    assert got[Link.NIC_IN].tolist() == [0, 2 * BOX, 2 * BOX, 2 * BOX, 2 * BOX]
    assert got[Link.NVLINK_IN].tolist() == [0, 6 * BOX, 6 * BOX, 6 * BOX, 6 * BOX]
    assert got[Link.NVLINK_OUT].max() <= 7 * BOX


def test_a_slow_nvlink_is_not_used():
    hosts = Hosts.packed([4, 4], 4)
    plan = plan_of(4, [4], hosts, Topology(nic_gbps=400, nvlink_gbps=100))
    assert (plan.operations.kind == Kind.SEND).all()


def test_instances_pass_on_what_one_trainer_rank_would_send_many_times():
    hosts = Hosts.packed([1, 1, 1, 1], 1)
    topology = Topology(nic_gbps=400)
    plan = plan_of(1, [1, 1, 1], hosts, topology)
    got = loads(plan, hosts)
    assert got[Link.NIC_OUT, 0] == 8 * BOX
    assert got[Link.NIC_IN].tolist() == [0, 8 * BOX, 8 * BOX, 8 * BOX]
    assert got[Link.NIC_OUT, 1:].max() <= 8 * BOX
    direct = plan_of(1, [1, 1, 1], hosts, None)
    assert seconds(direct, hosts, topology) == pytest.approx(3 * seconds(plan, hosts, topology))


def test_relays_between_instances_can_be_forbidden():
    hosts = Hosts.packed([1, 2, 2], 1)
    plan = plan_of(1, [2, 2], hosts, Topology(nic_gbps=400, between_instances=False))
    o = plan.operations
    assert (o.src_party[o.kind == Kind.RELAY] == o.dst_party[o.kind == Kind.RELAY]).all()
    assert (o.kind == Kind.RELAY).sum() == 16


def test_enough_trainer_ranks_need_no_relay():
    hosts = Hosts.packed([4, 1, 1], 1)
    assert (plan_of(4, [1, 1], hosts, Topology(nic_gbps=400)).operations.kind == Kind.SEND).all()


def test_a_long_chain_gives_way_to_a_tree_when_hops_cost():
    """32 receivers: a chain has 32 hops, a tree of two branches 6, but its inner ranks send a box twice."""
    hosts = Hosts.packed([1, *[1] * 32], 1)
    plans = {
        latency: plan_of(1, [1] * 32, hosts, Topology(nic_gbps=400, latency_us=latency)) for latency in (0, 0.05, 1e6)
    }
    sent = [loads(plan, hosts)[Link.NIC_OUT] for plan in plans.values()]
    assert [s[0] for s in sent] == [8 * BOX, 8 * BOX, 8 * 32 * BOX]
    assert [(plan.operations.kind == Kind.RELAY).any() for plan in plans.values()] == [True, True, False]
    branches = [
        np.unique(plan.operations.src_party[plan.operations.tensor == 3], return_counts=True)[1].max()
        for plan in plans.values()
    ]
    assert branches == [1, 2, 32]
    # Inner ranks of one tree are leaves of the next, so that together the trees send no more than they receive.
    assert sent[1][1:].max() <= 9 * BOX


def test_what_a_trainer_rank_on_the_host_holds_comes_from_it():
    hosts = Hosts.by_name(["a", "b"], [["b", "a"], ["c"]])
    o = plan_of(2, [2, 1], hosts, None).operations
    first = o.dst_party == 1
    assert (o.src_rank[first] == 1 - o.dst_rank[first]).all()
    # What is left goes to whoever has less; both have the same, so half to each.
    assert np.bincount(o.src_rank[~first]).tolist() == [4, 4]


def test_equal_instances_have_different_sources():
    o = plan_of(4, [1, 1, 1, 1], None, None).operations
    for tensor in np.unique(o.tensor).tolist():
        assert sorted(o.src_rank[o.tensor == tensor].tolist()) == [0, 1, 2, 3]


def test_chains_hang_on_what_came_from_the_same_host():
    hosts = Hosts.by_name(["a"], [["a"], ["b"], ["c"]])
    o = plan_of(1, [1, 1, 1], hosts, Topology(nic_gbps=400)).operations
    sent = o.kind == Kind.SEND
    assert o.dst_party[sent].tolist() == [1] * 8
    assert (o.src_party[~sent] != 0).all()


@pytest.mark.parametrize("fan_out", [1, 2, 3])
@pytest.mark.parametrize("alike", [1, 2, 3, 7, 16])
def test_trees_have_one_root_and_at_most_so_many_branches(fan_out, alike):
    groups = 5
    rank = np.tile(np.arange(alike), groups)
    key = np.repeat(np.arange(groups), alike)
    near = np.zeros(len(rank), dtype=bool)
    for host, shape in ((np.zeros(alike, dtype=int), (fan_out, 0)), (np.arange(alike), (0, fan_out))):
        parent = RelayGroups([key], rank, host, np.full(len(rank), 8), near).parents(*shape)
        assert (parent == DIRECT).sum() == groups
        passed = np.flatnonzero(parent != DIRECT)
        assert (key[parent[passed]] == key[passed]).all()
        assert np.bincount(parent[passed], minlength=1).max(initial=0) <= fan_out
        deepest = alike if fan_out == 1 else next(d for d in range(1, 9) if sum(fan_out**i for i in range(d)) >= alike)
        assert depths(parent).max() == deepest


def test_depths():
    assert depths(np.array([DIRECT, 0, 1, 2, DIRECT, 4, 4])).tolist() == [1, 2, 3, 4, 1, 2, 2]
    assert depths(np.array([], dtype=np.int64)).tolist() == []


def random_hosts(rng: random.Random, worlds: list[int]) -> Hosts:
    if rng.random() < 0.5:
        return Hosts.packed(worlds, rng.randint(1, 4), colocated=rng.random() < 0.5)
    names = [[rng.choice(["", "a", "b", "c"]) for _ in range(world)] for world in worlds]
    return Hosts.by_name(names[0], names[1:])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
@example(2173)  # Sources dealt to instances one after the other are slower than dealt together, by blocks.
@example(1755)  # Copies leave a rank's memory no time for passing on what it receives.
@example(197)  # Ranks on the trainer's hosts pass on what they received over NVLink.
def test_random_layouts_end_up_right_between_the_bound_and_direct_sends(seed):
    rng = random.Random(seed)
    pair = random_pair(seed)
    trainer, instances = pair.tables()
    hosts = random_hosts(rng, [len(trainer), *map(len, instances.values())])
    topology = Topology(
        nic_gbps=rng.choice([1, 10]), nvlink_gbps=rng.choice([1, 30]), nic_per_host=rng.random() < 0.3,
        latency_us=rng.choice([0, 0.01]), between_instances=rng.random() < 0.7, memory_gbps=rng.choice([4, 1000]),
    )  # fmt: skip
    plan = plan_transfer(trainer, instances, hosts=hosts, topology=topology)
    direct = plan_transfer(trainer, instances, hosts=hosts)
    assert judge(pair, plan)["elements"] == judge(pair, direct)["elements"]
    relayed, sent = (simulate(made, trainer, instances, hosts, topology) for made in (plan, direct))
    assert relayed.total <= sent.total * (1 + 1e-9)
    assert relayed.bounds[0].seconds <= relayed.total * (1 + 1e-9)


def chain() -> tuple[TransferPlan, tuple]:
    tables = tables_of(SPECS, [WHOLE]), {f"i{i}": tables_of(SPECS, [WHOLE]) for i in range(3)}
    return plan_transfer(*tables, hosts=Hosts.packed([1, 1, 1, 1], 1), topology=Topology(nic_gbps=400)), tables


def test_relays_that_wait_for_each_other_are_seen():
    plan, tables = chain()
    check_plan(plan, *tables)
    o = plan.operations
    root = np.flatnonzero((o.kind == Kind.SEND) & (o.tensor == 0))[0]
    last = next(
        row for row in np.flatnonzero(o.tensor == 0)
        if not ((o.tensor == 0) & (o.kind == Kind.RELAY) & (o.src_party == o.dst_party[row])).any()
    )  # fmt: skip
    o.kind[root], o.src_party[root], o.src_rank[root] = Kind.RELAY, o.dst_party[last], 0
    with pytest.raises(PlanError, match=r"tensor 'w0', i. rank 0 region 0: the relay of .* waits for a relay that"):
        check_plan(plan, *tables)


def test_hosts_of_other_sides_are_refused():
    with pytest.raises(
        LayoutError, match=r"hosts are given for \[1, 4\] ranks \(trainer, instances\), but .* \[1, 3\]"
    ):
        plan_of(1, [3], Hosts.packed([1, 4], 4), None)


def test_topologies_are_read():
    assert read_topology(b"nic_gbps = 400\nnic_per_host = true\nranks_per_host = 8\n") == Topology(
        400, nic_per_host=True, ranks_per_host=8
    )
    assert read_topology(b'{"nic_gbps": 50.5, "latency_us": 3}') == Topology(50.5, latency_us=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvlink_gbps = 3", "topology: nic_gbps is missing"),
        ("nic_gbps = 0", "nic_gbps is 0, expected a number from 1e-06 to 1e.09$"),
        ("nic_gbps = nan", "nic_gbps is nan, expected a number from"),
        ("nic_gbps = inf", "nic_gbps is inf, expected a number from"),
        ("nic_gbps = 'fast'", "nic_gbps is 'fast', expected a number from"),
        ("nic_gbps = true", "nic_gbps is True, expected a number from"),
        ("nic_gbps = 1\nranks_per_host = 1.5", "ranks_per_host is 1.5, expected an integer from 1 to"),
        ("nic_gbps = 1\nranks_per_host = 0", "ranks_per_host is 0, expected an integer from 1 to"),
        ("nic_gbps = 1\nlatency_us = -1", "latency_us is -1, expected a number from 0 to"),
        ("nic_gbps = 5e-324", "nic_gbps is 5e-324, expected a number from 1e-06 to 1e.09"),
        ("nic_gbps = 1\nnvlink_gbps = 1e300", "nvlink_gbps is 1e.300, expected a number from 1e-06 to 1e.09, or inf"),
        ('{"nic_gbps": 1%s}' % ("0" * 400), "nic_gbps is of 1329 bits, expected a number from"),
        ("nic_gbps = 0x%s" % ("f" * 5000), "nic_gbps is of 20000 bits, expected a number from"),
        (
            '{"nic_gbps": 1, "latency_us": 1%s}' % ("0" * 400),
            "latency_us is of 1329 bits, expected a number from 0 to 1e.09",
        ),
        ("nic_gbps = 1\nlatency_us = 1e308", "latency_us is 1e.308, expected a number from 0 to 1e.09"),
        ("nic_gbps = 1\nranks_per_host = 9999999999999999999999", "ranks_per_host is 9{22}, expected an integer"),
        ('{"nic_gbps": 4, "nic_gbps": 5}', "key 'nic_gbps' occurs twice in one object"),
        ("nic_gbps = {%s = 1, %s = 2}" % (("x" * 5000,) * 2), r"neither JSON nor TOML: .{0,160}$"),
        ("nic_gbs = 1", "nic_gbs is not known; known are nic_gbps"),
        ("nic_gbps", "neither JSON nor TOML"),
        ("{nic", "neither JSON nor TOML"),
    ],
)
def test_faults_of_a_topology(text, message):
    with pytest.raises(LayoutError, match=message):
        read_topology(text.encode())


def test_a_topology_made_in_code_is_checked_too():
    with pytest.raises(LayoutError, match="nic_gbps is 0, expected a number from 1e-06"):
        plan_of(1, [2], Hosts.packed([1, 2], 1), Topology(nic_gbps=0))


def test_the_trainers_world_costs_nothing_where_hops_are_counted(monkeypatch):
    """Tables are as large as the keys of regions, and only ranks of instances pass boxes on."""
    plan, _ = chain()
    keys = []

    def spy(left, right):
        keys.extend(int(key.max()) for key, _, _ in (left, right))
        return intersect(left, right)

    monkeypatch.setattr(stages, "intersect", spy)
    trainer, *instances = plan.parties
    large = replace(plan, parties=(replace(trainer, fingerprints=trainer.fingerprints * 100_000), *instances))
    assert np.array_equal(stages.hops(large), stages.hops(plan))
    assert keys[:2] == keys[2:]
