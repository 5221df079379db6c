"""An engine and trainer ranks that play their side of a pair in the gateway's own event loop, step by step.

No weights move: a rank's digest of a box is its volume times a number of the version, which adds up over boxes as the
real digests do. So what a test sees is the order of the steps alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from plan_support import tables_of

from weightcast.gateway.engines import EngineSpec
from weightcast.gateway.service import Deadlines, Order, Pair, PairSpec
from weightcast.transfer.columns import volumes
from weightcast.transfer.errors import EngineError, WeightcastError
from weightcast.transfer.layout import RankReport, Region, TensorSpec
from weightcast.transfer.plan import RankPart
from weightcast.transfer.residues import PRIME
from weightcast.transfer.wire import DigestReport

__all__ = ["ALL", "BOTTOM", "TOP", "Engine", "Trainer", "make_pair"]

SPECS = {"w": TensorSpec((8, 4), "bfloat16")}
TOP, BOTTOM, ALL = Region("w", (0, 0), (4, 4)), Region("w", (4, 0), (4, 4)), Region("w", (0, 0), (8, 4))
TRAINER = [[TOP], [BOTTOM]]
WAIT = 5.0


def reports_of(ranks: Sequence[Sequence[Region]]) -> list[RankReport]:
    return [RankReport(rank, len(ranks), "", table) for rank, table in enumerate(tables_of(SPECS, ranks))]


def digests_of(part: RankPart, version: int) -> DigestReport:
    values = [int(volume) * (1000 + version) % PRIME for volume in volumes(part.digests.size)]
    digest = np.array([value << 32 | value for value in values], dtype=np.uint64)
    return DigestReport(None if part.is_trainer else part.instance, part.rank, part.digests.cell, digest)


class Engine:
    """Driver and ranks of one instance: the ranks do what the engine is asked to, as those with the plugin do.

    `calls` are the driver's steps so far. `refuses` maps a step to the error it raises, before its ranks do anything;
    `late` to seconds that this, or the answer when its ranks are done, takes. `stale` is how many prepares find that
    something changed, `corrupt` a rank whose digests are wrong, `silent` one that reports none, `dies` one that fails
    while receiving.
    """

    def __init__(self, pair: Pair, name: str, ranks: Sequence[Sequence[Region]]) -> None:
        self.pair, self.name, self.ranks = pair, name, ranks
        self.calls: list[str] = []
        self.refuses: dict[str, Exception] = {}
        self.late: dict[str, float] = {}
        self.stale = 0
        self.corrupt = self.silent = self.dies = -1
        self.parts: list[RankPart] = []
        self.epoch = 0
        self.received: int | None = None
        pair.instance(name).driver = self

    @property
    def world(self) -> int:
        return len(self.ranks)

    async def _step(self, step: str) -> None:
        self.calls.append(step)
        await asyncio.sleep(0)
        if step in self.refuses:
            await asyncio.sleep(self.late.get(step, 0.0))
            raise self.refuses[step]

    async def connect(self, gateway_host: str, gateway_port: int, group: str) -> None:
        await self._step("connect")
        prefix, pair, name, epoch = group.split("/")
        assert (prefix, pair, name) == ("weightcast", self.pair.spec.name, self.name)
        self.epoch = int(epoch)
        try:
            self.parts = await asyncio.gather(*(self._join(report) for report in reports_of(self.ranks)))
        except WeightcastError as error:
            raise EngineError(f"instance {self.name}: {type(error).__name__}: {error}") from error

    async def _join(self, report: RankReport) -> RankPart:
        await self.pair.register_instance(self.name, self.epoch, report.rank, report)
        part = await self.pair.part(self.name, self.epoch, "instance", report.rank, WAIT)
        assert part is not None
        await self.pair.join(self.name, self.epoch, f"{self.name} rank {report.rank}")
        return part

    async def pause(self) -> None:
        await self._step("pause")

    async def begin(self) -> None:
        await self._step("begin")

    async def transfer(self, group: str) -> None:
        assert group == f"weightcast/{self.pair.spec.name}/{self.name}/{self.epoch}"
        await self._step("transfer")
        try:
            stale, self.stale = self.stale, max(self.stale - 1, 0)
            for rank in range(self.world):
                changed = "a placement changed" if stale and rank == 0 else ""
                await self.pair.ready(self.name, self.epoch, rank, changed)
            order = await self.pair.go(self.name, self.epoch, WAIT)
            assert order is not None
            if order.action != "run":
                raise EngineError(f"instance {self.name}: called off: {order.reason}")
            self.received = order.version
            if self.dies >= 0:
                error = EngineError("memory is gone")
                await self.pair.fail_rank(self.name, self.epoch, f"{self.name} rank {self.dies}", error)
                raise EngineError(f"instance {self.name}: {error}")
        finally:
            await asyncio.sleep(self.late.get("transfer", 0.0))

    async def end(self) -> None:
        await self._step("end")
        received, self.received = self.received, None
        if received is None:
            return
        for part in self.parts:
            if part.rank != self.silent:
                report = digests_of(part, received + (part.rank == self.corrupt))
                await self.pair.digests(self.name, self.epoch, "instance", part.rank, report)

    async def publish(self, version: int) -> None:
        await self._step("publish")

    async def resume(self) -> None:
        await self._step("resume")

    async def disconnect(self, group: str) -> None:
        await self._step("disconnect")


class Trainer:
    """One trainer rank. `told` are the orders that ended an update or a connect, by instance.

    `silent` makes it neither send nor digest.
    """

    def __init__(self, pair: Pair, rank: int) -> None:
        self.pair, self.rank = pair, rank
        self.silent = False
        self.parts: dict[str, RankPart] = {}
        self.cursor = dict.fromkeys(pair.instances, 0)
        self.told: dict[str, Order] = {}

    async def register(self) -> None:
        await self.pair.register_trainer(self.rank, reports_of(TRAINER)[self.rank])

    async def follow(self, *last: str) -> None:
        """Follows the orders of every instance to the first of the actions `last`."""
        await asyncio.gather(*(self._follow(name, last) for name in self.pair.instances))

    async def _follow(self, name: str, last: tuple[str, ...]) -> None:
        while True:
            orders = await self.pair.orders(name, self.cursor[name], WAIT)
            assert orders, f"no order for {name} within {WAIT} s"
            order = orders[0]
            self.cursor[name] += 1
            if order.action == "join":
                await self._join(name, order.epoch)
            elif order.action == "run" and not self.silent:
                await asyncio.sleep(0.01)
                assert order.version is not None
                await self.pair.transferred(name, order.epoch, self.rank)
                report = digests_of(self.parts[name], order.version)
                await self.pair.digests(name, order.epoch, "trainer", self.rank, report)
            # An "end" without a version calls an attempt off; the update goes on.
            if order.action in last and not (order.action == "end" and order.version is None):
                self.told[name] = order
                return

    async def _join(self, name: str, epoch: int) -> None:
        part = await self.pair.part(name, epoch, "trainer", self.rank, WAIT)
        assert part is not None
        self.parts[name] = part
        await self.pair.join(name, epoch, f"trainer rank {self.rank}")


def make_pair(*instances: str, **deadlines: float) -> tuple[Pair, dict[str, Engine], list[Trainer]]:
    """A pair of two trainer ranks and instances of two ranks, the first of which holds the tensor twice."""
    seconds: dict[str, Any] = {
        "register": 2.0,
        "join": 2.0,
        "prepare": 2.0,
        "transfer": 2.0,
        "verify": 2.0,
        **deadlines,
    }
    spec = PairSpec("main", 2, {name: EngineSpec("worker", 2) for name in instances}, Deadlines(**seconds))
    pair = Pair(spec)
    engines = {name: Engine(pair, name, [[ALL, ALL], [ALL]]) for name in instances}
    return pair, engines, [Trainer(pair, rank) for rank in range(2)]
