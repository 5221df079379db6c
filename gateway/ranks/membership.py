"""Shared parts of both sides of a pair: the waits of a rank, its place in a communicator, reports of its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple

import numpy as np

from weightcast.gateway.addresses import Place
from weightcast.gateway.client import GatewayClient, Seat
from weightcast.gateway.ranks.host import host_name, network_name
from weightcast.gateway.settings import Settings
from weightcast.transfer.colocated.offers import Share
from weightcast.transfer.colocated.peers import Neighbours, find_neighbours
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import DeadlineError, InputError, PairStateError, StalePlanError
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.placement import RankPlacement
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.layout.tensor_names import NONE, parse_names
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.transports.addresses import bare, numeric
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.communicator import Communicator
from weightcast.transfer.transports.rendezvous import connect_store, open_store

__all__ = [
    "Change",
    "Joining",
    "Member",
    "Run",
    "Waits",
    "changed_placement",
    "check_unmoved",
    "join",
    "only_layers",
    "place_of",
    "report_of",
]


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a rank waits: to join, for a transfer, for the gateway's decisions, and for a gateway that is gone.
    `heartbeat` are those between two signs of life.

    The gateway has deadlines of its own for every step and names who is missing. So a rank waits for it longer than for
    all of them together: its own deadline is for a gateway that hangs.
    """

    join: float
    transfer: float
    gateway: float
    outage: float
    heartbeat: float

    @classmethod
    def of(cls, settings: Settings, deadline: float | None = None) -> Waits:
        """Waits from the settings of a pair; a `deadline` in their place bounds every wait."""
        if deadline is not None:
            if not (isinstance(deadline, Real) and deadline > 0):
                raise InputError(f"deadline is {deadline!r}, expected seconds above 0, or None for the pair's settings")
            return cls(deadline, deadline, deadline, min(settings.outage, deadline), settings.heartbeat)
        return cls(settings.join, settings.transfer, settings.longest, settings.outage, settings.heartbeat)

    @classmethod
    def of_pair(cls, client: GatewayClient, pair: str, deadline: float | None) -> Waits:
        """Waits from the settings that the gateway has for a pair; sets `outage` of `client`."""
        waits = cls.of(Settings.given(client.settings(pair)), deadline)
        client.outage = waits.outage
        return waits


@dataclass(slots=True)
class Member:
    """This rank's place in the communicator of one instance: its part, and the executor once it has joined."""

    part: RankPart
    executor: Executor | None
    group: Communicator | None
    neighbours: Neighbours = field(default_factory=Neighbours)

    def rebind(self, layout: RankLayout) -> None:
        """Takes a layout with the same regions at new addresses."""
        if self.group is not None:
            self.executor = Executor(self.part, layout, self.group, self.neighbours)

    def executor_for(self, layers: Collection[int] | None, layout: RankLayout) -> Executor | None:
        """Executor of the part; with `layers` one for the operations on the routed experts of these layers alone. None
        for a rank that stays outside.
        """
        if layers is None or self.executor is None or self.group is None:
            return self.executor
        return Executor(only_layers(self.part, layers), layout, self.group, self.neighbours)

    def close(self) -> None:
        """Leaves the communicator and its neighbours."""
        if self.group is not None:
            self.group.close()
            self.group = self.executor = None
        self.neighbours.close()


@dataclass(slots=True)
class Run:
    """A transfer under way. The gateway may give it up before this rank sees why: no connection shows a peer that
    stands still, or a link that is cut.
    """

    epoch: int
    group: Communicator
    since: float = field(default_factory=time.monotonic)
    called_off: bool = False

    def call_off(self) -> None:
        """Makes the transfer fail at once, from any thread."""
        self.called_off = True
        self.group.abort()


def only_layers(part: RankPart, layers: Collection[int]) -> RankPart:
    """The part with nothing but operations on routed experts of `layers`; every member leaves out the same."""
    names = parse_names(part.tensors.names)
    mask = np.isin(names.layer, list(layers)) & (names.expert != NONE)
    rows = np.flatnonzero(mask[part.operations.tensor])
    return part.take(rows)


def report_of(layout: RankLayout, rank: int, world_size: int) -> RankReport:
    """Report of a layout, as it goes on the wire."""
    return RankReport(rank, world_size, host_name(), layout.table, layout.placement, layout.notes)


def place_of(client: GatewayClient, address: str | None) -> Place:
    """Place of this rank: at `address`, or unless given at the local address of its connection to the gateway."""
    return Place(host_name(), numeric(bare(address)) if address else client.local_address, network_name())


