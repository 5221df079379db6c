"""An inference rank's side of its pair, given a Sink.

Engine plugins call its steps one by one; an engine of your own calls `serve()` between two batches, and generates only
while `fenced` is False.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weightcast.gateway.client import POLL, GatewayClient, Orders
from weightcast.gateway.digests import PartDigests
from weightcast.gateway.heartbeat import Heartbeat
from weightcast.gateway.membership import (
    Change,
    Joining,
    Member,
    Run,
    Waits,
    changed_placement,
    check_unmoved,
    join,
    report_of,
)
from weightcast.gateway.settings import Settings
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.endpoints import Settles, Sink
from weightcast.transfer.errors import PairStateError, StalePlanError, WeightcastError
from weightcast.transfer.executor import TransferReport
from weightcast.transfer.layout import RankLayout

__all__ = ["InstanceWorker"]

log = logging.getLogger("weightcast.worker")


class InstanceWorker:
    """An inference rank's side: `connect` once an epoch, then `transfer` and `verify` once an update; or `serve`.

    `identity` stands for this rank's memory: another one than before makes the gateway distrust it. `uncommitted` says
    that the memory already holds an update that was never committed. `version` is the one that this worker has seen
    committed last.
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
        address: str = "127.0.0.1",
        deadline: float | None = None,
        identity: str | None = None,
        uncommitted: bool = False,
    ) -> None:
        self._url, self._token = url, token
        self._client = GatewayClient(url, token)
        self._heartbeat: Heartbeat | None = None
        self._pair, self._instance, self._sink = pair, instance, sink
        self._rank, self._world = rank, world_size
        self._backend, self._address, self._deadline = backend, address, deadline
        self._waits = Waits.of(Settings(), deadline)
        self._layout: RankLayout | None = None
        self._member: Member | None = None
        self._digests = PartDigests()
        self._joining: Joining | None = None
        self._run: Run | None = None
        self._given_up = False
        self._epoch = 0
        self._cursor: int | None = None
        self._boot = ""
        self._ahead: Orders | None = None
        self._identity = identity or uuid.uuid4().hex
        self._target: int | None = None
        self._verified: int | None = None
        self._followed = 0
        self.uncommitted = uncommitted
        self.version: int | None = None

    @property
    def target(self) -> int | None:
        """The version that was received last, committed or not."""
        return self._target

    @property
    def fenced(self) -> bool:
        """Whether the memory may hold bytes of two versions, or of one that is not committed: do not generate."""
        return self.uncommitted

    def connect(self, epoch: int) -> None:
        """Describes this rank, registers it, fetches its part, joins. A failure is told to the gateway, then raised."""
        self.disconnect()
        self._epoch = epoch
        try:
            self._register(epoch)
            self._join(epoch)
        except BaseException as error:
            self._tell(error)
            raise

    def _register(self, epoch: int) -> None:
        self._live()
        self._layout = self._sink.describe()
        report = report_of(self._layout, self._rank, self._world)
        committed = self._client.register_instance(
            self._pair,
            self._instance,
            epoch,
            report,
            identity=self._identity,
            uncommitted=self.uncommitted,
            verified=self._verified,
            followed=self._followed,
        )
        if committed:
            self.commit()

    def _live(self) -> None:
        """Learns how long to wait, and begins to say that this rank lives."""
        self._waits = Waits.of_pair(self._client, self._pair, self._deadline)
        if self._heartbeat is None:
            path = f"{self._pair}/instances/{self._instance}/ranks/{self._rank}"
            seconds = self._waits.heartbeat
            self._heartbeat = Heartbeat(self._url, self._token, path, self._identity, seconds, self._heard)

    def _join(self, epoch: int) -> None:
        deadline = time.monotonic() + self._waits.gateway
        part = self._client.part(self._pair, self._instance, epoch, "instance", self._rank, deadline)
        self._digests.prepare(part, self._described())
        self._joining = Joining.within(self._waits.join)
        self._still_wanted()
        self._member = join(
            self._client, self._pair, epoch, part, self._described(), self._backend, self._address, self._joining
        )

    def transfer(self) -> TransferReport:
        """Checks that the layout still holds, waits until every rank has, and receives.

        Raises StalePlanError when the layout changed here or on another rank; then nothing was written.
        """
        try:
            member, change = self._joined(), self._change()
            layers = None if change.layers is None else list(change.layers)
            where = (self._pair, self._instance, self._epoch)
            deadline = time.monotonic() + self._waits.gateway
            order = self._client.ready(*where, self._rank, change.text, layers, deadline)
            if order["action"] != "run":
                raise StalePlanError(f"the update was called off: {order['reason']}")
            if self._cursor is not None:
                self._cursor = int(order["number"]) + 1  # it need not be asked for
            executor = member.executor_for(order["layers"], self._described())
            if executor is None or member.group is None:
                raise PairStateError(f"{self._instance} rank {self._rank} is not joined")
            self._run = Run(self._epoch, member.group)
            self._still_wanted()
            self.uncommitted, self._verified = True, None
            self._target, self._followed = int(order["version"]), int(order["trainer"])
            labels = {"pair": self._pair, "version": self._target}
            return executor.run(Deadline.after(self._waits.transfer), labels)
        except StalePlanError:
            raise
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._run = None

    def give_up(self) -> None:
        """Makes whatever this worker waits for fail, from any thread; it writes nothing from then on. Close it."""
        self._given_up = True
        if self._joining is not None:
            self._joining.give_up()
        if (run := self._run) is not None:
            run.call_off()

    def _still_wanted(self) -> None:
        if self._given_up:
            raise PairStateError(f"{self._instance} rank {self._rank}: another connect has taken the place of this one")

    def failed(self, error: BaseException) -> None:
        """Tells the gateway what keeps this rank from its part."""
        self._tell(error)

    def _heard(self, sent: float, running: int | None) -> None:
        """The gateway says at each beat whose run it waits for."""
        run = self._run
        if run is not None and sent > run.since and running != run.epoch:
            log.warning("%s rank %d: the run is called off", self._instance, self._rank)
            run.call_off()

    def verify(self) -> bool:
        """Lets the sink settle, digests this rank's memory as it then is, and reports.

        Called after the engine's own end of the update session.
        False when the placement changed under the transfer: then the gateway is told which layers, and sends them again
        after all ranks were described anew.
        """
        try:
            change = self._change()
            if change.layers is None:
                raise StalePlanError(f"changed during the transfer: {change.text}")
            where, target = (self._pair, self._instance, self._epoch), self._target
            if target is None:
                raise PairStateError(f"{self._instance} rank {self._rank} has received nothing to verify")
            if change.text:
                self._client.moved(*where, self._rank, target, list(change.layers))
                return False
            if isinstance(self._sink, Settles):
                self._sink.settle()
            labels = {"pair": self._pair, "instance": self._instance}
            digests = self._digests.report(self._joined().part, self._described(), target, labels)
            self._verified = target  # whoever never hears of it cannot have committed it
            self._ahead = self._client.digests(
                *where, "instance", self._rank, target, digests.report, after=self._cursor, known=self._boot
            )
            return True
        except BaseException as error:
            self._tell(error)
            raise

    def serve(self, wait: float = 0.0) -> int | None:
        """For engines without an API of their own: follows the gateway's orders through one connect or update.

        Call it between two batches, on every rank. Returns at once when there is no order within `wait` seconds, and
        stays while something is under way. Returns the version that was committed, None when none was.
        """
        if self._cursor is None:
            self._cursor = self._first_order()
        self._ahead = None
        busy, until = False, time.monotonic() + wait
        while True:
            patience = POLL if busy else max(0.0, until - time.monotonic())
            found = self._ahead or self._client.orders(self._pair, self._instance, self._cursor, patience, self._boot)
            self._ahead = None
            if found.boot != self._boot:
                return self._meet_again(found.boot, found.given)
            for number, order in enumerate(found.orders, found.given - len(found.orders)):
                if number < self._cursor:
                    continue
                self._cursor = number + 1
                self._obey(order)
                if self._is_last(order):
                    return self._committed(order)
            busy = busy or bool(found.orders)
            if not busy and time.monotonic() >= until:
                return None

    def _first_order(self) -> int:
        """Number of the first order that is for this worker; those that another one has followed before it are not."""
        self._live()
        found = self._client.orders(self._pair, self._instance, 0, 0.0)
        self._boot = found.boot
        last = found.orders[-1]["action"] if found.orders else "left"
        if last in ("register", "left"):
            return found.given - (last == "register")
        self._client.restarted(self._pair, self._instance, self._rank)
        return found.given

    def _meet_again(self, boot: str, given: int) -> int | None:
        """The gateway was restarted: an update that was under way is over, committed if it says so."""
        self._boot, self._cursor = boot, 0
        log.warning("%s rank %d: the gateway was restarted", self._instance, self._rank)
        self.disconnect()
        record = self._client.pair_status(self._pair)["instances"].get(self._instance, {})
        held = self._verified if self.uncommitted else None
        if held is None or record.get("version") != held or record["fenced"]:
            return None
        self.commit()
        return held

    def _is_last(self, order: dict[str, Any]) -> bool:
        """Whether an order ends a connect or an update; within an update connecting does not end it."""
        if order["action"] in ("connected", "failed"):
            return order["version"] is None
        return order["action"] in ("end", "left") and not (order["action"] == "end" and order["version"] is None)

    def _committed(self, order: dict[str, Any]) -> int | None:
        """The version of an order that ends an update, if it was committed and this worker has verified it."""
        if not order["committed"] or order["version"] != self._verified:
            return None
        self.commit()
        return self.version

    def commit(self) -> None:
        """What was transferred and verified last has been committed."""
        if self._verified is not None:
            self.uncommitted, self.version = False, self._verified

    def _obey(self, order: dict[str, Any]) -> None:
        """One order; failures are told to the gateway, which ends the connect or update."""
        with suppress(WeightcastError):
            if order["action"] == "register":
                self.disconnect()
                self._epoch = order["epoch"]
                self._telling(lambda: self._register(order["epoch"]))
            elif order["action"] == "join":
                self._telling(lambda: self._join(order["epoch"]))
            elif order["action"] == "prepare":
                self.transfer()
                self.verify()

    def _telling(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            self._tell(error)
            raise

    def disconnect(self) -> None:
        """Leaves the communicator."""
        if self._member is not None:
            self._member.close()
            self._member = None

    def close(self) -> None:
        """Leaves the communicator and the gateway."""
        self.disconnect()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        self._client.close()

    def _described(self) -> RankLayout:
        if self._layout is None:
            raise PairStateError(f"{self._instance} rank {self._rank} has not registered")
        return self._layout

    def _joined(self) -> Member:
        if self._member is None:
            raise PairStateError(f"{self._instance} rank {self._rank} has not joined")
        return self._member

    def _change(self) -> Change:
        """What changed since this rank was described."""
        layout = self._described()
        try:
            check_unmoved(layout)
        except StalePlanError as error:
            return Change(str(error), None)
        return changed_placement(layout.placement, self._sink.placement())

    def _tell(self, error: BaseException) -> None:
        where = {"pair": self._pair, "instance": self._instance, "rank": self._rank}
        log.error("%s rank %d: %s", self._instance, self._rank, error, extra=where)
        try:
            self._client.fail(self._pair, self._instance, self._epoch, "instance", self._rank, error)
        except WeightcastError as second:
            log.error("%s rank %d: could not tell the gateway: %s", self._instance, self._rank, second)
