"""A pair as the gateway knows it: the trainer's reports and offers, its instances, and how updates ended.

The order of steps is in `connect` and `update`, and `instance` has what one instance and its ranks report. All of it
runs in one event loop. There is no I/O but that of engine drivers and the state store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from weightcast.gateway.addresses import UNKNOWN, Place
from weightcast.gateway.control.instance import RESTARTED, Instance, Step, absent, check_rank, check_report
from weightcast.gateway.control.instance_state import Event, InstanceRecord, Phase, advance
from weightcast.gateway.control.store import SavedInstance, Store
from weightcast.gateway.control.waiting import Party, Wait
from weightcast.gateway.incarnations import Admission, Incarnation, Incarnations, Standing, TrainerProcess, process_of
from weightcast.gateway.layouts.merge import TrainerLayout
from weightcast.gateway.records import MAX_INSTANCES, Action, EngineSpec, Order, PairSpec, UpdateRecord
from weightcast.gateway.versions import MOST_LINEAGES, Version
from weightcast.transfer.deadline import Deadline, utc
from weightcast.transfer.errors import (
    AbsentError,
    ControlError,
    DeadlineError,
    DisplacedError,
    InputError,
    VersionError,
    WeightcastError,
)
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.plan.digest_report import DigestReport

__all__ = ["Pair", "as_weightcast_error", "check_name", "check_spec"]

log = logging.getLogger("weightcast.gateway")

_START = re.compile(r"[A-Za-z0-9.-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
KEPT_ORDERS = 10_000
KEPT_RESULTS = 100
"""Number of past updates whose results can be asked for."""


Updated = Callable[[str, str, UpdateRecord], None]
"""Callback for each update of an instance that has ended: pair, instance, record."""


class Offer(NamedTuple):
    """A trainer rank's offer. With `restart` its version begins a lineage."""

    version: Version
    restart: bool = False

    def __str__(self) -> str:
        return f"{self.version.number}{' with restart=True' if self.restart else ''}"


class Taken(NamedTuple):
    """Version of an offer that was taken. The `first` offer begins its update."""

    version: Version
    first: bool


