"""An inference rank's side of its pair, given a Sink.

Engine plugins call its steps one by one. An engine of your own calls `serve()` between two batches, and generates only
while `fenced` is False. It is never False before the first commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from weightcast.gateway.addresses import UNKNOWN
from weightcast.gateway.client import POLL, GatewayClient, Orders, Seat
from weightcast.gateway.ranks.digests import PartDigests
from weightcast.gateway.ranks.heartbeat import Heartbeat
from weightcast.gateway.ranks.host import process_identity
from weightcast.gateway.ranks.membership import (
    Change,
    Joining,
    Member,
    Run,
    Waits,
    changed_placement,
    check_unmoved,
    join,
    place_of,
    report_of,
)
from weightcast.gateway.ranks.orders import say_who_is_missing
from weightcast.gateway.ranks.outage import Outage
from weightcast.gateway.records import Action, Order
from weightcast.gateway.reminder import SAY_SECONDS, SELDOM_SECONDS, Reminder
from weightcast.gateway.settings import Settings
from weightcast.gateway.versions import Version
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.documents import whole_number
from weightcast.transfer.errors import (
    AbsentError,
    AuthorizationError,
    ControlError,
    DisplacedError,
    PairStateError,
    StalePlanError,
    TransferError,
    WeightcastError,
)
from weightcast.transfer.executor import TransferReport
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.protocols import Settles, Sink, check_sink, layout_of
from weightcast.transfer.transports.choose import check_backend

__all__ = ["InstanceWorker", "MemoryRecord"]

log = logging.getLogger("weightcast.worker")

_ANSWER = 5.0
"""Seconds that the gateway may take to answer an engine that has nothing to do for it."""


@dataclass(slots=True)
class MemoryRecord:
    """Record of a process about the memory of its rank. It lasts as long as that memory: longer than workers, pairs and
    gateways.

    `version` was committed last. `verified` is the version whose digests were reported last, if the memory was not
    written since. `of` is the uid of the pair that it came from. `uncommitted` says that the memory was written since a
    commit. `unconfirmed` says that the gateway's record differs from `version`. `followed` is the generation of the
    trainer of pair `followed_in` that wrote the memory last. `identity` stands for the process.
    """

    version: Version | None = None
    verified: Version | None = None
    of: str = ""
    uncommitted: bool = False
    unconfirmed: bool = False
    followed: int = 0
    followed_in: str = ""
    identity: str = field(default_factory=process_identity)


class InstanceWorker:
    """An inference rank's side: `connect` once an epoch, then `transfer` and `verify` once an update; or `serve`.

    `address` is the one at which the trainer's ranks reach this one. Unless given it is the local address of the
    connection to the gateway, or that of the Ray node for `ray://`.

    `memory` is that of an earlier worker of this process whose weights are still there; without it nothing is held yet.
    When two processes say that they are one rank, the last to say so is. The other one is refused for good, with
    DisplacedError.
    """

    def __init__(
        self,
        url: str,
        pair: str,
        instance: str,
        sink: Sink,
        *,
        rank: int,
        world_size: int,
        token: str | None = None,
        backend: str = "tcp",
        address: str | None = None,
        deadline: float | None = None,
        memory: MemoryRecord | None = None,
    ) -> None:
        check_sink(sink)
        check_backend(backend)
        self._url, self._token = url, token
        self.memory = memory or MemoryRecord()
        self._waits = Waits.of(Settings(), deadline)
        self._client = GatewayClient(url, token, timeout=self._waits.outage, identity=self.memory.identity)
        self._client.reminder = Reminder(self._remind, SAY_SECONDS, SELDOM_SECONDS)
        self._heartbeat: Heartbeat | None = None
        self._pair, self._instance, self._sink = pair, instance, sink
        self._rank, self._world = whole_number("rank", rank), whole_number("world_size", world_size)
        self._who = f"{instance} rank {rank}"
        self._backend, self._address, self._deadline = backend, address, deadline
        self._layout: RankLayout | None = None
        self._place = UNKNOWN
        self._member: Member | None = None
        self._joining: Joining | None = None
        self._digests = PartDigests()
        self._run: Run | None = None
        self._given_up = self._quiet = self._closed = self._left = False
        self._epoch = 0
        self._cursor: int | None = None
        self._boot = self._uid = ""
        self._ahead: Orders | None = None
        self._absent = ""
        self._outage = Outage(url, self._who)
        self._displaced: DisplacedError | None = None
        self._target: Version | None = None

    @property
    def version(self) -> int | None:
        """The number of the version that was committed last, None before the first."""
        return None if self.memory.version is None else self.memory.version.number

    @property
    def stamp(self) -> str | None:
        """The text of the version that was committed last, such as "81@2"; None before the first."""
        return None if self.memory.version is None else str(self.memory.version)

    @property
    def target(self) -> Version | None:
        """The version that was received last, committed or not."""
        return self._target

    @property
    def fenced(self) -> bool:
        """True if this rank must not generate.

        That is so before the first commit, and when another process has taken its place. It is so as well while its
        memory may hold bytes of two versions, or of one that no gateway confirms.
        """
        memory = self.memory
        return memory.version is None or memory.uncommitted or memory.unconfirmed or self._displaced is not None

    def connect(self, epoch: int) -> None:
        """Describes this rank, registers it, fetches its part, joins. A failure is told to the gateway, then raised."""
        self._check_open()
        self.disconnect()
        self._epoch = epoch
        with self._telling():
            self._register(epoch)
            self._join(epoch)
            self._finish_join()

    def _register(self, epoch: int) -> None:
        self._live()
        self._layout = layout_of(self._sink)
        report = report_of(self._layout, self._rank, self._world)
        memory = self.memory
        self._place = place_of(self._client, self._address)
        committed, self._uid = self._client.register_instance(
            self._seat(epoch),
            report,
            verified=memory.verified,
            of=memory.of,
            uncommitted=memory.uncommitted,
            followed=memory.followed if memory.followed_in == self._pair else 0,
            place=self._place,
        )
        self._still_wanted()
        self._confirm(committed)

    def _confirm(self, committed: bool) -> None:
        """Takes the gateway's word on what this rank holds."""
        if committed:
            self.commit()
        else:
            self.memory.unconfirmed = True

    def _live(self) -> None:
        """Learns how long to wait, and starts to beat."""
        self._waits = Waits.of_pair(self._client, self._pair, self._deadline)
        if self._heartbeat is None:
            path = f"{self._pair}/instances/{self._instance}/ranks/{self._rank}"
            seconds, identity = self._waits.heartbeat, self.memory.identity
            self._heartbeat = Heartbeat(self._url, self._token, path, identity, seconds, self._heard, self._unheard)

    def _join(self, epoch: int, failed: Callable[[BaseException], None] = lambda error: None) -> None:
        """Fetches the part, and begins to join in a thread: it waits for others, whom the gateway may give up."""
        seat, layout, address = self._seat(epoch), self._described(), self._place.address
        part = self._client.part(seat, time.monotonic() + self._waits.gateway)
        self._digests.prepare(part, layout)
        self._joining = Joining(
            self._waits.join,
            lambda joining: join(self._client, seat, part, layout, self._backend, address, joining),
            failed,
        )
        if self._given_up:
            self._joining.abandon()

    def _finish_join(self) -> None:
        if (joining := self._joining) is not None:
            try:
                self._member = joining.result()
            finally:
                self._joining = None

    def transfer(self) -> TransferReport:
        """Checks that the layout still holds, waits until every rank has checked its own, and receives.

        Raises StalePlanError when the layout changed here or on another rank; then nothing was written.
        """
        try:
            member, change = self._joined(), self._change()
            layers = None if change.layers is None else list(change.layers)
            deadline = time.monotonic() + self._waits.gateway
            number, order = self._client.ready(self._seat(), change.text, layers, deadline)
            if order.action is not Action.RUN:
                raise StalePlanError(f"the update was called off: {order.reason}")
            if self._cursor is not None:
                self._cursor = number + 1  # this order need not be asked for
            executor = member.executor_for(order.layers, self._described())
            if executor is None or member.group is None:
                raise PairStateError(f"{self._who} is not joined")
            self._run = Run(self._epoch, member.group)
            self._still_wanted()
            self.memory.uncommitted, self.memory.verified = True, None
            self._target = order.version
            self.memory.followed, self.memory.followed_in = order.trainer, self._pair
            target = None if self._target is None else self._target.as_json()
            labels = {"pair": self._pair, "version": target}
            return executor.run(Deadline.after(self._waits.transfer), labels)
        except StalePlanError:
            raise
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._run = None

    def give_up(self, *, quietly: bool = False) -> None:
        """Makes all that this worker waits for fail, from any thread; it writes nothing from then on. Close it.

        With `quietly` the gateway is not told: another worker has taken the place of this one.
        """
        self._given_up, self._quiet = True, self._quiet or quietly
        if (joining := self._joining) is not None:
            joining.abandon()
        if (run := self._run) is not None:
            run.call_off()

    def _still_wanted(self) -> None:
        if self._given_up:
            raise PairStateError(f"{self._who}: another connect has taken the place of this one")

    def failed(self, error: BaseException) -> None:
        """Tells the gateway what keeps this rank from its part."""
        self._tell(error)

    def _heard(self, sent: float, running: int | None) -> None:
        """Ends the run when the gateway answers a beat that it waits for another one, or for none.

        A gateway that answers beats is asked for orders again at once.
        """
        self._outage.soon()
        run = self._run
        if run is not None and sent > run.since and running != run.epoch:
            log.warning("%s: the run is called off", self._who)
            run.call_off()

    def _unheard(self, seconds: float, error: WeightcastError) -> None:
        """Ends the run when the gateway has refused this process, or has not answered for the setting `outage`: without
        it no update can be committed. `seconds` have gone by since its last answer.
        """
        if isinstance(error, DisplacedError):
            self._displaced = error
        elif not isinstance(error, TransferError) or seconds <= self._waits.outage:
            return
        run = self._run
        if run is not None:
            log.warning("%s: the run is called off: %s", self._who, error)
            run.call_off()

    def verify(self) -> bool:
        """Lets the sink settle, digests this rank's memory as it then is, and reports.

        Called after the engine's own end of the update session. Returns False when the placement changed under the
        transfer. Then the gateway is told the layers, and has them sent again after all ranks were described anew.
        """
        with self._telling():
            change, target = self._change(), self._target
            if change.layers is None:
                raise StalePlanError(f"changed during the transfer: {change.text}")
            if target is None:
                raise PairStateError(f"{self._who} has received nothing to verify")
            if change.text:
                self._client.moved(self._seat(), target, list(change.layers))
                return False
            if isinstance(self._sink, Settles):
                self._sink.settle()
            labels = {"pair": self._pair, "instance": self._instance}
            report = self._digests.report(self._joined().part, self._described(), target, labels).report
            self._still_wanted()
            # Before the report: a gateway that never hears of it cannot have committed it.
            self.memory.verified, self.memory.of = target, self._uid
            self._ahead = self._client.digests(self._seat(), target, report, after=self._cursor, known=self._boot)
            return True

    def serve(self, wait: float = 0.0) -> int | None:
        """Follows the gateway's orders through one connect or update, for engines without an API of their own.

        Call it between two batches, on every rank. Returns when there is no order within `wait` seconds, and stays
        while something is under way. Returns the number of the version that was committed, None when none was; `stamp`
        tells its lineage too.

        A pair that is not there, or that has no such instance, is logged once and waited for; then it returns None. So
        it does for a gateway that is not reached, which is logged once a minute and asked again by later calls. Such a
        call waits for one answer, and in the middle of an update for the setting `outage`. A gateway that no longer
        takes the token is treated alike. Raises AuthorizationError for a token that was never taken. Raises
        DisplacedError, for good, when another process has taken the place of this one.
        """
        self._check_open()
        deadline = time.monotonic() + wait
        try:
            while True:
                try:
                    if not self._outage.left:
                        return self._serve(deadline)
                except AbsentError as error:
                    self._outage.over()
                    self._say_absent(error)
                except (AuthorizationError, TransferError) as error:
                    was_taken = isinstance(error, AuthorizationError) and self._cursor is not None
                    if not (self._client.lost or was_taken):
                        raise
                    self._outage.note(error, self._standing)
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    return None
                time.sleep(min(1.0, seconds, self._outage.left or 1.0))
        except DisplacedError as error:
            self._displaced = error
            raise
        finally:
            self._client.once = None
            self._give_up_join()

    @property
    def _holds(self) -> str:
        """The version that was committed to this rank last, in words."""
        return "no version" if self.version is None else f"version {self.stamp}"

    @property
    def _standing(self) -> str:
        """The state of this rank while its gateway is gone, in words."""
        if not self.fenced:
            return f"serving version {self.stamp}"
        return "nothing was committed yet" if self.version is None else f"fenced since version {self.stamp}"

    def _serve(self, until: float) -> int | None:
        if self._displaced is not None:
            self.disconnect()
            raise self._displaced
        self._client.once = _ANSWER
        if self._cursor is None:
            self._cursor = self._first_order()
        self._ahead = None
        busy = False
        while True:
            patience = POLL if busy else max(0.0, until - time.monotonic())
            answer = self._ahead or self._client.orders(self._pair, self._instance, self._cursor, patience, self._boot)
            self._ahead, self._absent = None, ""
            self._outage.over()
            if answer.boot != self._boot:
                return self._meet_again(answer.boot)
            if answer.orders:
                self._client.once = None  # something is under way: the gateway may start anew meanwhile
            for number, order in enumerate(answer.orders, answer.given - len(answer.orders)):
                if number < self._cursor:
                    continue
                self._cursor = number + 1
                self._obey(order)
                if self._is_last(order):
                    return self._committed(order)
            busy = busy or bool(answer.orders)
            if not busy and time.monotonic() >= until:
                return None

    def _remind(self) -> None:
        """Says what this rank waits for: to join again, its first connect, or ranks that are missing in another one."""
        if self._left:
            self._say_left(f"instance {self._instance} is not in pair {self._pair}")
        elif self._epoch:
            say_who_is_missing(self._client, self._pair, self._who, self._instance)
        elif not self._absent:
            text = "no connect from the trainer yet; its next connect() or update() brings one"
            log.warning("%s: pair %s: %s", self._who, self._pair, text)

    def _say_left(self, reason: str) -> None:
        log.warning("%s: %s; this rank waits until it joins again", self._who, reason)

    def _say_failure(self, order: Order) -> None:
        """Says why a connect or an update of this instance failed, or why it has left."""
        if order.action is Action.FAILED:
            log.warning("%s: the connect failed: %s", self._who, order.reason)
        elif order.action is Action.END and order.version is not None and not order.committed:
            log.warning("%s: version %s was not committed: %s", self._who, order.version, order.reason)
        elif order.action is Action.LEFT:
            self._say_left(order.reason)

    def _say_absent(self, error: AbsentError) -> None:
        if str(error) != self._absent:  # once, and again when there are other pairs: the name may be misspelt
            self._absent = str(error)
            self.disconnect()
            log.warning("%s: %s; holds %s and waits for pair %s to have it", self._who, error, self._holds, self._pair)

    def _first_order(self) -> int:
        """Number of the first order for this worker, behind those that an earlier one has followed."""
        self._live()
        answer = self._client.orders(self._pair, self._instance, 0, 0.0)
        self._boot = answer.boot
        action = answer.orders[-1].action if answer.orders else None
        self._left = action is Action.LEFT
        if action in (None, Action.REGISTER, Action.LEFT):
            return answer.given - (action is Action.REGISTER)
        self._client.restarted(self._pair, self._instance, self._rank)
        return answer.given

    def _meet_again(self, boot: str) -> int | None:
        """Leaves the life of the pair that is over, as the gateway was restarted or the pair created again. An update
        that was under way is over, committed if the gateway says so: then returns its version.
        """
        text = "the gateway was restarted or the pair created again; this rank holds"
        log.warning("%s: %s %s", self._who, text, self._holds)
        self.disconnect()
        self._live()
        status, memory = self._client.pair_status(self._pair), self.memory
        record = status["instances"].get(self._instance, {})
        verified, old_version = memory.verified, memory.version
        is_committed = verified is not None and (
            (record.get("version"), status["uid"], record.get("fenced")) == (verified.as_json(), memory.of, False)
        )
        self._confirm(is_committed)
        self._boot, self._cursor, self._left = boot, 0, False
        return self.version if is_committed and memory.version != old_version else None

    def _is_last(self, order: Order) -> bool:
        """True if an order ends a connect or an update. Within an update connecting does not end it."""
        if order.action in (Action.CONNECTED, Action.FAILED):
            return order.version is None
        return order.ends_update()

    def _committed(self, order: Order) -> int | None:
        """The version of an order that ends an update, if it was committed and this worker has verified it."""
        if not order.committed or order.version != self.memory.verified:
            return None
        self.commit()
        return self.version

    def commit(self) -> None:
        """Takes as committed the version that was transferred and verified last."""
        if self.memory.verified is not None:
            self.memory.uncommitted = self.memory.unconfirmed = False
            self.memory.version = self.memory.verified

    def _obey(self, order: Order) -> None:
        """Follows one order. Failures are told to the gateway, which ends the connect or update."""
        self._left = order.action is Action.LEFT
        self._say_failure(order)
        with suppress(WeightcastError):
            if order.action is Action.REGISTER:
                self.disconnect()
                self._epoch = order.epoch
                with self._telling():
                    self._register(order.epoch)
            elif order.action is Action.JOIN:
                epoch = order.epoch
                with self._telling():
                    self._join(epoch, lambda error: self._tell(error, epoch))
            elif order.action in (Action.CONNECTED, Action.PREPARE):
                self._finish_join()
            elif order.action is not Action.RUN:
                self._give_up_join()
            if order.action is Action.PREPARE:
                self.transfer()
                self.verify()
        if self._displaced is not None:
            raise self._displaced

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the gateway what is raised within."""
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise

    def disconnect(self) -> None:
        """Leaves the communicator, or gives up joining it."""
        self._give_up_join()
        if self._member is not None:
            self._member.close()
            self._member = None

    def _give_up_join(self) -> None:
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.abandon()

    def close(self) -> None:
        """Leaves the communicator and the gateway, for good."""
        self._closed = True
        self.disconnect()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ControlError(f"{self._who}: this InstanceWorker was closed; make a new one")

    def _seat(self, epoch: int | None = None) -> Seat:
        """Place of this rank in an epoch, the present one unless given."""
        return Seat(self._pair, self._instance, self._epoch if epoch is None else epoch, "instance", self._rank)

    def _described(self) -> RankLayout:
        if self._layout is None:
            raise PairStateError(f"{self._who} has not registered")
        return self._layout

    def _joined(self) -> Member:
        if self._member is None:
            raise PairStateError(f"{self._who} has not joined")
        return self._member

    def _change(self) -> Change:
        """Change of memory or placement since this rank was described."""
        layout = self._described()
        try:
            check_unmoved(layout)
        except StalePlanError as error:
            return Change(str(error), None)
        return changed_placement(layout.placement, self._sink.placement())

    def _tell(self, error: BaseException, epoch: int | None = None) -> None:
        """Tells the gateway what failed in `epoch`, the present one unless given."""
        labels = {"pair": self._pair, "instance": self._instance, "rank": self._rank}
        log.error("%s: %s", self._who, error, extra=labels)
        if isinstance(error, DisplacedError):
            self._displaced = error
            return  # the process that has taken the place decides about the instance
        if self._quiet or self._client.lost:
            return
        try:
            self._client.fail(self._seat(epoch), error, uid=self._uid)
        except WeightcastError as second:
            log.error("%s: could not tell the gateway: %s", self._who, second)
