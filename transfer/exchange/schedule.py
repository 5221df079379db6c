"""What one rank does in each round of an update, prepared: tensors to send and receive, copies before and after.

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
    Traffic,
    check_operations,
    find_traffic,
    in_memory,
)
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_name, to_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind, RankPart
from weightcast.transfer.transports.communicator import Message
from weightcast.transfer.transports.iovec import Spans

__all__ = ["Round", "Schedule", "make_rounds", "make_schedule", "place_messages"]

_ALIGNMENT = 64


@dataclass(slots=True)
class Round:
    """One round of one rank: packed when the first `after` rounds are over, because it may pass on what came in them.

    `nbytes` moves in it, both ways.
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
    as may be in flight have a part each. `said` is a byte for each peer that sends to this rank, `heard` one from each
    that receives from it: the word that everything has arrived.
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
    """The rounds of `part` over the memory of `layout`, with messages on `device`, or Spans where the transport
    `scatters`. Raises PlanError.

    Staging memory stays within `part.bucket_bytes`, but for at most 64 bytes a message and SCRATCH_BYTES.
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
    heard, said = (
        [(peer, byte) for peer in np.unique(traffic.peer[way]).tolist()]
        for way, byte in zip(ways, word.split(1), strict=True)
    )
    sent, received = (int(traffic.nbytes[way].sum()) for way in ways)
    return Schedule(rounds, replicate, staging, said, heard, sent, received, bytes_copied)


def place_messages(traffic: Traffic) -> tuple[int, IntArray]:
    """Bytes of staging memory, and (m,) the first byte of each message in it.

    Round i and round i + IN_FLIGHT use the same part.
    """
    staged = np.where(traffic.straight, 0, -(-traffic.nbytes // _ALIGNMENT) * _ALIGNMENT)
    order = np.argsort(traffic.round, kind="stable")
    before = np.cumsum(staged[order]) - staged[order]
    first = np.searchsorted(traffic.round[order], traffic.round[order])
    place = np.empty_like(staged)
    place[order] = before - before[first] if len(first) else before
    needed = np.bincount(traffic.round, weights=staged).astype(np.int64)
    parts = np.array([needed[i::IN_FLIGHT].max(initial=0) for i in range(IN_FLIGHT)])
    return int(parts.sum()), place + (np.cumsum(parts) - parts)[traffic.round % IN_FLIGHT]


def make_rounds(
    traffic: Traffic, layout: RankLayout, staging: torch.Tensor, places: IntArray, scratch: torch.Tensor
) -> list[Round]:
    """The messages and copies of every round. `scratch` has SCRATCH_BYTES."""
    bases = layout.memory.bases
    columns = (traffic.straight, places, traffic.nbytes, traffic.dtype)
    staged = [
        staging[place : place + (0 if straight else nbytes)].view(to_torch(dtype_name(code)))
        for straight, place, nbytes, code in zip(*(c.tolist() for c in columns), strict=True)
    ]
    rounds = [Round(CopyBatch(), [], [], CopyBatch()) for _ in range(int(traffic.round.max(initial=-1)) + 1)]
    leaves = traffic.leaves[traffic.copies.group]
    packed = traffic.copies.take(~traffic.direct & leaves)
    make_copies(packed, (bases, staged), WIRE, [r.pack for r in rounds], traffic.round[packed.group], scratch)
    # The side that is read comes first.
    unpacked = traffic.copies.take(~traffic.direct & ~leaves).turned()
    make_copies(unpacked, (staged, bases), 0, [r.unpack for r in rounds], traffic.round[unpacked.group], scratch)
    messages: Sequence[torch.Tensor | Spans] = (
        _spans(traffic, layout, staged) if traffic.scatters else _tensors(traffic, layout, staged)
    )
    # In each round, messages to one peer keep their order: both ends post them alike.
    ways = (traffic.peer.tolist(), traffic.leaves.tolist(), traffic.round.tolist())
    for message, peer, leaving, at in zip(messages, *ways, strict=True):
        (rounds[at].sends if leaving else rounds[at].receives).append((peer, message))
        rounds[at].nbytes += message.nbytes
    for at, after in _dependencies(traffic):
        rounds[at].after = after
    return rounds


def _tensors(traffic: Traffic, layout: RankLayout, staged: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each message as one tensor, of bytes so that every dtype travels over every backend."""
    straight = iter(strided_views(layout.memory.bases, traffic.copies.take(traffic.direct), MEMORY))
    found = [
        next(straight) if whole else tensor for whole, tensor in zip(traffic.straight.tolist(), staged, strict=True)
    ]
    return [tensor.view(torch.uint8) for tensor in found]


def _spans(traffic: Traffic, layout: RankLayout, staged: Sequence[torch.Tensor]) -> list[Spans]:
    """Each message as the places where it lies: runs of memory, and of staging memory for what is packed."""
    copies, held, packed = traffic.copies, np.flatnonzero(traffic.direct), np.flatnonzero(~traffic.direct)
    itemsize = ITEMSIZE[traffic.dtype[copies.group]]
    memory, staging = (
        np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64) for tensors in (layout.memory.bases, staged)
    )
    run, first = unroll(copies, held)
    copy = np.concatenate([run, packed])
    address = np.concatenate([memory[copies.base[run, MEMORY]], staging[copies.group[packed]]])
    address += np.concatenate([first[:, MEMORY], copies.start[packed, WIRE]]) * itemsize[copy]
    nbytes = np.concatenate([copies.size[run, -1], copies.size[packed].prod(axis=1)]) * itemsize[copy]
    order = np.argsort(copy, kind="stable")
    address, nbytes = address[order], nbytes[order]
    edges = np.searchsorted(copies.group[copy[order]], np.arange(len(staged) + 1)).tolist()
    return [Spans.of(address[begin:end], nbytes[begin:end]) for begin, end in pairwise(edges)]


def _dependencies(traffic: Traffic) -> list[tuple[int, int]]:
    """(round, how many rounds must be over before) for rounds of a rank that receives and passes on."""
    if traffic.leaves.all() or not traffic.leaves.any():
        return []
    _, first = np.unique(traffic.round, return_index=True)
    stage = traffic.stage[first]
    relaying = np.unique(traffic.round[traffic.leaves])
    return list(zip(relaying.tolist(), np.searchsorted(stage, stage[relaying]).tolist(), strict=True))


def _replication(part: RankPart, layout: RankLayout, scratch: torch.Tensor) -> tuple[CopyBatch, int]:
    """Copies from the region that received a box to the further ones that hold it, and their bytes."""
    rows = np.flatnonzero(part.operations.kind == Kind.COPY)
    rows = rows[shape_order(part.operations.size[rows])]
    ops = part.operations.take(rows)
    keep = ops.size.prod(axis=1) > 0
    ops = ops.take(np.flatnonzero(keep))
    source_base, source_start, source_stride, size = in_memory(layout, ops.src_region, ops.offset, ops.size)
    base, start, stride, _ = in_memory(layout, ops.dst_region, ops.offset, ops.size)
    copies = join(
        StridedCopies(
            np.zeros(len(ops), dtype=np.int64),
            size,
            np.stack([source_base, base], axis=1),
            np.stack([source_start, start], axis=1),
            np.stack([source_stride, stride], axis=2),
        )
    )
    batch, bases = CopyBatch(), layout.memory.bases
    itemsize = np.array([t.itemsize for t in bases], dtype=np.int64)[copies.base[:, 1]]
    make_copies(copies, (bases, bases), None, [batch], np.zeros(len(copies), dtype=np.int64), scratch)
    return batch, int((copies.size.prod(axis=1) * itemsize).sum())
