"""What one rank does in each round of an update, prepared: tensors to send and receive, copies before and after.

Everything here is worked out once, so that a run makes no view and allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weightcast.transfer.copying import CopyBatch, make_copies, strided_views
from weightcast.transfer.dtypes import dtype_name, to_torch
from weightcast.transfer.layout import IntArray, RankLayout
from weightcast.transfer.messages import IN_FLIGHT, shape_order
from weightcast.transfer.plan import Kind, RankPart
from weightcast.transfer.runs import SCRATCH_BYTES
from weightcast.transfer.strided import StridedCopies, join
from weightcast.transfer.traffic import MEMORY, WIRE, Traffic, check_operations, find_traffic, in_memory
from weightcast.transfer.transports.base import Message

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
    as may be in flight have a part each.
    """

    rounds: list[Round]
    replicate: CopyBatch
    staging: torch.Tensor
    bytes_sent: int
    bytes_received: int
    bytes_copied: int


def make_schedule(part: RankPart, layout: RankLayout, device: torch.device) -> Schedule:
    """The rounds of `part` over the memory of `layout`, with messages on `device`. Raises PlanError.

    Staging memory stays within `part.bucket_bytes`, but for at most 64 bytes a message and SCRATCH_BYTES.
    """
    check_operations(part, layout)
    traffic = find_traffic(part, layout, device)
    staging_bytes, places = place_messages(traffic)
    staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        rounds = make_rounds(traffic, layout, staging, places, scratch)
        replicate, bytes_copied = _replication(part, layout, scratch)
    sent, received = (int(traffic.nbytes[some].sum()) for some in (traffic.leaves, ~traffic.leaves))
    return Schedule(rounds, replicate, staging, sent, received, bytes_copied)


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
    """The tensors of every round."""
    bases = layout.memory.bases
    is_straight = traffic.straight[traffic.copies.group]
    straight = iter(strided_views(bases, traffic.copies.take(is_straight), MEMORY))
    tensors: list[torch.Tensor] = []
    columns = (traffic.straight, places, traffic.nbytes, traffic.dtype)
    for whole, place, nbytes, code in zip(*(c.tolist() for c in columns), strict=True):
        in_staging = staging[place : place + nbytes].view(to_torch(dtype_name(code)))
        tensors.append(next(straight) if whole else in_staging)

    rounds = [Round(CopyBatch(), [], [], CopyBatch()) for _ in range(int(traffic.round.max(initial=-1)) + 1)]
    leaves = traffic.leaves[traffic.copies.group]
    packed = traffic.copies.take(~is_straight & leaves)
    make_copies(packed, (bases, tensors), WIRE, [r.pack for r in rounds], traffic.round[packed.group], scratch)
    # The side that is read comes first.
    unpacked = traffic.copies.take(~is_straight & ~leaves).turned()
    make_copies(unpacked, (tensors, bases), 0, [r.unpack for r in rounds], traffic.round[unpacked.group], scratch)
    # In each round, messages to one peer keep their order: both ends post them alike.
    ways = (traffic.peer.tolist(), traffic.leaves.tolist(), traffic.round.tolist())
    for tensor, peer, leaving, at in zip(tensors, *ways, strict=True):
        # Bytes, so that every dtype travels over every backend.
        (rounds[at].sends if leaving else rounds[at].receives).append((peer, tensor.view(torch.uint8)))
        rounds[at].nbytes += tensor.nbytes
    for at, after in _dependencies(traffic):
        rounds[at].after = after
    return rounds


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
