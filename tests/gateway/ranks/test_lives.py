"""Pairs, gateways and processes that end and begin again while others live on: who hears of it, and who is believed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import first
from gateway_support import running_gateway
from life_support import ENGINE, ONE, Engine, create, engine_on, soon, trainer, training_on
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient, Seat
from weightcast.gateway.control.instance import Holding
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import DisplacedError, VersionError


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def record(url: str, token: str) -> dict[str, Any]:
    with GatewayClient(url, token) as client:
        return dict(client.pair_status("main")["instances"][ENGINE])


def test_a_new_worker_is_fenced_until_a_version_is_committed(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = engine_on(undo, url, token)
    assert engine.state == (None, True)
    training = training_on(undo, url, token)
    assert engine.state == (None, True), "connected, and nothing committed"
    training.update(1)
    soon(lambda: engine.state == (1, False))


def test_engines_hear_of_a_pair_that_is_created_again(undo: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """And its versions are others: the new pair begins at 1, though the ranks hold version 2 of the one before."""
    caplog.set_level(logging.WARNING, "weightcast.worker")
    url, token = undo.enter_context(running_gateway())
    create(url, token, register=15.0)
    engine = engine_on(undo, url, token)
    before = training_on(undo, url, token)
    before.update(1)
    before.update(2)
    soon(lambda: engine.state == (2, False))
    before.close()
    with GatewayClient(url, token) as client:
        client.delete_pair("main")
    soon(lambda: "there is no pair 'main'; there are none; holds version 2 and waits for pair main" in caplog.text)
    assert engine.state == (2, False), "it goes on with what it has"
    create(url, token, register=15.0)
    soon(lambda: "the pair created again" in caplog.text)
    after = training_on(undo, url, token, value=5.0)
    assert engine.state == (2, True), "what it holds is of another pair"
    after.update(1)
    soon(lambda: engine.state == (1, False))
    assert engine.weights.tolist() == [5.0] * 8
    assert engine.said == []
    assert caplog.text.count("waits for pair main") == 1, "said once, however often `serve` is called"


def test_a_trainer_goes_on_with_a_pair_that_was_created_again(undo: ExitStack) -> None:
    """Its orders are numbered anew; without a word from anybody its next update registers again."""
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = engine_on(undo, url, token)
    training = training_on(undo, url, token)
    training.update(1)
    with GatewayClient(url, token) as client:
        client.delete_pair("main")
    create(url, token)
    training.update(2)
    soon(lambda: engine.state == (2, False))


def test_a_trainer_that_was_replaced_is_not_believed_by_a_pair_that_was_created_again(undo: ExitStack) -> None:
    """And a survivor is: a single rank may be replaced later, as if the pair had been there all the time."""
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = engine_on(undo, url, token)
    replaced = training_on(undo, url, token)
    replaced.update(1)
    training = training_on(undo, url, token, value=2.0)
    training.update(2)
    with GatewayClient(url, token) as client:
        client.delete_pair("main")
    create(url, token)
    for ask in (lambda: replaced.update(3), replaced.connect):
        with pytest.raises(DisplacedError, match="was replaced by trainer rank 0"):
            ask()
    training.update(3)
    soon(lambda: engine.state == (3, False))
    assert engine.weights.tolist() == [2.0] * 8


def test_an_instance_that_leaves_and_joins_again_is_heard(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = engine_on(undo, url, token)
    training = training_on(undo, url, token)
    training.update(1)
    with GatewayClient(url, token) as client:
        other = {"kind": "worker", "world_size": 1}
        client.join_instance("main", "other", other)
        client.leave_instance("main", ENGINE)
        client.join_instance("main", ENGINE, ONE[ENGINE])
        client.leave_instance("main", "other")
    assert record(url, token)["reason"] == "it had left"
    training.update(2)
    soon(lambda: engine.state == (2, False))


def test_who_waits_for_orders_of_an_instance_is_woken_when_it_joins_again(undo: ExitStack) -> None:
    """Else a rank that polls for long would hear of the update when it is too late to register."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=60.0, register=4.0)
    engine = Engine(url, token, wait=8.0)
    undo.callback(engine.close)
    training = training_on(undo, url, token)
    training.update(1)
    with GatewayClient(url, token) as client:
        client.join_instance("main", "other", {"kind": "worker", "world_size": 1})
        client.leave_instance("main", ENGINE)
        soon(lambda: client.pair_status("main")["instances"][ENGINE]["phase"] == "left")
        time.sleep(1.0)  # it has heard that, and asks again
        client.join_instance("main", ENGINE, ONE[ENGINE])
        client.leave_instance("main", "other")
    training.update(2)
    assert engine.served == [1, 2] or engine.state == (2, False)


