"""Nodes of a Ray cluster come and go under a pair: instances are added, lost, fenced, and brought up again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_support import PARTS, TOKEN, actors, instances, ray_cluster, seen, tried, updated_at_last, weightcast

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SPEC = """
pair = "main"

[gateway]
state = "{folder}/gateway.db"

[trainer]
ranks = 2
entry = "cluster_parts:make_source"

[[instance]]
name = "rollout"
count = {count}
kind = "worker"
world_size = 1
command = ["{{python}}", "{parts}", "{{gateway}}", "main", "{{instance}}", "0", "1", "{folder}"]
options = {{ resources = {{ engine = 1 }} }}
health = ""
log = "{folder}/{{instance}}.log"

[settings]
heartbeat = 1
silence = 6
"""
A, B = "rollout-0", "rollout-1"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of a head and a node for one engine."""
    with ray_cluster({}, resources={"head": 1}) as made:
        made.first = made.add_node(num_cpus=1, resources={"engine": 1})
        yield made


def hosts_of(instance: str) -> list[str]:
    """The hosts of an instance's ranks, as the planner has them."""
    found = json.loads(weightcast("inspect", "main", instance, "--gateway", "ray://weightcast", "--json"))
    return [rank["host"] for rank in found["ranks"]]


def test_instances_follow_the_nodes(cluster: Any, tmp_path: Path):
    def file(count: int) -> str:
        path = tmp_path / "cluster.toml"
        path.write_text(SPEC.format(folder=tmp_path, parts=PARTS, count=count))
        return str(path)

    weightcast("up", file(1))
    weightcast("update", "main", "--version", "1")
    assert seen(tmp_path, 1, A) == "right"

    # More instances than there are nodes for: the engine waits for one, as an autoscaler brings it.
    command = [sys.executable, "-m", "weightcast", "up", file(2)]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True) as growing:
        assert growing.stderr is not None
        assert (
            growing.stderr.readline()
            == f"{B} waits for a node that has what it wants: {{'resources': {{'engine': 1}}}}\n"
        )
        second = cluster.add_node(num_cpus=1, resources={"engine": 1})
        assert growing.wait(120) == 0
    assert instances()[B]["serves"] is False  # until it has the newest version
    weightcast("update", "main", "--version", "2")
    assert (seen(tmp_path, 2, A), seen(tmp_path, 2, B)) == ("right", "right")
    assert instances()[B]["serves"]
    assert len({*hosts_of(A), *hosts_of(B)}) == 2

    # The node is lost after its instance has received the bytes, and before they are verified.
    hold = tmp_path / f"hold-{B}"
    hold.write_text("3")
    command = [sys.executable, "-m", "weightcast", "update", "main", "--version", "3"]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True) as updating:
        assert seen(tmp_path, 3, A) == "right"
        lost = time.monotonic()
        cluster.remove_node(second, allow_graceful=False)
        assert updating.stderr is not None
        assert f"{B} is fenced: " in updating.stderr.read()
        assert updating.wait(60) == 4
        assert time.monotonic() - lost < 25.0  # silence, and the end of a command
    hold.unlink()
    states = {name: (i["version"], i["fenced"], i["serves"]) for name, i in instances().items()}
    assert states == {A: (3, False, True), B: (2, True, False)}

    ran = tried("update", "main", "--version", "4")  # with nobody there
    assert ran.returncode == 4
    assert B in ran.stderr
    assert A not in ran.stderr
    assert seen(tmp_path, 4, A) == "right"

    cluster.add_node(num_cpus=1, resources={"engine": 1})  # Ray starts the engine again, here
    version = updated_at_last(5)
    assert seen(tmp_path, version, B) == "right"
    assert {i["version"] for i in instances().values()} == {version}

    # Fewer again.
    weightcast("up", file(1))
    assert list(instances()) == [A]
    assert f"main/{B}" not in actors()
    weightcast("update", "main", "--version", str(version + 1))
    assert seen(tmp_path, version + 1, A) == "right"
    other = file(1).replace("cluster.toml", "other.toml")
    Path(other).write_text(Path(file(1)).read_text().replace("silence = 6", "silence = 7"))
    assert "differs from the file in more than its instances" in weightcast("up", other, status=4)
    weightcast("down", file(1))
    assert actors() == set()


def test_sources_on_the_receivers_node_are_preferred(cluster: Any):
    """Two trainer ranks hold everything; each feeds the instance on its own node, though both are one machine."""
    from weightcast.cluster.ray_actors import RankActor, spawn
    from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
    from weightcast.gateway.server.ray_actor import start_gateway, stop_gateway, worker_token

    gateway = start_gateway(tokens={"operator": TOKEN})
    specs = {name: {"kind": "worker", "world_size": 1} for name in (A, B)}
    with GatewayClient("ray://weightcast", TOKEN) as client:
        client.create_pair("main", 2, specs)
    environment = {TOKEN_VARIABLE: worker_token(TOKEN)}
    places = ({"resources": {"head": 0.1}}, {"resources": {"engine": 0.1}})
    engines = {name: spawn(RankActor, name, environment, **at) for name, at in zip((B, A), places, strict=True)}
    for name, engine in engines.items():
        ray.get(engine.begin.remote("cluster_parts:whole_engine", "ray://weightcast", name))
    ranks = [spawn(RankActor, f"trainer-{rank}", environment, **at) for rank, at in enumerate(places)]
    for rank, actor in enumerate(ranks):
        ray.get(actor.begin.remote("cluster_parts:whole_trainer", "ray://weightcast", rank))
    sent = [ray.get(actor.hear.remote(120.0))[1] for actor in ranks]
    assert sent == [{A: 0, B: 4096}, {A: 4096, B: 0}]  # without hosts it would be the other way round
    assert stop_gateway()
    del gateway
