"""Whole pairs in real processes: gateway over HTTP, Gloo between the ranks, and everything in between."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pair_workers
import pytest
from spawn_support import free_port, run_ranks

from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.errors import AuthorizationError, InputError

PAIR_MAP = [0, 1, 2, 3, 3, 0]
"""Two replicas of expert 3 on rank 1 of two."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """URL of a real gateway process; its token is in the environment."""
    token, port = make_token(), free_port()
    environment = {**os.environ, TOKEN_VARIABLE: token}
    process = subprocess.Popen([sys.executable, "-m", "weightcast", "gateway", "--port", str(port)], env=environment)
    url = f"http://127.0.0.1:{port}"
    before = os.environ.get(TOKEN_VARIABLE)
    os.environ[TOKEN_VARIABLE] = token
    try:
        for _ in range(300):
            try:
                httpx.get(url, trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        if before is None:
            del os.environ[TOKEN_VARIABLE]
        else:
            os.environ[TOKEN_VARIABLE] = before
        process.terminate()
        process.wait(10)


Roles = list[tuple[str, dict[str, Any]]]


def trainers(versions: list[int], deadline: float = 150.0) -> Roles:
    return [("trainer", {"rank": rank, "versions": versions, "deadline": deadline}) for rank in range(2)]


def ranks(name: str, world: int, row: list[int], deadline: float = 150.0, **plays: Any) -> Roles:
    shared = {"world": world, "name": name, "row": row, "plays": plays, "deadline": deadline}
    return [("instance", {"rank": rank, **shared}) for rank in range(world)]


def test_two_instances_get_every_version(gateway: str) -> None:
    """Different layouts, a same-rank pair, an old version that is refused; every byte of every slot is compared."""
    pair_workers.create(gateway, "two", {"rollout-0": 2, "rollout-1": 1})
    roles = [
        *trainers([1, 2, 2, 7]),
        *ranks("rollout-0", 2, PAIR_MAP, versions=[1, 2, 7]),
        *ranks("rollout-1", 1, [0, 1, 2, 3], versions=[1, 2, 7]),
    ]
    found = run_ranks(pair_workers.play, 5, gateway, "two", roles, timeout=100.0)
    for said in found[:2]:
        assert [said[0]["rollout-0"]["committed"], said[1]["rollout-1"]["committed"]] == [True, True]
        assert said[2].startswith("VersionError: pair two has version 2; version 2 is not newer")
        assert said[3]["rollout-0"]["verified"]["slot_regions"] == 6
        assert said[3]["rollout-0"]["verified"]["replicas"] == 2
        assert said[3]["rollout-0"]["attempts"] == 1
    assert found[2:] == [[[], [], []]] * 3
    with GatewayClient(gateway) as client:
        status = client.pair_status("two")["instances"]["rollout-0"]
    assert (status["phase"], status["version"], status["serves"], status["fenced"]) == ("connected", 7, True, False)


def test_a_rebalance_between_updates_is_planned_anew(gateway: str) -> None:
    pair_workers.create(gateway, "moved", {"rollout-0": 2})
    roles = [*trainers([1, 2]), *ranks("rollout-0", 2, PAIR_MAP, versions=[1, 2], rebalance={1: [3, 2, 1, 0, 0, 1]})]
    found = run_ranks(pair_workers.play, 4, gateway, "moved", roles, timeout=100.0)
    assert found[2:] == [[[], []]] * 2
    assert [said["rollout-0"]["attempts"] for said in found[0]] == [1, 2]


def test_a_flipped_bit_fences_and_the_next_update_repairs(gateway: str) -> None:
    pair_workers.create(gateway, "flip", {"rollout-0": 2, "rollout-1": 1})
    roles = [
        *trainers([1, 2, 3]),
        *ranks("rollout-0", 2, PAIR_MAP, versions=[1, 3], corrupt=2, rank=1),
        *ranks("rollout-1", 1, [0, 1, 2, 3], versions=[1, 2, 3]),
    ]
    found = run_ranks(pair_workers.play, 5, gateway, "flip", roles, timeout=100.0)
    assert found[0][0]["rollout-0"]["committed"]
    assert found[0][1].startswith("UpdateError: version 2 is not served everywhere: rollout-0 is fenced: ")
    assert "experts.0.down_proj.weight' (float32) box [0:3, 0:5] on rollout-0 rank 1 region 3 (slot 2)" in found[0][1]
    assert "rollout-1" not in found[0][1]
    assert found[0][2]["rollout-0"]["committed"]
    assert found[2:] == [[[], []]] * 2 + [[[], [], []]]


@pytest.mark.parametrize("verify", ["full", "off"])
def test_an_engine_that_cannot_settle_is_fenced_and_the_next_update_repairs(gateway: str, verify: str) -> None:
    """What a sink computes from its parameters is up to date when a version is served, or the version is not."""
    pair_workers.create(gateway, f"settle-{verify}", {"rollout-0": 2}, verify=verify)
    roles = [*trainers([1, 2, 3]), *ranks("rollout-0", 2, PAIR_MAP, versions=[1, 3], unsettled=[2])]
    found = run_ranks(pair_workers.play, 4, gateway, f"settle-{verify}", roles, timeout=100.0)
    assert found[0][0]["rollout-0"]["committed"]
    assert found[0][1].startswith("UpdateError: version 2 is not served everywhere: rollout-0 is fenced: ")
    assert "rollout-0 rank 1: doubled could not be computed anew" in found[0][1]
    assert found[0][2]["rollout-0"]["committed"]
    assert found[2:] == [[[], []]] * 2


def test_without_verification_a_flipped_bit_is_served_and_nothing_is_called_verified(gateway: str) -> None:
    pair_workers.create(gateway, "blind", {"rollout-0": 2}, verify="off")
    roles = [*trainers([1, 2]), *ranks("rollout-0", 2, PAIR_MAP, versions=[1, 2], corrupt=2, rank=1)]
    found = run_ranks(pair_workers.play, 4, gateway, "blind", roles, timeout=100.0)
    assert [said["rollout-0"]["verified"]["regions"] for said in found[0]] == [0, 0]
    assert found[2] == [[], []]
    assert len(found[3][1]) == 1


def test_an_update_that_ends_before_a_rank_knows_that_it_has_reported_calls_nothing_off(gateway: str) -> None:
    """The group was given up, and every second update began with a failure and joined anew."""
    pair_workers.create(gateway, "deaf", {"rollout-0": 2}, verify="off")
    roles = [(kind, {**plays, "deaf_seconds": 0.5}) for kind, plays in trainers([1, 2, 3])]
    roles += ranks("rollout-0", 2, PAIR_MAP, versions=[1, 2, 3])
    found = run_ranks(pair_workers.play, 4, gateway, "deaf", roles, timeout=100.0)
    assert [said["rollout-0"]["attempts"] for said in found[0]] == [1, 1, 1]
    with GatewayClient(gateway) as client:
        assert client.pair_status("deaf")["instances"]["rollout-0"]["epoch"] == 1


def test_an_instance_that_lacks_an_expert_is_named(gateway: str) -> None:
    """Expert 3 is on no rank: its map says so by itself, and the trainer is told which tensors are on no rank."""
    pair_workers.create(gateway, "lacks", {"rollout-0": 1}, register=20.0)
    roles = [*trainers([1], 30.0), ("lacking", {})]
    found = run_ranks(pair_workers.lacking_play, 3, gateway, "lacks", roles, timeout=100.0)
    for said in found[:2]:
        assert said[0].startswith("CoverageError: ")
        assert "experts 3" in said[0]
        assert "on no rank of rollout-0" in said[0]


def test_a_dead_rank_fences_its_instance_alone(gateway: str) -> None:
    """Rank 1 of rollout-0 ends after version 1: version 2 names it, and reaches rollout-1 all the same."""
    pair_workers.create(gateway, "dead", {"rollout-0": 2, "rollout-1": 1}, prepare=10.0)
    roles = [
        *trainers([1, 2]),
        ranks("rollout-0", 2, PAIR_MAP, versions=[1, 2], deadline=20.0)[0],
        ranks("rollout-0", 2, PAIR_MAP, versions=[1])[1],
        *ranks("rollout-1", 1, [0, 1, 2, 3], versions=[1, 2]),
    ]
    found = run_ranks(pair_workers.play, 5, gateway, "dead", roles, timeout=100.0)
    assert (
        "rollout-0 is not updated: pair dead: instance rollout-0 ranks 1 did not get ready within 10 s" in found[0][1]
    )
    assert "rollout-1" not in found[0][1]
    assert found[4] == [[], []]


def test_a_trainer_that_starts_again_goes_on_with_higher_versions(gateway: str) -> None:
    """Two trainers one after the other, no restart of the instance; the second may not go back."""
    pair_workers.create(gateway, "again", {"rollout-0": 2})
    sinks = ranks("rollout-0", 2, PAIR_MAP, versions=[1, 2])
    roles = [("again", {"rank": rank, "versions": [[1], [1, 2]]}) for rank in range(2)]
    found = run_ranks(pair_workers.again_play, 4, gateway, "again", [*roles, *sinks], timeout=100.0)
    assert found[2:] == [[[], []]] * 2
    for first, second in found[:2]:
        assert first[0]["rollout-0"]["committed"]
        assert second[0].startswith("VersionError: pair again has version 1; version 1 is not newer")
        assert second[1]["rollout-0"]["committed"]


def test_ranks_that_offer_different_versions_are_all_told(gateway: str) -> None:
    pair_workers.create(gateway, "torn", {"rollout-0": 1})
    roles = trainers([5, 7])
    roles[1][1]["versions"] = [6, 7]
    roles += ranks("rollout-0", 1, [0, 1, 2, 3], versions=[7])
    found = run_ranks(pair_workers.play, 3, gateway, "torn", roles, timeout=100.0)
    said = sorted([found[0][0], found[1][0]])
    assert said[0].startswith("UpdateError: ")
    assert "is fenced: pair torn: trainer rank" in said[0], "a new instance is fenced until its first commit"
    assert said[1].startswith("VersionError: pair torn: trainer rank")
    assert found[0][1]["rollout-0"]["committed"]
    assert found[2] == [[]]


def test_a_trainer_rank_that_never_offers_is_named(gateway: str) -> None:
    pair_workers.create(gateway, "silent", {"rollout-0": 1}, offer=10.0)
    roles = trainers([1])
    roles[1][1]["versions"] = []
    roles += ranks("rollout-0", 1, [0, 1, 2, 3], versions=[])
    roles[2][1]["plays"]["connect"] = True
    found = run_ranks(pair_workers.play, 3, gateway, "silent", roles, timeout=100.0)
    assert "trainer ranks 1 did not offer version 1 within 10 s" in found[0][0]


def test_client_raises_what_the_gateway_says(gateway: str) -> None:
    with (
        GatewayClient(gateway, "wrong-token-wrong-token") as client,
        pytest.raises(AuthorizationError, match="set WEIGHTCAST_TOKEN"),
    ):
        client.status()
    with GatewayClient(gateway) as client, pytest.raises(InputError, match="there is no pair 'nope'"):
        client.pair_status("nope")


@pytest.mark.parametrize(("body", "status"), [(b"", 400), (b"\x00" * 100, 400), (b"\x81\xa1x" * 50, 400)])
def test_reports_that_are_none_are_refused_in_one_line(gateway: str, body: bytes, status: int) -> None:
    with GatewayClient(gateway) as client:
        client.create_pair("junk", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
        headers = {"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"}
        answer = httpx.post(f"{gateway}/pairs/junk/trainer/0/report", content=body, headers=headers, trust_env=False)
        assert (answer.status_code, answer.json()["error"]) == (status, "WireError")
        assert "\n" not in answer.json()["message"]
        assert client.pair_status("junk")["trainer"]["registered"] == []
