"""One instance as the gateway knows it: its record, the reports of its ranks for the present epoch, orders for them.

Every wait on it has a deadline, and its error names the ranks that are missing. A wait ends at once when one of the
ranks has failed or is no longer heard from.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weightcast.gateway.addresses import UNKNOWN, Place
from weightcast.gateway.control.engines import make_driver
from weightcast.gateway.control.instance_state import Event, InstanceRecord, Phase, advance, check_version
from weightcast.gateway.control.store import SavedInstance, Store
from weightcast.gateway.control.waiting import Party
from weightcast.gateway.layouts.digest_check import DigestCheck
from weightcast.gateway.layouts.merge import InstanceLayout
from weightcast.gateway.records import Action, EngineSpec, NonFinite, Order, PairSpec, UpdateRecord
from weightcast.gateway.versions import Version
from weightcast.transfer.deadline import Deadline, utc
from weightcast.transfer.errors import (
    ControlError,
    DeadlineError,
    DisplacedError,
    EngineError,
    InputError,
    PairStateError,
    UnregisteredError,
    VersionError,
    WeightcastError,
)
from weightcast.transfer.layout.summaries import number_ranges
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.wire import messages as wire

__all__ = ["Holding", "Instance", "Step", "absent", "check_rank", "check_report"]

log = logging.getLogger("weightcast.gateway")

KEPT_ORDERS = 1000
KEPT_UPDATES = 20
KEPT_DISPLACED = 100
RESTARTED = "the gateway was restarted; the next update connects the instance again"


class Holding(NamedTuple):
    """Statement of a rank about its memory.

    `verified` is the version whose digests it reported last, None if its memory was written since. `of` is the uid of
    the pair that it had this version from. `uncommitted` says that the memory holds an update of which the rank does
    not know that it was committed.
    """

    verified: Version | None = None
    of: str = ""
    uncommitted: bool = False

    def differs(self, uid: str, committed: Version | None) -> str:
        """Contradiction to a record, in words; empty when there is none."""
        statement = "no version" if committed is None else f"version {committed}"
        if self.verified is None:
            word = "an uncommitted update" if self.uncommitted else "no version"
            return f"holds {word}, the record says {statement}" if self.uncommitted or committed is not None else ""
        if self.of != uid:
            return f"holds version {self.verified} of another pair, the record says {statement}"
        if self.verified != committed:
            return f"holds version {self.verified}, the record says {statement}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A connect, or an update to `version`, for one generation of the trainer."""

    generation: int
    version: Version | None = None


