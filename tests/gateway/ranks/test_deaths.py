"""An instance dies, and the others go on: engines in processes of their own that are killed or stopped, and come back.

The engine processes are `examples/own_engine.py`. `Vanished` is a server whose packets are lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_support import running_gateway
from life_support import Engine, soon
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.control import engines
from weightcast.gateway.control.engines import SGLangDriver
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.records import EngineSpec
from weightcast.transfer.errors import CoverageError, EngineError, UpdateError

A, B = "rollout-0", "rollout-1"
OWN = {"kind": "worker", "world_size": 1}
QUICK = {"heartbeat": 0.5, "silence": 4.0}


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Pair:
    """A pair with a trainer of one rank, and engines in processes of their own."""

    def __init__(self, undo: ExitStack, url: str, token: str, instances: dict[str, Any], **options: Any) -> None:
        self._undo, self._url, self._token = undo, url, token
        self.client = undo.enter_context(GatewayClient(url, token, outage=30.0))
        self.client.create_pair("main", 1, instances, **options)
        source = PlainSource({"model.norm.weight": torch.ones(64)})
        self.trainer = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
        undo.callback(self.trainer.close)

    def engine(self, name: str) -> subprocess.Popen[str]:
        program = Path(__file__).parents[3] / "examples" / "own_engine.py"
        environment = {**os.environ, TOKEN_VARIABLE: self._token, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(program), self._url, "main", name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._undo.enter_context(process)
        self._undo.callback(process.kill)
        return process

    def record(self, name: str) -> dict[str, Any]:
        return dict(self.client.pair_status("main")["instances"][name])

    def until(self, name: str, **state: Any) -> None:
        soon(lambda: {key: self.record(name)[key] for key in state} == state, 90.0)

    def update(self, version: int) -> dict[str, bool]:
        """Whether each instance committed a version."""
        return {name: record["committed"] for name, record in self.trainer.update(version).instances.items()}


def serves(process: subprocess.Popen[str], version: int) -> None:
    """Returns when an engine says that it serves a version."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) != f"serving version {version}\n":
        assert line, "the engine has ended"


