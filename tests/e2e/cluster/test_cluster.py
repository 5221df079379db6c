"""A pair on a real Ray cluster, from a file: up, update, a gateway that dies, down. And what is wrong with files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster_support import PARTS, TOKEN, actors, ray_cluster, seen, tried, updated_at_last, weightcast
from gateway_support import running_gateway
from spawn_support import free_port

from weightcast.cluster.die_with_parent import tethered
from weightcast.cluster.processes import running, start_process
from weightcast.cluster.ray_actors import RankActor
from weightcast.cluster.spec import read_spec
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.host import name_of_node
from weightcast.gateway.records import EngineSpec
from weightcast.transfer.errors import AuthorizationError, InputError, TransferError
from weightcast.transfer.planner.topology import Topology

ray = pytest.importorskip("ray", reason="Ray is not installed")

COMMAND = ("command =", "health =", "log =")
"""What the file says of an engine that `up` is to start."""

SPEC = """
pair = "main"

[ray]
address = "{address}"

[gateway]
state = "{folder}/gateway.db"

[trainer]
ranks = 2
entry = "cluster_parts:make_source"
strategy = "STRICT_SPREAD"

[[instance]]
name = "rollout-0"
kind = "worker"
world_size = 1
command = ["{{python}}", "{parts}", "{{gateway}}", "main", "rollout-0", "0", "1", "{folder}"]
health = ""
log = "{folder}/engine.log"

[settings]
heartbeat = 1
silence = 20

[topology]
nic_gbps = 100
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes on this machine."""
    with ray_cluster({}) as made:
        made.add_node(num_cpus=2, resources={"other": 2})
        yield made.address


@pytest.mark.slow
def test_up_update_and_down(cluster: str, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(SPEC.format(address=cluster, folder=tmp_path, parts=PARTS))
    bystander = ray.remote(Bystander).options(name="bystander", namespace="weightcast", num_cpus=0).remote()
    assert json.loads(weightcast("up", str(file), "--json"))["gateway"] == "ray://weightcast"
    assert actors() == {"weightcast", "main/rollout-0", "main/trainer/0", "main/trainer/1", "bystander"}
    assert groups() == {"main/trainer"}
    assert "rollout-0: version 1, " in weightcast("update", "main", "--version", "1", "--ray", cluster)
    assert seen(tmp_path, 1) == "right"
    token = (tmp_path / "rollout-0.token").read_text()
    with GatewayClient("ray://weightcast", token) as engine, pytest.raises(AuthorizationError, match="scope worker"):
        engine.delete_pair("main")

    (tmp_path / "gateway.db.port").unlink()  # it comes again at another address, as on another node
    ray.kill(ray.get_actor("weightcast", namespace="weightcast"), no_restart=False)
    found = json.loads(weightcast("status", "--gateway", "ray://weightcast", "--json"))["pairs"][0]
    assert found["instances"]["rollout-0"]["version"] == 1
    refused = weightcast("update", "main", "--version", "1", "--ray", cluster, status=4)
    assert "version 1" in refused
    assert "rollout-0: version 2, " in weightcast("update", "main", "--version", "2", "--ray", cluster)
    assert seen(tmp_path, 2) == "right"

    ray.kill(ray.get_actor("main/trainer/1", namespace="weightcast"), no_restart=False)
    assert "rollout-0: version 3, " in weightcast("update", "main", "--version", "3", "--ray", cluster)
    assert seen(tmp_path, 3) == "right"

    ray.kill(ray.get_actor("main/rollout-0", namespace="weightcast"), no_restart=False)
    assert seen(tmp_path, updated_at_last(4)) == "right"

    weightcast("down", str(file))
    assert actors() == {"bystander"}
    assert groups() == set()
    ray.kill(bystander)


def groups() -> set[str]:
    """The placement groups that are there."""
    return {one["name"] for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"}


class Bystander:
    """Somebody else's actor."""


