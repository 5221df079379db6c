"""Ranks that wait say for whom, and an engine hears why its connect failed. Real gateway and ranks, short intervals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import torch
from gateway_support import running_gateway
from life_support import ENGINE, ONE, Engine, create, soon

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks import instance as instance_ranks
from weightcast.gateway.ranks import orders
from weightcast.gateway.ranks import trainer as trainer_ranks
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import DeadlineError, WeightcastError

SOON = 60.0


@pytest.fixture
def undo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[ExitStack]:
    """What is to be closed; ranks of this process say after 0.3 s for whom they wait, and warnings are collected."""
    for module in (instance_ranks, orders, trainer_ranks):
        monkeypatch.setattr(module, "SAY_SECONDS", 0.3)
    caplog.set_level(logging.WARNING, "weightcast.worker")
    with ExitStack() as stack:
        yield stack


def start(undo: ExitStack, work: threading.Thread) -> threading.Thread:
    work.start()
    undo.callback(work.join, SOON)
    return work


def trainer_rank(url: str, token: str, rank: int, world: int, connected: list[object]) -> threading.Thread:
    """A trainer rank that connects in a thread; an error is what it ends with."""

    def run() -> None:
        worker = TrainerWorker(url, "main", PlainSource({"t": torch.ones(8)}), rank=rank, world_size=world, token=token)
        try:
            worker.connect()
            connected.append(worker)
        except WeightcastError as error:
            connected.append(error)
            worker.close()

    return threading.Thread(target=run, daemon=True)


def test_an_engine_without_a_connect_says_that_it_waits_for_the_trainer(
    undo: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = Engine(url, token)
    undo.callback(engine.close)
    text = "rollout-0 rank 0: pair main: no connect from the trainer yet; its next connect() or update() brings one"
    soon(lambda: text in caplog.text, SOON)
    assert caplog.text.count(text) == 1, "the next time is after a minute"


def test_an_engine_hears_that_its_connect_failed_and_why(undo: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """The other rank of its instance never comes: that is no failure of its own, so it had heard nothing of it."""
    url, token = undo.enter_context(running_gateway())
    with GatewayClient(url, token) as client:
        client.create_pair("main", 1, {ENGINE: {"kind": "worker", "world_size": 2}}, {"register": 3.0})
    engine = Engine(url, token, world=2)
    undo.callback(engine.close)
    soon(lambda: engine.worker._cursor is not None, SOON)
    ended: list[object] = []
    start(undo, trainer_rank(url, token, 0, 1, ended)).join(SOON)
    reason = (
        "pair main: instance rollout-0 ranks 1 did not register within 3 s; rollout-0 rank 1 was never heard of; start "
        "the engine, whose ranks call InstanceWorker.serve between two batches"
    )
    assert [(type(error), str(error)) for error in ended] == [(DeadlineError, reason)]
    line = f"rollout-0 rank 0: the connect failed: {reason}"
    soon(lambda: line in caplog.text, SOON)
    assert caplog.text.count("the connect failed") == 1
    assert engine.said == [], "serve goes on"


def test_an_engine_says_that_it_has_left_and_that_its_pair_is_another_one(
    undo: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = Engine(url, token)
    undo.callback(engine.close)
    soon(lambda: engine.worker._cursor is not None, SOON)
    with GatewayClient(url, token) as client:
        client.leave_instance("main", ENGINE)
        left = "rollout-0 rank 0: instance rollout-0 left pair main; this rank waits until it joins again"
        soon(lambda: left in caplog.text, SOON)
        client.create_pair("main", 1, ONE, replace=True)
        soon(lambda: "or the pair created again; this rank holds no version" in caplog.text, SOON)
    assert (caplog.text.count(left), engine.said) == (1, [])


def test_an_update_that_waits_for_a_trainer_rank_names_its_process(
    undo: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 has connected and does not offer: rank 0 says which process that is, and when it was heard."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, trainers=2, silence=60.0)
    engine = Engine(url, token)
    undo.callback(engine.close)
    ranks: list[object] = []
    for thread in [start(undo, trainer_rank(url, token, rank, 2, ranks)) for rank in range(2)]:
        thread.join(SOON)
    workers = {worker._rank: worker for worker in ranks if isinstance(worker, TrainerWorker)}
    assert sorted(workers) == [0, 1]

    def update() -> None:
        with suppress(WeightcastError):
            workers[0].update(1)

    start(undo, threading.Thread(target=update, daemon=True))
    text = "trainer rank 0: pair main: waiting, "
    soon(lambda: "trainer ranks 1 did not offer version 1 yet; trainer rank 1 was process " in caplog.text, SOON)
    assert text in caplog.text
    assert "last heard 2" in caplog.text
    workers[1].update(1)
    soon(lambda: engine.state == (1, False), SOON)
    for worker in workers.values():
        worker.close()


def test_of_many_trainer_ranks_one_speaks(undo: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 says it at once, the others only when it takes a minute."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, trainers=2, register=3.0)
    ranks: list[object] = []
    for thread in [start(undo, trainer_rank(url, token, rank, 2, ranks)) for rank in range(2)]:
        thread.join(SOON)
    assert [type(error) for error in ranks] == [DeadlineError] * 2
    assert "trainer rank 0: pair main: waiting, " in caplog.text
    assert "instance rollout-0 ranks 0 did not register yet; rollout-0 rank 0 was never heard of" in caplog.text
    assert "trainer rank 1: pair main: waiting, " not in caplog.text
