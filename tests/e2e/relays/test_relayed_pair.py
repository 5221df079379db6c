"""Pairs with a topology, in real processes: what several ranks of an instance receive alike is passed on among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import relay_workers
from gateway_support import running_gateway
from spawn_support import run_ranks

from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.transfer.errors import InputError, LayoutError, WeightcastError

TOPOLOGY = {"nic_gbps": 10, "nvlink_gbps": 100}
DENSE = len(relay_workers.DENSE) * 32 * 16 * 4
ROW, MOVED = [0, 1, 2, 3, 3, 0, 1, 2], [1, 0, 2, 3, 3, 0, 1, 2]
HOSTS = ("a", "a", "b", "b")


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """URL of a real gateway process; its token is in the environment."""
    with pytest.MonkeyPatch.context() as patch, running_gateway() as (url, token):
        patch.setenv(TOKEN_VARIABLE, token)
        yield url


def create(
    url: str, pair: str, instances: dict[str, int], topology: dict[str, float] | None, **settings: float
) -> None:
    with GatewayClient(url) as client:
        specs = {name: {"kind": "worker", "world_size": world} for name, world in instances.items()}
        client.create_pair(pair, 1, specs, settings, topology=topology)


def ranks(name: str, row: list[int], hosts: tuple[str, ...], versions: list[int], **plays: Any) -> list[Any]:
    shared = {"world": len(hosts), "name": name, "row": row, "versions": versions, **plays}
    return [("instance", host, {"rank": rank, **shared}) for rank, host in enumerate(hosts)]


@pytest.mark.slow
def test_the_trainer_sends_once_what_all_ranks_hold(gateway: str) -> None:
    """Also after a map has changed, between two updates and under a transfer: planned anew with the topology."""
    create(gateway, "direct", {"rollout": 4}, None)
    create(gateway, "relayed", {"rollout": 4}, TOPOLOGY)
    instance = ranks("rollout", ROW, HOSTS, [1, 2, 3], rebalance={1: MOVED}, moves={3: ROW})
    roles = [("trainer", "t", {"versions": [1, 2, 3]}), *instance]
    trainer, *found = run_ranks(relay_workers.play, 5, gateway, ["direct", "relayed"], roles, timeout=100.0)
    for pair, relayed in enumerate((False, True)):
        assert [faults for said in found for faults, _ in said[pair]] == [[]] * 12
        for update in range(3):
            passed_on = sum(said[pair][update][1] for said in found)
            assert passed_on >= 3 * len(relay_workers.DENSE) if relayed else passed_on == 0
            assert trainer[pair][update][1]["rollout"]["verified"]["slot_regions"] == len(ROW)
        assert [update[1]["rollout"]["resends"] for update in trainer[pair]] == [0, 0, 1]
    for (direct, _), (relayed_bytes, _) in list(zip(*trainer, strict=True))[:2]:
        assert direct["rollout"] >= 4 * DENSE
        assert direct["rollout"] - relayed_bytes["rollout"] >= 3 * DENSE


@pytest.mark.slow
def test_a_killed_relay_fences_its_instance_alone(gateway: str) -> None:
    """The next update repairs it, with another process in the place of the one that was killed."""
    create(gateway, "killed", {"two": 2, "one": 1}, TOPOLOGY, heartbeat=0.5, silence=5.0)
    two, one = ranks("two", ROW, ("a", "b"), [1, 3]), ranks("one", [0, 1, 2, 3], ("c",), [1, 2, 3])
    kind, host, arguments = two[1]
    assert kind == "instance"
    two[1] = ("doomed", host, {**arguments, "versions": [3], "killed": 2})
    roles = [("trainer", "t", {"versions": [1, 2, 3]}), *two, *one]
    said, *found = (played[0] for played in run_ranks(relay_workers.play, 4, gateway, ["killed"], roles, timeout=100.0))
    assert [said[update][1][name]["committed"] for update in (0, 2) for name in ("two", "one")] == [True] * 4
    assert said[1].startswith("UpdateError: version 2 is not served everywhere: two is fenced: ")
    assert "one is" not in said[1]
    assert [faults for rank in found for faults, _ in rank] == [[]] * (2 + 1 + 3)
    assert sum(rank[-1][1] for rank in found[:2]) > 0


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({}, "topology: nic_gbps is missing"),
        ({"nic_gbps": 0}, "topology: nic_gbps is 0, expected a number from 1e-06 to 1e+09"),
        ({"nic_gbps": "fast"}, "topology: nic_gbps is 'fast', expected a number from 1e-06 to 1e+09"),
        ({"nic_gbps": 1, "nic": 2}, "topology: nic is not known; known are nic_gbps, nvlink_gbps"),
        ({"nic_gbps": 1, "ranks_per_host": 0}, "topology: ranks_per_host is 0, expected an integer from 1 to"),
    ],
)
def test_what_is_no_topology_makes_no_pair(gateway: str, topology: dict[str, Any], message: str) -> None:
    with GatewayClient(gateway) as client:
        before = client.status()
        with pytest.raises(LayoutError) as refused:
            client.create_pair("bad", 1, {"a": {"kind": "worker", "world_size": 1}}, topology=topology)
        assert str(refused.value).startswith(message)
        body = {"trainer_world": 1, "instances": {"a": {"kind": "worker", "world_size": 1}}, "topology": topology}
        with pytest.raises(WeightcastError) as told:
            client._call("PUT", "/pairs/bad", json=body)
        same = str(refused.value).replace("topology: ", "body: topology.")
        assert (type(told.value), str(told.value)) == (InputError, same)
        assert client.status() == before