class Instance(Party):
    """Run-time state of one instance.

    `step` is the connect or update that holds the instance, None while it is free: see `Pair.hold`. `deadline` is that
    of the update. `generation` is that of the trainer to which the instance was connected last.

    `identities` has the process of each rank. `displaced` has the reason why a process was displaced, by identity: such
    processes are refused until the instance leaves. `latest` is the newest version that a rank says was committed to
    it. `evicted` says why the instance has left, if it did so because it was dead; empty otherwise. `committed_at` is
    the time of its last commit in this life of the gateway, in UTC. `recognised` are the ranks that have beaten in this
    life from the process that is known for them.
    """

    def __init__(
        self,
        pair: PairSpec,
        name: str,
        spec: EngineSpec,
        record: InstanceRecord | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(f"pair {pair.name}", name, pair.settings.silence, KEPT_ORDERS)
        self.pair, self.uid = pair.name, pair.uid
        self.settings = pair.settings
        self.trainer_world = pair.trainer_world
        self.spec = spec
        self.driver = make_driver(name, spec, pair.settings.engine, pair.settings.prepare / 2)
        self.record = record or InstanceRecord(name)
        self.store = store or Store()
        self.updates: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self.layout: InstanceLayout | None = None
        self.identities: dict[int, str] = {}
        self.displaced: dict[str, str] = {}
        self.latest: Version | None = None
        self.committed_at: str | None = None
        self._since: dict[str, str] = {}
        self.paused = self.leaving = False
        self.evicted = ""
        self.recognised: set[int] = set()
        self.resend: set[int] | None = None
        self.step: Step | None = None
        self.deadline: Deadline | None = None
        self.generation = 0
        self.clear_epoch()

    def clear_epoch(self) -> None:
        """Forgets what belongs to one epoch: reports, plan, rendezvous and joined members."""
        self.reports: dict[int, RankReport] = {}
        self.places: dict[int, Place] = {}
        self.parts: PlanParts | None = None
        self.checks: DigestCheck | None = None
        self.meeting: tuple[str, int] | None = None
        self.joined: set[str] = set()
        self.failure: WeightcastError | None = None
        self.told: list[tuple[str, WeightcastError]] = []
        self.suspect = False
        if self.spec.kind != "worker":
            # Ranks of an engine speak when it is told to connect; after its restart they are other processes.
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
    def present(self) -> bool:
        """True if the instance has not left, and does not leave."""
        return self.record.phase is not Phase.LEFT and not self.leaving

    @property
    def belongs(self) -> bool:
        """True if the instance is present, or was evicted and comes back by itself."""
        return self.present or bool(self.evicted)

    @property
    def heard_whole(self) -> bool:
        """True if all ranks were heard from, and none is missed."""
        return len(self.heard) == self.world and not self.silent

    @property
    def death(self) -> WeightcastError | None:
        """The error of whatever would wait for an instance that is dead; None for one that may live.

        Dead is one whose engine is not reached. One without an engine to ask is dead when a rank of it is silent.
        """
        if (absence := self.driver.absence) is not None:
            return EngineError(f"instance {self.name}: {absence.why}")
        if self.silent and self.spec.kind == "worker":
            return DeadlineError(f"pair {self.pair}: {self.silence()}")
        return None

    @property
    def dead_since(self) -> float:
        """The `time.monotonic()` since which a dead instance was not heard from; infinite for one that may live."""
        if self.death is None:
            return math.inf
        beats = [self.heard[rank] for rank in self.silent]
        return min([*beats, *([self.driver.absence.since] if self.driver.absence is not None else [])])

    def obituary(self) -> str:
        """The rank or engine of a dead instance that was not heard from, and since when, in words."""
        if (absence := self.driver.absence) is not None:
            return absence.why
        rank = min(self.silent, key=lambda rank: self.heard[rank])
        process = f" ({_process_name(self.identities[rank])})" if self.identities.get(rank) else ""
        moment = time.time() - time.monotonic() + self.heard[rank]
        return f"rank {rank}{process} was not heard from since {utc(moment)}"

    def excuse(self, seconds: float) -> None:
        """Takes `seconds` as not having passed, in which no engine could be asked either."""
        super().excuse(seconds)
        if (absence := self.driver.absence) is not None:
            absence.since += seconds

    @property
    def serves(self) -> bool:
        """True if the instance may answer with a version of this pair, and no rank of it is missed."""
        return not self.silent and (self.record.serves or self._goes_on)

    @property
    def _goes_on(self) -> bool:
        """True after a restart of the gateway, once each rank has beaten from the process that the state file knows.

        The memory of these processes is as it was: a fence would be in the file before the first byte.
        """
        record, is_whole = self.record, len(self.recognised) == self.world
        committed = record.version is not None and not record.fenced
        return committed and record.reason == RESTARTED and is_whole and not self.paused

    @property
    def state(self) -> str:
        """The state in one word, for people: "waiting" until it connects for the first time, or what it is since."""
        if self.serves:
            return "serves"
        never_served = self.record.version is None and not self.generation
        if never_served and (self.record.phase is Phase.REGISTERING or not self.reports) and self.present:
            return "waiting"
        return "fenced" if self.record.fenced and self.present else self.record.phase.value

    @property
    def unready(self) -> str:
        """The reason why the instance must get no requests now; empty while it serves and does not leave."""
        record = self.record
        if not self.present:
            return self.evicted or "it has left, or leaves"
        if self.silent:
            return self.silence()
        if self.serves:
            return ""
        if record.target is not None and record.fenced:
            return f"version {record.target} is being written"
        return record.reason or "no version was committed yet"

    @property
    def updating(self) -> Version | None:
        """The version of the update that holds the instance; None between updates, and in a connect."""
        return self.step.version if self.step is not None else None

    @property
    def newest(self) -> Version | None:
        """The greatest version that was committed, by the record or by what ranks say."""
        return max((v for v in (self.record.version, self.latest) if v is not None), default=None)

    @property
    def running(self) -> int | None:
        """The epoch of the last order, if that was to run; None otherwise."""
        order = self.orders.last
        return order.epoch if order is not None and order.action is Action.RUN else None

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

    def on(self, event: Event, *, version: Version | None = None, reason: str = "") -> None:
        """Moves the record on; see `instance_state.advance`."""
        self.adopt(advance(self.record, event, version=version, reason=reason), event, reason)

    def adopt(self, record: InstanceRecord, event: Event, reason: str = "") -> None:
        """Takes a record that `event` has led to."""
        old_record, self.record = self.record, record
        if event is Event.COMMIT:
            self.committed_at = utc(time.time())
        version = record.target or record.version
        fields = {"pair": self.pair, "instance": self.name, "version": None if version is None else version.as_json()}
        log.info("%s: %s -> %s%s", event, old_record.phase, record.phase, f": {reason}" if reason else "", extra=fields)

    def saved(self, record: InstanceRecord | None = None) -> SavedInstance:
        """State that has to outlive this process, with `record` in place of the present one."""
        record = record or self.record
        has_left = record.phase is Phase.LEFT or self.leaving
        state = (record.version, record.fenced, record.epoch, self.paused, has_left)
        processes = (dict(self.identities), dict(self.displaced))
        return SavedInstance(self.pair, self.name, self.spec, *state, *processes, self.evicted)

    async def save(self) -> None:
        """Writes the state of `saved` to the store. Raises ControlError when it cannot be written."""
        await self.store.save(self.saved())

    def resumed(self) -> None:
        """Notes that the engine was asked to go on."""
        self.paused = False
        self.store.save_soon(self.saved())

    def stop(self, error: WeightcastError) -> None:
        """Ends what is under way with `error`, unless something else has failed already."""
        if self.failure is None:
            self.failure = error
        self.notify()

    async def until(
        self,
        ready: Callable[[], bool],
        seconds: float,
        missing: Callable[[], str],
        detail: Callable[[], str] = lambda: "",
    ) -> None:
        """Waits like `wait`, but at most until the time for the whole update is over.

        Raises the failure of a rank of this instance at once, and DeadlineError when a rank has fallen silent.
        """

        def over() -> bool:
            return self.failure is not None or bool(self.silent) or ready()

        budget = self.left(seconds)
        if budget < seconds:
            await self._in_time(self.wait(over, budget, missing, detail), missing)
        else:
            await self.wait(over, seconds, missing, detail)
        if self.failure is not None:
            raise self.failure
        if self.silent and not ready():
            raise DeadlineError(f"pair {self.pair}: {self.silence()}")

    def left(self, seconds: float) -> float:
        """The smaller of `seconds` and what is left of the time for the update under way."""
        return seconds if self.deadline is None else min(seconds, self.deadline.left)

    async def in_update(self, step: Awaitable[None], missing: Callable[[], str]) -> None:
        """Runs a call to the engine in the update under way, as one of `waits`.

        Raises DeadlineError with the text of `missing()` when the time for the update is over.
        """
        url = self.spec.shown_url
        with self.waiting(self.left(self.settings.engine), missing, lambda: f"it was asked at {url}" if url else ""):
            await self._in_time(step, missing)

    async def _in_time(self, step: Awaitable[None], missing: Callable[[], str]) -> None:
        deadline = self.deadline
        if deadline is None:
            await step
            return
        try:
            async with asyncio.timeout(deadline.left):  # not `wait_for`, which can swallow the end of the gateway
                await step
        except (TimeoutError, DeadlineError):
            if not deadline.expired:
                raise
            raise DeadlineError(
                f"pair {self.pair}: {missing()} within the {deadline.seconds:g} s of setting update for a whole update"
            ) from None

    # Reports of ranks

    def check_epoch(self, epoch: int) -> None:
        """Raises PairStateError with both numbers unless `epoch` is the present one."""
        if epoch != self.record.epoch:
            raise PairStateError(f"instance {self.name} is in epoch {self.record.epoch}, not {epoch}; connect again")

    def check_target(self, version: Version) -> None:
        """Raises VersionError with both numbers unless the instance is being updated to `version`."""
        if version != self.record.target:
            raise VersionError(
                f"instance {self.name} is being updated to {self.record.target}, not to {version}; it is too late"
            )

    def check_newer(self, version: Version) -> None:
        """Raises VersionError with the numbers unless `version` is newer than the record's and that of any rank.

        Raises it, too, for a stamp that no consumer of the instance can read.
        """
        if version.lineage > 1 and self.spec.stamps == "integer":
            raise VersionError(f"instance {self.name} takes integer stamps alone, and not {version}; it has to leave")
        check_version(self.record, version)
        if self.latest is not None and version <= self.latest:
            raise VersionError(
                f"ranks of instance {self.name} hold version {self.latest}, the record says {self.record.version}; "
                f"{version.refusal}"
            )

    def check_process(self, identity: str) -> None:
        """Raises DisplacedError, which names both processes, if another process has taken this one's place."""
        if identity in self.displaced:
            raise DisplacedError(self.displaced[identity])

    def _process(self, identity: str) -> str:
        """A process in words: its number and host, and when it was first heard of by this gateway."""
        return f"{_process_name(identity)} (since {self._since.get(identity, 'before the gateway started')})"

    def process(self, rank: int) -> str:
        return self._process(identity) if (identity := self.identities.get(rank)) else ""

    def unregistered(self) -> str:
        """Accounts of the ranks that have not registered for the present epoch, and the remedy."""
        ranks = [rank for rank in range(self.world) if rank not in self.reports]
        if self.spec.kind != "worker":
            remedy = f"the engine was asked at {self.spec.shown_url}; its log says what keeps it"
        else:
            remedy = "start the engine, whose ranks call InstanceWorker.serve between two batches"
        return f"{self.accounts(ranks)}; {remedy}"

    def _takes(self, rank: int, identity: str) -> str:
        """Makes a process the one of a rank, and tells in words which process it has displaced.

        The last process to say that it is the rank displaces the one before for good. The text is empty for the process
        that was known, or the first.
        """
        self._since.setdefault(identity, utc(time.time()))
        holder = self.identities.setdefault(rank, identity)
        if holder == identity:
            return ""
        self.identities[rank] = identity
        beats = time.monotonic() - self.heard.get(rank, -math.inf) <= 2 * self.settings.heartbeat
        clause = ", which still beats," if beats else ""
        text = f"{self.name} rank {rank}: {self._process(holder)}{clause} was displaced by {self._process(identity)}"
        if holder:
            self.displaced[holder] = f"{text}; end one of the two, or give it an instance or a rank of its own"
            for oldest in tuple(self.displaced)[:-KEPT_DISPLACED]:
                del self.displaced[oldest]
        log.warning("%s", text, extra={"pair": self.pair, "instance": self.name, "rank": rank})
        self.store.save_soon(self.saved())
        return text

    def _distrust(self, reason: str) -> None:
        self.on(Event.DISTRUST, reason=reason)
        self.store.save_soon(self.saved())

    async def register(
        self,
        epoch: int,
        rank: int,
        report: RankReport,
        identity: str = "",
        holds: Holding | None = None,
        place: Place = UNKNOWN,
    ) -> bool:
        """Takes the report of a rank. Returns True if the rank holds the committed version.

        `identity` is another one when the rank's process is, and so its memory; `holds` is what it says of that memory.
        If either contradicts the record, the instance is distrusted, whatever this gateway knows of it.
        """
        self.check_epoch(epoch)
        check_rank(self.name, rank, self.world, self.pair)
        check_report(self.name, rank, self.world, report, self.pair)
        self.check_process(identity)
        holds = holds or Holding()
        # Once all have reported, the plan is made from their reports.
        complete = self.record.phase is not Phase.REGISTERING or len(self.reports) == self.world
        late = rank in self.reports and complete
        displacement = self._takes(rank, identity)
        contradiction = holds.differs(self.uid, self.record.version)
        if contradiction and holds.of == self.uid and not holds.uncommitted and holds.verified is not None:
            self.latest = max(holds.verified, self.latest or holds.verified)
            self._distrust(f"rank {rank} {contradiction}")
        elif (displacement or contradiction) and not self.record.fenced:
            self._distrust(f"{displacement}, with other memory" if displacement else f"rank {rank} {contradiction}")
        if displacement and late:
            self._start_over(rank, displacement)
        self.reports[rank], self.places[rank] = report, place
        self._speaks(rank)
        self.notify()
        return not (displacement or contradiction or self.record.fenced)

    async def restarted(self, rank: int, identity: str = "") -> None:
        """Notes that a rank started anew after it had joined: the instance is fenced, and connects anew."""
        check_rank(self.name, rank, self.world, self.pair)
        self.check_process(identity)
        self._start_over(rank, self._takes(rank, identity))
        self._speaks(rank)
        self.notify()

    def _start_over(self, rank: int, displacement: str) -> None:
        """Fences the instance, because the process of a rank is another one in the middle of an epoch.

        `displacement` names both processes, if the one before is known.
        """
        clause = f": {displacement}; end one of the two if both run" if displacement else ""
        error = ControlError(
            f"{self.name} rank {rank} started anew{clause}; the next update connects the instance again"
        )
        self.suspect = True
        if not self.record.fenced:
            self._distrust(str(error))
        if self.failure is None:
            self.failure = error
        if self.record.phase is Phase.CONNECTED:
            self.on(Event.FAIL, reason=str(self.failure))

    def _speaks(self, rank: int) -> None:
        """Notes that a missed rank lives, because it asks for something before its beat has come."""
        self.signs[rank] = time.time()
        if rank in self.heard:
            self.hear(rank, time.monotonic())

    async def beat(self, rank: int, identity: str) -> None:
        """Notes that a rank lives.

        Raises UnregisteredError for a process other than the one that registered for the rank. An engine of an earlier
        pair of this name beats on, and a beat alone takes no place.
        """
        check_rank(self.name, rank, self.world, self.pair)
        self.check_process(identity)
        holder = self.identities.get(rank)
        if rank in self.reports and holder is not None and holder != identity:
            raise UnregisteredError(
                f"{self.name} rank {rank} is {self._process(holder)}; {_process_name(identity)} has not registered "
                "for it since the pair was made; its beats do not count"
            )
        if holder == identity:
            self.recognised.add(rank)
        if self.hear(rank, time.monotonic()):
            log.info("rank %d is heard again", rank, extra={"pair": self.pair, "instance": self.name, "rank": rank})
            self.notify()

    async def fail_rank(self, epoch: int, who: str, error: WeightcastError) -> None:
        """Notes that a rank could not do its step; the first failure of an epoch stops the update."""
        self.check_epoch(epoch)
        failure = type(error)(f"{who}: {error}")
        self.told.append((who, failure))
        self.stop(failure)
        self.notify()

    def cause(self) -> WeightcastError | None:
        """The first failure told by a rank that blames no other rank which has told one.

        When a member is gone, ranks that see it close their connections. Others see only this, and may be heard first.
        """
        tellers = [teller for teller, _ in self.told]
        for teller, failure in self.told:
            if not any(name != teller and re.search(rf"{re.escape(name)}(?!\d)", str(failure)) for name in tellers):
                return failure
        return self.failure

    async def part(self, epoch: int, side: str, rank: int, wait: float) -> bytes | None:
        """A rank's part of the plan, encoded; None while there is no plan yet. Raises what made planning fail."""
        await self._poll_in(epoch, lambda: self.parts is not None, wait)
        if self.parts is None:
            return None
        make = self.parts.trainer_part if side == "trainer" else self.parts.instance_part
        return await asyncio.to_thread(lambda: wire.encode_part(make(self.name, rank)))

    async def set_rendezvous(self, epoch: int, host: str, port: int) -> None:
        """Sets the address where the first member of the communicator listens."""
        self.check_epoch(epoch)
        self.meeting = (host, port)
        self.notify()

    async def rendezvous(self, epoch: int, wait: float) -> tuple[str, int] | None:
        """Host and port at which to join; None while nobody listens yet."""
        await self._poll_in(epoch, lambda: self.meeting is not None, wait)
        return self.meeting

    async def _poll_in(self, epoch: int, ready: Callable[[], bool], wait: float) -> None:
        """Polls until `ready()` holds. Raises what has made the connect fail, PairStateError when the epoch is over."""
        self.check_epoch(epoch)
        await self.poll(lambda: ready() or self.failure is not None or self.record.epoch != epoch, wait)
        self.check_epoch(epoch)
        if self.failure is not None:
            raise self.failure

    async def join(self, epoch: int, member: str) -> None:
        """Notes that a member has joined the communicator. Raises InputError for one that is no member."""
        self.check_epoch(epoch)
        if member not in self.members:
            raise InputError(f"{member!r} is no member of the communicator of instance {self.name}")
        self.joined.add(member)
        self.notify()

    async def ready(self, epoch: int, rank: int, stale: str, layers: Collection[int] | None) -> None:
        """Notes that a rank has checked its layout.

        `stale` says what changed, empty when nothing did. `layers` are those whose placement did, None when more
        changed than placements.
        """
        self.check_epoch(epoch)
        check_rank(self.name, rank, self.world, self.pair)
        if stale:
            self.stale = self.stale or f"rank {rank}: {stale}"
            stale_layers = self.stale_layers
            self.stale_layers = None if layers is None or stale_layers is None else stale_layers | set(layers)
        self.ready_ranks.add(rank)
        self.notify()

    async def go(self, epoch: int, wait: float) -> tuple[int, Order] | None:
        """Order for a rank that reported ready, with its number: "run", or "end" when the update was called off.

        None if there is no such order within `wait` seconds.
        """
        self.check_epoch(epoch)

        def last() -> tuple[int, Order]:
            # Only orders of this epoch: the next one may have begun before this rank was woken. If there are none, an
            # earlier life of the gateway gave them.
            entries = (entry for entry in self.orders.latest() if entry[1].epoch == epoch)
            return next(entries, (self.orders.count, Order(Action.END, epoch, reason=RESTARTED)))

        def decided() -> bool:
            return last()[1].action in (Action.RUN, Action.END, Action.FAILED, Action.LEFT)

        await self.poll(decided, wait)
        return last() if decided() else None

    async def report_moved(self, epoch: int, rank: int, version: Version, layers: Collection[int]) -> None:
        """Takes the layers whose placement on a rank changed while `version` was transferred.

        They come in place of the rank's digests.
        """
        self.check_epoch(epoch)
        self.check_target(version)
        check_rank(self.name, rank, self.world, self.pair)
        if not layers:
            raise InputError(f"{self.name} rank {rank}: no layers are named that changed")
        self.moved[rank] = tuple(sorted(layers))
        self.notify()

    async def report_digests(
        self, epoch: int, side: str, rank: int, version: Version, report: DigestReport, first: bool = False
    ) -> None:
        """Takes the digests of a rank of this instance after `version` was transferred, or of a trainer rank.

        A trainer rank's are of its `first` pass over its weights, or of its second.
        """
        self.check_epoch(epoch)
        self.check_target(version)
        trainer = side == "trainer"
        check_rank("trainer" if trainer else self.name, rank, self.trainer_world if trainer else self.world, self.pair)
        trainer_reports = self.first_digests if first else self.trainer_digests
        (trainer_reports if trainer else self.digests)[rank] = report
        self.notify()

    def give(self, order: Order) -> None:
        """Appends an order for the ranks of the communicator."""
        self.orders.add(order)
        self.notify()


def absent(present: Collection[int] | Mapping[int, object], world: int) -> str:
    """The ranks of 0..world-1 that are not in `present`, in ranges."""
    return number_ranges(rank for rank in range(world) if rank not in present)


def _process_name(identity: str) -> str:
    """The number and host of a process, as its identity tells them."""
    parts = identity.rsplit("~", 2)
    return f"process {parts[1]} on {parts[0]}" if len(parts) == 3 else f"process {identity!r}"


def check_rank(who: str, rank: int, world: int, pair: str) -> None:
    """Raises InputError unless `rank` is one of the `world` ranks."""
    if not 0 <= rank < world:
        raise InputError(f"{who} rank {rank} is not in 0..{world - 1} of pair {pair}")


def check_report(who: str, rank: int, world: int, report: RankReport, pair: str) -> None:
    """Raises InputError for a report of another rank, or of another number of ranks."""
    if report.world_size != world:
        setting = "trainer_world" if who == "trainer" else "world_size in the instance's record"
        raise InputError(
            f"{who} rank {rank} has world_size={report.world_size}, but pair {pair} has {setting} {world}: "
            "make them equal"
        )
    if report.rank != rank:
        raise InputError(f"{who} rank {rank}: the report is that of rank {report.rank}")
