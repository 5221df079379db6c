"""Predictions on literal topologies, the limits of machines, shapes of published models, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from plan_support import tables_of

from weightcast.cli import main
from weightcast.offline.chart import draw
from weightcast.offline.models import MODELS, instance_tables, random_placement, read_instances, trainer_tables
from weightcast.offline.simulate import Simulation, simulate
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.tables import NO_SLOT, Region, TensorSpec
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.topology import Hosts, Link, Topology

CASES = Path(__file__).parent.parent / "cases"
GB = 10**9
W = {"w": TensorSpec((4, GB // 4), "uint8")}
ALL = Region("w", (0, 0), (4, GB // 4))
CLUSTER = Topology(nic_gbps=400, nvlink_gbps=3600, memory_gbps=26800)


def row(i: int) -> Region:
    return Region("w", (i, 0), (1, GB // 4))


def play(trainer, instances, hosts: Hosts, topology: Topology, *, relays: bool = True) -> Simulation:
    sides = tables_of(W, trainer), {f"i{i}": tables_of(W, ranks) for i, ranks in enumerate(instances)}
    plan = plan_transfer(*sides, hosts=hosts, topology=topology if relays else None)
    return simulate(plan, *sides, hosts, topology)


def test_a_rank_waits_for_the_link_that_is_busy_longest():
    """1 GB at 400 Gb/s is 0.02 s; the copy reads and writes 1 GB beside the GB that came in."""
    made = play([[ALL]], [[[ALL, ALL]]], Hosts.packed([1, 1], 1), CLUSTER)
    assert made.labels == ("trainer 0", "i0 0")
    assert made.seconds[:, 0].tolist() == pytest.approx([0.02, 0, 0, 0, 8 / 26800])
    assert made.seconds[:, 1].tolist() == pytest.approx([0, 0.02, 0, 0, 24 / 26800])
    assert (made.total, made.ratio, made.hops) == (pytest.approx(0.02), pytest.approx(1), 1)
    slow = play([[ALL]], [[[ALL, ALL]]], Hosts.packed([1, 1], 1), Topology(nic_gbps=400, memory_gbps=800))
    assert (slow.labels[slow.bottleneck], slow.link) == ("i0 0", "memory")
    assert (slow.total, slow.ratio) == (pytest.approx(0.03), pytest.approx(1))


def test_one_host_is_nvlink():
    made = play([[ALL]], [[[ALL]]], Hosts.packed([1, 1], 2, colocated=True), CLUSTER)
    assert made.seconds[Link.NVLINK_OUT].tolist() == pytest.approx([8 / 3600, 0])
    assert not made.seconds[Link.NIC_OUT].any()


def test_ranks_that_share_a_nic():
    hosts = Hosts.packed([1, 2], 2)
    own, shared = (
        play([[ALL]], [[[row(0), row(1)], [row(2), row(3)]]], hosts, Topology(nic_gbps=400, nic_per_host=per_host))
        for per_host in (False, True)
    )
    assert own.seconds[Link.NIC_IN].tolist() == pytest.approx([0, 0.01, 0.01])
    assert shared.seconds[Link.NIC_IN].tolist() == pytest.approx([0, 0.02, 0.02])


def test_relays_come_near_the_bound_that_direct_sends_are_far_from():
    """Eight ranks of a host need the same GB: over eight NICs it is there in an eighth of the time."""
    hosts = Hosts.packed([8, 8], 8)
    rows = [Region("w", (i % 4, i // 4 * (GB // 8)), (1, GB // 8)) for i in range(8)]
    direct, relayed = (play([rows] * 8, [[rows] * 8], hosts, CLUSTER, relays=relays) for relays in (False, True))
    assert (direct.total, direct.ratio) == (pytest.approx(0.02), pytest.approx(8))
    assert (relayed.total, relayed.ratio) == (pytest.approx(0.0025), pytest.approx(1))
    assert (direct.hops, relayed.hops) == (1, 8)


def test_latency_is_counted_for_each_hop():
    hosts = Hosts.packed([1, 1, 1, 1], 1)
    made = play([[ALL]], [[[ALL]]] * 3, hosts, Topology(nic_gbps=400, latency_us=100))
    assert made.hops == 3
    assert sorted(made.rank_seconds.tolist()) == pytest.approx([0.0201, 0.0201, 0.0202, 0.0203])


def test_the_bounds():
    """Two trainer ranks hold half each, instance ranks on one host need halves, a rank elsewhere needs all."""
    top, bottom = [row(0), row(1)], [row(2), row(3)]
    hosts = Hosts.by_name(["t0", "t1"], [["h", "h"], ["k"]])
    made = play([top, bottom], [[top, bottom], [[ALL]]], hosts, CLUSTER)
    bounds = {bound.reason: bound.seconds for bound in made.bounds}
    assert bounds == {
        "what one host needs once, over its NICs": pytest.approx(0.02),
        "what one rank needs, over all its links": pytest.approx(0.02),
        "one copy of all, over the NICs of the trainer's hosts": pytest.approx(0.01),
        "what one rank writes to its memory": pytest.approx(8 / 26800),
    }
    assert made.bounds[0].seconds == max(bounds.values())


@pytest.mark.parametrize("per_host", [False, True])
def test_a_rank_on_the_trainers_host_sends_for_it(per_host):
    """What rank 0 got over NVLink it passes on by its own NIC while the trainer sends the rest, if it has one."""
    specs = {name: TensorSpec((GB,), "uint8") for name in "ab"}
    a, b = (Region(name, (0,), (GB,)) for name in "ab")
    sides = tables_of(specs, [[a, b]]), {"i": tables_of(specs, [[a], [a], [b]])}
    hosts = Hosts.by_name(["h"], [["h", "k", "m"]])
    topology = Topology(nic_gbps=400, nvlink_gbps=40000, nic_per_host=per_host)
    made = simulate(plan_transfer(*sides, hosts=hosts, topology=topology), *sides, hosts, topology)
    least = 0.04 if per_host else 0.02
    assert made.total == pytest.approx(least)
    bounds = {bound.reason: bound.seconds for bound in made.bounds}
    assert bounds["one copy of all, over the NICs of the trainer's hosts"] == pytest.approx(least)


def test_what_the_host_holds_is_in_no_bound_of_nics():
    hosts = Hosts.by_name(["a", "b"], [["a"]])
    made = play([[row(0), row(1), row(2)], [row(3)]], [[[ALL]]], hosts, CLUSTER)
    assert made.bounds[0].seconds == pytest.approx(0.005)
    assert made.total == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-30b-a3b", 30.532), ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0), ("kimi-k2", 1026.4)],
)
def test_shapes_have_the_published_number_of_parameters(model, billions):
    shape = MODELS[model]
    (table,) = instance_tables(shape, 1, random_placement(shape, 0, 0))
    assert table.size.prod(axis=1).sum() / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("trainer", ["pp4xep8", "pp3xep2xdp2", "fsdp5"])
@pytest.mark.parametrize("dense", ["replicated", "tensor", "sharded"])
def test_layouts_of_shapes_are_complete(trainer, dense):
    model = MODELS["qwen3-30b-a3b"]
    few = type(model)(**{name: getattr(model, name) for name in model.__slots__} | {"moe_layers": 4, "experts": 16})
    placement = random_placement(few, 8, 1)
    instance = instance_tables(few, 6, placement, dense, "float8_e4m3fn")
    plan = plan_transfer(trainer_tables(few, trainer), {"i": instance})
    assert len(plan.tensors) == 2 + 4 * (2 + 6 + 1 + 16 * 3) + 1
    routed = np.concatenate([table.slot for table in instance])
    assert (routed != NO_SLOT).sum() == 4 * 24 * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: trainer_tables(m, "pp8ep32"), "'pp8ep32' is not of the form pp8xep32"),
        (lambda m: trainer_tables(m, "pp8xep5"), "128 experts must divide evenly among 5 ranks"),
        (lambda m: trainer_tables(m, "pp49xep1"), "48 layers make at most as many stages"),
        (lambda m: instance_tables(m, 5, random_placement(m, 0, 0)), "128 slots a layer do not divide evenly among 5"),
        (lambda m: instance_tables(m, 1, random_placement(m, 0, 0), "half"), "'half' are none of replicated"),
        (lambda m: read_instances("8"), "'8' are not of the form 8x16"),
    ],
)
def test_shapes_that_do_not_fit(call, message):
    with pytest.raises(LayoutError, match=message):
        call(MODELS["qwen3-30b-a3b"])


@pytest.fixture
def topology(tmp_path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text("nic_gbps = 400\nnvlink_gbps = 3600\nmemory_gbps = 26800\nranks_per_host = 8\n")
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instances", "dtype", "limit"),
    [
        ("1x128", "bfloat16", 0.32),
        ("8x16", "bfloat16", 2.57),
        ("1x128", "float8_e4m3fn", 0.16),
        ("8x16", "float8_e4m3fn", 1.285),
    ],
)
def test_the_limits_of_machines_for_a_trillion_parameters(instances, dtype, limit, topology, capsys):
    """256 trainer ranks, NICs of 400 Gb/s, 128 receivers: all is bound by what the receivers' NICs take."""
    options = ("--trainer", "pp8xep32", "--maps", "equal", "--dense", "sharded", "--dtype", dtype)
    status, out, _ = run(
        capsys, "--shape", "kimi-k2", "--instances", instances, *options, "--simulate", topology, "--json"
    )
    made = json.loads(out)["simulation"]
    assert status == 0
    assert made["seconds"] == pytest.approx(limit, rel=0.1)
    assert made["ratio"] == pytest.approx(1, abs=0.01)
    assert made["bottleneck"]["link"] == "NIC in"


