"""How many bytes of a plan each rank sends, receives and copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import volumes
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.plan.operations import TRAINER, Kind, TransferPlan

__all__ = ["Traffic", "traffic_of"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by rank, as they travel (in the destination's dtype).

    `trainer_sent` (trainer world,); of each instance, by rank: `sent` (relays), `received` and `copied`. `sends`,
    `copies` and `relays` count operations.
    """

    trainer_sent: IntArray
    sent: tuple[IntArray, ...]
    received: tuple[IntArray, ...]
    copied: tuple[IntArray, ...]
    sends: int
    copies: int
    relays: int

    @property
    def bytes_sent(self) -> int:
        return int(self.trainer_sent.sum()) + sum(int(column.sum()) for column in self.sent)

    @property
    def bytes_copied(self) -> int:
        return sum(int(column.sum()) for column in self.copied)

    @property
    def max_send_bytes(self) -> int:
        """What the busiest sender sends."""
        return max(int(column.max(initial=0)) for column in (self.trainer_sent, *self.sent))

    @property
    def max_receive_bytes(self) -> int:
        """What the busiest receiver receives."""
        return max(int(column.max(initial=0)) for column in self.received)


def traffic_of(plan: TransferPlan) -> Traffic:
    """Counts a plan."""
    o = plan.operations
    nbytes = volumes(o.size) * ITEMSIZE[plan.instance_dtype[o.instance, o.tensor]]
    moved = o.kind != Kind.COPY

    def by_rank(mine: np.ndarray, rank: IntArray, world: int) -> IntArray:
        total = np.zeros(world, dtype=np.int64)
        np.add.at(total, rank[mine], nbytes[mine])
        return total

    worlds = list(enumerate(plan.instance_world))
    return Traffic(
        trainer_sent=by_rank(o.src_instance == TRAINER, o.src_rank, plan.trainer_world),
        sent=tuple(by_rank(moved & (o.src_instance == i), o.src_rank, world) for i, world in worlds),
        received=tuple(by_rank(moved & (o.instance == i), o.dst_rank, world) for i, world in worlds),
        copied=tuple(by_rank(~moved & (o.instance == i), o.dst_rank, world) for i, world in worlds),
        sends=int((o.kind == Kind.SEND).sum()),
        copies=int((o.kind == Kind.COPY).sum()),
        relays=int((o.kind == Kind.RELAY).sum()),
    )
