"""The gateway itself: what the shells (HTTP, Ray) expose. One event loop, no I/O but the engine drivers.

A pair is a trainer and its instances. Trainer ranks and instance ranks register reports, fetch parts, join
communicators and post digests; all of them wait for one another here, and every wait has a deadline that names who is
missing. How the steps follow one another is in `coordinator`; this module holds the state they share.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from weightcast.gateway.engines import EngineDriver, EngineSpec, make_driver
from weightcast.gateway.merge import InstanceLayout, TrainerLayout
from weightcast.gateway.pairs import Event, InstanceRecord, Phase, advance
from weightcast.gateway.verify import DigestCounts
from weightcast.transfer.errors import (
    ControlError,
    DeadlineError,
    InputError,
    PairStateError,
    VersionError,
    WeightcastError,
)
from weightcast.transfer.layout import RankReport
from weightcast.transfer.parts import PlanParts
from weightcast.transfer.plan import RankPart, TransferPlan
from weightcast.transfer.replan import Planner
from weightcast.transfer.wire import DigestReport

__all__ = ["Deadlines", "Instance", "Order", "Pair", "PairSpec", "UpdateRecord"]


_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
KEPT_RESULTS = 100
"""How many updates back a result can be asked for."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that the gateway waits for each step before it gives the update up."""

    offer: float = 600.0
    register: float = 300.0
    join: float = 120.0
    prepare: float = 60.0
    transfer: float = 600.0
    verify: float = 300.0
    engine: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise InputError(f"deadline {name} is {seconds}, expected a positive number of seconds")


