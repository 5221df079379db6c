"""The second run: a pair that an earlier one has left, whatever that had under way, is replaced or deleted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_support import running_gateway
from life_support import ENGINE, ONE, SIZE, Engine, create, soon, trainer
from spawn_support import free_port

from weightcast.cli import main
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.transfer.errors import AbsentError, ControlError, WeightcastError


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def leave_under_way(root: Path, url: str, token: str, stage: str) -> None:
    """Runs a trainer of two ranks that dies with a connect or an update under way."""
    command = [sys.executable, str(root / "tests" / "support" / "dying_trainer.py"), url, "main", stage]
    ended = subprocess.run(command, env={**os.environ, TOKEN_VARIABLE: token}, timeout=120.0)
    assert ended.returncode == -signal.SIGKILL


def update(undo: ExitStack, url: str, token: str, engine: Engine, value: float) -> None:
    """A new trainer of one rank whose version 1 the engine serves."""
    worker = trainer(url, token, value=value)
    undo.callback(worker.close)
    assert worker.update(1).stamp == "1"
    soon(lambda: engine.state == (1, False) and engine.weights.tolist() == [value] * SIZE)


@pytest.mark.parametrize("stage", ["CONNECT", "OFFER"])
@pytest.mark.parametrize("way", ["replace", "delete"])
def test_a_run_begins_anew_whatever_a_dead_one_has_left(
    undo: ExitStack, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, way: str
) -> None:
    options, port = ("--state", str(tmp_path / "state")), free_port()
    with running_gateway(*options, port=port) as (url, token):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        create(url, token, trainers=2, silence=300.0)
        engine = Engine(url, token)
        undo.callback(engine.close)
        leave_under_way(root, url, token, stage)
        with GatewayClient(url, token) as client:
            uid = client.pair_status("main")["uid"]
            with pytest.raises(ControlError, match=r"pair main is being (connected|updated); .* main --force'"):
                client.delete_pair("main")
            if way == "replace":
                client.create_pair("main", 1, ONE, {"outage": 2.0}, replace=True)
            else:
                assert main(["delete", "main", "--force", "--gateway", url]) == 0
                with pytest.raises(AbsentError):
                    client.pair_status("main")
                create(url, token)
            status = client.pair_status("main")
            assert (status["uid"] == uid, status["trainer"]["world_size"], status["offers"]) == (False, 1, {})
        update(undo, url, token, engine, 2.0)
    with running_gateway(*options, port=port, token=token), GatewayClient(url, token) as client:
        assert client.pair_status("main")["instances"][ENGINE]["version"] == 1, "the file has the new pair"
        assert client.pair_status("main")["uid"] == status["uid"]


def test_a_pair_in_use_is_replaced_and_who_used_it_is_told(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    engine = Engine(url, token)
    undo.callback(engine.close)
    earlier = trainer(url, token, value=9.0)
    undo.callback(earlier.close)
    earlier.update(5)
    soon(lambda: engine.state == (5, False))
    with GatewayClient(url, token) as client:
        client.create_pair("main", 1, ONE, {"outage": 2.0}, replace=True)
        status = client.pair_status("main")["instances"][ENGINE]
        assert (status["version"], status["fenced"]) == (None, True)
    update(undo, url, token, engine, 2.0)
    with pytest.raises(WeightcastError, match="was replaced by trainer rank 0"):
        earlier.update(6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainer_world": 2}, "trainer_world is 1, now 2"),
        ({"commit": "all"}, "commit is 'each', now 'all'"),
        ({"settings": {"join": 5.0}}, "settings.join is 120.0, now 5.0"),
        ({"instances": {**ONE, "other": ONE[ENGINE]}}, "instances.other is absent, now there"),
    ],
)
def test_another_specification_is_refused_with_what_differs(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"trainer_world": 1, "instances": ONE}
    with running_gateway() as (url, token), GatewayClient(url, token) as client:
        client.create_pair("main", **arguments)
        client.create_pair("main", **arguments)
        with pytest.raises(ControlError) as refusal:
            client.create_pair("main", **{**arguments, **change})
        assert str(refusal.value) == (
            f"pair main exists with another specification: {words}; delete it with 'weightcast delete main', or create "
            "it with replace=True"
        )
        before = client.pair_status("main")["uid"]
        with pytest.raises(WeightcastError, match="world_size"):
            client.create_pair("main", 1, {ENGINE: {"kind": "worker", "world_size": 0}}, replace=True)
        assert client.pair_status("main")["uid"] == before, "what cannot be created replaces nothing"