def test_the_command_on_a_bundle(topology, tmp_path, capsys):
    picture = tmp_path / "load.html"
    bundle = CASES / "two-instances-two-shards.json"
    status, out, err = run(capsys, "--layouts", bundle, "--simulate", topology, "--picture", picture)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == [
        "rank",
        "seconds",
        *["NIC", "out", "NIC", "in", "NVLink", "out", "NVLink", "in", "memory"],
    ]
    assert [line.split()[:2] for line in lines[1:4]] == [["trainer", "0"], ["trainer", "1"], ["rollout-0", "0"]]
    assert re.search(r"^predicted \S+ s, waiting for trainer 0, NIC out$", out, re.M)
    assert re.search(r"^lower bound \S+ s: .*; ours is 1.000 times that$", out, re.M)
    page = picture.read_text()
    assert "two-instances-two-shards.json on cluster.toml" in page
    assert "http" not in page
    _, out, _ = run(capsys, "--layouts", bundle, "--simulate", topology, "--json")
    document = json.loads(out)
    assert {op["kind"] for op in document["ops"]} == {"send", "relay"}
    relay = next(op for op in document["ops"] if op["kind"] == "relay")
    assert set(relay) == {
        "kind", "tensor", "src_instance", "src_rank", "instance", "dst_rank", "dst_region", "offset", "size",
    }  # fmt: skip
    assert [rank["rank"] for rank in document["simulation"]["ranks"]][:2] == ["trainer 0", "trainer 1"]
    _, out, _ = run(capsys, "--layouts", bundle, "--simulate", topology, "--json", "--no-relays")
    assert {op["kind"] for op in json.loads(out)["ops"]} == {"send"}