@dataclass(frozen=True, slots=True)
class PairSpec:
    """One trainer of `trainer_world` ranks and the instances that it feeds."""

    name: str
    trainer_world: int
    instances: dict[str, EngineSpec]
    deadlines: Deadlines = field(default_factory=Deadlines)
    bucket_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks of an instance's communicator are to do next.

    `action` is "register" (describe yourself for `epoch`; for ranks without an engine API), "join" (fetch the part of
    `epoch` and join), "connected", "prepare" (check that the layout still holds, then report ready), "run" (transfer
    `version`), "end" (the update to `version` is over: committed or not, and why), "failed" (connecting is).
    """

    action: str
    epoch: int
    version: int | None = None
    committed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """How an update ended on one instance. `verified` counts what the digests covered; None when it did not get that
    far.
    """

    version: int
    committed: bool
    fenced: bool
    reason: str
    seconds: float
    verified: DigestCounts | None = None
    attempts: int = 1


class Instance:
    """Run-time state of one instance: its record, what its ranks sent for the present epoch, and the orders given so
    far.
    """

    def __init__(self, name: str, spec: EngineSpec, driver: EngineDriver) -> None:
        self.spec = spec
        self.driver = driver
        self.record = InstanceRecord(name)
        self.orders: list[Order] = []
        self.updates: list[UpdateRecord] = []
        self.layout: InstanceLayout | None = None
        self.identities: dict[int, str] = {}
        self.paused = False
        self.plan: TransferPlan | None = None
        self.parts: PlanParts | None = None
        self.clear_epoch()

    def clear_epoch(self) -> None:
        """Forgets what belongs to one epoch: reports, plan, rendezvous and who joined."""
        self.reports: dict[int, RankReport] = {}
        self.plan = self.parts = None
        self.rendezvous: tuple[str, int] | None = None
        self.joined: set[str] = set()
        self.failure: WeightcastError | None = None
        self.clear_update()

    def clear_update(self) -> None:
        """Forgets what belongs to one update."""
        self.ready: set[int] = set()
        self.transferred: set[int] = set()
        self.stale: str = ""
        self.digests: dict[int, DigestReport] = {}
        self.trainer_digests: dict[int, DigestReport] = {}

    @property
    def name(self) -> str:
        return self.record.name

    def group(self, pair: str) -> str:
        """Name of the communicator of the present epoch."""
        return f"weightcast/{pair}/{self.name}/{self.record.epoch}"

    def on(self, event: Event, *, version: int | None = None, reason: str = "") -> None:
        """Moves the record on; see `pairs.advance`."""
        self.record = advance(self.record, event, version=version, reason=reason)


class Pair:
    """Everything the gateway knows of one pair, with the waits on it."""

    def __init__(self, spec: PairSpec) -> None:
        if spec.trainer_world < 1:
            raise InputError(f"pair {spec.name}: trainer_world is {spec.trainer_world}, expected at least 1")
        for name in (spec.name, *spec.instances):
            if not _NAME.fullmatch(name):
                raise InputError(f"name {name!r} is not 1 to 64 letters, digits, '.', '_' or '-', the first no '.'")
        if not spec.instances:
            raise InputError(f"pair {spec.name}: no instances")
        urls = [engine.url for engine in spec.instances.values() if engine.url]
        if len(set(urls)) != len(urls):
            raise InputError(f"pair {spec.name}: two instances have one url; each engine is one instance")
        self.spec = spec
        self.instances = {
            name: Instance(name, s, make_driver(name, s, spec.deadlines.engine)) for name, s in spec.instances.items()
        }
        self.trainer_reports: dict[int, RankReport] = {}
        self.trainer_layout: TrainerLayout | None = None
        self.planners: dict[tuple[str, ...], Planner] = {}
        self.offers: dict[int, int] = {}
        self.conflict: VersionError | None = None
        self.results: dict[int, dict[str, UpdateRecord]] = {}
        self.changed = asyncio.Condition()
        self._notifying: set[asyncio.Task[None]] = set()

    async def notify(self) -> None:
        """Wakes every wait; call after each change of state."""
        async with self.changed:
            self.changed.notify_all()

    def notify_soon(self) -> None:
        """The same from where nothing can be awaited."""
        task = asyncio.create_task(self.notify())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def wait(self, ready: Callable[[], bool], seconds: float, missing: Callable[[], str]) -> None:
        """Until `ready()`. Raises DeadlineError with what `missing()` says when `seconds` have passed."""
        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(ready), seconds)
            except TimeoutError:
                raise DeadlineError(f"pair {self.spec.name}: {missing()} within {seconds:g} s") from None

    async def poll(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Like `wait`, for long polls: False instead of an error when the time is over."""
        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(ready), seconds)
            except TimeoutError:
                return False
            return True

    def instance(self, name: str) -> Instance:
        """Raises InputError naming the instances there are."""
        found = self.instances.get(name)
        if found is None:
            raise InputError(f"pair {self.spec.name} has no instance {name!r}; it has {', '.join(self.instances)}")
        return found

    def _instance_in(self, name: str, epoch: int) -> Instance:
        instance = self.instance(name)
        if epoch != instance.record.epoch:
            raise PairStateError(f"instance {name} is in epoch {instance.record.epoch}, not {epoch}; connect again")
        return instance

    def _check_rank(self, who: str, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise InputError(f"{who} rank {rank} is not in 0..{world - 1} of pair {self.spec.name}")

    async def register_trainer(self, rank: int, report: RankReport) -> None:
        """The report of a trainer rank. A rank that registers again starts the trainer anew: all register again."""
        self._check_rank("trainer", rank, self.spec.trainer_world)
        self._check_report("trainer", rank, self.spec.trainer_world, report)
        if rank in self.trainer_reports:
            self.trainer_reports.clear()
            self.trainer_layout = None
        self.trainer_reports[rank] = report
        await self.notify()

    async def register_instance(
        self, name: str, epoch: int, rank: int, report: RankReport, identity: str = "", uncommitted: bool = False
    ) -> None:
        """The report of an instance's rank.

        `identity` is another one when the rank's memory is; `uncommitted` says that the memory holds an update that was
        never committed. Both fence the instance, whatever this gateway knows of it.
        """
        instance = self._instance_in(name, epoch)
        self._check_rank(name, rank, instance.spec.world_size)
        self._check_report(name, rank, instance.spec.world_size, report)
        if uncommitted or instance.identities.get(rank, identity) != identity:
            instance.on(Event.DISTRUST)
        instance.identities[rank] = identity
        instance.reports[rank] = report
        await self.notify()

    async def restarted(self, name: str, rank: int) -> None:
        """A rank of the instance started anew after it had joined: the instance is fenced, and connects anew."""
        instance = self.instance(name)
        self._check_rank(name, rank, instance.spec.world_size)
        instance.on(Event.DISTRUST)
        if instance.failure is None:
            instance.failure = ControlError(
                f"{name} rank {rank} started anew; the next update connects the instance again"
            )
        if instance.record.phase is Phase.CONNECTED:
            instance.on(Event.FAIL, reason=str(instance.failure))
        await self.notify()

    def _check_report(self, who: str, rank: int, world: int, report: RankReport) -> None:
        if report.rank != rank or report.world_size != world:
            raise InputError(
                f"{who} rank {rank}: the report says rank {report.rank} of {report.world_size}, "
                f"expected {rank} of {world} in pair {self.spec.name}"
            )

    async def fail_rank(self, name: str, epoch: int, who: str, error: WeightcastError) -> None:
        """A rank could not do its step; the first failure of an epoch is kept and stops the update."""
        instance = self._instance_in(name, epoch)
        if instance.failure is None:
            instance.failure = type(error)(f"{who}: {error}")
        await self.notify()

    async def part(self, name: str, epoch: int, side: str, rank: int, wait: float) -> RankPart | None:
        """A rank's part of the plan; None while there is no plan yet. Raises what made planning fail."""
        instance = self._instance_in(name, epoch)
        await self.poll(
            lambda: instance.parts is not None or instance.failure is not None or instance.record.epoch != epoch, wait
        )
        self._instance_in(name, epoch)
        if instance.failure is not None:
            raise instance.failure
        if instance.parts is None:
            return None
        make = instance.parts.trainer_part if side == "trainer" else instance.parts.instance_part
        return await asyncio.to_thread(make, name, rank)

    async def set_rendezvous(self, name: str, epoch: int, host: str, port: int) -> None:
        """Where the first member of the communicator listens."""
        instance = self._instance_in(name, epoch)
        instance.rendezvous = (host, port)
        await self.notify()

    async def rendezvous(self, name: str, epoch: int, wait: float) -> tuple[str, int] | None:
        """Where to join; None while nobody listens yet."""
        instance = self._instance_in(name, epoch)
        await self.poll(lambda: instance.rendezvous is not None or instance.failure is not None, wait)
        if instance.failure is not None:
            raise instance.failure
        return instance.rendezvous

    async def join(self, name: str, epoch: int, member: str) -> None:
        """A member of the communicator has joined it."""
        self._instance_in(name, epoch).joined.add(member)
        await self.notify()

    async def orders(self, name: str, after: int, wait: float) -> list[Order]:
        """The orders of an instance from number `after` on; empty when there is none within `wait` seconds."""
        instance = self.instance(name)
        await self.poll(lambda: len(instance.orders) > after, wait)
        return instance.orders[after:]

    async def give(self, instance: Instance, order: Order) -> None:
        """Appends an order for the ranks of an instance's communicator."""
        instance.orders.append(order)
        await self.notify()

    async def ready(self, name: str, epoch: int, rank: int, stale: str) -> None:
        """A rank of the instance checked its layout; `stale` says what changed, empty when nothing did."""
        instance = self._instance_in(name, epoch)
        self._check_rank(name, rank, instance.spec.world_size)
        if stale and not instance.stale:
            instance.stale = f"rank {rank}: {stale}"
        instance.ready.add(rank)
        await self.notify()

    async def go(self, name: str, epoch: int, wait: float) -> Order | None:
        """What a rank that reported ready is to do: the order "run", or "end" when the update was called off."""
        instance = self._instance_in(name, epoch)

        def last() -> Order:
            # Of this epoch: the next one may have begun before this rank was woken.
            return next(order for order in reversed(instance.orders) if order.epoch == epoch)

        def decided() -> bool:
            return last().action in ("run", "end", "failed")

        await self.poll(decided, wait)
        return last() if decided() else None

    async def transferred(self, name: str, epoch: int, rank: int) -> None:
        """A trainer rank has sent its part."""
        self._check_rank("trainer", rank, self.spec.trainer_world)
        self._instance_in(name, epoch).transferred.add(rank)
        await self.notify()

    async def digests(self, name: str, epoch: int, side: str, rank: int, report: DigestReport) -> None:
        """The digests of a rank, trainer or instance."""
        instance = self._instance_in(name, epoch)
        self._check_rank(side, rank, self.spec.trainer_world if side == "trainer" else instance.spec.world_size)
        target = instance.trainer_digests if side == "trainer" else instance.digests
        target[rank] = report
        await self.notify()

    async def offer(self, rank: int, version: int) -> bool:
        """A trainer rank is ready to send `version`; True for the first. Raises VersionError if it may not be."""
        self._check_rank("trainer", rank, self.spec.trainer_world)
        if version < 0:
            raise VersionError(f"pair {self.spec.name}: version {version} is negative")
        newest = max((i.record.version for i in self.instances.values() if i.record.version is not None), default=None)
        if newest is not None and version <= newest:
            raise VersionError(
                f"pair {self.spec.name} has version {newest}; version {version} is not newer, offer a greater one"
            )
        others = {v for v in self.offers.values() if v != version}
        if others:
            self.conflict = VersionError(
                f"pair {self.spec.name}: trainer rank {rank} offers {version}, other ranks offer {others.pop()}"
            )
            await self.notify()
            raise self.conflict
        # Decided before anything is awaited: two ranks may offer at the same moment.
        first = not self.offers
        self.offers[rank] = version
        self.results.pop(version, None)
        await self.notify()
        return first

    async def offered(self, version: int) -> None:
        """Until every trainer rank has offered. Raises VersionError when they disagree, else DeadlineError."""
        world = self.spec.trainer_world

        def missing() -> str:
            absent = ", ".join(str(rank) for rank in range(world) if rank not in self.offers)
            return f"trainer ranks {absent} did not offer version {version}"

        await self.wait(
            lambda: self.conflict is not None or len(self.offers) == world, self.spec.deadlines.offer, missing
        )
        if self.conflict is not None:
            raise self.conflict

    def decide(self, version: int, records: dict[str, UpdateRecord]) -> None:
        """Ends the update under way: keeps how it ended, and takes offers again."""
        self.results[version] = records
        for old in sorted(self.results)[:-KEPT_RESULTS]:
            del self.results[old]
        self.offers.clear()
        self.conflict = None

    def status(self) -> dict[str, Any]:
        """The pair for people, as JSON."""
        return {
            "pair": self.spec.name,
            "trainer": {"world_size": self.spec.trainer_world, "registered": sorted(self.trainer_reports)},
            "offers": {str(rank): version for rank, version in sorted(self.offers.items())},
            "deadlines": asdict(self.spec.deadlines),
            "instances": {
                name: {
                    "phase": i.record.phase.value,
                    "version": i.record.version,
                    "serves": i.record.serves,
                    "fenced": i.record.fenced,
                    "epoch": i.record.epoch,
                    "reason": i.record.reason,
                    "registered": sorted(i.reports),
                    "orders": len(i.orders),
                    "world_size": i.spec.world_size,
                    "updates": [asdict(u) for u in i.updates[-20:]],
                }
                for name, i in self.instances.items()
            },
        }


def elapsed(since: float) -> float:
    """Seconds since a `time.monotonic()`."""
    return time.monotonic() - since


def as_weightcast_error(error: BaseException) -> WeightcastError:
    """Errors of ours as they are; anything else wrapped, so that it travels with its class name."""
    if isinstance(error, WeightcastError):
        return error
    return ControlError(f"{type(error).__name__}: {' '.join(str(error).split())}")
