"""Rounds of one rank in an update, prepared: tensors to send and receive, copies before and after.

Everything here is worked out once, so that a run makes no view and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.slices import shape_order
from weightcast.transfer.boxes.strided import StridedCopies, join, unroll
from weightcast.transfer.copy.batch import CopyBatch, make_copies, strided_views
from weightcast.transfer.copy.runs import SCRATCH_BYTES
from weightcast.transfer.exchange.messages import IN_FLIGHT
from weightcast.transfer.exchange.messages_in_memory import (
    MEMORY,
    WIRE,
    RankMessages,
    check_operations,
    find_traffic,
    in_memory,
)
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_name, to_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind, RankPart
from weightcast.transfer.transports.communicator import Message
from weightcast.transfer.transports.iovec import Iovec

__all__ = ["Round", "Schedule", "make_rounds", "make_schedule", "place_messages"]

_ALIGNMENT = 64


@dataclass(slots=True)
class Round:
    """One round of one rank, in which `nbytes` move, both ways together.

    It is packed when the first `after` rounds are over, because it may pass on what came in them.
    """

    pack: CopyBatch
    sends: list[Message]
    receives: list[Message]
    unpack: CopyBatch
    after: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """All rounds of one rank, and what follows them.

    `staging` holds every message that does not move straight from or to a parameter. Rounds share it in turn: as many
    as may be in flight have a part each. `said` has a byte for each peer that sends to this rank, `heard` one from each
    peer that receives from it. The byte is the word that everything has arrived.
    """

    rounds: list[Round]
    replicate: CopyBatch
    staging: torch.Tensor
    said: list[Message]
    heard: list[Message]
    bytes_sent: int
    bytes_received: int
    bytes_copied: int


def make_schedule(part: RankPart, layout: RankLayout, device: torch.device, scatters: bool) -> Schedule:
    """Prepares the rounds of `part` over the memory of `layout`. Raises PlanError.

    Messages are tensors on `device`, or Iovec if the transport `scatters`. Staging memory stays within
    `part.bucket_bytes`, but for at most 64 bytes a message and SCRATCH_BYTES.
    """
    check_operations(part, layout)
    traffic = find_traffic(part, layout, device, scatters=scatters)
    staging_bytes, places = place_messages(traffic)
    staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        rounds = make_rounds(traffic, layout, staging, places, scratch)
        replicate, bytes_copied = _replication(part, layout, scratch)
    ways = (traffic.leaves, ~traffic.leaves)
    word = torch.zeros(2, dtype=torch.uint8, device=device)
    word_receives, word_sends = (
        [(peer, byte) for peer in np.unique(traffic.peer[way]).tolist()]
        for way, byte in zip(ways, word.split(1), strict=True)
    )
    bytes_sent, bytes_received = (int(traffic.nbytes[way].sum()) for way in ways)
    return Schedule(rounds, replicate, staging, word_sends, word_receives, bytes_sent, bytes_received, bytes_copied)


def place_messages(traffic: RankMessages) -> tuple[int, IntArray]:
    """Bytes of staging memory, and (m,) the first byte of each message in it.

    Round i and round i + IN_FLIGHT use the same part.
    """
    nbytes = np.where(traffic.straight, 0, -(-traffic.nbytes // _ALIGNMENT) * _ALIGNMENT)
    order = np.argsort(traffic.round, kind="stable")
    offset = np.cumsum(nbytes[order]) - nbytes[order]
    first = np.searchsorted(traffic.round[order], traffic.round[order])
    places = np.empty_like(nbytes)
    places[order] = offset - offset[first] if len(first) else offset
    round_bytes = np.bincount(traffic.round, weights=nbytes).astype(np.int64)
    parts = np.array([round_bytes[i::IN_FLIGHT].max(initial=0) for i in range(IN_FLIGHT)])
    return int(parts.sum()), places + (np.cumsum(parts) - parts)[traffic.round % IN_FLIGHT]


def make_rounds(
    traffic: RankMessages, layout: RankLayout, staging: torch.Tensor, places: IntArray, scratch: torch.Tensor
) -> list[Round]:
    """The messages and copies of every round. `scratch` has SCRATCH_BYTES."""
    bases = layout.memory.bases
    columns = (traffic.straight, places, traffic.nbytes, traffic.dtype)
    views = [
        staging[start : start + (0 if straight else nbytes)].view(to_torch(dtype_name(code)))
        for straight, start, nbytes, code in zip(*(c.tolist() for c in columns), strict=True)
    ]
    rounds = [Round(CopyBatch(), [], [], CopyBatch()) for _ in range(int(traffic.round.max(initial=-1)) + 1)]
    leaves = traffic.leaves[traffic.copies.group]
    packs = traffic.copies.take(~traffic.direct & leaves)
    make_copies(packs, (bases, views), WIRE, [r.pack for r in rounds], traffic.round[packs.group], scratch)
    # The side that is read comes first.
    unpacks = traffic.copies.take(~traffic.direct & ~leaves).turned()
    make_copies(unpacks, (views, bases), 0, [r.unpack for r in rounds], traffic.round[unpacks.group], scratch)
    messages: Sequence[torch.Tensor | Iovec] = (
        _spans(traffic, layout, views) if traffic.scatters else _tensors(traffic, layout, views)
    )
    # In each round, messages to one peer keep their order: both ends post them alike.
    ways = (traffic.peer.tolist(), traffic.leaves.tolist(), traffic.round.tolist())
    for message, peer, departs, number in zip(messages, *ways, strict=True):
        (rounds[number].sends if departs else rounds[number].receives).append((peer, message))
        rounds[number].nbytes += message.nbytes
    for number, predecessors in _dependencies(traffic):
        rounds[number].after = predecessors
    return rounds


def _tensors(traffic: RankMessages, layout: RankLayout, staged: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each message as one tensor, of bytes so that every dtype travels over every backend."""
    straight = iter(strided_views(layout.memory.bases, traffic.copies.take(traffic.direct), MEMORY))
    tensors = [
        next(straight) if is_straight else tensor
        for is_straight, tensor in zip(traffic.straight.tolist(), staged, strict=True)
    ]
    return [tensor.view(torch.uint8) for tensor in tensors]


