"""One gateway, and many ranks that move nothing: how long a connect and an update take.

    python benchmarks/bench_gateway.py [--instances 64] [--ranks 8] [--trainers 8] [--updates 5]

The gateway is a real process with a state file. Ranks are tasks of this process that send the requests that real ones
send, over a connection each; they hold one small tensor each way, and join no communicator. A round trip is from the
first offer to the moment when every trainer rank has the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.digest.residues import PRIME
from weightcast.transfer.layout.tables import RankReport, Region, RegionTable, TensorSpec
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

WAIT = 20


class Connection(asyncio.Protocol):
    """HTTP/1.1 over one connection, as little of it as the gateway needs: ranks share the cores with it."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._head = port, f"Host: gateway\r\nAuthorization: Bearer {token}\r\n"
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = b""
        self.requests = 0

    def speak_as(self, incarnation: Incarnation) -> None:
        """That of a trainer rank, with every request from now on."""
        self._head += f"{HEADER}: {incarnation}\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = cast(asyncio.Transport, transport), b""

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the gateway has closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        at = self._received.find(b"content-length: ", 0, head)
        length = int(self._received[at + 16 : self._received.index(b"\r\n", at)]) if at >= 0 else 0
        end = head + 4 + length
        if len(self._received) >= end and self._answer is not None and not self._answer.done():
            self._answer.set_result((int(self._received[9:12]), self._received[head + 4 : end]))
            self._received = self._received[end:]

    async def open(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
        if self._transport is None:
            await self.open()
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        head = f"{method} {path} HTTP/1.1\r\n{self._head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        status, answer = await self._answer
        self.requests += 1
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
        return status, answer

    async def poll(self, path: str) -> bytes:
        while True:
            status, body = await self.ask("GET", f"{path}{'&' if '?' in path else '?'}wait={WAIT}")
            if status != 204:
                return body


def report_of(rank: int, world: int, rows: int) -> bytes:
    """A report of one tensor in `world` row shards, or whole for a world of which each rank has all of it."""
    share = rows // world
    table = RegionTable.from_regions(
        {"w": TensorSpec((rows, 4), "bfloat16")}, [Region("w", (share * rank, 0), (share, 4))]
    )
    return wire.encode_report(RankReport(rank, world, f"host{rank}", table))


def digests_of(part: RankPart, version: int) -> bytes:
    """Numbers that add up as digests do."""
    values = [int(size.prod()) * (1000 + version) % PRIME for size in part.digests.size]
    return encoded(None if part.is_trainer else part.instance, part.rank, tuple(part.digests.cell), tuple(values))


@lru_cache(1024)
def encoded(name: str | None, rank: int, cells: tuple[int, ...], values: tuple[int, ...]) -> bytes:
    """A trainer rank sends the same to all instances."""
    digest = np.array([value << 32 | value for value in values], dtype=np.uint64)
    return wire.encode_digests(DigestReport(name, rank, np.array(cells), digest))


class Rank:
    """An inference rank: follows orders."""

    def __init__(self, connection: Connection, name: str, rank: int, report: bytes, first: bool) -> None:
        self.c, self.name, self.rank, self.report, self.first = connection, name, rank, report, first
        self.base = f"/pairs/p/instances/{name}"

    async def run(self) -> None:
        await self.c.open()
        await self.c.ask("GET", "/pairs/p/settings")
        after = 0
        part: RankPart | None = None
        body = b""
        while True:
            if not body:
                _, body = await self.c.ask("GET", f"{self.base}/orders?after={after}&wait={WAIT}")
            orders, body = json.loads(body)["orders"], b""
            for order in orders:
                after += 1
                here = f"{self.base}/{order['epoch']}"
                if order["action"] == "register":
                    await self.c.ask("POST", f"{here}/ranks/{self.rank}/report?identity=x", self.report, MSGPACK)
                elif order["action"] == "join":
                    part = wire.decode_part(await self.c.poll(f"{here}/parts/instance/{self.rank}"))
                    await self.c.poll(f"{here}/instance/{self.rank}/rendezvous")
                    await self.c.ask("POST", f"{here}/instance/{self.rank}/joined")
                elif order["action"] == "prepare" and part is not None:
                    ready = f"{here}/ranks/{self.rank}/ready?wait={WAIT}"
                    _, told = await self.c.ask("POST", ready, b'{"stale": "", "layers": []}')
                    go = json.loads(told)
                    after = go["number"] + 1
                    path = f"{here}/instance/{self.rank}/digests?version={go['version']}&after={after}&wait={WAIT}"
                    _, body = await self.c.ask("POST", path, digests_of(part, go["version"]), MSGPACK)


class Trainer:
    """A trainer rank: a connection for itself and one for each instance, as `TrainerWorker` has threads."""

    def __init__(self, make: Any, names: list[str], rank: int, world: int, rows: int) -> None:
        self.own: Connection = make()
        self.connections: dict[str, Connection] = {name: make() for name in names}
        self.after = 0
        self.parts: dict[str, RankPart] = {}
        self.rank, self.report = rank, report_of(rank, world, rows)

    async def connect(self) -> None:
        await asyncio.gather(self.own.open(), *(c.open() for c in self.connections.values()))
        path, start = f"/pairs/p/trainer/{self.rank}/report", f"{self.rank}.1"
        _, body = await self.own.ask("POST", f"{path}?start={start}", self.report, MSGPACK)
        told = json.loads(body)
        for connection in (self.own, *self.connections.values()):
            connection.speak_as(Incarnation(self.rank, told["generation"], told["boot"], start))
        if self.rank == 0:
            await self.own.ask("POST", "/pairs/p/connect")
        await self.follow("connected")

    async def update(self, version: int) -> None:
        body = json.dumps({"version": version}).encode()
        await self.own.ask("POST", f"/pairs/p/trainer/{self.rank}/offers", body)
        await self.own.poll(f"/pairs/p/updates/{version}/instances")
        await self.follow("end")
        result = json.loads(await self.own.poll(f"/pairs/p/updates/{version}"))
        failed = [record["reason"] for record in result.values() if not record["committed"]]
        if failed:
            raise RuntimeError(failed[0])

    async def follow(self, last: str) -> None:
        """One poll for all instances; what is to be done for each goes on beside it."""
        left, doing = set(self.connections), set()
        while left:
            _, body = await self.own.ask("GET", f"/pairs/p/orders?after={self.after}&wait={WAIT}")
            for order in json.loads(body)["orders"]:
                self.after += 1
                doing.add(asyncio.create_task(self.obey(order)))
                if order["action"] == last:
                    left.discard(order["instance"])
        await asyncio.gather(*doing)

    async def obey(self, order: dict[str, Any]) -> None:
        name = order["instance"]
        c, here = self.connections[name], f"/pairs/p/instances/{name}/{order['epoch']}"
        if order["action"] == "join":
            self.parts[name] = part = wire.decode_part(await c.poll(f"{here}/parts/trainer/{self.rank}"))
            if part.group_rank == 0:
                where = b'{"host": "127.0.0.1", "port": 29500}'
                await c.ask("PUT", f"{here}/trainer/{self.rank}/rendezvous", where)
            await c.ask("POST", f"{here}/trainer/{self.rank}/joined")
        elif order["action"] == "prepare":
            path = f"{here}/trainer/{self.rank}/digests?version={order['version']}&first=true"
            await c.ask("POST", path, digests_of(self.parts[name], order["version"]), MSGPACK)
        elif order["action"] == "run":
            path = f"{here}/trainer/{self.rank}/digests?version={order['version']}"
            await c.ask("POST", path, digests_of(self.parts[name], order["version"]), MSGPACK)


async def play(arguments: argparse.Namespace, port: int, token: str, gateway: int) -> None:
    made: list[Connection] = []

    def make() -> Connection:
        made.append(Connection(port, token))
        return made[-1]

    names = [f"rollout-{n}" for n in range(arguments.instances)]
    rows = 4 * arguments.ranks * arguments.trainers
    operator = make()
    await operator.open()
    spec = {name: {"kind": "worker", "world_size": arguments.ranks} for name in names}
    pair = {"trainer_world": arguments.trainers, "instances": spec}
    await operator.ask("PUT", "/pairs/p", json.dumps(pair).encode())
    reports = [report_of(rank, arguments.ranks, rows) for rank in range(arguments.ranks)]
    ranks = [Rank(make(), name, rank, reports[rank], False) for name in names for rank in range(arguments.ranks)]
    tasks = [asyncio.create_task(rank.run()) for rank in ranks]
    trainers = [Trainer(make, names, rank, arguments.trainers, rows) for rank in range(arguments.trainers)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{arguments.instances} instances of {arguments.ranks} ranks, {arguments.trainers} trainer ranks, 1 gateway")
    print(f"{'':10}{'seconds':>9}{'gateway CPU':>13}{'ranks CPU':>12}{'requests':>10}")
    for version in range(arguments.updates + 1):
        begun, spent, asked = time.monotonic(), cpu_of(gateway), sum(c.requests for c in made)
        own = time.process_time()
        await asyncio.gather(*(t.update(version) if version else t.connect() for t in trainers))
        seconds = time.monotonic() - begun
        label = f"update {version}" if version else "connect"
        requests = sum(c.requests for c in made) - asked
        used = f"{cpu_of(gateway) - spent:>11.2f} s{time.process_time() - own:>10.2f} s"
        print(f"{label:10}{seconds:>8.2f} s{used}{requests:>10}", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=8)
    parser.add_argument("--updates", type=int, default=5)
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    token = make_token()
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder, "state"))
        command = [sys.executable, "-m", "weightcast", "gateway", "--json", "--port", str(port), "--state", state]
        with subprocess.Popen(
            command, env={**os.environ, TOKEN_VARIABLE: token}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(play(arguments, port, token, process.pid))
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