def test_a_host_has_eight_ranks_unless_told_otherwise(tmp_path, capsys):
    """Machines have eight GPUs: with hosts of one rank nothing would go over NVLink."""
    made = {}
    for ranks in (1, 8, None):
        path = tmp_path / f"{ranks}.toml"
        path.write_text("nic_gbps = 400\nnvlink_gbps = 3600\n" + (f"ranks_per_host = {ranks}\n" if ranks else ""))
        options = ("--trainer", "pp1xep8", "--instances", "1x8", "--simulate", path, "--json")
        status, out, _ = run(capsys, "--shape", "qwen3-30b-a3b", *options)
        assert status == 0
        made[ranks] = json.loads(out)["simulation"]
    assert made[None] == made[8]
    assert made[8]["seconds"] < made[1]["seconds"]


def test_faults_of_the_command(topology, tmp_path, capsys):
    bundle = CASES / "two-instances-two-shards.json"
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("nic_gbps = -1")
    for options, message in (
        (["--layouts", bundle, "--picture", tmp_path / "p.html"], "give --simulate TOPOLOGY too"),
        (["--layouts", bundle, "--simulate", tmp_path / "none.toml"], "No such file"),
        (["--layouts", bundle, "--simulate", wrong], "nic_gbps is -1, expected a number from 1e-06 to 1e+09"),
        (["--layouts", bundle, "--simulate", topology, "--picture", tmp_path / "no" / "p.html"], "cannot write"),
        (["--shape", "kimi-k2", "--instances", "8"], "are not of the form 8x16"),
        (["--shape", "kimi-k2", "--redundant", "-1"], "--redundant -1: expected a number from 0 to"),
        (["--shape", "kimi-k2", "--redundant", "999999999996"], "--redundant 999999999996: expected a number"),
        (["--shape", "qwen3-30b-a3b", "--dtype", "float3"], "dtype 'float3' is not known"),
    ):
        status, out, err = run(capsys, *options)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_the_picture():
    """Each bar is as high as its seconds, on one scale; the bound is a line; the slowest rank is marked."""
    hosts = Hosts.packed([1, 2], 1)
    made = play([[ALL]], [[[ALL], [row(0)]]], hosts, Topology(nic_gbps=400))
    page = draw(made, "a <b> & c")
    assert "a &lt;b&gt; &amp; c" in page
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]
    assert len(charts) == 2
    paths = [path.get("d") for path in charts[1].iter("path") if path.get("fill") == "#2f6fb3"]
    heights = [float(h) for h in re.findall(r"v-([\d.]+)h", paths[0])]
    assert heights == pytest.approx([150 * 0.02 / 0.025, 150 * 0.005 / 0.025], abs=0.01)
    titles = [title.text for title in charts[1].iter("title")]
    assert titles[1].startswith("i0 1: NIC in 0.005 s (0.25 GB)")
    marked = ["#1c2128" in [path.get("fill") for path in chart.iter("path")] for chart in charts]
    assert marked == [True, False]


def test_hosts_of_a_bundle_come_before_the_topology(tmp_path, topology, capsys):
    """Rank 0 of the instance is on the host of trainer rank 1, which holds all that it needs."""
    whole = [{"tensor": "w", "offset": [0], "size": [8]}]
    bundle = tmp_path / "bundle.json"
    bundle.write_text(
        json.dumps(
            {
                "tensors": {"w": {"shape": [8], "dtype": "bfloat16"}},
                "trainer": {"ranks": {"0": whole, "1": whole}, "hosts": {"0": "a", "1": "b"}},
                "instances": {"i": {"ranks": {"0": whole}, "hosts": {"0": "b"}}},
            }
        )
    )
    for options in ([], ["--simulate", topology]):
        _, out, _ = run(capsys, "--layouts", bundle, "--json", *options)
        assert [op["src_rank"] for op in json.loads(out)["ops"]] == [1]
