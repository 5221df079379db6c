"""A pair as the gateway knows it: the trainer's reports and offers, its instances, how updates ended.

How the steps of a connect and of an update follow one another is in `coordinator` and `transaction`; what one instance
and its ranks say is in `instance`. One event loop, no I/O but the engine drivers and the state store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from weightcast.gateway.control.instance import RESTARTED, Instance, absent, check_rank, check_report
from weightcast.gateway.control.instance_state import Event, InstanceRecord, Phase
from weightcast.gateway.control.sent import Sent
from weightcast.gateway.control.store import SavedInstance, Store
from weightcast.gateway.control.waiting import Journal, Side
from weightcast.gateway.incarnations import Admission, Incarnation, Incarnations, Standing, TrainerProcess, process_of
from weightcast.gateway.layouts.merge import TrainerLayout
from weightcast.gateway.records import Action, EngineSpec, Order, PairSpec, UpdateRecord
from weightcast.transfer.deadline import Deadline
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
from weightcast.transfer.planner.replan import Planner

__all__ = ["Pair", "as_weightcast_error", "check_name"]

log = logging.getLogger("weightcast.gateway")

_START = re.compile(r"[A-Za-z0-9.-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
MAX_INSTANCES = 10_000
"""How many names of instances a pair remembers, those that have left too."""
KEPT_ORDERS = 10_000
KEPT_RESULTS = 100
"""How many updates back a result can be asked for."""


Updated = Callable[[str, str, UpdateRecord], None]
"""Told of each update of an instance that has ended: pair, instance, how."""


def _unseen(pair: str, instance: str, record: UpdateRecord) -> None: ...


class Pair(Side):
    """Everything the gateway knows of one pair, with the waits on it.

    `busy` is held by a connect or an update: one at a time. `incarnations` are the trainer's processes, `acting` is the
    generation that the connect or update under way is for. `boot` stands for this life of the pair, in which its orders
    are numbered: a gateway that starts again, and a pair that is created again, begin another one.
    """

    def __init__(
        self,
        spec: PairSpec,
        store: Store | None = None,
        updated: Updated = _unseen,
        processes: Iterable[Standing] = (),
    ) -> None:
        super().__init__(f"pair {spec.name}", "trainer", spec.settings.silence)
        if spec.trainer_world < 1:
            raise InputError(f"pair {spec.name}: trainer_world is {spec.trainer_world}, expected at least 1")
        for name in (spec.name, *spec.instances):
            check_name(name)
        if not spec.instances:
            raise InputError(f"pair {spec.name}: no instances")
        urls = [engine.url for engine in spec.instances.values() if engine.url]
        if len(set(urls)) != len(urls):
            raise InputError(f"pair {spec.name}: two instances have one url; each engine is one instance")
        self.spec = spec = spec if spec.uid else replace(spec, uid=uuid.uuid4().hex)
        self.boot = uuid.uuid4().hex
        self.store = store or Store()
        self.updated = updated
        self.instances = {name: Instance(spec, name, s, store=self.store) for name, s in spec.instances.items()}
        self.trainer_reports: dict[int, RankReport] = {}
        self.trainer_layout: TrainerLayout | None = None
        self.planners: dict[tuple[str, ...], Planner] = {}
        self.offers: dict[int, int] = {}
        self.conflict: WeightcastError | None = None
        self.results: dict[int, dict[str, UpdateRecord]] = {}
        self.busy = asyncio.Lock()
        self.incarnations = Incarnations(spec.name, processes)
        self.acting = 0
        self.asking: dict[asyncio.Task[Any], Incarnation] = {}
        self.orders: Journal[Order] = Journal(KEPT_ORDERS)
        self._first_order = 0
        self.sent = Sent()
        self._result: tuple[dict[str, UpdateRecord], str] | None = None
        self._under_way: tuple[int, tuple[str, ...], int] | None = None

    def instance(self, name: str) -> Instance:
        """Raises AbsentError naming the instances there are."""
        found = self.instances.get(name)
        if found is None:
            raise AbsentError(f"pair {self.spec.name} has no instance {name!r}; it has {', '.join(self.instances)}")
        return found

    @property
    def present(self) -> list[Instance]:
        """The instances that have not left."""
        return [i for i in self.instances.values() if i.record.phase is not Phase.LEFT and not i.leaving]

    @property
    def newest(self) -> int | None:
        """The greatest version that any instance has committed, by the record or by what its ranks say."""
        return max((i.newest for i in self.instances.values() if i.newest is not None), default=None)

    def check_boot(self, known: str) -> None:
        """Raises ControlError for who asks about something that was begun in an earlier life of the pair."""
        if known not in ("", self.boot):
            raise ControlError(
                f"pair {self.spec.name}: the gateway was restarted or the pair was created again in the meantime; what "
                "was under way is over, offer anew"
            )

    async def give(self, instance: Instance, order: Order) -> None:
        """Gives an order to the ranks of an instance's communicator, for the trainer of the step under way."""
        order = replace(order, trainer=self.acting, instance=instance.name)
        self.orders.add(order)
        await instance.give(order)
        self.notify()

    async def orders_from(self, after: int, wait: float) -> list[Order]:
        """The orders of all instances from number `after` on; empty when there is none within `wait` seconds."""
        await self.poll(lambda: self.orders.count > after, wait)
        return self.orders.since(after)

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
    ) -> tuple[int, int]:
        """The report of a trainer rank; returns the generation that it belongs to and the number of its first order.

        `start` stands for one start of the rank, so that a report that arrives twice is one. A rank that starts again
        starts the trainer anew: all ranks register again, and a connect or update under way ends. Everything else:
        `Incarnations.admit`.
        """
        check_rank("trainer", rank, self.spec.trainer_world, self.spec.name)
        check_report("trainer", rank, self.spec.trainer_world, report, self.spec.name)
        if not _START.fullmatch(start):
            raise InputError(f"trainer rank {rank}: start is {start!r}, expected 1 to 64 letters, digits, '.' or '-'")
        if resumes and was is None:
            raise InputError(f"trainer rank {rank}: it resumes, and does not say which generation it was of")
        known = self.incarnations.believed(rank)
        if known is not None and known.start == start and rank in self.trainer_reports:
            return self.generation, self._first_order
        newcomer = TrainerProcess(rank, start, " ".join(report.host.split())[:255], pid, time.time())
        admission = self.incarnations.admit(newcomer, was=was, resumes=resumes, takeover=takeover)
        if admission.begins:
            self._new_generation(rank)
        self.trainer_reports[rank] = report
        self._silence_others(admission)
        self.notify()
        generation, first_order = self.generation, self._first_order
        await self.store.save_processes(self.spec.name, admission.changed, admission.forgotten)
        return generation, first_order

    def _silence_others(self, admission: Admission) -> None:
        """Ends the requests under way of incarnations that are believed no more."""
        gone = {process.process: by for process, by in admission.changed if by is not None}
        for process, by in admission.changed:
            if by is not None:
                log.warning("%s, was replaced by %s", process, by, extra={"pair": self.spec.name, "rank": process.rank})
        for task, said in tuple(self.asking.items()):
            if process_of(said.start) in gone or said.generation != self.generation:
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
        if self.busy.locked():
            for instance in self.present:
                instance.stop(error)

    def follow(self, generation: int, who: str) -> None:
        """A rank of an instance has followed the trainer in `generation`. What an older one has begun ends."""
        if self.incarnations.follow(generation):
            text = f"the trainer was replaced by one of generation {generation}, which {who} has followed"
            log.warning("%s", text, extra={"pair": self.spec.name})
            self._forget_trainer(DisplacedError(f"pair {self.spec.name}: {text}"))
            for task in tuple(self.asking):
                task.cancel()
            self.notify()

    async def beat(self, rank: int) -> None:
        """A trainer rank lives."""
        check_rank("trainer", rank, self.spec.trainer_world, self.spec.name)
        if rank in self.trainer_reports and self.hear(rank, time.monotonic()):
            self.notify()

    def listen(self, now: float) -> bool:
        """See `Side.listen`. What is under way ends when a trainer rank is missing: all instances need all of them."""
        before = set(self.silent)
        changed = super().listen(now)
        if set(self.silent) - before and self.busy.locked():
            error = DeadlineError(f"pair {self.spec.name}: {self.silence()}")
            for instance in self.present:
                instance.stop(error)
        return changed

    # Updates

    @property
    def updating(self) -> int | None:
        """The version that the instances are being updated to."""
        return self._under_way[0] if self._under_way is not None else None

    async def offer(self, rank: int, version: int, wait: float = 0.0) -> bool | None:
        """A trainer rank is ready to send `version`; True for the first. None while an update that ends has not ended
        within `wait` seconds: then nothing was offered. Raises VersionError if it may not be.
        """
        check_rank("trainer", rank, self.spec.trainer_world, self.spec.name)
        if version < 0:
            raise VersionError(f"pair {self.spec.name}: version {version} is negative")
        newest = self.newest
        if newest is not None and version <= newest:
            raise VersionError(
                f"pair {self.spec.name} has version {newest}; version {version} is not newer, offer a greater one"
            )
        before = self.offers.get(rank, version)
        if before != version:
            self._given_up(ControlError(f"pair {self.spec.name}: trainer rank {rank} gave up version {before}"))
        if self.conflict is not None and not await self.poll(lambda: not self.offers, wait):
            return None  # an update that ends for it takes its offers along
        others = {v for v in self.offers.values() if v != version}
        if others:
            error = VersionError(
                f"pair {self.spec.name}: trainer rank {rank} offers {version}, other ranks offer {others.pop()}"
            )
            self.conflict = self.conflict or error
            self.notify()
            raise error
        # Decided before anything is awaited: two ranks may offer at the same moment.
        first = not self.offers
        self.offers[rank] = version
        self.results.pop(version, None)
        self.notify()
        return first

    def _given_up(self, error: WeightcastError) -> None:
        """A trainer rank waits no longer for the update that it offered, as one whose link was cut for a while."""
        self.conflict = self.conflict or error
        if self._under_way is not None:
            for instance in self.present:
                instance.stop(error)
        self.notify()

    async def offered(self, version: int, deadline: Deadline) -> None:
        """Until every trainer rank has offered. Raises what came in between, else DeadlineError naming ranks.

        `deadline` is that of the whole update.
        """
        world = self.spec.trainer_world
        await self.wait(
            lambda: self.conflict is not None or bool(self.silent) or len(self.offers) == world,
            min(self.spec.settings.offer, deadline.left),
            lambda: f"trainer ranks {absent(self.offers, world)} did not offer version {version}",
        )
        self.check_wanted()

    def check_wanted(self) -> None:
        """Raises why the trainer no longer waits for the update that it offered: a rank gave it up, or is silent."""
        if self.conflict is not None:
            raise self.conflict
        if self.silent:
            raise DeadlineError(f"pair {self.spec.name}: {self.silence()}")

    async def begin(self, version: int) -> list[Instance]:
        """The instances that the update to `version` is for, from now on fixed."""
        members = self.present
        self._under_way = (version, tuple(i.name for i in members), self.orders.count)
        self.notify()
        return members

    async def begun(self, version: int, wait: float) -> tuple[tuple[str, ...], int] | None:
        """The instances of the update to `version`, and the number of the first order for it; None until it begins.

        No instances when the update is over, or was refused before it began.
        """

        def under_way() -> bool:
            return self._under_way is not None and self._under_way[0] == version

        await self.poll(lambda: under_way() or version in self.results, wait)
        if version in self.results:
            return (), self.orders.count
        return self._under_way[1:] if self._under_way is not None and under_way() else None

    def decide(self, version: int, records: dict[str, UpdateRecord]) -> None:
        """Ends the update under way: keeps how it ended, and takes offers again."""
        self.results[version] = records
        for old in sorted(self.results)[:-KEPT_RESULTS]:
            del self.results[old]
        self.offers.clear()
        self.sent.clear()
        self.conflict = None
        self._under_way = None

    def result_text(self, version: int) -> str:
        """How an update ended on each instance, as JSON: every trainer rank asks for it."""
        records = self.results[version]
        if self._result is None or self._result[0] is not records:
            self._result = records, json.dumps({name: asdict(record) for name, record in records.items()})
        return self._result[1]

    # Instances come and go

    async def join(self, name: str, spec: EngineSpec) -> Instance:
        """A further instance, or one that had left: fenced until the next update has brought it the newest version."""
        check_name(name)
        known = self.instances.get(name)
        if known in self.present:
            if known.spec == spec:
                return known
            raise ControlError(f"pair {self.spec.name} has an instance {name} already; it has to leave first")
        if known is None and len(self.instances) >= MAX_INSTANCES:
            raise ControlError(f"pair {self.spec.name} has had {len(self.instances)} instances; make another pair")
        if known is not None and known.leaving:
            raise ControlError(f"instance {name} of pair {self.spec.name} is still leaving; try again after the update")
        if spec.url and spec.url in [i.spec.url for i in self.present]:
            raise InputError(f"pair {self.spec.name}: {spec.url} is an instance already; each engine is one instance")
        joining = Instance(self.spec, name, spec, known.record if known else None, self.store)
        if known is not None:
            joining.orders = known.orders  # ranks may have counted them
            known.end()  # and wait for the next one there
            joining.on(Event.REJOIN)
            joining.on(Event.DISTRUST, reason="it had left")
        await joining.save()
        self.instances[name] = joining
        self.notify()
        return joining

    async def leave(self, name: str) -> Instance:
        """The instance is no longer one of the pair; what is under way for it ends, and its ranks are told."""
        leaving = self.instance(name)
        if leaving in self.present:
            leaving.leaving = True
            try:
                await leaving.save()
            except ControlError:
                leaving.leaving = False
                raise
            leaving.stop(ControlError(f"instance {name} left pair {self.spec.name}"))
            if not self.busy.locked():
                self.let_go()
        return leaving

    def let_go(self) -> None:
        """Parts with the instances that leave. Called when nothing is under way that they take part in."""
        for instance in self.instances.values():
            if instance.leaving:
                instance.leaving = False
                instance.on(Event.LEAVE)
                self.planners = {names: p for names, p in self.planners.items() if instance.name not in names}
                reason, epoch = str(instance.failure or ""), instance.record.epoch
                left = Order(Action.LEFT, epoch, reason=reason, trainer=self.generation, instance=instance.name)
                self.orders.add(left)
                instance.orders.add(left)
                instance.notify()
                self.notify()

    @classmethod
    def restored(cls, spec: PairSpec, saved: Iterable[SavedInstance], store: Store, updated: Updated) -> Pair:
        """A pair of an earlier life of the gateway; its instances connect anew, but for those that have left."""
        pair = cls(spec, store, updated, store.load_processes(spec.name))
        for one in saved:
            check_name(one.name)
            phase = Phase.LEFT if one.left else Phase.FAILED
            record = InstanceRecord(one.name, phase, one.epoch, one.version, fenced=one.fenced, reason=RESTARTED)
            instance = pair.instances[one.name] = Instance(pair.spec, one.name, one.spec, record, store)
            instance.identities, instance.displaced = dict(one.identities), dict(one.displaced)
            instance.paused = one.paused
        return pair

    def status(self) -> dict[str, Any]:
        """The pair for people, as JSON."""
        return {
            "pair": self.spec.name,
            "uid": self.spec.uid,
            "trainer": {
                "world_size": self.spec.trainer_world,
                "registered": sorted(self.trainer_reports),
                "silent": list(self.silent),
            },
            "offers": {str(rank): version for rank, version in sorted(self.offers.items())},
            "settings": asdict(self.spec.settings),
            "commit": self.spec.commit,
            "topology": self.spec.topology.document if self.spec.topology is not None else None,
            "instances": {name: _status(i) for name, i in self.instances.items()},
        }


def _status(i: Instance) -> dict[str, Any]:
    return {
        "phase": i.record.phase.value,
        "version": i.record.version,
        "serves": i.serves,
        "fenced": i.record.fenced,
        "epoch": i.record.epoch,
        "reason": i.record.reason or (i.silence() if i.silent else ""),
        "registered": sorted(i.reports),
        "silent": list(i.silent),
        "orders": i.orders.count,
        "world_size": i.world,
        "updates": [asdict(u) for u in i.updates],
    }


def check_name(name: str) -> None:
    """Raises InputError for what cannot be the name of a pair or of an instance."""
    if not _NAME.fullmatch(name):
        raise InputError(f"name {name!r} is not 1 to 64 letters, digits, '.', '_' or '-', the first no '.'")


def as_weightcast_error(error: BaseException) -> WeightcastError:
    """Errors of ours as they are; anything else wrapped, so that it travels with its class name."""
    if isinstance(error, WeightcastError):
        return error
    return ControlError(f"{type(error).__name__}: {' '.join(str(error).split())}")