class Pair(Party):
    """Everything the gateway knows of one pair, with the waits on it.

    `incarnations` are the trainer's processes. `boot` stands for this life of the pair, in which its orders are
    numbered. Another life begins when the gateway starts again, or when the pair is created again: `since` is when, in
    UTC. `sent` has the last report of each trainer rank, as bytes and decoded: it sends the same for every instance of
    an update. `closed` says why nothing begins any more, as the pair is about to be forgotten.
    """

    def __init__(
        self,
        spec: PairSpec,
        store: Store | None = None,
        updated: Updated = lambda pair, instance, record: None,
        processes: Iterable[Standing] = (),
    ) -> None:
        spec = PairSpec.given(spec, f"pair {spec.name}")
        super().__init__(f"pair {spec.name}", "trainer", spec.settings.silence, KEPT_ORDERS)
        check_spec(spec)
        self.spec = spec = spec if spec.uid else replace(spec, uid=uuid.uuid4().hex)
        self.boot, self.since = uuid.uuid4().hex, utc(time.time())
        self.store = store or Store()
        self.updated = updated
        self.instances = {name: Instance(spec, name, s, store=self.store) for name, s in spec.instances.items()}
        self.trainer_reports: dict[int, RankReport] = {}
        self.trainer_places: dict[int, Place] = {}
        self.trainer_layout: TrainerLayout | None = None
        self.offers: dict[int, Offer] = {}
        self.conflict: WeightcastError | None = None
        self.closed: ControlError | None = None
        self.results: dict[Version, dict[str, UpdateRecord]] = {}
        self.incarnations = Incarnations(spec.name, processes)
        self.asking: dict[asyncio.Task[Any], Incarnation] = {}
        self._first_order = 0
        self.sent: dict[int, tuple[bytes, DigestReport]] = {}
        self._result: tuple[dict[str, UpdateRecord], str] | None = None
        self._under_way: tuple[Version, tuple[str, ...], int] | None = None

    def instance(self, name: str) -> Instance:
        """The instance of that name. Raises AbsentError naming the instances that there are."""
        instance = self.instances.get(name)
        if instance is None:
            raise AbsentError(f"pair {self.spec.name} has no instance {name!r}; it has {', '.join(self.instances)}")
        return instance

    @property
    def present(self) -> list[Instance]:
        """The instances that have not left."""
        return [instance for instance in self.instances.values() if instance.present]

    @property
    def evicted(self) -> list[Instance]:
        """The instances that have left because they were dead, and come back by themselves."""
        return [instance for instance in self.instances.values() if instance.evicted]

    @property
    def newest(self) -> Version | None:
        """The greatest version that any instance has committed, by the record or by what its ranks say."""
        return max((i.newest for i in self.instances.values() if i.newest is not None), default=None)

    @property
    def lineage(self) -> int:
        """The lineage in which versions go on: that of the record, of what ranks say, or of an offer under way."""
        versions = [offer.version for offer in self.offers.values()] + [self.newest or Version(1, 0)]
        return max(self.spec.lineage, *(version.lineage for version in versions))

    def check_boot(self, known: str) -> None:
        """Raises ControlError for a request about something that began in an earlier life of the pair."""
        if known not in ("", self.boot):
            raise ControlError(
                f"pair {self.spec.name}: the gateway was restarted or the pair was created again in the meantime; what "
                "was under way is over, offer anew"
            )

    async def hold(
        self, step: Step, group: Sequence[Instance] | None = None, deadline: Deadline | None = None
    ) -> list[Instance]:
        """Takes instances for a step as soon as all of them are free. Returns those that have not left meanwhile.

        Without a `group` they are those of the pair, also those that join while it waits. A step that waits for an
        instance holds none, so no two steps wait for each other. Nothing is held for a trainer that has started anew,
        nor in a pair that is closed.
        Raises what `check_wanted` does for an update, DeadlineError naming instances.
        """

        def instances() -> Sequence[Instance]:
            return self.present if group is None else group

        def ready() -> bool:
            if self.closed is not None:
                return True
            unwanted = step.version is not None and (self.conflict is not None or bool(self.silent))
            return unwanted or step.generation != self.generation or all(i.step is None for i in instances())

        def holding() -> str:
            return ", ".join(i.name for i in instances() if i.step is not None)

        seconds = math.inf if deadline is None else deadline.left
        with self.waiting(seconds, lambda: f"another connect or update has not released {holding()}"):
            in_time = await self.poll(ready, seconds)
        if not in_time:
            names = holding()
            seconds = 0.0 if deadline is None else deadline.seconds
            raise DeadlineError(
                f"pair {self.spec.name}: still being connected {seconds:g} s after the first offer: {names}"
            )
        if step.version is not None:
            self.check_wanted()
        if step.generation != self.generation or self.closed is not None:
            return []
        members = [instance for instance in instances() if instance.present]
        for instance in members:
            instance.step, instance.deadline = step, deadline
        return members

    def release(self, step: Step, instances: Iterable[Instance]) -> None:
        """Ends the hold of a step on instances, those that it still has."""
        for instance in instances:
            if instance.step is step:
                instance.step = instance.deadline = None
                self._let_go(instance)
        self.notify()

    def _stop_steps(self, error: WeightcastError, *, updates_only: bool = False) -> None:
        """Ends connects and updates under way, or updates alone."""
        for instance in self.present:
            if instance.updating is not None or (instance.step is not None and not updates_only):
                instance.stop(error)

    def close(self, error: ControlError) -> None:
        """Ends what is under way, with `error` as the reason, and lets nothing begin any more."""
        self.closed = self.closed or error
        self.conflict = self.conflict or error
        self._stop_steps(error)
        self.notify()

    def reopen(self) -> None:
        """Lets work begin again, because the pair is not forgotten after all."""
        self.closed = None
        if not self.offers:  # else the update that ends takes it along
            self.conflict = None

    def check_open(self) -> None:
        """Raises the reason why nothing begins any more, if the pair is closed."""
        if self.closed is not None:
            raise self.closed

    @property
    def idle(self) -> bool:
        """True if no connect and no update is under way."""
        return not self.offers and all(instance.step is None for instance in self.instances.values())

    def forget_store(self) -> None:
        """Makes the pair and its instances write no more: the file has forgotten them, or has others of their names."""
        self.store = Store()
        for instance in self.instances.values():
            instance.store = self.store

    def give(self, instance: Instance, order: Order, step: Step | None = None) -> None:
        """Gives an order to the members of an instance's communicator, for the step that holds it.

        Of another `step` the trainer alone is told.
        """
        holder = instance.step
        step = step or holder
        generation = self.generation if step is None else step.generation
        order = replace(order, trainer=generation, instance=instance.name)
        self.orders.add(order)
        if holder in (None, step):
            instance.give(order)
        self.notify()

    # The trainer

    @property
    def generation(self) -> int:
        """Number of the trainer's last start."""
        return self.incarnations.generation

    async def register_trainer(
        self,
        rank: int,
        report: RankReport,
        start: str,
        *,
        pid: int = 0,
        was: int | None = None,
        resumes: bool = False,
        takeover: bool = False,
        place: Place = UNKNOWN,
    ) -> tuple[int, int]:
        """Takes the report of a trainer rank at a place. Returns its generation, and the number of its first order.

        `start` stands for one start of the rank, so that a report that arrives twice is one. A rank that starts again
        starts the trainer anew: all ranks register again, and a connect or update under way ends. For the rest see
        `Incarnations.admit`.
        """
        self.check_open()
        check_rank("trainer", rank, self.spec.trainer_world, self.spec.name)
        check_report("trainer", rank, self.spec.trainer_world, report, self.spec.name)
        if not _START.fullmatch(start):
            raise InputError(f"trainer rank {rank}: start is {start!r}, expected 1 to 64 letters, digits, '.' or '-'")
        if resumes and was is None:
            raise InputError(f"trainer rank {rank}: it resumes, and does not say which generation it was of")
        incumbent = self.incarnations.believed(rank)
        if incumbent is not None and incumbent.start == start and rank in self.trainer_reports:
            return self.generation, self._first_order
        newcomer = TrainerProcess(rank, start, " ".join(report.host.split())[:255], pid, time.time())
        admission = self.incarnations.admit(newcomer, was=was, resumes=resumes, takeover=takeover)
        if admission.begins:
            self._new_generation(rank)
        self.trainer_reports[rank], self.trainer_places[rank] = report, place
        self.signs[rank] = time.time()
        self._silence_others(admission)
        self.notify()
        generation, first_order = self.generation, self._first_order
        await self.store.save_processes(self.spec.name, admission.changed, admission.forgotten)
        return generation, first_order

    def _silence_others(self, admission: Admission) -> None:
        """Ends the requests under way of incarnations that are no longer believed."""
        names = {process.process: successor for process, successor in admission.changed if successor is not None}
        for process, successor in admission.changed:
            if successor is not None:
                log.warning(
                    "%s, was replaced by %s", process, successor, extra={"pair": self.spec.name, "rank": process.rank}
                )
        for task, incarnation in tuple(self.asking.items()):
            if process_of(incarnation.start) in names or incarnation.generation != self.generation:
                task.cancel()

    def _new_generation(self, rank: int) -> None:
        self._first_order = self.orders.count
        self._forget_trainer(ControlError(f"pair {self.spec.name}: trainer rank {rank} started anew"))

    def _forget_trainer(self, error: WeightcastError) -> None:
        self.trainer_reports.clear()
        self.trainer_layout = None
        self.forget()
        if self.offers:
            self.conflict = self.conflict or error
        self._stop_steps(error)

    def follow(self, generation: int, who: str) -> None:
        """Notes that a rank of an instance has followed the trainer in `generation`.

        Work that an older generation has begun ends.
        """
        if self.incarnations.follow(generation):
            text = f"the trainer was replaced by one of generation {generation}, which {who} has followed"
            log.warning("%s", text, extra={"pair": self.spec.name})
            self._forget_trainer(DisplacedError(f"pair {self.spec.name}: {text}"))
            for task in tuple(self.asking):
                task.cancel()
            self.notify()

    def process(self, rank: int) -> str:
        believed = self.incarnations.believed(rank)
        return believed.place if believed is not None else ""

    async def beat(self, rank: int) -> None:
        """Notes that a trainer rank lives, if it has registered."""
        check_rank("trainer", rank, self.spec.trainer_world, self.spec.name)
        if rank in self.trainer_reports and self.hear(rank, time.monotonic()):
            self.notify()

    def listen(self, now: float) -> bool:
        """Listens like `Party.listen`, and ends what is under way when a trainer rank is missing.

        All instances need all trainer ranks.
        """
        earlier_ranks = set(self.silent)
        changed = super().listen(now)
        if set(self.silent) - earlier_ranks:
            self._stop_steps(DeadlineError(f"pair {self.spec.name}: {self.silence()}"))
        return changed

    # Updates

    async def offer(self, rank: int, number: int, wait: float = 0.0, *, restart: bool = False) -> Taken | None:
        """Takes the offer of a trainer rank that is ready to send a version; `restart` begins a lineage with it.

        Returns None, and takes no offer, while an update that ends has not ended within `wait` seconds. Raises
        VersionError for a version that is negative, not newer, or not that of other ranks, and for a restart that an
        instance does not take.
        """
        self.check_open()
        check_rank("trainer", rank, self.spec.trainer_world, self.spec.name)
        offer = self._offer(number, restart)
        earlier_offer = self.offers.get(rank, offer)
        if earlier_offer != offer:
            self._given_up(ControlError(f"pair {self.spec.name}: trainer rank {rank} gave up version {earlier_offer}"))
        if self.conflict is not None:
            if not await self.poll(lambda: not self.offers, wait):
                return None  # the update that ends for it takes its offers along
            self.check_open()
            offer = self._offer(number, restart)  # that update may have begun a lineage
        other_offers = {other for other in self.offers.values() if other != offer}
        if other_offers:
            error = VersionError(
                f"pair {self.spec.name}: trainer rank {rank} offers {offer}, other ranks offer {other_offers.pop()}"
            )
            self.conflict = self.conflict or error
            self.notify()
            raise error
        # Decided before anything is awaited: two ranks may offer at the same moment.
        first = not self.offers
        self.offers[rank] = offer
        self.results.pop(offer.version, None)
        self.notify()
        return Taken(offer.version, first)

    def _offer(self, number: int, restart: bool) -> Offer:
        """The offer of a number. The lineage that it begins is the one of a restart under way, so that all ranks that
        agree offer the same. Raises VersionError.
        """
        if number < 0:
            raise VersionError(f"pair {self.spec.name}: version {number} is negative")
        if restart:
            self._check_stamps()
        under_way = any(offer.restart for offer in self.offers.values())
        lineage = self.lineage + (restart and not under_way)
        if lineage > MOST_LINEAGES:
            raise VersionError(f"pair {self.spec.name} has had {lineage - 1} lineages; make another pair")
        version, newest = Version(lineage, number), self.newest
        if newest is not None and version <= newest:
            raise VersionError(f"pair {self.spec.name} has version {newest}; {version.refusal}")
        return Offer(version, restart)

    def _check_stamps(self) -> None:
        """Raises VersionError naming the instances whose consumers cannot tell versions of two lineages apart."""
        names = [i.name for i in self.instances.values() if i.belongs and i.spec.stamps == "integer"]
        if names:
            raise VersionError(
                f"pair {self.spec.name}: restart=True begins a lineage with stamps such as '81@2', and instances "
                f"{', '.join(names)} take integer stamps alone; offer a greater version, or make the pair anew with "
                "create_pair(replace=True)"
            )

    async def begin_lineage(self, lineage: int) -> None:
        """Goes on in a lineage from now on, in later lives of the gateway, too. Raises ControlError if that cannot be
        written; then it has not begun.
        """
        if lineage > self.spec.lineage:
            spec = replace(self.spec, lineage=lineage)
            await self.store.save_spec(spec)
            self.spec = spec
            log.info("lineage %d begins", lineage, extra={"pair": self.spec.name})

    def _given_up(self, error: WeightcastError) -> None:
        """Ends the update that a trainer rank no longer waits for, as when its link was cut for a while."""
        self.conflict = self.conflict or error
        self._stop_steps(error, updates_only=True)
        self.notify()

    async def offered(self, version: Version, deadline: Deadline) -> None:
        """Returns when every trainer rank has offered. Raises what came in between, else DeadlineError naming ranks.

        `deadline` is that of the whole update.
        """
        world = self.spec.trainer_world
        await self.wait(
            lambda: self.conflict is not None or bool(self.silent) or len(self.offers) == world,
            min(self.spec.settings.offer, deadline.left),
            lambda: f"trainer ranks {absent(self.offers, world)} did not offer version {version}",
            lambda: self.accounts(rank for rank in range(world) if rank not in self.offers),
        )
        self.check_wanted()

    def check_wanted(self) -> None:
        """Raises an error if the trainer no longer waits for its update: a rank gave it up, or is silent."""
        if self.conflict is not None:
            raise self.conflict
        if self.silent:
            raise DeadlineError(f"pair {self.spec.name}: {self.silence()}")

    async def begin(self, version: Version) -> list[Instance]:
        """Fixes the instances that the update to `version` is for, and returns them."""
        members = self.present
        self._under_way = (version, tuple(i.name for i in members), self.orders.count)
        self.notify()
        return members

    async def begun(self, version: Version, wait: float) -> tuple[tuple[str, ...], int] | None:
        """Names of the instances of the update to `version`, and the number of its first order; None until it begins.

        There are no instances if the update is over, or was refused before it began.
        """

        def under_way() -> bool:
            return self._under_way is not None and self._under_way[0] == version

        await self.poll(lambda: under_way() or version in self.results, wait)
        if version in self.results:
            return (), self.orders.count
        return self._under_way[1:] if self._under_way is not None and under_way() else None

    def decide(self, version: Version, records: dict[str, UpdateRecord]) -> None:
        """Ends the update under way: keeps its records by instance, and takes offers again."""
        self.results[version] = records
        for past_version in sorted(self.results)[:-KEPT_RESULTS]:
            del self.results[past_version]
        self.offers.clear()
        self.sent.clear()
        self.conflict = None
        self._under_way = None

    def result_text(self, version: Version) -> str:
        """Records of an update by instance, as JSON; made once, though every trainer rank asks for them."""
        records = self.results[version]
        if self._result is None or self._result[0] is not records:
            self._result = records, json.dumps({name: record.as_json() for name, record in records.items()})
        return self._result[1]

    # Instances come and go

    async def join(self, name: str, spec: EngineSpec) -> Instance:
        """Adds an instance, or one that had left. It is fenced until an update has brought it the newest version."""
        self.check_open()
        check_name(name)
        namesake = self.instances.get(name)
        if namesake is not None and namesake.present:
            if namesake.spec == spec:
                return namesake
            raise ControlError(f"pair {self.spec.name} has an instance {name} already; it has to leave first")
        if namesake is None and len(self.instances) >= MAX_INSTANCES:
            raise ControlError(f"pair {self.spec.name} has had {len(self.instances)} instances; make another pair")
        if namesake is not None and namesake.leaving:
            raise ControlError(f"instance {name} of pair {self.spec.name} is still leaving; try again after the update")
        if spec.url and spec.url in [i.spec.url for i in self.instances.values() if i.belongs and i is not namesake]:
            raise InputError(
                f"pair {self.spec.name}: {spec.shown_url} is an instance already; each engine is one instance"
            )
        if spec.stamps == "integer" and self.lineage > 1:
            raise VersionError(
                f"instance {name} takes integer stamps alone, and pair {self.spec.name} is in lineage {self.lineage}, "
                "with stamps such as '81@2'; make the pair anew with create_pair(replace=True)"
            )
        newcomer = Instance(self.spec, name, spec, namesake.record if namesake else None, self.store)
        if namesake is not None:
            newcomer.orders = namesake.orders  # ranks may have counted them
            namesake.end()  # and wait for the next one there
            newcomer.on(Event.REJOIN)
            newcomer.on(Event.DISTRUST, reason="it had left")
        await newcomer.save()
        self.instances[name] = newcomer
        self.notify()
        return newcomer

    async def leave(self, name: str, evicted: str = "") -> Instance:
        """Takes an instance out of the pair: what is under way for it ends, and its ranks are told.

        With `evicted`, which says why, it comes back by itself.
        """
        instance = self.instance(name)
        if instance.belongs:
            earlier = instance.leaving, instance.evicted
            leaves = instance.leaving or instance.present
            instance.leaving, instance.evicted = leaves, evicted
            try:
                await instance.save()
            except ControlError:
                instance.leaving, instance.evicted = earlier
                raise
            if leaves:  # it may have left already, while that was written
                instance.stop(ControlError(f"instance {name} left pair {self.spec.name}{evicted and f': {evicted}'}"))
            else:
                instance.on(Event.LEAVE, reason="it was taken out after it had been evicted")
            if instance.step is None:
                self._let_go(instance)
        return instance

    async def bring_back(self, instance: Instance) -> None:
        """Brings back an instance that was evicted. It is fenced until an update has brought it the newest version."""
        record = advance(instance.record, Event.REJOIN)
        record = advance(record, Event.DISTRUST, reason=f"it lives again; it was {instance.evicted}")
        evicted, instance.evicted = instance.evicted, ""
        try:
            await instance.store.save(instance.saved(record))
        except ControlError:
            instance.evicted = evicted
            raise
        instance.adopt(record, Event.REJOIN, record.reason)
        instance.clear_epoch()
        self.notify()

    def _let_go(self, instance: Instance) -> None:
        """Parts with an instance, if it leaves. Called when no step holds it."""
        if instance.leaving:
            instance.leaving = False
            instance.on(Event.LEAVE, reason=instance.evicted)
            self.give(instance, Order(Action.LEFT, instance.record.epoch, reason=str(instance.failure or "")))
            if instance.evicted:
                instance.clear_epoch()  # whoever takes the place of a dead rank may beat

    @classmethod
    def restored(cls, spec: PairSpec, saved: Iterable[SavedInstance], store: Store, updated: Updated) -> Pair:
        """A pair of an earlier life of the gateway; its instances connect anew, but for those that have left."""
        pair = cls(spec, store, updated, store.load_processes(spec.name))
        for state in saved:
            check_name(state.name)
            phase, reason = (Phase.LEFT, state.evicted) if state.left else (Phase.FAILED, RESTARTED)
            record = InstanceRecord(state.name, phase, state.epoch, state.version, fenced=state.fenced, reason=reason)
            instance = pair.instances[state.name] = Instance(pair.spec, state.name, state.spec, record, store)
            instance.identities, instance.displaced = dict(state.identities), dict(state.displaced)
            instance.paused, instance.evicted = state.paused, state.evicted
            if not state.left and state.spec.kind == "worker":  # who has died while the gateway was gone is missed too
                instance.heard = dict.fromkeys(state.identities, time.monotonic())
        return pair

    def under_way(self) -> list[tuple[str, Wait]]:
        """The waits on the pair and on its instances, each with the name of the instance, empty for the pair's own."""
        sides: list[tuple[str, Party]] = [("", self), *((i.name, i) for i in self.present)]
        return [(name, wait) for name, side in sides for wait in side.waits]

    def waiting_json(self) -> list[dict[str, Any]]:
        """The waits under way, with the missing of each, as JSON."""
        return [{"instance": name, **asdict(wait.record())} for name, wait in self.under_way()]

    def status(self) -> dict[str, Any]:
        """State of the pair for people, as JSON. Times are UTC."""
        return {
            "pair": self.spec.name,
            "uid": self.spec.uid,
            "now": utc(time.time()),
            "since": self.since,
            "waiting": self.waiting_json(),
            "trainer": {
                "world_size": self.spec.trainer_world,
                "registered": sorted(self.trainer_reports),
                "silent": list(self.silent),
                "heard": self.last_sign,
            },
            "offers": {str(rank): offer.version.as_json() for rank, offer in sorted(self.offers.items())},
            "settings": asdict(self.spec.settings),
            "commit": self.spec.commit,
            "min_instances": self.spec.min_instances,
            "topology": self.spec.topology.document if self.spec.topology is not None else None,
            "instances": {name: _status(i) for name, i in self.instances.items()},
        }


