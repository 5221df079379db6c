"""Bytes that each rank sends, receives and copies in a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.plan.operations import Kind, TransferPlan

__all__ = ["Traffic", "traffic_of"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by rank, as they travel (in the destination's dtype).

    `trainer_sent` is (trainer world,). `sent` (by relays), `received` and `copied` have an array (world,) for each
    instance. `sends`, `copies` and `relays` count operations.
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
        """Bytes that the busiest sender sends."""
        return max(int(column.max(initial=0)) for column in (self.trainer_sent, *self.sent))

    @property
    def max_receive_bytes(self) -> int:
        """Bytes that the busiest receiver receives."""
        return max(int(column.max(initial=0)) for column in self.received)


def traffic_of(plan: TransferPlan) -> Traffic:
    """Counts the bytes and operations of a plan."""
    o = plan.operations
    nbytes = plan.nbytes
    is_transfer = o.kind != Kind.COPY

    def by_rank(mine: np.ndarray, rank: IntArray, world: int) -> IntArray:
        total = np.zeros(world, dtype=np.int64)
        np.add.at(total, rank[mine], nbytes[mine])
        return total

    worlds = [(number, party.world) for number, party in enumerate(plan.parties)]
    sent = [by_rank(is_transfer & (o.src_party == i), o.src_rank, world) for i, world in worlds]
    return Traffic(
        trainer_sent=sent[0],
        sent=tuple(sent[1:]),
        received=tuple(by_rank(is_transfer & (o.dst_party == i), o.dst_rank, world) for i, world in worlds[1:]),
        copied=tuple(by_rank(~is_transfer & (o.dst_party == i), o.dst_rank, world) for i, world in worlds[1:]),
        sends=int((o.kind == Kind.SEND).sum()),
        copies=int((o.kind == Kind.COPY).sum()),
        relays=int((o.kind == Kind.RELAY).sum()),
    )
