"""An inference rank's side of its pair, given a Sink.

Engine plugins call its steps one by one; an engine of your own calls `serve()` between two batches.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weightcast.gateway.client import POLL, GatewayClient
from weightcast.gateway.membership import (
    DEFAULT_DEADLINE,
    Member,
    Waits,
    changed_placement,
    check_unmoved,
    digest_report,
    join,
    report_of,
)
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.endpoints import Sink
from weightcast.transfer.errors import PairStateError, StalePlanError, WeightcastError
from weightcast.transfer.executor import TransferReport
from weightcast.transfer.layout import RankLayout

__all__ = ["InstanceWorker"]

log = logging.getLogger("weightcast.worker")


class InstanceWorker:
    """An inference rank's side: `connect` once an epoch, then `transfer` and `verify` once an update; or `serve`.

    `identity` stands for this rank's memory: another one than before makes the gateway distrust it. `uncommitted` says
    that the memory already holds an update that was never committed.
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
        backend: str = "gloo",
        address: str = "127.0.0.1",
        deadline: float | None = None,
        identity: str | None = None,
        uncommitted: bool = False,
    ) -> None:
        self._client = GatewayClient(url, token)
        self._pair, self._instance, self._sink = pair, instance, sink
        self._rank, self._world = rank, world_size
        self._backend, self._address, self._deadline = backend, address, deadline
        self._waits = Waits.given(deadline or DEFAULT_DEADLINE)
        self._layout: RankLayout | None = None
        self._member: Member | None = None
        self._epoch = 0
        self._cursor: int | None = None
        self._identity = identity or uuid.uuid4().hex
        self._target: int | None = None
        self._verified: int | None = None
        self.uncommitted = uncommitted

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
        if self._deadline is None:
            self._waits = Waits.of_pair(self._client.pair_status(self._pair))
        self._layout = self._sink.describe()
        report = report_of(self._layout, self._rank, self._world)
        self._client.register_instance(
            self._pair, self._instance, epoch, report, identity=self._identity, uncommitted=self.uncommitted
        )

    def _join(self, epoch: int) -> None:
        deadline = time.monotonic() + self._waits.gateway
        part = self._client.part(self._pair, self._instance, epoch, "instance", self._rank, deadline)
        self._member = join(
            self._client, self._pair, epoch, part, self._described(), self._backend, self._address, self._waits.join
        )

    def transfer(self) -> TransferReport:
        """Checks that the layout still holds, waits until every rank has, and receives.

        Raises StalePlanError when the layout changed here or on another rank; then nothing was written.
        """
        try:
            member = self._joined()
            stale = self._staleness()
            self._client.ready(self._pair, self._instance, self._epoch, self._rank, stale)
            order = self._client.go(self._pair, self._instance, self._epoch, time.monotonic() + self._waits.gateway)
            if order["action"] != "run":
                raise StalePlanError(f"the update was called off: {order['reason']}")
            if member.executor is None:
                raise PairStateError(f"{self._instance} rank {self._rank} is not joined")
            self.uncommitted, self._verified = True, None
            moved = member.executor.run(Deadline.after(self._waits.transfer))
            self._target = int(order["version"])
            return moved
        except StalePlanError:
            raise
        except BaseException as error:
            self._tell(error)
            raise

    def verify(self) -> None:
        """Digests this rank's memory as it now is, after the engine's own post-load work, and reports."""
        try:
            stale = self._staleness()
            if stale:
                raise StalePlanError(f"changed during the transfer: {stale}")
            report = digest_report(self._joined().part, self._described())
            self._client.digests(self._pair, self._instance, self._epoch, "instance", self._rank, report)
            self._verified = self._target
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
        busy, until = False, time.monotonic() + wait
        while True:
            patience = POLL if busy else max(0.0, until - time.monotonic())
            found = self._client.orders(self._pair, self._instance, self._cursor, patience)
            for order in found:
                self._cursor += 1
                self._obey(order)
                if order["action"] in ("connected", "failed", "end"):
                    return self._committed(order)
            busy = busy or bool(found)
            if not busy and time.monotonic() >= until:
                return None

    def _first_order(self) -> int:
        """Number of the first order that is for this worker; those that another one has followed before it are not."""
        given = [order["action"] for order in self._client.orders(self._pair, self._instance, 0, 0.0)]
        if not given or given[-1] == "register":
            return max(0, len(given) - 1)
        self._client.restarted(self._pair, self._instance, self._rank)
        return len(given)

    def _committed(self, order: dict[str, Any]) -> int | None:
        """The version of an order that ends an update, if it was committed and this worker has verified it."""
        if not order["committed"] or order["version"] != self._verified:
            return None
        self.commit()
        return self._verified

    def commit(self) -> None:
        """What was transferred and verified last has been committed."""
        self.uncommitted = self._verified is None

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
        self._client.close()

    def _described(self) -> RankLayout:
        if self._layout is None:
            raise PairStateError(f"{self._instance} rank {self._rank} has not registered")
        return self._layout

    def _joined(self) -> Member:
        if self._member is None:
            raise PairStateError(f"{self._instance} rank {self._rank} has not joined")
        return self._member

    def _staleness(self) -> str:
        """What changed since this rank was described, in one line; empty when nothing did."""
        layout = self._described()
        try:
            check_unmoved(layout)
        except StalePlanError as error:
            return str(error)
        return changed_placement(layout.placement, self._sink.placement())

    def _tell(self, error: BaseException) -> None:
        log.error("%s rank %d: %s", self._instance, self._rank, error)
        try:
            self._client.fail(self._pair, self._instance, self._epoch, f"{self._instance} rank {self._rank}", error)
        except WeightcastError as second:
            log.error("%s rank %d: could not tell the gateway: %s", self._instance, self._rank, second)