def _status(i: Instance) -> dict[str, Any]:
    return {
        "state": i.state,
        "phase": i.record.phase.value,
        "version": None if i.record.version is None else i.record.version.as_json(),
        "committed": i.committed_at,
        "serves": i.serves,
        "fenced": i.record.fenced,
        "epoch": i.record.epoch,
        "reason": i.record.reason or (i.silence() if i.silent else ""),
        "registered": sorted(i.reports),
        "silent": list(i.silent),
        "heard": i.last_sign,
        "orders": i.orders.count,
        "world_size": i.world,
        "updates": [update.as_json() for update in i.updates],
    }


def check_spec(spec: PairSpec) -> None:
    """Raises InputError for names that cannot be those of a pair and its instances, and for two of one url."""
    for name in (spec.name, *spec.instances):
        check_name(name)
    urls = [engine.url for engine in spec.instances.values() if engine.url]
    if len(set(urls)) != len(urls):
        raise InputError(f"pair {spec.name}: two instances have one url; each engine is one instance")


def check_name(name: str) -> None:
    """Raises InputError unless `name` can be the name of a pair or of an instance."""
    if not _NAME.fullmatch(name):
        raise InputError(f"name {name!r} is not 1 to 64 letters, digits, '.', '_' or '-', the first no '.'")


def as_weightcast_error(error: BaseException) -> WeightcastError:
    """Returns an error of weightcast as it is, and any other one wrapped, so that it travels with its class name."""
    if isinstance(error, WeightcastError):
        return error
    return ControlError(f"{type(error).__name__}: {' '.join(str(error).split())}")
