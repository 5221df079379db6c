from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from colocated_pairs import lend, lose_a_trainer, many_updates, several_worlds
from colocated_workers import measure_shared, run_random_shared, run_relays, survive
from gateway_support import running_gateway
from pair_workers import create
from spawn_support import run_ranks

from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.transports.rendezvous import open_store


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux")
def test_processes_take_no_more_than_the_setting(store_port: int) -> None:
    """In place a reader casts 1 MiB at a time; staged a lender fills the bucket."""
    bucket_bytes = 24 << 20
    lender, reader = run_ranks(measure_shared, 2, store_port, bucket_bytes)
    for first, second, staging in (*lender, *reader):
        assert max(first, staging) <= 1.05 * bucket_bytes
        assert second < 1 << 20
    assert [first > 0.5 * bucket_bytes for first, _, _ in (*lender, *reader)] == [False, True, False, False]


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
def test_a_hundred_updates_with_weights_that_go_away_and_maps_that_change(gateway: str) -> None:
    """In one pair: one trainer rank lends its weights, which move, the other a buffer, since its weights are freed."""
    create(gateway, "hundred", {"rollout-0": 2})
    results = run_ranks(many_updates, 4, gateway, "hundred", 100, 7, timeout=550.0)
    for number, found in enumerate(results):
        print(f"{'trainer' if number < 2 else 'engine'} rank {number % 2}: {found}")
    assert [found.faults for found in results] == [()] * 4
    assert [found.right for found in results] == [0, 0, 100, 100]
    assert [found.slots for found in results] == [0, 0, 300, 300]
    assert [found.left for found in results] == [()] * 4
    assert all(found.away >= 30 for found in results)
    assert all(found.maps >= 20 for found in results[2:])
    assert [found.under for found in results] == [0, 0, 10, 10]
    assert sum(found.sent for found in results) == 0
    assert all(found.shared > 0 for found in results[:2])
    assert sum(found.shared for found in results) >= 100 * 4 * (32 + 4 * 15), "all of it at least once in each"


def engine(url: str, pair: str, instance: str, dies: int, *prefix: str) -> subprocess.Popen[str]:
    """An instance of its own process, in whatever `prefix` puts it."""
    program = str(Path(__file__).parents[2] / "support" / "colocated_pairs.py")
    command = [*prefix, sys.executable, program, url, pair, instance, str(dies)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


ELSEWHERE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""As good as another host: a process there cannot open the memory of one here. The shell is its init, which nothing
kills."""


@pytest.fixture
def elsewhere() -> list[str]:
    if not shutil.which("unshare") or subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("process namespaces cannot be made")
    return [*ELSEWHERE, "sh", "-c", '"$0" "$@"; exit $?']


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_an_instance_on_this_host_and_one_on_another(gateway: str, elsewhere: list[str], killed: int) -> None:
    """Nothing goes through sockets for one, all for the other. One is killed in the middle, and the other commits."""
    names = ["rollout-0", "rollout-1"]
    create(gateway, "hybrid", dict.fromkeys(names, 1), retries=0)
    prefixes: list[list[str]] = [[], elsewhere]
    engines = [engine(gateway, "hybrid", name, 2 if number == killed else 0, *prefixes[number])
               for number, name in enumerate(names)]  # fmt: skip
    try:
        both = run_ranks(lend, 2, gateway, "hybrid", 2, timeout=150.0)
        with GatewayClient(gateway) as client:
            instances = client.pair_status("hybrid")["instances"]
    finally:
        for process in engines:
            process.kill()
        said = [process.communicate()[0].splitlines() for process in engines]
    sent = [[sum(rank[0].to[name][way] for rank in both) for way in (0, 1)] for name in names]
    whole = 32 + 4 * 15  # elements of w and of all experts
    assert sent == [[0, 4 * whole], [4 * whole, 0]]
    for _, second in both:
        assert second.error.startswith(f"version 2 is not served everywhere: {names[killed]} is fenced: ")
        assert f"lost its connection to {names[killed]} rank 0" in second.error
        assert names[1 - killed] not in second.error
        assert second.seconds < 20.0
    assert [json.loads(line) for line in said[1 - killed]] == [[1, [], False], [2, [], False]]
    assert [json.loads(line) for line in said[killed]] == [[1, [], False]]
    states = [(record["version"], record["fenced"], record["serves"]) for record in map(instances.get, names)]
    assert states[1 - killed] == (2, False, True)
    assert states[killed] == (1, True, False)


def test_a_trainer_rank_that_is_killed_while_it_is_read_leaves_a_fenced_engine(gateway: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    create(gateway, "killed", {"rollout-0": 1}, retries=0)
    left, gone, reader = run_ranks(lose_a_trainer, 3, gateway, "killed", tmp_path / "pid", timeout=150.0)
    assert gone == (-9,)
    committed, fenced, seconds, *segments = reader
    assert (committed, fenced, segments) == (None, True, [])
    assert seconds < 20.0
    assert left[0].error == ""
    assert left[1].error.startswith("version 2 is not served everywhere: rollout-0 is fenced: ")
    assert "trainer rank 1" in left[1].error
    with GatewayClient(gateway) as client:
        record = client.pair_status("killed")["instances"]["rollout-0"]
    assert (record["version"], record["fenced"], record["serves"]) == (1, True, False)
    assert [name for name in set(os.listdir("/dev/shm")) - before if "weightcast" in name or "torch" in name] == []


@pytest.mark.slow
def test_two_trainer_ranks_feed_four_and_four_feed_two(gateway: str) -> None:
    """Half of the trainer ranks lend their weights, half a buffer; the map changes between two versions."""
    worlds = [(2, 4), (4, 2)]
    for trainers, engines in worlds:
        create(gateway, f"{trainers}-to-{engines}", {"rollout-0": engines}, trainers=trainers)
    results = run_ranks(several_worlds, 6, gateway, worlds, timeout=150.0)
    for number, (trainers, engines) in enumerate(worlds):
        right, sent, shared = zip(*(result[number] for result in results), strict=True)
        assert right == (0,) * trainers + (3,) * engines
        assert sent == (0,) * 6
        assert all(shared[:trainers])
