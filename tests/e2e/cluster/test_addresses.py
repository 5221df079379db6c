"""Addresses on several hosts: ranks that are given none, loopback that is refused, IPv6 between hosts, guessers.

The hosts are network namespaces of this machine; skipped where they cannot be made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netns_support import PORT, RANKS, Hosts, Switch, heard, switch, update, why_not

from weightcast.gateway.addresses import http_url

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SETTINGS = {"heartbeat": 1, "silence": 20, "transfer": 100, "join": 60}
GUESS = """
import sys, httpx
url, *addresses = sys.argv[1:]
for address in addresses:
    transport = httpx.HTTPTransport(local_address=address, limits=httpx.Limits(max_keepalive_connections=0))
    with httpx.Client(transport=transport, trust_env=False) as client:
        for _ in range(20):
            answer = client.get(url + "/pairs", headers={"Authorization": "Bearer a-guess-of-the-tests"})
        print(answer.status_code, answer.json()["message"])
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Switch, Hosts]]:
    if reason := why_not():
        pytest.skip(reason)
    with switch(3) as net, ExitStack() as undo:
        yield net, Hosts(net, tmp_path, undo)


def create(on: Hosts) -> None:
    instances = {"rollout-0": {"kind": "worker", "world_size": 1}}
    on.ask("PUT", "/pairs/main", json.dumps({"trainer_world": 2, "instances": instances, "settings": SETTINGS}))


def connected(on: Hosts, trainer_url: str, engine_url: str) -> None:
    """A trainer on host 1 and an engine on host 2, without addresses, that bring a version over."""
    create(on)
    engine = on.rank(2, "engine", "rollout-0", engine_url, "")
    trainers = [on.rank(1, "trainer", rank, trainer_url, "") for rank in range(2)]
    assert [heard(process) for process in trainers] == ["connected"] * 2
    assert update(trainers, 1) == [["rollout-0"]] * 2
    assert heard(engine) == [1, True, False]


def test_ranks_without_an_address_meet_over_ipv4(hosts: tuple[Switch, Hosts]) -> None:
    net, on = hosts
    on.serve("0.0.0.0", "--advertise", net.address(0))
    connected(on, on.url, on.url)


def test_ranks_without_an_address_meet_over_ipv6(hosts: tuple[Switch, Hosts]) -> None:
    net, on = hosts
    on.url = http_url(net.address6(0), PORT)
    on.serve(net.address6(0))
    connected(on, on.url, on.url)


def test_a_gateway_at_every_address_is_reached_by_both_families(hosts: tuple[Switch, Hosts]) -> None:
    """The trainer's ranks are at IPv6 addresses, the engine is at one of IPv4."""
    net, on = hosts
    on.serve("::", "--advertise", f"[{net.address6(0)}]")
    connected(on, http_url(net.address6(0), PORT), http_url(net.address(0), PORT))


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_loopback_is_refused_and_an_address_mends_it(hosts: tuple[Switch, Hosts], loopback: str) -> None:
    """The trainer reaches its gateway by loopback, and the engine is on another host."""
    net, on = hosts
    on.serve("::", "--advertise", net.address(0))
    create(on)
    engine = on.rank(1, "engine", "rollout-0", on.url, "")
    trainers = [on.rank(0, "trainer", rank, http_url(loopback, PORT), "") for rank in range(2)]
    for text in [str(heard(process)) for process in trainers]:
        assert text.startswith("AddressError: instance rollout-0: trainer rank 0 is on host "), text
        assert f" ({loopback}), and loopback reaches nobody on another host, such as rollout-0 rank 0 on " in text
        assert f" ({net.address(1)}); give trainer rank 0 the gateway's URL by an address that is not loopback" in text

    trainers = [on.rank(0, "trainer", rank, http_url(loopback, PORT), net.address(0)) for rank in range(2)]
    assert [heard(process) for process in trainers] == ["connected"] * 2
    assert update(trainers, 1) == [["rollout-0"]] * 2
    assert heard(engine) == [1, True, False]


def test_an_engine_that_gives_loopback_is_named(hosts: tuple[Switch, Hosts]) -> None:
    net, on = hosts
    on.serve(net.address(0))
    create(on)
    on.rank(1, "engine", "rollout-0", on.url, "127.0.0.1")
    trainers = [on.rank(0, "trainer", rank, on.url, "") for rank in range(2)]
    text = str(heard(trainers[0]))
    assert text.startswith("AddressError: instance rollout-0: rollout-0 rank 0 is on host "), text
    assert " (127.0.0.1), and loopback reaches nobody on another host, such as trainer rank 0 on host " in text


def test_a_pair_on_a_ray_node_at_an_ipv6_address(hosts: tuple[Switch, Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    net, on = hosts
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address = net.address6(0)
    said = heard(on.start(0, "ray", str(RANKS.with_name("ray_at.py")), address))
    assert isinstance(said, dict)
    assert [url.startswith(f"http://[{address}]:") for url in said["urls"]] == [True, True], said
    assert (said["trainer"], said["engine"]) == (address, [1, address])


def test_guessers_are_told_apart_by_their_addresses(hosts: tuple[Switch, Hosts]) -> None:
    """IPv4 at a gateway for both families, and a host that guesses from two addresses of its IPv6 network."""
    net, on = hosts
    on.serve("::", "--advertise", net.address(0))

    def guess(host: int, url: str, *addresses: str) -> list[str]:
        command = [*net.on(host), sys.executable, "-c", GUESS, url, *addresses]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    (first,) = guess(1, http_url(net.address(0), PORT), net.address(1))
    assert first.startswith("401 missing or wrong bearer token")
    create(on)  # another host is heard
    again = guess(1, http_url(net.address(0), PORT), net.address(1))
    assert again[0].startswith(f"429 too many wrong tokens from {net.address(1)}; none is looked at for"), again

    second = f"{net.address6(1)}00"
    subprocess.run([*net.on(1), "ip", "address", "add", f"{second}/64", "dev", "e0", "nodad"], check=True)
    said = guess(1, http_url(net.address6(0), PORT), net.address6(1), second)
    assert said[0].startswith("401 ")
    assert said[1].startswith("429 too many wrong tokens from fd00:d9:53::/64; none is looked at for"), said