@pytest.mark.slow
def test_a_trainer_on_ray_feeds_an_engine_outside_through_a_gateway_outside(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with running_gateway() as (url, token):
        monkeypatch.setenv("WEIGHTCAST_TOKEN", token)
        text = SPEC.format(address=cluster, folder=tmp_path, parts=PARTS)
        text = text.replace(f'state = "{tmp_path}/gateway.db"', f'url = "{url}"')
        text = text.replace("silence = 20", "silence = 120")  # one that stands still is waited for
        file = tmp_path / "cluster.toml"
        file.write_text("".join(f"{line}\n" for line in text.splitlines() if not line.startswith(COMMAND)))
        outside = [sys.executable, str(PARTS), url, "main", "rollout-0", "0", "1", str(tmp_path)]
        with running(outside, tmp_path / "engine.log", {}) as engine:
            weightcast("up", str(file))
            assert actors() == {"main/trainer/0", "main/trainer/1"}
            assert "rollout-0: version 1, " in weightcast("update", "main", "--version", "1", "--ray", cluster)
            assert seen(tmp_path, 1) == "right"
            update_late(cluster, url, token, engine)
            assert "rollout-0: version 1@2, " in weightcast(
                "update", "main", "--version", "1", "--restart", "--ray", cluster
            )
            assert seen(tmp_path, 1) == "right"
            weightcast("down", str(file))
            assert actors() == set()
            assert engine.poll() is None
        assert weightcast("status", "--gateway", url) == "no pairs\n"


@pytest.mark.slow
def test_an_engine_that_somebody_else_starts_is_waited_for_by_name_and_all_else_stays(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was said that the trainer ranks say nothing, and all was taken back."""
    with running_gateway() as (url, token):
        monkeypatch.setenv("WEIGHTCAST_TOKEN", token)
        text = SPEC.format(address=cluster, folder=tmp_path, parts=PARTS)
        text = text.replace(f'state = "{tmp_path}/gateway.db"', f'url = "{url}"')
        file = tmp_path / "cluster.toml"
        file.write_text("".join(f"{line}\n" for line in text.splitlines() if not line.startswith(COMMAND)))
        said = weightcast("up", str(file), "--deadline", "25", status=4)
        missing = (
            "instance rollout-0 ranks 0 did not register yet; rollout-0 rank 0 was never heard of; start the engine"
        )
        *reminders, last = [line for line in said.splitlines() if missing in line]
        assert reminders, "said while it waited"
        assert reminders[0].startswith("pair main: waiting, ")
        assert last.startswith("weightcast up: pair main: not done within 25 s: waiting, ")
        assert "start rollout-0, then run weightcast update main --version N" in last
        assert actors() == {"main/trainer/0", "main/trainer/1"}
        assert missing in tried("up", str(file)).stderr, "a second call starts nothing, and says it again"
        outside = [sys.executable, str(PARTS), url, "main", "rollout-0", "0", "1", str(tmp_path)]
        with running(outside, tmp_path / "engine.log", {}):
            assert "rollout-0: version 1, " in weightcast("update", "main", "--version", "1", "--ray", cluster)
            assert seen(tmp_path, 1) == "right"
            weightcast("down", str(file))
        assert actors() == set()


@pytest.mark.slow
def test_an_engine_of_an_instance_that_has_left_is_stopped_all_the_same(cluster: str, tmp_path: Path):
    """As after an eviction: it is no longer in the pair, nor in the file, and would run for ever."""
    file, text = tmp_path / "cluster.toml", SPEC.format(address=cluster, folder=tmp_path, parts=PARTS)
    table = text[text.index("[[instance]]") : text.index("[settings]")]
    other = table.replace("rollout-0", "rollout-1").replace("engine.log", "other.log")
    file.write_text(text.replace("[settings]", f"{other}[settings]"))
    weightcast("up", str(file))
    assert {"main/rollout-0", "main/rollout-1"} <= actors()
    weightcast("leave", "main", "rollout-1", "--gateway", "ray://weightcast")
    file.write_text(text)
    ran = tried("up", str(file))
    assert (ran.returncode, "rollout-1 has left and is stopped" in ran.stderr) == (0, True), ran.stderr
    assert "main/rollout-1" not in actors()
    assert "rollout-0: version 1, " in weightcast("update", "main", "--version", "1", "--ray", cluster)
    weightcast("down", str(file))
    assert actors() == set()


@pytest.mark.slow
def test_down_says_which_gateway_keeps_the_pair(cluster: str, tmp_path: Path):
    file, url = tmp_path / "cluster.toml", f"http://127.0.0.1:{free_port()}"
    text = SPEC.format(address=cluster, folder=tmp_path, parts=PARTS)
    file.write_text(text.replace(f'state = "{tmp_path}/gateway.db"', f'url = "{url}"'))
    ran = tried("down", str(file))
    assert ran.returncode == 0
    assert f"pair main is not deleted: gateway {url}: DELETE /pairs/main: ConnectError" in ran.stderr


@pytest.mark.slow
def test_what_up_cannot_finish_is_taken_back(cluster: str, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    broken = SPEC.replace("make_source", "no_such_function")
    file.write_text(broken.format(address=cluster, folder=tmp_path, parts=PARTS))
    said = weightcast("up", str(file), "--deadline", "60", status=2)
    assert "'cluster_parts:no_such_function' cannot be imported as module:function" in said
    assert actors() == set()
    assert groups() == set()
    wide = SPEC.replace("ranks = 2", "ranks = 3")
    file.write_text(wide.format(address=cluster, folder=tmp_path, parts=PARTS))
    assert "no room for 3 trainer ranks" in weightcast("up", str(file), "--deadline", "10", status=4)
    assert (actors(), groups()) == (set(), set())
    dead = SPEC.replace('"{parts}"', '"-c", "import sys; sys.exit(7)"').replace('health = ""', 'health = "/health"')
    file.write_text(dead.format(address=cluster, folder=tmp_path))
    assert "the process ended with 7" in weightcast("up", str(file), "--deadline", "60", status=4)
    assert actors() == set()


def update_late(cluster: str, url: str, token: str, engine: subprocess.Popen[bytes]) -> None:
    """An update to version 2 whose command gives up before it ends; its answer is none to the next command."""
    command = ("update", "main", "--version", "2", "--ray", cluster)
    engine.send_signal(signal.SIGSTOP)
    try:
        said = weightcast(*command, "--deadline", "10", status=4)
        assert "pair main: not done within 10 s: " in said
        assert "instance rollout-0 ranks 0 did not get ready yet" in said
    finally:
        engine.send_signal(signal.SIGCONT)
    with GatewayClient(url, token) as client:
        while client.pair_status("main")["instances"]["rollout-0"]["version"] != 2:
            time.sleep(0.1)
        while client.pair_status("main")["offers"]:
            time.sleep(0.1)
    assert "version 2 is not newer" in weightcast(*command, status=4)


@pytest.mark.slow
def test_the_gateways_actor_is_asked_like_any_gateway(cluster: str, tmp_path: Path):
    from weightcast.gateway.ray_address import gateway_url
    from weightcast.gateway.server.ray_actor import start_gateway, stop_gateway

    kept = start_gateway("asked", tokens={"operator": TOKEN})
    with GatewayClient("ray://asked", TOKEN) as by_name, GatewayClient(gateway_url("asked"), TOKEN) as by_address:
        by_name.create_pair("main", 1, {"a": {"kind": "worker", "world_size": 1}})
        assert by_name.status() == by_address.status() != []
        with pytest.raises(InputError, match="there is no pair 'other'"):
            by_name.pair_status("other")
    with GatewayClient("ray://asked", "another-token-that-is-wrong") as stranger, pytest.raises(AuthorizationError):
        stranger.status()
    assert kept is not None
    assert stop_gateway("asked")
    assert not stop_gateway("asked")
    with GatewayClient("ray://asked", TOKEN) as nobody, pytest.raises(TransferError, match="no Ray actor 'asked'"):
        nobody.status()


def test_what_is_on_a_tether_ends_when_the_tether_is_cut(tmp_path: Path):
    """As Ray does it, when a worker that loses its node kills its children."""
    said = tmp_path / "said"
    stubborn = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)"
    )
    tether = start_process(tethered([sys.executable, "-c", f"{stubborn}; time.sleep(60)"]), said, {})
    while not said.read_text():
        time.sleep(0.05)
    tether.kill()
    tether.wait()
    before = time.monotonic()
    while Path(f"/proc/{int(said.read_text())}").exists():
        assert time.monotonic() - before < 15.0, "it lives on"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('pair = "main"', ""), "pair is missing"),
        (("ranks = 2", 'ranks = "2"'), "trainer.ranks is '2', expected a whole number from 1 to 100000"),
        (('address = "auto"', "address = 3"), "ray.address is 3, expected text"),
        (("ranks = 2", "ranks = 0"), "trainer.ranks is 0, expected a whole number from 1 to 100000"),
        (("world_size = 1", "world_size = true"), "instance.0.world_size is True, expected a whole number"),
        (("entry =", "enter ="), "trainer.enter is not known; known are ranks, entry, checkpoint, backend"),
        (('entry = "cluster_parts:make_source"', ""), "trainer: it wants an entry or a checkpoint, one of them"),
        (('kind = "worker"', 'url = "http://a:1"'), "instance.0: 'rollout-0' wants a command or a url, one of them"),
        (("silence = 20", "silence = -1"), "settings.silence is -1, expected a positive number of seconds"),
        (("[settings]", "[setting]"), "setting is not known; known are pair, trainer, instance"),
        (('pair = "main"', 'pair = "main"\ncommit = "some"'), "commit is 'some', expected 'each', 'all'"),
        (
            ('pair = "main"', 'pair = "main"\nmin_instances = 0'),
            "min_instances is 0, expected a whole number from 1 to",
        ),
        (("nic_gbps = 100", ""), "topology.nic_gbps is missing"),
        (("nic_gbps = 100", "nic_gbps = 0"), "topology.nic_gbps is 0, expected a number from 1e-06 to 1e+09"),
        (("[topology]", "[[topology]]"), "topology is [{'nic_gbps': 100}], expected a table of nic_gbps, nvlink_gbps"),
        (("[[instance]]", "[instance]"), "expected a list of tables: write [[instance]]"),
        (("ranks = 2", "ranks = "), "Invalid value"),
        (("STRICT_SPREAD", "spread"), "trainer.strategy is 'spread', expected 'PACK', 'SPREAD', 'STRICT_PACK'"),
        (("world_size = 1", "world_size = 1\ncount = 2"), "instance.0: count is 2, which wants no url,"),
        (("world_size = 1", "world_size = 1\ncount = 0"), "instance.0: count is 0, which wants no url,"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, change: tuple[str, str], message: str):
    file = tmp_path / "cluster.toml"
    file.write_text(SPEC.format(address="auto", folder=tmp_path, parts=PARTS))
    assert (read_spec(file).pair, read_spec(file).topology) == ("main", Topology(100))
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(InputError) as caught:
        read_spec(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_count_stands_for_so_many_instances(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    text = SPEC.format(address="auto", folder=tmp_path, parts=PARTS).replace("engine.log", "{instance}.log")
    file.write_text(text.replace("world_size = 1", "world_size = 1\ncount = 2"))
    found = [(one.name, one.log_file) for one in read_spec(file).instances]
    assert found == [(f"rollout-0-{i}", f"{tmp_path}/rollout-0-{i}.log") for i in range(2)]
    file.write_text(text.replace("world_size = 1", "world_size = 1\ncount = 0"))
    with pytest.raises(InputError, match="there are no instances"):
        read_spec(file)


def test_how_many_instances_a_file_needs(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(text := SPEC.format(address="auto", folder=tmp_path, parts=PARTS))
    assert (read_spec(file).min_instances, read_spec(file).settings.evict_after) == (None, 600.0)
    file.write_text("min_instances = 1\n" + text.replace("silence = 20", "silence = 20\nevict_after = 60"))
    assert (read_spec(file).min_instances, read_spec(file).settings.evict_after) == (1, 60.0)


def test_nodes_of_one_name_are_told_apart():
    def node(number: str, name: str, alive: bool = True) -> dict[str, object]:
        return {"NodeID": number, "NodeManagerHostname": name, "Alive": alive}

    nodes = [node("1", "a"), node("2", "b"), node("3", "b"), node("4", "a", alive=False)]
    assert [name_of_node(number, nodes) for number in "123"] == ["a", "b/2", "b/3"]


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        read_spec(tmp_path / "none.toml")


def test_what_a_file_says_of_values_is_in_the_engine_s_record(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'pair = "main"\n[trainer]\nranks = 1\nentry = "a:b"\n'
        '[[instance]]\nname = "e"\nworld_size = 1\nkind = "worker"\nallow_non_finite = ["*.mask"]\n'
        '[[instance]]\nname = "f"\nworld_size = 1\nkind = "worker"\nnon_finite = "report"\nhold = true\n'
    )
    assert [EngineSpec.given(one.record("")) for one in read_spec(file).instances] == [
        EngineSpec(kind="worker", world_size=1, allow_non_finite=("*.mask",)),
        EngineSpec(kind="worker", world_size=1, non_finite="report", hold=True),
    ]


def say_two(mail: Any) -> None:
    """The body of a rank that says two things, the second when it is told."""
    mail.send("first")
    mail.recv()
    mail.send("second")


def test_two_who_listen_to_one_rank_hear_each_message_once_and_in_time() -> None:
    actor = RankActor({})
    actor.begin(f"{__name__}:say_two")
    with ThreadPoolExecutor(8) as pool:
        answers = [future.result(5.0) for future in [pool.submit(actor.hear, 0.5) for _ in range(8)]]
    assert sorted(answers, key=str) == [(False, None)] * 7 + [(True, "first")]
    actor.tell(None)
    assert actor.hear(5.0) == (True, "second")
    assert actor.finish(5.0)