@contextmanager
def older_state(undo: ExitStack, folder: Path) -> Iterator[tuple[str, str, Engine, TrainerWorker]]:
    """A gateway on a state file of version 1, with its address and token, whose engine and trainer are at version 3."""
    state, backup, port = folder / "state", folder / "backup", free_port()
    options = ("--state", str(state))
    with running_gateway(*options, port=port) as (url, token):
        create(url, token)
        engine = engine_on(undo, url, token)
        training = training_on(undo, url, token)
        training.update(1)
    shutil.copy(state, backup)
    with running_gateway(*options, port=port, token=token):
        training.update(3)
        soon(lambda: engine.state == (3, False))
    for file in folder.glob("state*"):
        file.unlink()
    shutil.copy(backup, state)
    with running_gateway(*options, port=port, token=token):
        yield url, token, engine, training


def test_a_state_file_that_is_older_than_what_ranks_hold(undo: ExitStack, tmp_path: Path) -> None:
    with older_state(undo, tmp_path) as (url, token, engine, first):
        first.close()
        second = training_on(undo, url, token)
        status = record(url, token)
        assert (status["version"], status["fenced"], status["serves"]) == (1, True, False)
        assert status["reason"] == "rank 0 holds version 3, the record says version 1"
        soon(lambda: engine.state == (3, True))
        with pytest.raises(VersionError, match="version 2 is not newer, offer a greater one"):
            second.update(2)
        second.update(4)
        soon(lambda: engine.state == (4, False))
        assert record(url, token)["serves"]


def test_a_version_below_what_ranks_hold_is_refused_though_they_say_so_late(undo: ExitStack, tmp_path: Path) -> None:
    """The trainer was connected before the gateway was restarted: its offer comes before any rank has registered."""
    with older_state(undo, tmp_path) as (_, _, engine, training):
        with pytest.raises(Exception, match="hold version 3, the record says 1; version 2 is not newer"):
            training.update(2)
        assert engine.state == (3, True)
        training.update(4)
        soon(lambda: engine.state == (4, False))


@pytest.mark.parametrize(
    ("holding", "committed", "said"),
    [
        (Holding(), None, ""),
        (Holding(first(3), "here"), first(3), ""),
        (Holding(first(3), "here", True), first(3), ""),  # the commit was not heard of
        (Holding(first(3), "here"), first(1), "holds version 3, the record says version 1"),
        (Holding(first(1), "here"), first(3), "holds version 1, the record says version 3"),
        (Holding(first(1), "here"), None, "holds version 1, the record says no version"),
        (Holding(first(3), "there"), first(3), "holds version 3 of another pair, the record says version 3"),
        (Holding(), first(3), "holds no version, the record says version 3"),
        (Holding(uncommitted=True), first(3), "holds an uncommitted update, the record says version 3"),
        (Holding(first(4), "here", True), first(3), "holds version 4, the record says version 3"),
    ],
)
def test_what_a_rank_says_is_compared_with_the_record(holding: Holding, committed: Version | None, said: str) -> None:
    assert holding.differs("here", committed) == said


