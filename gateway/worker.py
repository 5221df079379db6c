"""One rank's side of a pair: register, fetch a part, join, run, report. Given a Source or a Sink.

`TrainerWorker` is what a training loop holds on every trainer rank:

    worker = TrainerWorker("http://127.0.0.1:8900", "main", FsdpSource(model), rank=rank, world_size=world)
    worker.connect()
    ...
    worker.update(version=step)          # on every rank; raises if an instance did not commit

`InstanceWorker` is its counterpart on an inference rank. Engine plugins call its steps one by one; an engine of your
own calls
`serve()` between two batches.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightcast.gateway.client import POLL, GatewayClient
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.digest import digest_rows
from weightcast.transfer.endpoints import Sink, Source
from weightcast.transfer.errors import DeadlineError, PairStateError, StalePlanError, UpdateError, WeightcastError
from weightcast.transfer.executor import Executor, TransferReport, member_labels
from weightcast.transfer.layout import RankLayout, RankReport
from weightcast.transfer.placement import RankPlacement
from weightcast.transfer.plan import RankPart
from weightcast.transfer.transports.torch_group import TorchGroup, connect_store, open_store
from weightcast.transfer.wire import DigestReport

__all__ = ["InstanceWorker", "TrainerWorker", "UpdateResult"]

log = logging.getLogger("weightcast.worker")

DEFAULT_DEADLINE = 600.0
"""Seconds that a rank waits before it knows its pair's deadlines."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """How an update ended: the gateway's record for each instance, and what this rank moved for it."""

    version: int
    instances: dict[str, dict[str, Any]]
    transfers: dict[str, TransferReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a rank waits: to join, for a transfer, and for what the gateway decides.

    The gateway has deadlines of its own for every step and names who is missing, so a rank waits for it longer than for
    all of them together: its own deadline is for a gateway that is gone.
    """

    join: float
    transfer: float
    gateway: float

    @classmethod
    def given(cls, seconds: float) -> Waits:
        """The same for all."""
        return cls(seconds, seconds, seconds)

    @classmethod
    def of_pair(cls, status: dict[str, Any]) -> Waits:
        """From the deadlines of the pair's status."""
        deadlines = {name: float(seconds) for name, seconds in status["deadlines"].items()}
        return cls(deadlines["join"], deadlines["transfer"], sum(deadlines.values()))


@dataclass(slots=True)
class Member:
    """This rank's place in the communicator of one instance: its part, and the executor once it has joined."""

    part: RankPart
    executor: Executor | None
    group: TorchGroup | None

    def close(self) -> None:
        """Leaves the communicator."""
        if self.group is not None:
            self.group.close()
            self.group = self.executor = None


def report_of(layout: RankLayout, rank: int, world_size: int) -> RankReport:
    """What goes on the wire of a layout."""
    return RankReport(rank, world_size, socket.gethostname(), layout.table, layout.placement, layout.notes)


def join(
    client: GatewayClient,
    pair: str,
    epoch: int,
    part: RankPart,
    layout: RankLayout,
    backend: str,
    address: str,
    seconds: float,
) -> Member:
    """Joins the communicator of a part and prepares its executor. A rank that no operation names stays outside."""
    if part.is_trainer and part.rank not in part.trainer_ranks:
        return Member(part, None, None)
    labels = member_labels(part)
    deadline = Deadline.after(seconds)
    if part.group_rank == 0:
        store, port = open_store(address, deadline)
        client.set_rendezvous(pair, part.instance, epoch, address, port)
    else:
        host, port = client.rendezvous(pair, part.instance, epoch, deadline.at)
        store = connect_store(host, port, deadline)
    group = TorchGroup.join(
        store,
        rank=part.group_rank,
        labels=labels,
        name=f"{pair}/{part.instance}/{epoch}",
        deadline=deadline,
        backend=backend,
        interface=address if backend == "gloo" else "",
    )
    try:
        executor = Executor(part, layout, group)
    except WeightcastError:
        group.close()
        raise
    client.joined(pair, part.instance, epoch, labels[part.group_rank])
    return Member(part, executor, group)


