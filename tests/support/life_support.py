"""Engines and trainers of one tensor, and a link between a rank and its gateway that can be cut."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from plain_support import Piece, PlainSink

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker, MemoryRecord
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import WeightcastError
from weightcast.transfer.protocols import Sink

__all__ = [
    "ENGINE",
    "ONE",
    "SIZE",
    "Engine",
    "Link",
    "create",
    "cut_link",
    "engine_on",
    "soon",
    "trainer",
    "training_on",
]

SIZE = 8
ENGINE = "rollout-0"
ONE = {ENGINE: {"kind": "worker", "world_size": 1}}


class Engine:
    """The first rank of an own engine: a loop that does nothing but `serve`. `said` are the errors that it raised.

    With `memory` and `weights` of an earlier one it is the same process with another worker. Its sink is one of
    `weights` unless given.
    """

    def __init__(
        self,
        url: str,
        token: str,
        pair: str = "main",
        name: str = ENGINE,
        wait: float = 0.05,
        world: int = 1,
        memory: MemoryRecord | None = None,
        weights: torch.Tensor | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.weights = torch.full((SIZE,), float("nan")) if weights is None else weights
        own_sink = PlainSink([Piece("t", (SIZE,), (0,), self.weights)])
        self.worker = InstanceWorker(
            url, pair, name, sink or own_sink, rank=0, world_size=world, token=token, memory=memory
        )
        self.served: list[int] = []
        self.said: list[WeightcastError] = []
        self._wait, self._end = wait, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                version = self.worker.serve(wait=self._wait)
            except WeightcastError as error:
                self.said.append(error)
                time.sleep(0.1)
            else:
                self.served += [] if version is None else [version]

    @property
    def state(self) -> tuple[int | None, bool]:
        return self.worker.version, self.worker.fenced

    def close(self) -> None:
        self._end.set()
        self._thread.join(30.0)
        self.worker.close()


def trainer(url: str, token: str, pair: str = "main", value: float = 1.0) -> TrainerWorker:
    """A trainer of one rank, connected."""
    source = PlainSource({"t": torch.full((SIZE,), value)})
    worker = TrainerWorker(url, pair, source, rank=0, world_size=1, token=token)
    worker.connect()
    return worker


def engine_on(undo: ExitStack, url: str, token: str, name: str = ENGINE, **options: Any) -> Engine:
    """An engine that ends with the test."""
    engine = Engine(url, token, name=name, **options)
    undo.callback(engine.close)
    return engine


def training_on(undo: ExitStack, url: str, token: str, value: float = 1.0) -> TrainerWorker:
    """A trainer of one rank, connected, that ends with the test."""
    worker = trainer(url, token, value=value)
    undo.callback(worker.close)
    return worker


def soon(ready: object, seconds: float = 30.0) -> None:
    """Returns when `ready()` holds; fails when it does not."""
    limit = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < limit, f"not within {seconds:g} s"
        time.sleep(0.02)


_RELAY = """
import asyncio, sys

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def serve(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class Link:
    """A process that relays to the gateway. Cut, it answers as a link does that loses all packets: not at all."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"

    def cut(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def mend(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def cut_link(url: str) -> Iterator[Link]:
    """A link to the gateway at `url`."""
    command = [sys.executable, "-c", _RELAY, url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Link(process, int(process.stdout.readline()))
        finally:
            process.kill()


def create(url: str, token: str, pair: str = "main", trainers: int = 1, **settings: float) -> None:
    """A pair of one instance."""
    with GatewayClient(url, token) as client:
        client.create_pair(pair, trainers, ONE, {"outage": 2.0, **settings})
