"""What both sides of a pair share: how long a rank waits, its place in a communicator, its reports of its memory."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightcast.gateway.client import GatewayClient
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.digest import digest_rows
from weightcast.transfer.errors import StalePlanError, WeightcastError
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout import RankLayout, RankReport
from weightcast.transfer.placement import RankPlacement
from weightcast.transfer.plan import RankPart
from weightcast.transfer.transports.torch_group import TorchGroup, connect_store, open_store
from weightcast.transfer.wire import DigestReport

__all__ = [
    "DEFAULT_DEADLINE",
    "Member",
    "Waits",
    "changed_placement",
    "check_unmoved",
    "digest_report",
    "join",
    "report_of",
]

DEFAULT_DEADLINE = 600.0
"""Seconds that a rank waits before it knows its pair's deadlines."""


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