def _spans(traffic: RankMessages, layout: RankLayout, staged: Sequence[torch.Tensor]) -> list[Iovec]:
    """Each message as Iovec: runs of memory where it lies, and of staging memory for what is packed."""
    copies, direct_rows, packed_rows = traffic.copies, np.flatnonzero(traffic.direct), np.flatnonzero(~traffic.direct)
    itemsize = ITEMSIZE[traffic.dtype[copies.group]]
    memory, staging = (
        np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64) for tensors in (layout.memory.bases, staged)
    )
    run, first = unroll(copies, direct_rows)
    copy = np.concatenate([run, packed_rows])
    address = np.concatenate([memory[copies.base[run, MEMORY]], staging[copies.group[packed_rows]]])
    address += np.concatenate([first[:, MEMORY], copies.start[packed_rows, WIRE]]) * itemsize[copy]
    nbytes = np.concatenate([copies.size[run, -1], copies.size[packed_rows].prod(axis=1)]) * itemsize[copy]
    order = np.argsort(copy, kind="stable")
    address, nbytes = address[order], nbytes[order]
    edges = np.searchsorted(copies.group[copy[order]], np.arange(len(staged) + 1)).tolist()
    return [Iovec.of(address[start:end], nbytes[start:end]) for start, end in pairwise(edges)]


def _dependencies(traffic: RankMessages) -> list[tuple[int, int]]:
    """Pairs (round, number of rounds that must be over before it), for a rank that receives and passes on."""
    if traffic.leaves.all() or not traffic.leaves.any():
        return []
    _, first = np.unique(traffic.round, return_index=True)
    stage = traffic.stage[first]
    relay_rounds = np.unique(traffic.round[traffic.leaves])
    return list(zip(relay_rounds.tolist(), np.searchsorted(stage, stage[relay_rounds]).tolist(), strict=True))


def _replication(part: RankPart, layout: RankLayout, scratch: torch.Tensor) -> tuple[CopyBatch, int]:
    """Copies from the region that received a box to the further ones that hold it, and their bytes."""
    ops = part.operations.take((part.operations.kind == Kind.COPY) & (part.operations.size > 0).all(axis=1))
    ops = ops.take(shape_order(ops.size))
    source, size = in_memory(layout, ops.src_region, ops.offset, ops.size)
    target, _ = in_memory(layout, ops.dst_region, ops.offset, ops.size)
    copies = join(StridedCopies.of_sides(np.zeros(len(ops), dtype=np.int64), size, source, target))
    batch, bases = CopyBatch(), layout.memory.bases
    itemsize = np.array([t.itemsize for t in bases], dtype=np.int64)[copies.base[:, 1]]
    make_copies(copies, (bases, bases), None, [batch], np.zeros(len(copies), dtype=np.int64), scratch)
    return batch, int((copies.size.prod(axis=1) * itemsize).sum())
