from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from colocated_workers import lose_the_engine, many_updates, run_random_shared, run_relays, survive
from gateway_support import running_gateway
from pair_workers import create
from spawn_support import run_ranks

from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.handles import Share
from weightcast.transfer.transports.torch_group import open_store


@pytest.fixture
def store_port() -> Iterator[int]:
    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    yield port
    del store


@pytest.mark.parametrize(("trainer", "hosts", "seeds"), [(2, "aaaa", range(40)), (3, "abab", range(40, 70)),
                                                        (1, "abba", range(70, 100))])  # fmt: skip
def test_random_layouts_are_read_byte_for_byte(store_port: int, trainer: int, hosts: str, seeds: range) -> None:
    """Equal and unequal numbers of ranks, on one host or on two, in place and by staging."""
    results = run_ranks(run_random_shared, 4, store_port, trainer, hosts, seeds)
    checked, messages, shared, rounds = (sum(column) for column in zip(*results, strict=True))
    assert min(checked, shared) > 0
    assert (messages == rounds == 0) == (len(set(hosts)) == 1)


def test_what_was_read_in_place_is_passed_on(store_port: int) -> None:
    """Each trainer rank is beside one rank of the instance; a third rank is far from both."""
    results = run_ranks(run_relays, 5, store_port, "ababc", range(15))
    checked, shared, passed = (sum(column) for column in zip(*results, strict=True))
    assert min(checked, shared, passed) > 0


@pytest.mark.parametrize(("rank", "peer", "read"), [(0, "rollout-0 rank 0", [1.0]), (1, "trainer rank 0", [1.0])])
def test_a_side_that_is_killed_is_named_and_leaves_no_memory(
    store_port: int, rank: int, peer: str, read: list[float]
) -> None:
    """A reader goes on reading what a dead lender lent, but does not take it for an update."""
    before = set(os.listdir("/dev/shm"))
    ((seconds, said, found, left),) = run_ranks(survive, 1, store_port, rank)
    assert f"lost its connection to {peer}" in said
    assert seconds < 10.0, "only the deadline noticed"
    assert found == read
    assert left == []
    assert [name for name in set(os.listdir("/dev/shm")) - before if "weightcast" in name or "torch" in name] == []


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_gateway() as (url, token):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("share", ["in_place", "staged"])
def test_many_updates_with_weights_that_go_away_and_maps_that_change(gateway: str, share: Share) -> None:
    create(gateway, share, {"rollout-0": 2})
    results = run_ranks(many_updates, 4, gateway, share, share, 50, 7, timeout=500.0)
    assert [faults for _, _, faults, _ in results] == [[]] * 4
    assert [left for _, _, _, left in results] == [[]] * 4
    sent, shared = (sum(column) for column in list(zip(*results, strict=True))[:2])
    assert sent == 0
    assert shared >= 50 * 4 * (32 + 4 * 15), "all of it at least once in each"


def test_an_engine_that_is_killed_in_the_middle_is_fenced(gateway: str) -> None:
    create(gateway, "killed", {"rollout-0": 1}, retries=0)
    first, second, engine = run_ranks(lose_the_engine, 3, gateway, "killed", timeout=150.0)
    assert engine == ["engine ended with -9"]
    for committed, lost in (first, second):
        assert committed == "committed"
        assert lost.startswith("True version 2 is not served everywhere: rollout-0 is fenced: ")
        assert "lost its connection to rollout-0 rank 0" in lost