def test_of_two_processes_for_one_rank_the_second_is_the_rank(undo: ExitStack, root: Path) -> None:
    """Both are named in one line, to the one that is refused and in the gateway's log, and they never take turns."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, heartbeat=0.5, silence=5.0)
    environment = {**os.environ, TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(root / "examples" / "own_engine.py"), url, "main", ENGINE]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        undo.enter_context(process)
        undo.callback(process.kill)
        return process

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    source = PlainSource({"model.norm.weight": torch.ones(64)})
    training = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
    first = start()
    training.connect()
    training.update(1)
    assert line(first) == "serving version 1"
    second = start()
    _, said = first.communicate(timeout=60)
    assert "DisplacedError" in said
    refusal = said.strip().splitlines()[-1]
    for process in (first, second):
        assert f"process {process.pid} on " in refusal
    assert refusal.count("(since 20") == 2
    assert ", which still beats, was displaced by process" in refusal
    assert first.returncode == 1
    found = record(url, token)
    assert (found["fenced"], found["serves"]) == (True, False)
    training.update(2)
    assert line(second) == "serving version 2"
    assert record(url, token)["serves"]
    training.close()


def test_a_displaced_worker_is_refused_for_good_and_fails_nobody(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token, heartbeat=0.2, silence=5.0)
    first = engine_on(undo, url, token)
    training = training_on(undo, url, token)
    training.update(1)
    soon(lambda: first.state == (1, False))
    second = engine_on(undo, url, token)
    soon(lambda: first.said)
    for version in range(2, 6):
        training.update(version)
        soon(lambda version=version: second.state == (version, False))
    assert first.state == (1, True), "it must not go on either"
    assert {type(error) for error in first.said} == {DisplacedError}
    assert len({str(error) for error in first.said}) == 1
    assert second.said == []
    seat = Seat("main", ENGINE, 1, "instance", 0)
    with GatewayClient(url, token, identity=first.worker.memory.identity) as client:
        for ask in (
            lambda: client.orders("main", ENGINE, 0, 0.0),
            lambda: client.restarted("main", ENGINE, 0),
            lambda: client.beat(f"main/instances/{ENGINE}/ranks/0", first.worker.memory.identity),
            lambda: client.joined(seat),
            lambda: client.fail(seat, ValueError("x")),
            lambda: client.moved(seat, Version.parse(5), [0]),
            lambda: client.ready(seat, "", [], 0.0),
        ):
            with pytest.raises(DisplacedError, match="was displaced by process"):
                ask()


def test_a_displaced_process_is_refused_by_the_next_gateway_too(undo: ExitStack, tmp_path: Path) -> None:
    options, port = ("--state", str(tmp_path / "state")), free_port()
    with running_gateway(*options, port=port) as (url, token):
        create(url, token, heartbeat=0.2, silence=5.0)
        first = engine_on(undo, url, token)
        training = training_on(undo, url, token)
        training.update(1)
        second = engine_on(undo, url, token)
        soon(lambda: first.said)
        training.update(2)
        soon(lambda: second.state == (2, False))
    with running_gateway(*options, port=port, token=token):
        client = undo.enter_context(GatewayClient(url, token, identity=first.worker.memory.identity))
        with pytest.raises(DisplacedError, match="was displaced by process"):
            client.orders("main", ENGINE, 0, 0.0)
        training.update(3)
        soon(lambda: second.state == (3, False))


def test_an_update_that_reaches_nobody_says_so(undo: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """An operator has taken out the only instance: it is no error, and it was not said."""
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = Engine(url, token)
    undo.callback(engine.close)
    training = trainer(url, token)
    undo.callback(training.close)
    training.update(1)
    with GatewayClient(url, token) as client:
        client.leave_instance("main", ENGINE)
    with caplog.at_level("WARNING", "weightcast.worker"):
        assert training.update(2).instances == {}
    assert "pair main: version 2 reaches nobody: all instances have left; let one join" in caplog.text
