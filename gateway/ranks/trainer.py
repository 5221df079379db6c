"""A trainer rank's side of its pair, given a Source. A training loop holds on every trainer rank:

worker = TrainerWorker("http://127.0.0.1:8900", "main", FsdpSource(model), rank=rank, world_size=world)
worker.connect()
...
worker.update(version=step)          # on every rank; raises if fewer than `min_instances` committed
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from weightcast.gateway.addresses import UNKNOWN
from weightcast.gateway.client import GatewayClient, Offered, Registered, Seat
from weightcast.gateway.ranks.digests import SharedDigests
from weightcast.gateway.ranks.heartbeat import Heartbeat
from weightcast.gateway.ranks.membership import Joining, Member, Run, Waits, join, place_of, report_of
from weightcast.gateway.ranks.orders import OrderFeed, say_who_is_missing
from weightcast.gateway.records import Action, Order, needed_of, shortfall
from weightcast.gateway.reminder import SAY_SECONDS, SELDOM_SECONDS, Reminder
from weightcast.gateway.settings import Settings
from weightcast.gateway.versions import Version
from weightcast.transfer.colocated.host_memory import share_memory
from weightcast.transfer.colocated.offers import Share, check_share
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.documents import whole_number
from weightcast.transfer.errors import (
    AbsentError,
    ControlError,
    DeadlineError,
    EngineError,
    PairStateError,
    StalePlanError,
    TransferError,
    UnregisteredError,
    UpdateError,
    WeightcastError,
)
from weightcast.transfer.executor import TransferReport
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.verification import Verify
from weightcast.transfer.protocols import Source, check_source, layout_of
from weightcast.transfer.transports.choose import check_backend

__all__ = ["TrainerWorker", "UpdateResult"]

log = logging.getLogger("weightcast.worker")


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """End of an update: the gateway's record for each instance, and the report of what this rank moved for it.

    `version` is the number, and `stamp` the text that instances have for it, such as "81@2". With `min_instances` there
    may be records of instances that did not commit.
    """

    version: int
    stamp: str
    instances: dict[str, dict[str, Any]]
    transfers: dict[str, TransferReport] = field(default_factory=dict)


class TrainerWorker:
    """A trainer rank's hold on its pair. All methods are called on every trainer rank, in the same order.

    `backend` of the communicators is "tcp", "gloo" or "nccl". `address` is the one at which engines reach this rank.
    Unless given it is the local address of the connection to the gateway, or that of the Ray node for `ray://`.
    `deadline` in seconds bounds every wait; without it the pair's settings do. The token comes from WEIGHTCAST_TOKEN
    unless given.

    `share` is what ranks of engines on this host may read. With "in_place" that is the weights themselves, which are
    moved into shared memory once, with their views. With "staged" it is a buffer of the pair's bucket size, for a
    trainer that resizes, offloads or pins its weights. Without `share` all bytes travel.

    Of each rank of a pair's trainer one process is believed: the worker that connected last. It displaces the one
    before it for good: whatever that one asks from then on raises DisplacedError, `connect` too. With `takeover` this
    worker's `connect` displaces another one also when it was displaced itself. That is for a trainer that is to go on
    after it was replaced by mistake; then all of its ranks need it.
    """

    def __init__(
        self,
        url: str,
        pair: str,
        source: Source,
        *,
        rank: int,
        world_size: int,
        token: str | None = None,
        backend: str = "tcp",
        address: str | None = None,
        deadline: float | None = None,
        share: Share = None,
        takeover: bool = False,
    ) -> None:
        check_source(source)
        check_share(share)
        check_backend(backend)
        self._url, self._token = url, token
        self._waits = Waits.of(Settings(), deadline)
        self._client = GatewayClient(url, token, timeout=self._waits.outage)
        seconds = SAY_SECONDS if rank == 0 else SELDOM_SECONDS
        self._client.reminder = Reminder(
            lambda: say_who_is_missing(self._client, pair, f"trainer rank {rank}"), seconds, seconds
        )
        self._heartbeat: Heartbeat | None = None
        self._pair = pair
        self._source, self._share = source, share
        self._rank, self._world = whole_number("rank", rank), whole_number("world_size", world_size)
        self._backend, self._address, self._deadline = backend, address, deadline
        self._layout: RankLayout | None = None
        self._place = UNKNOWN
        self._members: dict[str, Member] = {}
        self._joining: dict[str, Joining] = {}
        self._running: dict[str, Run] = {}
        self._given_up = self._closed = False
        self._digests = SharedDigests()
        self._takeover = takeover
        # One process to the gateway, whose connects are numbered.
        self._process, self._connects, self._generation = uuid.uuid4().hex, 0, 0

    def connect(self) -> None:
        """Describes and registers this rank, and joins the communicator of every instance.

        Raises what made an instance fail to connect: CoverageError, LayoutError, DescribeError, DeadlineError and so
        on. Instances that are dead or late are only logged, if `min_instances` of the pair are left without them.
        Raises DisplacedError when another process has replaced this one, TransferError when the gateway did not answer
        for the setting `outage`.
        """
        self._begin()
        for member in self._members.values():
            member.close()  # every instance is joined anew, and one that is not has no part of this layout
        self._members.clear()
        self._layout = self._describe()
        self._waits = Waits.of_pair(self._client, self._pair, self._deadline)
        self._connects += 1
        registered = self._register(self._layout, takeover=self._takeover)
        status = self._client.pair_status(self._pair)
        names = [name for name, record in status["instances"].items() if record["phase"] != "left"]
        if self._rank == 0:
            self._client.start_connect(self._pair)
        failures: dict[str, UpdateError] = {}
        self._feed(registered.first_order, registered.boot).follow(
            names,
            lambda name, take: self._follow_connect(name, take, failures),
            lambda order: (
                order.trainer >= self._generation and order.action in (Action.CONNECTED, Action.FAILED, Action.LEFT)
            ),
            lost=self._give_up,
        )
        if len(names) - len(failures) < needed_of(len(names), status.get("min_instances")):
            raise next(iter(failures.values()))
        if failures:
            reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
            self._warn(f"pair {self._pair} is not connected everywhere: {reasons}")

    def _warn(self, text: str) -> None:
        """Logs what all ranks know alike: the first one as a warning, so that there is one."""
        level = logging.WARNING if self._rank == 0 else logging.DEBUG
        log.log(level, "%s", text, extra={"pair": self._pair, "rank": self._rank})

    def _describe(self) -> RankLayout:
        layout = layout_of(self._source)
        return share_memory(layout) if self._share == "in_place" else layout

    def _register(self, layout: RankLayout, *, resumes: bool = False, takeover: bool = False) -> Registered:
        """Registers this rank, and beats for it. Orders for the trainer as it was before this are passed over."""
        report, start = report_of(layout, self._rank, self._world), f"{self._process}.{self._connects}"
        place = self._place = place_of(self._client, self._address)
        registered = self._client.register_trainer(
            self._pair, report, start, resumes=resumes, takeover=takeover, place=place
        )
        self._generation = registered.generation
        incarnation = self._client.incarnation
        if self._heartbeat is None:
            path, seconds = f"{self._pair}/trainer/{self._rank}", self._waits.heartbeat
            self._heartbeat = Heartbeat(self._url, self._token, path, "", seconds, incarnation=incarnation)
        self._heartbeat.speak_as(incarnation)
        return registered

    def _feed(self, first_order: int, boot: str) -> OrderFeed:
        return OrderFeed(self._client, self._pair, first_order, boot, time.monotonic() + self._waits.gateway)

    def update(self, version: int, *, restart: bool = False) -> UpdateResult:
        """Brings every instance to `version`. Returns when all are decided, after the setting `update` at the latest.
        Until then the weights must stand still: where they do not, it is found out, and nothing is served.

        With `restart`, on all ranks, the version begins a new lineage of the pair, whatever number it has: for a
        trainer that resumes from an older step. Later updates go on in that lineage, also when this one fails.

        Raises VersionError for a version that is not newer than what is committed, for ranks that offer different ones,
        and for a restart where an instance declares integer stamps. Raises StalePlanError when this rank's layout is no
        longer the one it registered. Raises DisplacedError when another process has replaced this one,
        PairStateError when another rank started anew and all have to connect again. Raises UpdateError naming each
        instance that did not commit and why, if fewer than `min_instances` of the pair are left; all of them have to
        commit unless that is set. Raises TransferError when the gateway did not answer for the setting `outage`.
        """
        version = whole_number("version", version)
        self._begin()
        layout = self._describe()
        if self._layout is None:
            raise PairStateError(f"trainer rank {self._rank}: update before connect")
        if layout.table.fingerprint != self._layout.table.fingerprint:
            raise StalePlanError(
                f"trainer rank {self._rank}: the layout is not the one that was registered; connect again"
            )
        if layout.memory.address.tolist() != self._layout.memory.address.tolist():
            for member in self._members.values():
                member.rebind(layout)  # the plan holds, the executors get new views
        self._layout = layout
        try:
            offered = self._offer(layout, version, restart)
        except AbsentError as error:
            raise AbsentError(
                f"{error}; it was deleted, or the gateway started anew without --state: create it and connect() again "
                "on all ranks"
            ) from None
        try:
            return self._update(layout, *offered)
        except UnregisteredError:
            raise UpdateError(
                f"version {offered.version} is not served everywhere: the gateway was started anew in the middle; call "
                "update again, with this version or a greater one"
            ) from None

    def _offer(self, layout: RankLayout, version: int, restart: bool) -> Offered:
        """Offers a version, after a registration where the gateway was restarted or the pair created again."""
        deadline = time.monotonic() + self._waits.gateway
        offered = self._client.offer(self._pair, self._rank, version, deadline, restart=restart)
        if offered is None:
            self._register(layout, resumes=True)
            offered = self._client.offer(self._pair, self._rank, version, deadline, restart=restart)
        if offered is None:
            raise PairStateError(f"pair {self._pair} does not know trainer rank {self._rank}; connect again")
        return offered

    def _update(self, layout: RankLayout, boot: str, version: Version) -> UpdateResult:
        """Goes through the update to a version that this rank has offered in a life of the pair."""
        deadline = time.monotonic() + self._waits.gateway
        # While the others offer, the engines pause and their ranks get ready.
        parts = [member.part for member in self._members.values()]
        self._digests.begin(parts, layout, version, self._labels(version))
        names, first_order, min_instances = self._client.begun(self._pair, version, boot, deadline)
        for name in self._members.keys() - set(names) if names else ():
            self._members.pop(name).close()  # it has left
        reports: dict[str, TransferReport] = {}
        self._feed(first_order, boot).follow(
            names,
            lambda name, take: self._follow_update(name, version, take, reports),
            lambda order: order.ends_update(version),
            self._call_off,
            self._give_up,
        )
        instances = self._client.result(self._pair, version, deadline, boot)
        failures = list(filter(None, itertools.starmap(shortfall, instances.items())))
        text = f"version {version} is not served everywhere: {'; '.join(failures)}"
        if len(instances) - len(failures) < needed_of(len(instances), min_instances):
            raise UpdateError(text)
        if failures:
            self._warn(f"pair {self._pair}: {text}")
        if not instances:
            self._warn(f"pair {self._pair}: version {version} reaches nobody: all instances have left; let one join")
        return UpdateResult(version.number, str(version), instances, reports)

    def _begin(self) -> None:
        if self._closed:
            raise ControlError(f"trainer rank {self._rank}: this TrainerWorker was closed; make a new one and connect")
        self._client.begin()
        self._given_up = False

    def _give_up(self, error: BaseException) -> None:
        """Ends all that is under way: the gateway gives this rank no more orders, as when it is gone."""
        log.warning("what is under way is given up: %s", error, extra={"pair": self._pair, "rank": self._rank})
        self._given_up = True
        for name in tuple(self._joining):
            self._leave_join(name)
        for run in tuple(self._running.values()):
            run.call_off()

    def close(self) -> None:
        """Leaves all communicators and the gateway, for good."""
        self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        for member in self._members.values():
            member.close()
        self._members.clear()
        self._digests.close()
        self._client.close()

    def _follow_connect(self, name: str, take: Callable[[], Order], failures: dict[str, UpdateError]) -> None:
        """Follows the orders of a connect. `failures` gets that of an instance that is dead or late, others raise."""
        while True:
            order = take()
            if order.trainer < self._generation:
                continue
            if order.action is Action.JOIN:
                self._join(name, order.epoch)
            elif order.action is Action.CONNECTED:
                self._finish_join(name)
                return
            else:
                self._leave_join(name)
                if order.action is Action.FAILED:
                    try:
                        self._raise_failure(name, order)
                    except (DeadlineError, EngineError) as error:
                        failures[name] = error
                        return
                if order.action is Action.LEFT:
                    return

    def _raise_failure(self, name: str, order: Order) -> None:
        """Raises the failure of a connect. The gateway keeps it as an error of its own class, which asking for the part
        raises; but not when the pair has been deleted.
        """
        with suppress(AbsentError):
            self._client.part(self._seat(name, order.epoch), time.monotonic() + 5.0)
        raise UpdateError(f"instance {name} did not connect: {order.reason}")

    def _join(self, name: str, epoch: int) -> None:
        if name in self._members:
            self._members.pop(name).close()
        layout = self._layout
        if layout is None:
            raise PairStateError(f"trainer rank {self._rank}: join before connect")
        seat = self._seat(name, epoch)
        try:
            part = self._client.part(seat, time.monotonic() + self._waits.gateway)
            self._digests.prepare(part, layout)
        except WeightcastError as error:
            self._tell(name, epoch, error)
            return
        address = self._place.address
        self._joining[name] = Joining(
            self._waits.join,
            lambda joining: join(self._client, seat, part, layout, self._backend, address, joining, self._share),
            lambda error: self._tell(name, epoch, error),
        )
        if self._given_up:
            self._leave_join(name)

    def _finish_join(self, name: str) -> None:
        joining = self._joining.pop(name, None)
        if joining is not None:
            with suppress(WeightcastError):  # it was told when it was raised
                self._members[name] = joining.result()

    def _leave_join(self, name: str) -> None:
        """Waits no longer for ranks that do not join: the gateway has given them up."""
        joining = self._joining.pop(name, None)
        if joining is not None:
            joining.abandon()

    def _follow_update(
        self, name: str, version: Version, take: Callable[[], Order], reports: dict[str, TransferReport]
    ) -> None:
        joined = False
        while True:
            order = take()
            if order.action is Action.JOIN:
                self._join(name, order.epoch)
            elif order.action is Action.CONNECTED:
                self._finish_join(name)
                joined = True
            elif order.action is Action.PREPARE and order.version == version:
                self._report_first_pass(name, order.epoch, version)
            elif order.action is Action.RUN and order.version == version:
                self._run(name, version, order, reports, since=time.monotonic() if joined else 0.0)
            elif order.action in (Action.REGISTER, Action.FAILED, Action.END, Action.LEFT):
                self._leave_join(name)
                if order.ends_update(version):
                    return

    def _seat(self, name: str, epoch: int) -> Seat:
        return Seat(self._pair, name, epoch, "trainer", self._rank)

    def _labels(self, version: Version) -> dict[str, object]:
        return {"pair": self._pair, "version": version.as_json()}

    def _report_first_pass(self, name: str, epoch: int, version: Version) -> None:
        """Reports the digests of the weights to the gateway, before anything of them is sent."""
        member = self._members.get(name)
        try:
            if member is None:
                raise PairStateError(f"not joined to instance {name} in epoch {epoch}")
            if member.part.verify is not Verify.OFF:
                report = self._digests.first(member.part).report
                self._client.digests(self._seat(name, epoch), version, report, first=True)
        except Exception as error:
            self._tell(name, epoch, error)
            if not isinstance(error, WeightcastError):
                raise

    def _run(self, name: str, version: Version, order: Order, reports: dict[str, TransferReport], since: float) -> None:
        """Sends this rank's part, digests once more and reports that. A failure is told to the gateway, which ends the
        update. `since` is as in `SharedDigests.second`.
        """
        member, layout = self._members.get(name), self._layout
        epoch = order.epoch
        run: Run | None = None
        try:
            if member is None or layout is None:
                raise PairStateError(f"not joined to instance {name} in epoch {epoch}")
            executor = member.executor_for(order.layers, layout)
            labels = self._labels(version)
            if executor is not None and member.group is not None:
                run = self._running[name] = Run(epoch, member.group)
                if self._given_up:
                    run.call_off()
                reports[name] = executor.run(Deadline.after(self._waits.transfer), labels)
                # What is over cannot be called off: the update may end before this rank hears that it has reported.
                del self._running[name]
            digests = self._digests.second(member.part, since=since).result()
            if executor is not None:
                seconds = self._digests.first(member.part).seconds + digests.seconds
                reports[name] = replace(reports[name], digest_seconds=seconds)
            self._client.digests(self._seat(name, epoch), version, digests.report)
        except Exception as error:
            if run is None or not run.called_off:
                self._tell(name, epoch, error)
            if not isinstance(error, WeightcastError):
                raise
        finally:
            self._running.pop(name, None)

    def _call_off(self, order: Order) -> None:
        """Ends a run that the gateway has given up: from a host that is cut off nothing comes, not even an error."""
        run = self._running.get(order.instance)
        if run is not None and (order.epoch != run.epoch or order.action in (Action.END, Action.FAILED, Action.LEFT)):
            labels = {"pair": self._pair, "instance": order.instance, "rank": self._rank}
            log.warning("the run is called off: %s", order.reason, extra=labels)
            run.call_off()

    def _tell(self, name: str, epoch: int, error: BaseException) -> None:
        labels = {"pair": self._pair, "instance": name, "rank": self._rank}
        log.error("trainer rank %d, instance %s: %s", self._rank, name, error, extra=labels)
        if self._client.lost:
            return
        # A failure that arrives in an epoch that is over concerns nobody any more. That the gateway is gone is told by
        # whoever waits for its orders.
        with suppress(PairStateError, TransferError):
            self._client.fail(self._seat(name, epoch), error)
