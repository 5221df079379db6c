"""An engine and trainer ranks that play their side of a pair in the gateway's own event loop, step by step.

No weights move: a rank's digest of a box is its volume times a number of the version, which adds up over boxes as the
real digests do. So what a test sees is the order of the steps alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from plan_support import tables_of

from weightcast.gateway.control import connect as coordinator
from weightcast.gateway.control import update as transaction
from weightcast.gateway.control.instance import Holding, Instance
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.records import CommitPolicy, EngineSpec, Order, PairSpec, UpdateRecord
from weightcast.gateway.settings import Settings
from weightcast.gateway.versions import Version
from weightcast.transfer.boxes.columns import volumes
from weightcast.transfer.digest.residues import PRIME
from weightcast.transfer.errors import EngineError, PairStateError, TransferError, VersionError, WeightcastError
from weightcast.transfer.layout.tables import RankReport, Region, TensorSpec
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.plan.verification import ValueCounts
from weightcast.transfer.wire import messages as wire

__all__ = [
    "ALL",
    "BOTTOM",
    "STEPS",
    "TOP",
    "A",
    "B",
    "Engine",
    "Play",
    "Trainer",
    "connected",
    "first",
    "make_pair",
    "reports_of",
]

STEPS = ["pause", "begin", "transfer", "end", "publish", "resume"]
A, B = "rollout-0", "rollout-1"

SPECS = {"w": TensorSpec((8, 4), "bfloat16")}
TOP, BOTTOM, ALL = Region("w", (0, 0), (4, 4)), Region("w", (4, 0), (4, 4)), Region("w", (0, 0), (8, 4))
TRAINER = [[TOP], [BOTTOM]]
WAIT = 5.0


def first(number: int) -> Version:
    """The version of that number in the first lineage."""
    return Version.parse(number)


def reports_of(ranks: Sequence[Sequence[Region]]) -> list[RankReport]:
    return [RankReport(rank, len(ranks), "", table) for rank, table in enumerate(tables_of(SPECS, ranks))]


def digests_of(part: RankPart, version: int, counts: ValueCounts | None = None) -> DigestReport:
    values = [int(volume) * (1000 + version) % PRIME for volume in volumes(part.digests.size)]
    digest = np.array([value << 32 | value for value in values], dtype=np.uint64)
    counts = ValueCounts.of({}) if counts is None else counts
    return DigestReport(None if part.is_trainer else part.instance, part.rank, part.digests.cell, digest, counts)


class Engine:
    """Driver and ranks of one instance: the ranks do what the engine is asked to, as those with the plugin do.

    `calls` are the driver's steps so far. `refuses` maps a step to the error it raises, before its ranks do anything;
    `late` to seconds that this, or the answer when its ranks are done, takes. `stale` is how many prepares find that
    something changed, `stale_after` the same after the first transfer, `moves` how many transfers find that a placement
    moved under them, `corrupt` a rank whose digests are wrong, `silent` one that reports none, `dies` one that fails
    while receiving, with an error of the class `dying`, the first `lives` times if that is not 0; a trainer rank
    tells what it has `seen` of that before.
    """

    def __init__(self, pair: Pair, name: str, ranks: Sequence[Sequence[Region]]) -> None:
        self.pair, self.name, self.ranks = pair, name, ranks
        self.calls: list[str] = []
        self.refuses: dict[str, Exception] = {}
        self.late: dict[str, float] = {}
        self.stale = self.stale_after = self.moves = 0
        self.layers: list[tuple[int, ...] | None] = []
        self.corrupt = self.silent = self.dies = -1
        self.dying: type[WeightcastError] = EngineError
        self.lives = 0
        self.seen = ""
        self.parts: list[RankPart] = []
        self.epoch = 0
        self.received: Version | None = None
        self.holds = Holding()
        pair.instance(name).driver = self

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def instance(self) -> Instance:
        return self.pair.instance(self.name)

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
        await self.instance.register(self.epoch, report.rank, report, holds=self.holds)
        part = wire.decode_part(await self.instance.part(self.epoch, "instance", report.rank, WAIT) or b"")
        await self.instance.join(self.epoch, f"{self.name} rank {report.rank}")
        return part

    async def pause(self) -> None:
        await self._step("pause")

    async def begin(self) -> None:
        await self._step("begin")

    async def transfer(self, group: str) -> None:
        assert group == f"weightcast/{self.pair.spec.name}/{self.name}/{self.epoch}"
        await self._step("transfer")
        try:
            if self.layers and self.layers[-1:] == [None] and self.stale_after:
                self.stale, self.stale_after = self.stale_after, 0
            stale, self.stale = self.stale, max(self.stale - 1, 0)
            for rank in range(self.world):
                changed = "a placement changed" if stale and rank == 0 else ""
                await self.instance.ready(self.epoch, rank, changed, [0] if changed else [])
            told = await self.instance.go(self.epoch, WAIT)
            assert told is not None
            order = told[1]
            if order.action != "run":
                raise EngineError(f"instance {self.name}: called off: {order.reason}")
            self.received = order.version
            self.holds = Holding(uncommitted=True)
            self.layers.append(order.layers)
            if self.dies >= 0:
                error = self.dying("memory is gone")
                self.lives -= 1
                if not self.lives:
                    self.dies = -1
                if self.seen:
                    await self.instance.fail_rank(self.epoch, "trainer rank 0", TransferError(self.seen))
                await self.instance.fail_rank(self.epoch, f"{self.name} rank 1", error)
                raise EngineError(f"instance {self.name}: {error}")
        finally:
            await asyncio.sleep(self.late.get("transfer", 0.0))

    async def end(self) -> None:
        await self._step("end")
        received, self.received = self.received, None
        if received is None:
            return
        self.holds = Holding(received, self.instance.uid, uncommitted=True)
        moved, self.moves = self.moves, max(self.moves - 1, 0)
        for part in self.parts:
            if moved and part.rank == 0:
                await self.instance.report_moved(self.epoch, part.rank, received, [moved])
            elif part.rank != self.silent:
                report = digests_of(part, received.number + (part.rank == self.corrupt))
                await self.instance.report_digests(self.epoch, "instance", part.rank, received, report)

    async def publish(self, version: Version) -> None:
        await self._step("publish")
        self.holds = self.holds._replace(uncommitted=False)

    async def resume(self) -> None:
        await self._step("resume")

    async def disconnect(self, group: str) -> None:
        await self._step("disconnect")

    absence = None

    async def probe(self, seconds: float = 0.0) -> bool:
        return True

    async def close(self) -> None:
        self.calls.append("close")

    digests = staticmethod(digests_of)


class Trainer:
    """One trainer rank. `told` are the orders that ended an update or a connect, by instance.

    `silent` makes it neither send nor digest, `mute` not report its first pass. Its weights change by `drifts` between
    the passes; `values` (nan, inf, overflow) it counts in its first row.
    """

    def __init__(self, pair: Pair, rank: int) -> None:
        self.pair, self.rank = pair, rank
        self.silent = self.mute = False
        self.starts = 0
        self.drifts, self.values = 0, (0, 0, 0)
        self.parts: dict[str, RankPart] = {}
        self.cursor = dict.fromkeys(pair.instances, 0)
        self.told: dict[str, Order] = {}

    async def register(self) -> None:
        self.starts += 1
        start = f"{id(self):x}.{self.starts}"
        await self.pair.register_trainer(self.rank, reports_of(TRAINER)[self.rank], start)

    async def follow(self, *last: str) -> None:
        """Follows the orders of every instance to the first of the actions `last`."""
        await asyncio.gather(*(self._follow(i.name, last) for i in self.pair.present))

    async def _follow(self, name: str, last: tuple[str, ...]) -> None:
        while True:
            orders = await self.pair.instance(name).orders_from(self.cursor[name], WAIT)
            assert orders, f"no order for {name} within {WAIT} s"
            order = orders[0]
            self.cursor[name] += 1
            if order.action == "join":
                with suppress(WeightcastError):  # whoever cannot join is told so by an order
                    await self._join(name, order.epoch)
            elif order.action == "prepare" and not self.mute:
                await asyncio.sleep(0.01)
                assert order.version is not None
                report = digests_of(self.parts[name], order.version.number, ValueCounts.of({0: self.values}))
                with suppress(VersionError, PairStateError):
                    instance = self.pair.instance(name)
                    await instance.report_digests(order.epoch, "trainer", self.rank, order.version, report, first=True)
            elif order.action == "run" and not self.silent:
                await asyncio.sleep(0.01)
                assert order.version is not None
                with suppress(VersionError, PairStateError):  # it came too late: somebody else has failed
                    await self._send(name, order.epoch, order.version)
            # An "end" without a version calls an attempt off; the update goes on.
            if order.action in last and not (order.action == "end" and order.version is None):
                self.told[name] = order
                return

    async def _send(self, name: str, epoch: int, version: Version) -> None:
        instance = self.pair.instance(name)
        report = digests_of(self.parts[name], version.number + self.drifts)
        await instance.report_digests(epoch, "trainer", self.rank, version, report)

    async def _join(self, name: str, epoch: int) -> None:
        instance = self.pair.instance(name)
        part = wire.decode_part(await instance.part(epoch, "trainer", self.rank, WAIT) or b"")
        self.parts[name] = part
        await instance.join(epoch, f"trainer rank {self.rank}")


def make_pair(
    *instances: str, commit: CommitPolicy = "each", min_instances: int | None = None, **settings: float
) -> tuple[Pair, dict[str, Engine], list[Trainer]]:
    """A pair of two trainer ranks and instances of two ranks, the first of which holds the tensor twice."""
    seconds: dict[str, Any] = {"register": 2.0, "join": 2.0, "prepare": 2.0, "transfer": 2.0, "verify": 2.0, **settings}
    specs = {name: EngineSpec(kind="worker", world_size=2) for name in instances}
    options: dict[str, Any] = {"settings": Settings(**seconds), "commit": commit, "min_instances": min_instances}
    spec = PairSpec("main", trainer_world=2, instances=specs, **options)
    pair = Pair(spec)
    engines = {name: Engine(pair, name, [[ALL, ALL], [ALL]]) for name in instances}
    return pair, engines, [Trainer(pair, rank) for rank in range(2)]


class Play:
    """A pair with its players, for one event loop."""

    def __init__(self, *instances: str, **options: Any) -> None:
        self.pair, self.engines, self.trainers = make_pair(*(instances or (A,)), **options)

    @property
    def engine(self) -> Engine:
        return self.engines[A]

    async def connect(self) -> None:
        for trainer in self.trainers:
            await trainer.register()
        await self._both(coordinator.connect(self.pair, self.pair.generation, "127.0.0.1", 1), "connected", "failed")

    async def update(self, number: int, *, restart: bool = False) -> UpdateRecord:
        """The record of the first instance; the calls that led to it are `engine.calls`."""
        for engine in self.engines.values():
            engine.calls.clear()
        for trainer in self.trainers:
            taken = await self.pair.offer(trainer.rank, number, restart=restart)
            assert taken is not None
        version = taken.version
        await self._both(transaction.update(self.pair, version, "127.0.0.1", 1), "end")
        for name, record in self.pair.results[version].items():
            for trainer in self.trainers:
                told = trainer.told[name]
                assert (told.version, told.committed, told.reason) == (version, record.committed, record.reason)
        return self.pair.results[version][A]

    async def join(self, name: str) -> None:
        """An instance joins, with its player."""
        await self.pair.join(name, EngineSpec(kind="worker", world_size=2))
        self.engines[name] = Engine(self.pair, name, [[ALL, ALL], [ALL]])
        for trainer in self.trainers:
            trainer.cursor.setdefault(name, 0)

    async def _both(self, work: Coroutine[Any, Any, None], *last: str) -> None:
        await asyncio.wait_for(asyncio.gather(work, *(t.follow(*last) for t in self.trainers)), 20.0)

    def state(self, name: str = A) -> tuple[Phase, int | str | None, bool]:
        """Phase, version as JSON has it, whether it is fenced."""
        record = self.pair.instances[name].record
        return record.phase, None if record.version is None else record.version.as_json(), record.fenced


async def connected(*instances: str, version: int | None = 1, **options: Any) -> Play:
    """A play that has committed `version`, with the options of `make_pair`."""
    play = Play(*instances, **options)
    await play.connect()
    if version is not None:
        record = await play.update(version)
        assert record.committed, record.reason
    return play
