"""Readiness of an instance as a probe asks for it, through real ranks: before a commit, after it, fenced, and dead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gateway_support import running_gateway
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.errors import UpdateError
from weightcast.transfer.layout.memory import RankLayout

NAME = "model.norm.weight"
READY = make_token()


class Gateway:
    """A gateway that runs, as a probe and a trainer see it."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def probe(self, instance: str = "rollout-1", pair: str = "main") -> tuple[int, dict[str, Any]]:
        path = f"{self.url}/pairs/{pair}/instances/{instance}/ready"
        answer = httpx.get(path, headers={"Authorization": f"Bearer {READY}"}, trust_env=False)
        assert "\n" not in answer.text
        return answer.status_code, answer.json()

    def refusal(self, *names: str) -> str:
        """The reason of a probe that fails."""
        status, answer = self.probe(*names)
        assert (status, answer["error"]) == (503, "PairStateError")
        return str(answer["message"])

    def create(self, **settings: float) -> None:
        with GatewayClient(self.url, self.token) as client:
            client.create_pair("main", 1, {"rollout-1": {"kind": "worker", "world_size": 1}}, settings)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setenv("WEIGHTCAST_READY_TOKEN", READY)
    with running_gateway() as (url, token):
        yield Gateway(url, token)


def until(ready: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120.0
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.05)


@contextmanager
def trainer_of(gateway: Gateway, weights: dict[str, torch.Tensor]) -> Iterator[TrainerWorker]:
    source = PlainSource(weights)
    trainer = TrainerWorker(gateway.url, "main", source, rank=0, world_size=1, token=gateway.token)
    try:
        trainer.connect()
        yield trainer
    finally:
        trainer.close()


class Sink:
    """A rank that holds the tensor whole, and flips a bit of it after the transfer when it is told to."""

    def __init__(self) -> None:
        self.source = PlainSource({NAME: torch.zeros(64)})
        self.weights, self.flips = self.source.describe(), False

    def describe(self) -> RankLayout:
        return self.weights

    def placement(self) -> None:
        return None

    def settle(self) -> None:
        if self.flips:
            self.weights.view(0).view(torch.int32)[3] ^= 1


@contextmanager
def engine_of(gateway: Gateway, sink: Sink) -> Iterator[None]:
    worker = InstanceWorker(gateway.url, "main", "rollout-1", sink, rank=0, world_size=1, token=gateway.token)
    ends = threading.Event()

    def serve() -> None:
        while not ends.is_set():
            worker.serve(wait=0.2)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(60.0)
        worker.close()


def test_an_instance_is_ready_while_it_serves(gateway: Gateway) -> None:
    assert gateway.refusal() == "instance rollout-1 of pair main does not serve: the gateway does not know it"
    gateway.create()
    assert gateway.refusal().endswith("does not serve: no version was committed yet")
    assert "main" not in gateway.refusal("rollout-1", "secret")
    assert "rollout-1" not in gateway.refusal("rollout-9")
    sink, weights = Sink(), {NAME: torch.ones(64)}
    with engine_of(gateway, sink), trainer_of(gateway, weights) as trainer:
        assert gateway.probe()[0] == 503, "connected, but nothing was committed"
        trainer.update(1)
        assert gateway.probe() == (200, {"ready": True})
        sink.flips = True
        with pytest.raises(UpdateError):
            trainer.update(2)
        assert f"{NAME!r}" in gateway.refusal(), "the reason of the fence"
        sink.flips = False
        trainer.update(3)
        assert gateway.probe() == (200, {"ready": True})
        with GatewayClient(gateway.url, gateway.token) as client:
            client.leave_instance("main", "rollout-1")
        assert gateway.refusal().endswith("does not serve: it has left, or leaves")


def test_an_instance_is_ready_again_after_a_restart_of_the_gateway(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are the same, so its memory is: it needs no update. Another process of its rank is not known."""
    monkeypatch.setenv("WEIGHTCAST_READY_TOKEN", READY)
    state, port, token = ("--state", str(tmp_path / "state")), free_port(), make_token()
    names = (f"http://127.0.0.1:{port}", "main", "rollout-1")
    command = [sys.executable, str(root / "examples" / "own_engine.py"), *names]
    with running_gateway(*state, port=port, token=token) as (url, _):
        gateway = Gateway(url, token)
        gateway.create(heartbeat=0.5, silence=5.0)
        engine = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: token})
        try:
            with trainer_of(gateway, {NAME: torch.ones(64)}) as trainer:
                trainer.update(1)
        except BaseException:
            engine.kill()
            raise
    try:
        with running_gateway(*state, port=port, token=token):
            until(lambda: gateway.probe()[0] == 200)
            engine.kill()
            engine.wait()
            until(lambda: gateway.probe()[0] == 503)
        with running_gateway(*state, port=port, token=token), GatewayClient(url, token) as client:
            client.beat("main/instances/rollout-1/ranks/0", "another process")
            assert gateway.refusal().endswith("the gateway was restarted; the next update connects the instance again")
    finally:
        engine.kill()
        engine.wait()


def test_an_instance_that_dies_is_not_ready(gateway: Gateway, root: Path) -> None:
    gateway.create(heartbeat=0.5, silence=5.0)
    names = (gateway.url, "main", "rollout-1")
    command = [sys.executable, str(root / "examples" / "own_engine.py"), *names]
    with subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: gateway.token}) as engine:
        try:
            with trainer_of(gateway, {NAME: torch.ones(64)}) as trainer:
                trainer.update(1)
            assert gateway.probe()[0] == 200
        finally:
            engine.kill()
    until(lambda: gateway.probe()[0] == 503)
    assert gateway.refusal().endswith("does not serve: rollout-1 ranks 0 were not heard from for 5 s")