def digest_report(part: RankPart, layout: RankLayout) -> DigestReport:
    """Digests of this rank's own rows of a part, read from its live memory."""
    rows = part.digests
    values = digest_rows(layout, rows.region, rows.offset, rows.size, rows.dtype)
    return DigestReport(None if part.is_trainer else part.instance, part.rank, rows.cell, values)


def check_unmoved(layout: RankLayout) -> None:
    """Raises StalePlanError when memory that a layout points to was freed or reallocated."""
    moved = layout.memory.moved()
    if moved:
        rows = np.flatnonzero(np.isin(layout.memory.base, moved))
        region = layout.table.region(int(rows[0]))
        raise StalePlanError(
            f"the memory of {region.tensor!r} and {len(rows) - 1} more regions was reallocated "
            "since it was described; connect again"
        )


class TrainerWorker:
    """A trainer rank's hold on its pair. All methods are called on every trainer rank, in the same order.

    `backend` and `address` are those of the communicators: "gloo" or "nccl", and the address on which this rank can be
    reached.
    `deadline` in seconds bounds every wait; without it the pair's own for a transfer does. The token comes from
    WEIGHTCAST_TOKEN unless given.
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
        backend: str = "gloo",
        address: str = "127.0.0.1",
        deadline: float | None = None,
    ) -> None:
        self._client = GatewayClient(url, token)
        self._pair = pair
        self._source = source
        self._rank, self._world = rank, world_size
        self._backend, self._address, self._deadline = backend, address, deadline
        self._waits = Waits.given(deadline or DEFAULT_DEADLINE)
        self._layout: RankLayout | None = None
        self._members: dict[str, Member] = {}
        self._cursor: dict[str, int] = {}

    def connect(self) -> None:
        """Describes and registers this rank, and joins the communicator of every instance.

        Raises what made an instance fail to connect: CoverageError, LayoutError, DescribeError, DeadlineError and so
        on.
        """
        self._layout = self._source.describe()
        status = self._client.pair_status(self._pair)
        if self._deadline is None:
            self._waits = Waits.of_pair(status)
        # Orders before this moment were for the trainer as it was before; new ones come when all ranks have registered.
        self._cursor = {name: int(record["orders"]) for name, record in status["instances"].items()}
        self._client.register_trainer(self._pair, report_of(self._layout, self._rank, self._world))
        if self._rank == 0:
            self._client.start_connect(self._pair)
        self._each(list(self._cursor), self._follow_connect)

    def update(self, version: int) -> UpdateResult:
        """Brings every instance to `version`. Returns when all are decided.

        Raises VersionError for a version that is not newer than what is committed, StalePlanError when this rank's
        layout is no longer the one it registered, and UpdateError naming each instance that did not commit and why.
        """
        layout = self._source.describe()
        if self._layout is None:
            raise PairStateError(f"trainer rank {self._rank}: update before connect")
        if layout.table.fingerprint != self._layout.table.fingerprint:
            raise StalePlanError(
                f"trainer rank {self._rank}: the layout is not the one that was registered; connect again"
            )
        if layout.memory.address.tolist() != self._layout.memory.address.tolist():
            self._rebind(layout)
        self._client.offer(self._pair, self._rank, version)
        reports: dict[str, TransferReport] = {}
        self._each(list(self._cursor), lambda name: self._follow_update(name, version, reports))
        instances = self._client.result(self._pair, version, time.monotonic() + self._waits.gateway)
        failed = [_outcome(name, record) for name, record in instances.items() if record["reason"]]
        if failed:
            raise UpdateError(f"version {version} is not served everywhere: {'; '.join(failed)}")
        return UpdateResult(version, instances, reports)

    def close(self) -> None:
        """Leaves all communicators."""
        for member in self._members.values():
            member.close()
        self._members.clear()
        self._client.close()

    def _rebind(self, layout: RankLayout) -> None:
        """The same regions at new addresses: the plan holds, the executors get new views."""
        self._layout = layout
        for member in self._members.values():
            if member.group is not None:
                member.executor = Executor(member.part, layout, member.group)

    def _each(self, names: list[str], work: Callable[[str], None]) -> None:
        """Runs `work` for all instances at once, so that none waits for another; raises the first failure after all
        ended.
        """
        if len(names) == 1:
            work(names[0])
            return
        with ThreadPoolExecutor(max_workers=len(names), thread_name_prefix="weightcast") as pool:
            futures = [pool.submit(work, name) for name in names]
        for future in futures:
            future.result()

    def _next(self, name: str, deadline: float) -> dict[str, Any]:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"trainer rank {self._rank}: no order for instance {name} within {self._waits.gateway:g} s"
                )
            found = self._client.orders(self._pair, name, self._cursor[name], min(POLL, left))
            if found:
                self._cursor[name] += 1
                return found[0]

    def _follow_connect(self, name: str) -> None:
        deadline = time.monotonic() + self._waits.gateway
        while True:
            order = self._next(name, deadline)
            if order["action"] == "join":
                self._join(name, order["epoch"])
            elif order["action"] == "connected":
                return
            elif order["action"] == "failed":
                self._raise_failure(name, order)

    def _raise_failure(self, name: str, order: dict[str, Any]) -> None:
        """The gateway keeps the failure as an error of its own class; asking for the part raises it."""
        self._client.part(self._pair, name, order["epoch"], "trainer", self._rank, time.monotonic() + 5.0)
        raise UpdateError(f"instance {name} did not connect: {order['reason']}")

    def _join(self, name: str, epoch: int) -> None:
        if name in self._members:
            self._members.pop(name).close()
        layout = self._layout
        if layout is None:
            raise PairStateError(f"trainer rank {self._rank}: join before connect")
        try:
            part = self._client.part(
                self._pair, name, epoch, "trainer", self._rank, time.monotonic() + self._waits.gateway
            )
            self._members[name] = join(
                self._client, self._pair, epoch, part, layout, self._backend, self._address, self._waits.join
            )
        except WeightcastError as error:
            self._tell(name, epoch, error)

    def _follow_update(self, name: str, version: int, reports: dict[str, TransferReport]) -> None:
        deadline = time.monotonic() + self._waits.gateway
        while True:
            order = self._next(name, deadline)
            if order["action"] == "join":
                self._join(name, order["epoch"])
            elif order["action"] == "run" and order["version"] == version:
                self._run(name, order["epoch"], reports)
            elif order["action"] == "end" and order["version"] == version:
                return

    def _run(self, name: str, epoch: int, reports: dict[str, TransferReport]) -> None:
        """Sends this rank's part and digests what it holds; a failure is told to the gateway, which ends the update."""
        member, layout = self._members.get(name), self._layout
        try:
            if member is None or layout is None:
                raise PairStateError(f"not joined to instance {name} in epoch {epoch}")
            if member.executor is not None:
                reports[name] = member.executor.run(Deadline.after(self._waits.transfer))
            self._client.transferred(self._pair, name, epoch, self._rank)
            report = digest_report(member.part, layout)
            self._client.digests(self._pair, name, epoch, "trainer", self._rank, report)
        except WeightcastError as error:
            self._tell(name, epoch, error)

    def _tell(self, name: str, epoch: int, error: WeightcastError) -> None:
        log.error("trainer rank %d, instance %s: %s", self._rank, name, error)
        # A failure that arrives in an epoch that is over concerns nobody any more.
        with suppress(PairStateError):
            self._client.fail(self._pair, name, epoch, f"trainer rank {self._rank}", error)


def _outcome(name: str, record: dict[str, Any]) -> str:
    state = "not updated" if not record["committed"] else "not resumed"
    return f"{name} is {'fenced' if record['fenced'] else state}: {record['reason']}"


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


def changed_placement(described: RankPlacement | None, now: RankPlacement | None) -> str:
    """Which layers of an expert placement changed, in one line; empty when none did."""
    if described is None or now is None:
        return "" if described is now else "the engine has gained or lost its expert placement"
    before, after = (p.placement.physical_to_logical.shape for p in (described, now))
    if before != after:
        return f"the placement had shape {before}, now {after}"
    layers = described.placement.changed_layers(now.placement)
    if len(layers):
        return f"the expert placement of layers {', '.join(str(n) for n in layers[:20])} changed"
    if described.storage_rank != now.storage_rank:
        return f"the storage rank was {described.storage_rank}, now {now.storage_rank}"
    return ""