def test_an_engine_that_is_killed_takes_no_other_along(undo: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weightcast.worker")
    url, token = undo.enter_context(running_gateway())
    pair = Pair(undo, url, token, {A: OWN, B: OWN}, settings=QUICK | {"evict_after": 12.0}, min_instances=1)
    first, second = pair.engine(A), pair.engine(B)
    pair.trainer.connect()
    assert pair.update(1) == {A: True, B: True}
    second.kill()
    pair.until(B, silent=[0])
    result = pair.trainer.update(2)
    record = result.instances[B]
    assert (record["committed"], record["seconds"], record["fenced"]) == (False, 0.0, False), "nobody waits for it"
    assert record["reason"] == "pair main: rollout-1 ranks 0 were not heard from for 4 s"
    assert [line.message for line in caplog.records if "not served everywhere" in line.message] == [
        f"pair main: version 2 is not served everywhere: {B} is not updated: {record['reason']}"
    ]
    serves(first, 2)
    pair.trainer.connect()  # as a trainer does that starts again
    assert f"pair main is not connected everywhere: {B}: {record['reason']}" in caplog.text
    pair.until(B, phase="left")
    assert f"evicted: rank 0 (process {second.pid} on " in pair.record(B)["reason"]
    assert " was not heard from since 2" in pair.record(B)["reason"]
    assert pair.update(3) == {A: True}
    again = pair.engine(B)
    pair.until(B, phase="registering", fenced=True)
    assert pair.update(4) == {A: True, B: True}
    serves(again, 4)
    serves(first, 4)


def test_an_engine_that_stands_still_is_evicted_and_goes_on_without_a_restart(undo: ExitStack, tmp_path: Path) -> None:
    """Over the end of the gateway, which knows who was evicted and who was taken out."""
    port, state = free_port(), ("--state", str(tmp_path / "state"))
    with running_gateway(*state, port=port) as (url, token):
        pair = Pair(undo, url, token, {A: OWN, B: OWN}, settings=QUICK | {"evict_after": 6.0}, min_instances=1)
        processes = {A: pair.engine(A), B: pair.engine(B)}
        pair.trainer.connect()
        assert pair.update(1) == {A: True, B: True}
        processes[B].send_signal(signal.SIGSTOP)
        pair.until(B, phase="left")
    with running_gateway(*state, port=port, token=token):
        assert pair.update(2) == {A: True}
        serves(processes[A], 2)
        assert pair.record(B)["reason"].startswith("evicted: rank 0 (process ")
        pair.client.leave_instance("main", A)  # it lives, and asks for orders all the time
        processes[B].send_signal(signal.SIGCONT)
        pair.until(B, phase="registering", fenced=True)
        assert pair.record(A)["phase"] == "left", "an operator's word lasts"
        assert pair.update(3) == {B: True}
        serves(processes[B], 3)
        pair.client.join_instance("main", A, OWN)
        assert pair.update(4) == {A: True, B: True}
        serves(processes[A], 4)


def test_an_engine_that_died_while_the_gateway_was_gone_is_missed(undo: ExitStack, tmp_path: Path) -> None:
    port, state = free_port(), ("--state", str(tmp_path / "state"))
    with running_gateway(*state, port=port) as (url, token):
        pair = Pair(undo, url, token, {A: OWN, B: OWN}, settings=QUICK, min_instances=1)
        first, second = pair.engine(A), pair.engine(B)
        pair.trainer.connect()
        assert pair.update(1) == {A: True, B: True}
    second.kill()
    second.wait()
    with running_gateway(*state, port=port, token=token):
        pair.until(B, silent=[0])
        assert pair.update(2) == {A: True, B: False}
        serves(first, 2)
        assert pair.trainer.update(3).instances[B]["seconds"] == 0.0


def test_a_trainer_whose_instances_are_all_gone_is_told(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    settings = QUICK | {"silence": 2.0, "evict_after": 2.0}
    pair = Pair(undo, url, token, {A: OWN}, settings=settings, min_instances=1)
    engine = pair.engine(A)
    pair.trainer.connect()
    assert pair.update(1) == {A: True}
    engine.kill()
    pair.until(A, phase="left")
    with pytest.raises(UpdateError, match="everywhere: rollout-0 is not updated: evicted: rank 0"):
        pair.update(2)


def test_a_layout_that_is_wrong_is_raised_all_the_same(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    pair = Pair(undo, url, token, {A: OWN, B: OWN}, min_instances=1)
    pair.engine(A)
    undo.callback(Engine(url, token, name=B).close)
    with pytest.raises(CoverageError, match=B):
        pair.trainer.connect()


class NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...


def serve(undo: ExitStack, server: ThreadingHTTPServer) -> None:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    undo.callback(server.shutdown)


class Vanished:
    """A server whose host has vanished: what is sent to it is lost. `appear` makes it answer 404 to everything."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self._listener = undo.enter_context(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._fill = [self._call() for _ in range(4)]  # the queue is full, and further packets are dropped

    def _call(self) -> socket.socket:
        caller = self._undo.enter_context(socket.socket())
        caller.setblocking(False)
        with suppress(BlockingIOError):
            caller.connect(("127.0.0.1", self.port))
        return caller

    def appear(self) -> None:
        for caller in self._fill:
            caller.close()
        server = ThreadingHTTPServer(("127.0.0.1", self.port), NotFound, bind_and_activate=False)
        server.socket.close()
        server.socket = self._listener
        server.socket.listen(64)
        serve(self._undo, server)


def test_a_server_whose_host_has_vanished_takes_no_engine_along(undo: ExitStack) -> None:
    """It is waited for once; later updates refuse it at once, until a probe has reached it."""
    url, token = undo.enter_context(running_gateway())
    server = Vanished(undo)
    instances = {A: OWN, B: {"kind": "sglang", "url": server.url, "world_size": 1}}
    pair = Pair(undo, url, token, instances, settings=QUICK | {"evict_after": 8.0}, min_instances=1)
    first = pair.engine(A)
    pair.trainer.connect()
    for version in (1, 2):
        record = pair.trainer.update(version).instances[B]
        assert record["reason"].startswith(f"instance {B}: its engine {server.url} was not reached since 2"), record
        assert record["reason"].endswith(": ConnectTimeout; is the server up?")
        assert record["seconds"] == 0.0
    pair.until(B, phase="left")
    assert pair.record(B)["reason"].startswith(f"evicted: its engine {server.url} was not reached since 2")
    assert pair.update(3) == {A: True}
    server.appear()
    pair.until(B, phase="registering")
    record = pair.trainer.update(4).instances[B]
    assert "answered 404" in record["reason"], "it is asked again"
    serves(first, 4)


@pytest.mark.parametrize("step", ["begin", "end"])
def test_calls_to_a_host_that_has_vanished(undo: ExitStack, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(engines, "_CONNECT", 0.5)
    server = Vanished(undo)
    driver = SGLangDriver(A, EngineSpec(kind="sglang", world_size=1, url=server.url), 600.0)

    async def run() -> None:
        with pytest.raises(EngineError, match="failed: ConnectTimeout"):
            await getattr(driver, step)()
        assert driver.absence is not None
        assert not driver.absence.refused
        client, driver._client = driver._client, None  # type: ignore[assignment]
        with pytest.raises(EngineError, match=f"{server.url} was not reached since .* ConnectTimeout"):
            await getattr(driver, step)()  # by the reason that is known
        driver._client = client
        assert not await driver.probe(0.5)
        server.appear()
        while not await driver.probe(5.0):
            pass
        assert driver.absence is None
        with pytest.raises(EngineError, match="answered 404"):
            await getattr(driver, step)()
        await driver.close()

    asyncio.run(run())


def test_a_server_that_was_started_again_is_asked_by_the_next_connect(undo: ExitStack) -> None:
    """As the probe, which comes ever less often, would find out too late."""
    url, token = undo.enter_context(running_gateway())
    port = free_port()
    pair = Pair(undo, url, token, {B: {"kind": "sglang", "url": f"http://127.0.0.1:{port}", "world_size": 1}})
    with pytest.raises(EngineError, match="ConnectError"):
        pair.trainer.connect()
    serve(undo, undo.enter_context(ThreadingHTTPServer(("127.0.0.1", port), NotFound)))
    with pytest.raises(EngineError, match="answered 404"):
        pair.trainer.connect()


def test_a_host_that_refuses_connections_is_asked_in_each_update(undo: ExitStack) -> None:
    """That costs nothing, so a server that was started again takes part in the next update."""
    driver = SGLangDriver(A, EngineSpec(kind="sglang", world_size=1, url=f"http://127.0.0.1:{free_port()}"), 600.0)

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(EngineError, match="failed: ConnectError"):
                await driver.begin()
            assert driver.absence is not None
            assert driver.absence.refused
        await driver.close()

    asyncio.run(run())
