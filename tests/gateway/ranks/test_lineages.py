"""A trainer that resumes from an older step: its versions are others, in every stamp and after every restart."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from gateway_support import running_gateway
from life_support import ENGINE, ONE, SIZE, Engine, create, engine_on, soon, training_on
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.colocated.cycle import ColocatedCycle
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import UpdateError, VersionError, WeightcastError

OTHER = "rollout-1"
INTEGER = {"kind": "worker", "world_size": 1, "stamps": "integer"}


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def versions(url: str, token: str) -> dict[str, object]:
    with GatewayClient(url, token) as client:
        return {name: record["version"] for name, record in client.pair_status("main")["instances"].items()}


def test_a_trainer_resumes_from_an_older_step(undo: ExitStack, tmp_path: Path) -> None:
    """At 81 after 100, with other weights; then 82, and 83 after the gateway was started again."""
    options, port = ("--state", str(tmp_path / "state")), free_port()
    with running_gateway(*options, port=port) as (url, token):
        create(url, token)
        engine = engine_on(undo, url, token)
        training_on(undo, url, token).update(100)
        soon(lambda: engine.state == (100, False))
        assert (engine.worker.stamp, versions(url, token)) == ("100", {ENGINE: 100})
        resumed = training_on(undo, url, token, value=2.0)
        with pytest.raises(VersionError, match=r"has version 100; version 81 is not newer.*\(81, restart=True\)"):
            resumed.update(81)
        result = resumed.update(81, restart=True)
        assert (result.version, result.stamp, result.instances[ENGINE]["version"]) == (81, "81@2", "81@2")
        soon(lambda: engine.state == (81, False))
        assert (engine.worker.stamp, engine.weights.tolist()) == ("81@2", [2.0] * SIZE)
        assert resumed.update(82).stamp == "82@2"
        with pytest.raises(VersionError, match="has version 82@2; version 81@2 is not newer"):
            resumed.update(81)
    with running_gateway(*options, port=port, token=token):
        assert versions(url, token) == {ENGINE: "82@2"}
        assert resumed.update(83).stamp == "83@2"
        soon(lambda: engine.worker.stamp == "83@2")
        assert versions(url, token) == {ENGINE: "83@2"}
        assert engine.served == [100, 81, 82, 83]


def test_an_instance_that_was_away_when_the_lineage_began_comes_back(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    with GatewayClient(url, token) as client:
        settings = {"outage": 2.0, "heartbeat": 0.2, "silence": 2.0, "register": 10.0}
        client.create_pair("main", 1, {**ONE, OTHER: ONE[ENGINE]}, settings)
    engine, away = engine_on(undo, url, token), Engine(url, token, name=OTHER)
    training = training_on(undo, url, token)
    training.update(100)
    soon(lambda: away.state == (100, False))
    away.close()
    with pytest.raises(UpdateError, match=f"version 81@2 is not served everywhere: {OTHER} is "):
        training.update(81, restart=True)
    assert versions(url, token) == {ENGINE: "81@2", OTHER: 100}
    back = engine_on(undo, url, token, OTHER, memory=away.worker.memory, weights=away.weights)
    assert back.state == (100, False), "it goes on with what it has, under its stamp"
    with GatewayClient(url, token) as client:
        soon(lambda: client.pair_status("main")["instances"][OTHER]["silent"] == [])
    assert training.update(82).stamp == "82@2"
    soon(lambda: [one.worker.stamp for one in (engine, back)] == ["82@2"] * 2)
    assert versions(url, token) == {ENGINE: "82@2", OTHER: "82@2"}


def test_a_restart_is_refused_where_stamps_are_integers(undo: ExitStack) -> None:
    """Before anything is asked of an engine; the pair goes on in its lineage."""
    url, token = undo.enter_context(running_gateway())
    with GatewayClient(url, token) as client:
        client.create_pair("main", 1, {**ONE, OTHER: INTEGER}, {"outage": 2.0})
    engines = [engine_on(undo, url, token, name) for name in (ENGINE, OTHER)]
    training = training_on(undo, url, token)
    training.update(100)
    soon(lambda: [engine.state for engine in engines] == [(100, False)] * 2)
    with GatewayClient(url, token) as client:
        before = client.pair_status("main")
        with pytest.raises(
            VersionError, match=rf"instances {OTHER} take integer stamps alone; .*greater.*create_pair\(replace=True\)"
        ):
            training.update(81, restart=True)
        assert client.pair_status("main") == before, "no order was given"
    assert training.update(101).stamp == "101"
    with GatewayClient(url, token) as client:
        client.leave_instance("main", OTHER)
        assert training.update(81, restart=True).stamp == "81@2"
        with pytest.raises(VersionError, match=f"instance {OTHER} takes integer stamps alone, and pair main is in lin"):
            client.join_instance("main", OTHER, INTEGER)


def test_a_lineage_lasts_though_the_update_that_began_it_failed(undo: ExitStack, tmp_path: Path) -> None:
    options, port = ("--state", str(tmp_path / "state")), free_port()
    with running_gateway(*options, port=port) as (url, token):
        create(url, token)
        engine = engine_on(undo, url, token)
        training_on(undo, url, token).update(100)
        weights = torch.full((SIZE,), float("nan"))
        training = TrainerWorker(url, "main", PlainSource({"t": weights}), rank=0, world_size=1, token=token)
        undo.callback(training.close)
        training.connect()
        with pytest.raises(UpdateError, match=r"version 81@2 is not served everywhere: .*NaN"):
            training.update(81, restart=True)
        weights.fill_(3.0)
        assert training.update(81).stamp == "81@2", "no instance has it, so it is still to come"
        weights.fill_(float("nan"))
        with pytest.raises(UpdateError, match="version 81@3 is not served everywhere"):
            training.update(81, restart=True)
    weights.fill_(4.0)
    with running_gateway(*options, port=port, token=token):
        assert training.update(5).stamp == "5@3"
        soon(lambda: engine.worker.stamp == "5@3")
        assert engine.weights.tolist() == [4.0] * SIZE


@pytest.mark.parametrize(("numbers", "restarts"), [((101, 101), (True, False)), ((5, 6), (True, True))])
def test_ranks_that_do_not_agree_about_a_restart_are_told(
    undo: ExitStack, numbers: tuple[int, int], restarts: tuple[bool, bool]
) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token, trainers=2)
    engine = engine_on(undo, url, token)
    source = PlainSource({"t": torch.ones(SIZE)})
    workers = [TrainerWorker(url, "main", source, rank=rank, world_size=2, token=token) for rank in range(2)]
    pool = undo.enter_context(ThreadPoolExecutor(2))
    for worker in workers:
        undo.callback(worker.close)
    list(pool.map(TrainerWorker.connect, workers))

    def update(worker: TrainerWorker, number: int, restart: bool) -> object:
        try:
            return worker.update(number, restart=restart).stamp
        except WeightcastError as error:
            return error

    assert list(pool.map(update, workers, (100, 100), (False, False))) == ["100", "100"]
    failures = list(pool.map(update, workers, numbers, restarts))
    assert {type(failure) for failure in failures} == {VersionError, UpdateError}
    offers = [
        f"{number}{' with restart=True' if restart else ''}" for number, restart in zip(numbers, restarts, strict=True)
    ]
    for failure in failures:
        (rank,) = [rank for rank in range(2) if f"trainer rank {rank} offers {offers[rank]}," in str(failure)]
        assert f"other ranks offer {offers[1 - rank]}" in str(failure)
    (stamp,) = set(map(str, pool.map(update, workers, (7, 7), (True, True))))
    soon(lambda: engine.worker.stamp == stamp)
    assert stamp in ("7@2", "7@3")


class Hooks:
    """The trainer's part of a colocated cycle: the first version of this run begins a lineage, if that `resumes`."""

    def __init__(self, worker: TrainerWorker, weights: torch.Tensor, resumes: bool) -> None:
        self._worker, self._weights, self._restart = worker, weights, resumes
        self.stamps: list[str] = []

    def train(self, version: int) -> None:
        self._weights.fill_(float(version))

    def free(self) -> None: ...

    def transfer(self, version: int) -> None:
        self.stamps.append(self._worker.update(version, restart=self._restart).stamp)
        self._restart = False

    def offload(self) -> None: ...


def test_a_colocated_cycle_resumes_from_an_older_step(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = engine_on(undo, url, token)
    for resumes, versions_of_run, stamps in ((False, (99, 100), ["99", "100"]), (True, (81, 82), ["81@2", "82@2"])):
        weights = torch.zeros(SIZE)
        source = PlainSource({"t": weights})
        worker = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token, share="in_place")
        undo.callback(worker.close)
        worker.connect()
        hooks = Hooks(worker, weights, resumes)
        cycle = ColocatedCycle([], hooks)
        for version in versions_of_run:
            cycle.run(version)
            soon(lambda stamp=hooks.stamps[-1]: engine.worker.stamp == stamp)
            assert engine.weights.tolist() == [float(version)] * SIZE
        assert hooks.stamps == stamps
