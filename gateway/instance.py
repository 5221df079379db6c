"""One instance as the gateway knows it: its record, what its ranks sent for the present epoch, the orders for them.

Every wait on it has a deadline that names who is missing, and ends at once when one of its ranks has failed or is no
longer heard from.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from weightcast.gateway.changes import Journal, Side
from weightcast.gateway.engines import EngineSpec, make_driver
from weightcast.gateway.merge import InstanceLayout
from weightcast.gateway.pairs import Event, InstanceRecord, Phase, advance
from weightcast.gateway.records import Order, PairSpec, UpdateRecord
from weightcast.gateway.store import SavedInstance, Store
from weightcast.gateway.verify import DigestCheck, NonFinite
from weightcast.transfer import wire
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
from weightcast.transfer.wire import DigestReport

__all__ = ["Instance", "absent", "check_rank", "check_report"]

log = logging.getLogger("weightcast.gateway")

KEPT_ORDERS = 1000
KEPT_UPDATES = 20
RESTARTED = "the gateway was restarted; the next update connects the instance again"


class Instance(Side):
    """Run-time state of one instance."""

    def __init__(
        self,
        pair: PairSpec,
        name: str,
        spec: EngineSpec,
        record: InstanceRecord | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(f"pair {pair.name}", name, pair.settings.silence)
        self.pair = pair.name
        self.settings = pair.settings
        self.trainer_world = pair.trainer_world
        self.spec = spec
        self.driver = make_driver(name, spec, pair.settings.engine, pair.settings.prepare / 2)
        self.record = record or InstanceRecord(name)
        self.store = store or Store()
        self.updates: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self.layout: InstanceLayout | None = None
        self.identities: dict[int, str] = {}
        self.paused = self.leaving = False
        self.resend: set[int] | None = None
        self.orders: Journal[Order] = Journal(KEPT_ORDERS)
        self.clear_epoch()

    def clear_epoch(self) -> None:
        """Forgets what belongs to one epoch: reports, plan, rendezvous and who joined."""
        self.reports: dict[int, RankReport] = {}
        self.parts: PlanParts | None = None
        self.checks: DigestCheck | None = None
        self.meeting: tuple[str, int] | None = None
        self.joined: set[str] = set()
        self.failure: WeightcastError | None = None
        self.told: list[tuple[str, WeightcastError]] = []
        self.suspect = False
        if self.spec.kind != "worker":
            # Ranks of an engine speak when the engine is told to connect; those of one that was restarted are others.
            self.forget()
        self.clear_update()

    def clear_update(self) -> None:
        """Forgets what belongs to one pass through an update."""
        self.ready_ranks: set[int] = set()
        self.stale = ""
        self.stale_layers: set[int] | None = set()
        self.moved: dict[int, tuple[int, ...]] = {}
        self.digests: dict[int, DigestReport] = {}
        self.first_digests: dict[int, DigestReport] = {}
        self.trainer_digests: dict[int, DigestReport] = {}
        self.non_finite: tuple[NonFinite, ...] = ()

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def world(self) -> int:
        return self.spec.world_size

    @property
    def serves(self) -> bool:
        """Whether the instance may answer with a version of this pair, as far as its ranks can be heard."""
        return self.record.serves and not self.silent

    @property
    def running(self) -> int | None:
        """The epoch whose ranks were told to run, and nothing since; None if that is over."""
        last = self.orders.last
        return last.epoch if last is not None and last.action == "run" else None

    @property
    def group(self) -> str:
        """Name of the communicator of the present epoch."""
        return f"weightcast/{self.pair}/{self.name}/{self.record.epoch}"

    @property
    def members(self) -> Iterable[str]:
        """Labels of the members of the communicator: the trainer ranks that send to it, then all its ranks."""
        if self.parts is None:
            raise PairStateError(f"instance {self.name} has no plan")
        for rank in self.parts.trainer_ranks(self.name):
            yield f"trainer rank {rank}"
        for rank in range(self.world):
            yield f"{self.name} rank {rank}"

    def on(self, event: Event, *, version: int | None = None, reason: str = "") -> None:
        """Moves the record on; see `pairs.advance`."""
        self.adopt(advance(self.record, event, version=version, reason=reason), event, reason)

    def adopt(self, record: InstanceRecord, event: Event, reason: str = "") -> None:
        """Takes a record that `event` has led to."""
        before, self.record = self.record, record
        where = {"pair": self.pair, "instance": self.name, "version": record.target or record.version}
        log.info("%s: %s -> %s%s", event, before.phase, record.phase, f": {reason}" if reason else "", extra=where)

    def saved(self, record: InstanceRecord | None = None) -> SavedInstance:
        """What has to outlive this process, with `record` in place of the present one."""
        record = record or self.record
        left = record.phase is Phase.LEFT or self.leaving
        state = (record.version, record.fenced, record.epoch, self.paused, left)
        return SavedInstance(self.pair, self.name, self.spec, *state, dict(self.identities))

    async def save(self) -> None:
        """Writes that down. Raises ControlError when it cannot be."""
        await self.store.save(self.saved())

    def stop(self, error: WeightcastError) -> None:
        """Ends what is under way with `error`, unless something else has failed before."""
        if self.failure is None:
            self.failure = error
        self.notify()

    async def until(self, ready: Callable[[], bool], seconds: float, missing: Callable[[], str]) -> None:
        """Like `wait`, but ends at once with the failure of a rank of this instance, or when one has fallen silent."""
        await self.wait(lambda: self.failure is not None or bool(self.silent) or ready(), seconds, missing)
        if self.failure is not None:
            raise self.failure
        if self.silent and not ready():
            raise DeadlineError(f"pair {self.pair}: {self.silence()}")

    # What ranks say

    def check_epoch(self, epoch: int) -> None:
        """Raises PairStateError with both numbers unless `epoch` is the present one."""
        if epoch != self.record.epoch:
            raise PairStateError(f"instance {self.name} is in epoch {self.record.epoch}, not {epoch}; connect again")

    def check_target(self, version: int) -> None:
        """Raises VersionError with both numbers unless the instance is being updated to `version`."""
        if version != self.record.target:
            raise VersionError(
                f"instance {self.name} is being updated to {self.record.target}, not to {version}; it is too late"
            )

    async def register(
        self,
        epoch: int,
        rank: int,
        report: RankReport,
        identity: str = "",
        uncommitted: bool = False,
        verified: int | None = None,
    ) -> bool:
        """The report of a rank. True when what it holds is the committed version.

        `identity` is another one when the rank's memory is; `uncommitted` says that the memory holds an update of which
        the rank does not know that it was committed, `verified` the version of it if its digests were reported. Unless
        that version was committed in the meantime, both fence the instance, whatever this gateway knows of it.
        """
        self.check_epoch(epoch)
        check_rank(self.name, rank, self.world, self.pair)
        check_report(self.name, rank, self.world, report, self.pair)
        same = self.identities.get(rank, identity) == identity
        committed = same and not self.record.fenced and verified is not None and verified == self.record.version
        if not self.record.fenced and (not same or (uncommitted and not committed)):
            self.on(Event.DISTRUST, reason=f"rank {rank} holds {'an uncommitted update' if same else 'other memory'}")
            self.store.save_soon(self.saved())
        self.identities[rank] = identity
        self.reports[rank] = report
        self._speaks(rank)
        self.notify()
        return committed

    async def restarted(self, rank: int) -> None:
        """A rank started anew after it had joined: the instance is fenced, and connects anew."""
        check_rank(self.name, rank, self.world, self.pair)
        error = ControlError(f"{self.name} rank {rank} started anew; the next update connects the instance again")
        self.suspect = True
        self._speaks(rank)
        if not self.record.fenced:
            self.on(Event.DISTRUST, reason=str(error))
            self.store.save_soon(self.saved())
        if self.failure is None:
            self.failure = error
        if self.record.phase is Phase.CONNECTED:
            self.on(Event.FAIL, reason=str(self.failure))
        self.notify()

    def _speaks(self, rank: int) -> None:
        """A rank that is missed and asks for something lives, even if its beat has not come yet."""
        if rank in self.heard:
            self.hear(rank, time.monotonic())

    async def beat(self, rank: int, identity: str) -> None:
        """A rank lives. One with another identity than it registered with started anew."""
        check_rank(self.name, rank, self.world, self.pair)
        if rank in self.reports and self.identities[rank] != identity:
            await self.restarted(rank)
        if self.hear(rank, time.monotonic()):
            log.info("rank %d is heard again", rank, extra={"pair": self.pair, "instance": self.name, "rank": rank})
            self.notify()

    async def fail_rank(self, epoch: int, who: str, error: WeightcastError) -> None:
        """A rank could not do its step; the first failure of an epoch stops the update."""
        self.check_epoch(epoch)
        failure = type(error)(f"{who}: {error}")
        self.told.append((who, failure))
        self.stop(failure)
        self.notify()

    def cause(self) -> WeightcastError | None:
        """Of the failures that ranks have told the first that blames nobody who has told one: when a member is gone,
        whoever sees it closes its connections, and others, that see only this, may be heard first.
        """
        members = [who for who, _ in self.told]
        for who, failure in self.told:
            if not any(other != who and re.search(rf"{re.escape(other)}(?!\d)", str(failure)) for other in members):
                return failure
        return self.failure

    async def part(self, epoch: int, side: str, rank: int, wait: float) -> bytes | None:
        """A rank's part of the plan as it is sent; None while there is no plan yet. Raises what made planning fail."""
        self.check_epoch(epoch)
        await self.poll(lambda: self.parts is not None or self.failure is not None or self.record.epoch != epoch, wait)
        self.check_epoch(epoch)
        if self.failure is not None:
            raise self.failure
        if self.parts is None:
            return None
        make = self.parts.trainer_part if side == "trainer" else self.parts.instance_part
        return await asyncio.to_thread(lambda: wire.encode_part(make(self.name, rank)))

    async def set_rendezvous(self, epoch: int, host: str, port: int) -> None:
        """Where the first member of the communicator listens."""
        self.check_epoch(epoch)
        self.meeting = (host, port)
        self.notify()

    async def rendezvous(self, epoch: int, wait: float) -> tuple[str, int] | None:
        """Where to join; None while nobody listens yet."""
        self.check_epoch(epoch)
        await self.poll(
            lambda: self.meeting is not None or self.failure is not None or self.record.epoch != epoch, wait
        )
        self.check_epoch(epoch)
        if self.failure is not None:
            raise self.failure
        return self.meeting

    async def join(self, epoch: int, member: str) -> None:
        """A member of the communicator has joined it."""
        self.check_epoch(epoch)
        if member not in self.members:
            raise InputError(f"{member!r} is no member of the communicator of instance {self.name}")
        self.joined.add(member)
        self.notify()

    async def ready(self, epoch: int, rank: int, stale: str, layers: Collection[int] | None) -> None:
        """A rank checked its layout.

        `stale` says what changed, empty when nothing did; `layers` are those whose placement did, None when more
        changed than placements.
        """
        self.check_epoch(epoch)
        check_rank(self.name, rank, self.world, self.pair)
        if stale:
            self.stale = self.stale or f"rank {rank}: {stale}"
            known = self.stale_layers
            self.stale_layers = None if layers is None or known is None else known | set(layers)
        self.ready_ranks.add(rank)
        self.notify()

    async def go(self, epoch: int, wait: float) -> tuple[int, Order] | None:
        """What a rank that reported ready is to do, and the number of that order: "run", or "end" when the update was
        called off.
        """
        self.check_epoch(epoch)

        def last() -> tuple[int, Order]:
            # Of this epoch: the next one may have begun before this rank was woken. None at all: an earlier life of
            # the gateway gave them.
            mine = (found for found in self.orders.latest() if found[1].epoch == epoch)
            return next(mine, (self.orders.count, Order("end", epoch, reason=RESTARTED)))

        def decided() -> bool:
            return last()[1].action in ("run", "end", "failed", "left")

        await self.poll(decided, wait)
        return last() if decided() else None

    async def report_moved(self, epoch: int, rank: int, version: int, layers: Collection[int]) -> None:
        """The placement of `layers` on a rank changed while `version` was transferred; in place of its digests."""
        self.check_epoch(epoch)
        self.check_target(version)
        check_rank(self.name, rank, self.world, self.pair)
        if not layers:
            raise InputError(f"{self.name} rank {rank}: no layers are named that changed")
        self.moved[rank] = tuple(sorted(layers))
        self.notify()

    async def report_digests(
        self, epoch: int, side: str, rank: int, version: int, report: DigestReport, first: bool = False
    ) -> None:
        """The digests of a rank of this instance after `version` was transferred, or of a trainer rank: of its `first`
        pass over its weights, or of its second.
        """
        self.check_epoch(epoch)
        self.check_target(version)
        trainer = side == "trainer"
        check_rank("trainer" if trainer else self.name, rank, self.trainer_world if trainer else self.world, self.pair)
        of_trainer = self.first_digests if first else self.trainer_digests
        (of_trainer if trainer else self.digests)[rank] = report
        self.notify()

    # What ranks are told

    async def give(self, order: Order) -> None:
        """Appends an order for the ranks of the communicator."""
        self.orders.add(order)
        self.notify()

    async def orders_from(self, after: int, wait: float) -> list[Order]:
        """The orders from number `after` on; empty when there is none within `wait` seconds."""
        await self.poll(lambda: self.orders.count > after, wait)
        return self.orders.since(after)


def absent(present: Collection[int] | Mapping[int, object], world: int) -> str:
    """The ranks of 0..world-1 that are not in `present`."""
    return ", ".join(str(rank) for rank in range(world) if rank not in present)


def check_rank(who: str, rank: int, world: int, pair: str) -> None:
    """Raises InputError for a rank that there is not."""
    if not 0 <= rank < world:
        raise InputError(f"{who} rank {rank} is not in 0..{world - 1} of pair {pair}")


def check_report(who: str, rank: int, world: int, report: RankReport, pair: str) -> None:
    """Raises InputError for a report of another rank, or of another number of ranks."""
    if report.rank != rank or report.world_size != world:
        raise InputError(
            f"{who} rank {rank}: the report says rank {report.rank} of {report.world_size}, "
            f"expected {rank} of {world} in pair {pair}"
        )
