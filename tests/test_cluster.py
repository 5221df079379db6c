"""A pair on a real Ray cluster, from a file: up, update, a gateway that dies, down. And what is wrong with files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_support import running_gateway

from weightcast.cluster.processes import running
from weightcast.cluster.spec import read_spec
from weightcast.gateway.client import GatewayClient
from weightcast.transfer.errors import AuthorizationError, InputError, TransferError

ray = pytest.importorskip("ray", reason="Ray is not installed")

TOKEN = "a-token-for-the-cluster-tests"
COMMAND = ("command =", "health =", "log =")
"""What the file says of an engine that `up` is to start."""
PARTS = Path(__file__).parent / "cluster_parts.py"

SPEC = """
pair = "main"

[ray]
address = "{address}"

[gateway]
state = "{folder}/gateway.db"

[trainer]
ranks = 2
entry = "cluster_parts:make_source"

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
    from ray.cluster_utils import Cluster

    paths = [str(PARTS.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("WEIGHTCAST_TOKEN", TOKEN)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        node = {"num_cpus": 2, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        made.add_node(num_cpus=2, resources={"other": 2})
        patch.setenv("RAY_ADDRESS", made.address)
        ray.init(address=made.address, namespace="tests", log_to_driver=False, logging_level="error")
        try:
            yield made.address
        finally:
            ray.shutdown()
            made.shutdown()


def weightcast(*arguments: str, status: int = 0) -> str:
    """Runs the command; its standard output, or its error where it is to fail."""
    command = [sys.executable, "-m", "weightcast", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd="/", check=False)
    assert ran.returncode == status, ran.stderr[-2000:]
    return ran.stdout if status == 0 else ran.stderr


def actors() -> set[str]:
    return {a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "weightcast"}


def seen(folder: Path, version: int) -> str:
    """What the engine found in its memory when it began to serve a version."""
    file = folder / f"rollout-0-0-{version}"
    for _ in range(100):
        if file.exists() and file.read_text():
            return file.read_text()
        time.sleep(0.1)
    raise AssertionError(f"version {version} is not served; {(folder / 'engine.log').read_text()[-1000:]}")


@pytest.mark.slow
def test_up_update_and_down(cluster: str, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(SPEC.format(address=cluster, folder=tmp_path, parts=PARTS))
    bystander = ray.remote(Bystander).options(name="bystander", namespace="weightcast", num_cpus=0).remote()
    assert json.loads(weightcast("up", str(file), "--json"))["gateway"] == "ray://weightcast"
    assert actors() == {"weightcast", "main/rollout-0", "main/trainer/0", "main/trainer/1", "bystander"}
    assert "rollout-0: version 1, " in weightcast("update", "main", "--version", "1", "--ray", cluster)
    assert seen(tmp_path, 1) == "right"

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
    assert seen(tmp_path, updated_at_last(cluster, 4)) == "right"

    weightcast("down", str(file))
    assert actors() == {"bystander"}
    ray.kill(bystander)


def updated_at_last(cluster: str, version: int) -> int:
    """The first version, from one on, that an engine takes which is being started again."""
    command = [sys.executable, "-m", "weightcast", "update", "main", "--ray", cluster, "--version"]
    for tried in range(version, version + 10):
        ran = subprocess.run([*command, str(tried)], capture_output=True, text=True, timeout=200, cwd="/", check=False)
        if ran.returncode == 0:
            return tried
        assert "rollout-0" in ran.stderr
        time.sleep(2.0)
    raise AssertionError(ran.stderr)


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
        file = tmp_path / "cluster.toml"
        file.write_text("".join(f"{line}\n" for line in text.splitlines() if not line.startswith(COMMAND)))
        outside = [sys.executable, str(PARTS), url, "main", "rollout-0", "0", "1", str(tmp_path)]
        with running(outside, tmp_path / "engine.log", {}) as engine:
            weightcast("up", str(file))
            assert actors() == {"main/trainer/0", "main/trainer/1"}
            assert "rollout-0: version 1, " in weightcast("update", "main", "--version", "1", "--ray", cluster)
            assert seen(tmp_path, 1) == "right"
            weightcast("down", str(file))
            assert actors() == set()
            assert engine.poll() is None
        assert weightcast("status", "--gateway", url) == "no pairs\n"


@pytest.mark.slow
def test_what_up_cannot_finish_is_taken_back(cluster: str, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    broken = SPEC.replace("make_source", "no_such_function")
    file.write_text(broken.format(address=cluster, folder=tmp_path, parts=PARTS))
    said = weightcast("up", str(file), "--deadline", "60", status=2)
    assert "'cluster_parts:no_such_function' cannot be imported as module:function" in said
    assert actors() == set()
    dead = SPEC.replace('"{parts}"', '"-c", "import sys; sys.exit(7)"').replace('health = ""', 'health = "/health"')
    file.write_text(dead.format(address=cluster, folder=tmp_path))
    assert "the process ended with 7" in weightcast("up", str(file), "--deadline", "60", status=4)
    assert actors() == set()


@pytest.mark.slow
def test_the_gateways_actor_is_asked_like_any_gateway(cluster: str, tmp_path: Path):
    from weightcast.gateway.ray_actor import gateway_url, start_gateway, stop_gateway

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('pair = "main"', ""), "'pair' is missing"),
        (("ranks = 2", 'ranks = "2"'), "[trainer]: ranks is '2', expected a whole number"),
        (("ranks = 2", "ranks = 0"), "ranks and world_size must be 1 or more"),
        (("world_size = 1", "world_size = true"), "[[instance]]: world_size is True, expected a whole number"),
        (("entry =", "enter ="), "[trainer]: enter are not known; known are ranks, entry, checkpoint, backend"),
        (('entry = "cluster_parts:make_source"', ""), "[trainer] wants an entry or a checkpoint, one of them"),
        (('kind = "worker"', 'url = "http://a:1"'), "instance 'rollout-0' wants a command or a url, one of them"),
        (("silence = 20", "silence = -1"), "setting silence is -1"),
        (("[settings]", "[setting]"), "the file: setting are not known"),
        (('pair = "main"', 'pair = "main"\ncommit = "some"'), "commit 'some', expected a name, and 'each' or 'all'"),
        (("nic_gbps = 100", ""), "topology: 'nic_gbps' is missing"),
        (("nic_gbps = 100", "nic_gbps = 0"), "topology: nic_gbps is 0, expected a number above 0"),
        (("[topology]", "[[topology]]"), "[topology] is no table"),
        (("[[instance]]", "[instance]"), "'instance' is no list of tables"),
        (("ranks = 2", "ranks = "), "Invalid value"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, change: tuple[str, str], message: str):
    file = tmp_path / "cluster.toml"
    file.write_text(SPEC.format(address="auto", folder=tmp_path, parts=PARTS))
    assert (read_spec(file).pair, read_spec(file).topology) == ("main", {"nic_gbps": 100})
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(InputError) as caught:
        read_spec(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        read_spec(tmp_path / "none.toml")
