"""Gateway, ranks and commands at ::1, and ranks that are given no address. Of two hosts: cluster/test_addresses.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import far_ranks
import pair_workers
import pytest
from gateway_support import running_gateway
from loopback_support import LOOPBACKS
from spawn_support import run_ranks

from weightcast.cli import main
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.host import network_name
from weightcast.gateway.ranks.membership import place_of
from weightcast.transfer.errors import AuthorizationError


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, str]]:
    with running_gateway(host="::1") as found:
        yield found


@pytest.fixture
def gateway(running: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, running[1])
    return running[0]


def roles_of(versions: list[int], backend: str = "tcp", **plays: Any) -> list[tuple[str, dict[str, Any]]]:
    """Two trainer ranks and two of an instance, none of which is given an address."""
    common = {"deadline": 120.0, "backend": backend}
    instance = {"world": 2, "name": "rollout-0", "row": [0, 1, 2, 3, 3, 0], "plays": {"versions": versions, **plays}}
    return [
        *(("trainer", {"rank": rank, "versions": versions or [1], **common}) for rank in range(2)),
        *(("instance", {"rank": rank, **instance, **common}) for rank in range(2)),
    ]


@pytest.mark.ipv6
@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_a_pair_at_ipv6_loopback(gateway: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair_workers.create(gateway, backend, {"rollout-0": 2})
    outcomes = run_ranks(pair_workers.play, 4, gateway, backend, roles_of([1, 2], backend), timeout=200.0)
    assert [outcome["rollout-0"]["committed"] for outcome in outcomes[0]] == [True, True]
    assert outcomes[2:] == [[[], []]] * 2
    assert main(["status", "--gateway", gateway, "--json"]) == 0
    pairs = {pair["pair"]: pair for pair in json.loads(capsys.readouterr().out)["pairs"]}
    assert pairs[backend]["instances"]["rollout-0"]["version"] == 2


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_rank_is_at_its_end_of_the_connection_to_the_gateway(host: str) -> None:
    with running_gateway(host=host) as (url, token), GatewayClient(url, token) as client:
        assert client.local_address == ""
        with GatewayClient(url, "a-wrong-token-of-the-tests") as stranger:
            with pytest.raises(AuthorizationError):
                stranger.status()  # the gateway closes this connection
            assert stranger.local_address == host
        client.status()
        assert place_of(client, None)[1:] == (host, network_name())
        assert place_of(client, "127.0.0.2").address == "127.0.0.2", "an address that is given wins"
        assert place_of(client, "[fd00::7]").address == "fd00::7"


@pytest.mark.ipv6
@pytest.mark.parametrize("far_rank", [0, 3])
def test_loopback_is_refused_at_connect_where_a_peer_is_on_another_host(gateway: str, far_rank: int) -> None:
    """It was 120 s of silence, and then a deadline that named who did not join."""
    pair = f"far-{far_rank}"
    pair_workers.create(gateway, pair, {"rollout-0": 2})
    outcomes = run_ranks(far_ranks.play, 4, gateway, pair, roles_of([], connect=True), far_rank, timeout=200.0)
    ((first,), (second,)) = outcomes[:2]
    assert first == second
    assert first.startswith("AddressError: instance rollout-0: trainer rank 0 is on host ")
    peer = "trainer rank 1" if far_rank == 0 else "rollout-0 rank 1"
    assert f" (::1), and loopback reaches nobody on another host, such as {peer} on host " in first
    with GatewayClient(gateway) as client:
        record = client.pair_status(pair)["instances"]["rollout-0"]
    assert (record["phase"], f"AddressError: {record['reason']}") == ("failed", first)


def test_the_network_of_this_process_is_one_boot_and_one_namespace() -> None:
    boot, _, namespace = network_name().partition(":")
    assert len(boot) == 36
    assert namespace.isdecimal()