def join(
    client: GatewayClient,
    seat: Seat,
    part: RankPart,
    layout: RankLayout,
    backend: str,
    address: str,
    joining: Joining,
    share: Share = None,
) -> Member:
    """Joins the communicator of a part and prepares its executor. A rank that no operation names stays outside.

    `joining` has the deadline; `share` says what a trainer rank exports to ranks of its host.
    """
    if part.is_trainer and part.rank not in part.trainer_ranks:
        return Member(part, None, None)
    labels = member_labels(part)
    deadline = joining.deadline
    if part.group_rank == 0:
        store, port = open_store(address, deadline)
        client.set_rendezvous(seat, address, port)
    else:
        host, port = client.rendezvous(seat, deadline.at)
        store = connect_store(host, port, deadline)
    name = f"{seat.pair}/{seat.instance}/{seat.epoch}"
    group = join_group(
        store, rank=part.group_rank, labels=labels, name=name, deadline=deadline, backend=backend, address=address
    )
    joining.group = group
    member = Member(part, None, group)
    try:
        if deadline.expired:
            raise DeadlineError(f"{name}: {labels[part.group_rank]} joined too late")
        member.neighbours = find_neighbours(group, part, layout, share, deadline)
        member.executor = Executor(part, layout, group, member.neighbours)
        client.joined(seat)
    except BaseException:
        member.close()
        raise
    return member


class Joining:
    """A call of `join` in a thread of its own. It waits for others in calls that nothing ends before their deadline,
    and the gateway may have given them up long before. `failed` is told what it raised, unless nobody waits any longer.
    """

    def __init__(
        self, seconds: float, work: Callable[[Joining], Member], failed: Callable[[BaseException], None]
    ) -> None:
        self.deadline = Deadline.after(seconds)
        self.group: Communicator | None = None
        self._work, self._failed = work, failed
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._member: Member | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="weightcast-join", daemon=True).start()

    def _run(self) -> None:
        try:
            member = self._work(self)
        except BaseException as error:
            with self._lock:
                abandoned, self._error = self._abandoned, self._error or error
            self._over.set()  # before the error is told: that may fail
            if not abandoned:
                self._failed(error)
        else:
            with self._lock:
                self._member = member
                if self._abandoned:
                    member.close()
            self._over.set()

    def abandon(self) -> None:
        """Ends the wait, from any thread: joining fails, and what is joined after this is left at once."""
        with self._lock:
            if self._abandoned:
                return
            self._abandoned = True
            self._error = self._error or PairStateError("joining was given up: nobody waits for it any longer")
            if self._member is not None:
                self._member.close()
        self.deadline.cut()
        if self.group is not None:
            self.group.abort()
        self._over.set()

    def result(self) -> Member:
        """Waits for the end of joining, and returns the member. Raises what joining raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        if self._member is None:
            raise PairStateError("joining ended without a member")
        return self._member


def check_unmoved(layout: RankLayout) -> None:
    """Raises StalePlanError when memory that a layout points to was freed or reallocated."""
    bases = layout.memory.moved()
    if bases:
        rows = np.flatnonzero(np.isin(layout.memory.base, bases))
        region = layout.table.region(int(rows[0]))
        raise StalePlanError(
            f"the memory of {region.tensor!r} and {len(rows) - 1} more regions was reallocated "
            "since it was described; connect again"
        )


class Change(NamedTuple):
    """Difference of a rank from its description, in one line, empty when there is none.

    `layers` are those whose expert placement changed; None when more than that changed.
    """

    text: str
    layers: tuple[int, ...] | None = ()


def changed_placement(described: RankPlacement | None, now: RankPlacement | None) -> Change:
    """Change of an expert placement, with the layers in which it changed."""
    if described is None or now is None:
        if described is now:
            return Change("")
        return Change("the engine has gained or lost its expert placement", None)
    old_shape, new_shape = (p.placement.physical_to_logical.shape for p in (described, now))
    if old_shape != new_shape:
        return Change(f"the placement had shape {old_shape}, now {new_shape}", None)
    layers = tuple(described.placement.changed_layers(now.placement).tolist())
    if layers:
        suffix = f" and {len(layers) - 20} more" if len(layers) > 20 else ""
        return Change(f"the expert placement of layers {', '.join(map(str, layers[:20]))}{suffix} changed", layers)
    if described.storage_rank != now.storage_rank:
        return Change(f"the storage rank was {described.storage_rank}, now {now.storage_rank}", None)
    return Change("")
