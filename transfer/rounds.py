"""What one rank does in each round of an update, prepared: tensors to send and receive, copies before and after.

Everything here is worked out once, so that a run makes no view and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.transfer.copying import CopyBatch, make_copies, strided_views
from weightcast.transfer.dtypes import dtype_name, to_torch
from weightcast.transfer.errors import PlanError, TransferError
from weightcast.transfer.layout import IntArray, RankLayout, pad_boxes
from weightcast.transfer.messages import IN_FLIGHT, cut_messages, message_limit, shape_order
from weightcast.transfer.plan import Kind, RankPart
from weightcast.transfer.runs import SCRATCH_BYTES
from weightcast.transfer.strided import StridedCopies, contiguous_strides, join
from weightcast.transfer.transports.base import Message

__all__ = ["Round", "Schedule", "make_schedule"]

_ALIGNMENT = 64
_MEMORY, _WIRE = 0, 1


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one rank."""

    pack: CopyBatch
    sends: list[Message]
    receives: list[Message]
    unpack: CopyBatch


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


@dataclass(frozen=True, slots=True)
class _Traffic:
    """All messages of one rank in one direction, and the copies between them and its memory.

    Of messages, in columns: `peer`, `round`, `dtype`, `elements`, `nbytes`. `copies` has groups that are message
    numbers; side 0 is memory, side 1 the message. `straight` (m,) says which messages are one run of memory and need
    no copy.
    """

    peer: IntArray
    round: IntArray
    dtype: IntArray
    nbytes: IntArray
    copies: StridedCopies
    straight: IntArray


def make_schedule(part: RankPart, layout: RankLayout, device: torch.device) -> Schedule:
    """The rounds of `part` over the memory of `layout`, with messages on `device`. Raises PlanError.

    Staging memory stays within `part.bucket_bytes`, but for at most 64 bytes a message.
    """
    _check_operations(part, layout)
    ops = part.operations
    sent = np.flatnonzero(ops.kind == Kind.SEND)
    copied = np.flatnonzero(ops.kind == Kind.COPY)
    traffic = _traffic(part, layout, sent, device)
    staging_bytes, places = _place(traffic)
    staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        rounds = _rounds(part.is_trainer, traffic, layout, staging, places, scratch)
        replicate, bytes_copied = _replication(part, layout, copied, scratch)
    moved = int(traffic.nbytes.sum())
    sends, receives = (moved, 0) if part.is_trainer else (0, moved)
    return Schedule(rounds, replicate, staging, sends, receives, bytes_copied)


def _check_operations(part: RankPart, layout: RankLayout) -> None:
    """A part came over a network: what it names must lie where this rank holds it."""
    ops, where = part.operations, f"{part.instance} {'trainer' if part.is_trainer else 'rank'} {part.rank}"
    if (ops.kind == Kind.RELAY).any():
        raise TransferError(f"{where}: the plan has relays, which cannot be run yet; plan without relays")
    for regions in [ops.src_region] if part.is_trainer else [ops.dst_region, ops.src_region[ops.kind == Kind.COPY]]:
        if ((regions < 0) | (regions >= len(layout.table))).any():
            raise PlanError(f"{where}: an operation names a region outside 0..{len(layout.table) - 1}")
    for rows, regions in _ends(part):
        table = layout.table
        width = max(table.tensors.width, ops.offset.shape[1])
        low, size = pad_boxes(ops.offset[rows], width, 0), pad_boxes(ops.size[rows], width, 1)
        held, extent = pad_boxes(table.offset[regions], width, 0), pad_boxes(table.size[regions], width, 1)
        planned = np.array(part.tensors.names, dtype=object)[ops.tensor[rows]]
        mine = np.array(table.tensors.names, dtype=object)[table.tensor[regions]]
        bad = (planned != mine) | ((low < held) | (size < 0) | (low + size > held + extent)).any(axis=1)
        if bad.any():
            i = int(bad.argmax())
            raise PlanError(
                f"{where}: operation {int(rows[i])} moves {planned[i]!r} offset {low[i].tolist()} "
                f"size {size[i].tolist()}, but region {int(regions[i])} is {table.region(int(regions[i]))}"
            )
    if not part.is_trainer:
        held_dtype = layout.table.tensors.dtype[layout.table.tensor[ops.dst_region]]
        if (held_dtype != part.wire_dtype).any():
            i = int((held_dtype != part.wire_dtype).argmax())
            raise PlanError(
                f"{where}: tensor {part.tensors.names[int(ops.tensor[i])]!r} travels as "
                f"{dtype_name(int(part.wire_dtype[i]))}, expected {dtype_name(int(held_dtype[i]))} as it is held"
            )


def _ends(part: RankPart) -> Iterable[tuple[IntArray, IntArray]]:
    """Rows of operations and the regions of this rank that they touch."""
    ops = part.operations
    everything, copies = np.arange(len(ops)), np.flatnonzero(ops.kind == Kind.COPY)
    if part.is_trainer:
        return [(everything, ops.src_region)]
    return [(everything, ops.dst_region), (copies, ops.src_region[copies])]


def _traffic(part: RankPart, layout: RankLayout, rows: IntArray, device: torch.device) -> _Traffic:
    """Cuts the boxes that this rank exchanges with each peer and finds them in memory."""
    ops = part.operations
    limit = message_limit(part.bucket_bytes, max(len(part.trainer_ranks), part.instance_ranks))
    if part.is_trainer:
        peer, region = len(part.trainer_ranks) + ops.dst_rank[rows], ops.src_region[rows]
    else:
        peer, region = np.searchsorted(np.array(part.trainer_ranks), ops.src_rank[rows]), ops.dst_region[rows]
    columns: list[list[IntArray]] = []
    messages = 0
    for number in np.unique(peer):
        mine = np.flatnonzero(peer == number)
        made = cut_messages(ops.size[rows[mine]], part.wire_dtype[rows[mine]], limit)
        boxes = mine[made.box]
        columns.append(
            [
                np.full(len(made), number), made.round, made.dtype, made.nbytes, made.message + messages, region[boxes],
                ops.offset[rows[boxes]] + made.offset, made.size, made.start,
            ]
        )  # fmt: skip
        messages += len(made)
    if not columns:
        width = ops.size.shape[1]
        columns = [[np.zeros((0, width) if i in (6, 7) else 0, dtype=np.int64) for i in range(9)]]
    peers, rounds, dtype, nbytes, message, region, offset, size, start = (
        np.concatenate(c) for c in zip(*columns, strict=True)
    )
    base, first, stride, size = _in_memory(layout, region, offset, size)
    copies = join(
        StridedCopies(
            message,
            size,
            np.stack([base, message], axis=1),
            np.stack([first, start], axis=1),
            np.stack([stride, contiguous_strides(size)], axis=2),
        )
    )
    return _Traffic(peers, rounds, dtype, nbytes, copies, _straight(copies, dtype, layout, device))


def _in_memory(
    layout: RankLayout, region: IntArray, offset: IntArray, size: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Base, first element, strides and size of boxes inside regions; all of one width."""
    table, memory = layout.table, layout.memory
    width = max(table.tensors.width, offset.shape[1])
    stride = pad_boxes(memory.stride[region], width, 0)
    inside = pad_boxes(offset, width, 0) - pad_boxes(table.offset[region], width, 0)
    return memory.base[region], memory.start[region] + (inside * stride).sum(axis=1), stride, pad_boxes(size, width, 1)


def _straight(copies: StridedCopies, dtype: IntArray, layout: RankLayout, device: torch.device) -> IntArray:
    """(m,) bool: messages that are one run of memory in the dtype of the wire, on the device of the wire."""
    straight = np.zeros(len(dtype), dtype=bool)
    if not len(copies):
        return straight
    bases = layout.memory.bases
    wire = np.array([to_torch(dtype_name(int(code))) for code in dtype], dtype=object)[copies.group]
    held = np.array([b.dtype for b in bases], dtype=object)[copies.base[:, _MEMORY]]
    here = np.array([b.device == device for b in bases], dtype=bool)[copies.base[:, _MEMORY]]
    alone = np.bincount(copies.group, minlength=len(dtype))[copies.group] == 1
    straight[copies.group[alone & copies.contiguous(_MEMORY) & (wire == held) & here]] = True
    return straight


def _place(traffic: _Traffic) -> tuple[int, IntArray]:
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


def _rounds(
    sending: bool, traffic: _Traffic, layout: RankLayout, staging: torch.Tensor, places: IntArray, scratch: torch.Tensor
) -> list[Round]:
    """The tensors of every round."""
    bases = layout.memory.bases
    is_straight = traffic.straight[traffic.copies.group]
    straight = iter(strided_views(bases, traffic.copies.take(is_straight), _MEMORY))
    tensors: list[torch.Tensor] = []
    columns = (traffic.straight, places, traffic.nbytes, traffic.dtype)
    for in_memory, place, nbytes, code in zip(*(c.tolist() for c in columns), strict=True):
        in_staging = staging[place : place + nbytes].view(to_torch(dtype_name(code)))
        tensors.append(next(straight) if in_memory else in_staging)

    rounds = [Round(CopyBatch(), [], [], CopyBatch()) for _ in range(int(traffic.round.max(initial=-1)) + 1)]
    staged = traffic.copies.take(~is_straight)
    number = traffic.round[staged.group]
    if sending:
        make_copies(staged, (bases, tensors), _WIRE, [r.pack for r in rounds], number, scratch)
    else:
        # The side that is read comes first.
        make_copies(staged.turned(), (tensors, bases), 0, [r.unpack for r in rounds], number, scratch)
    # In each round, messages to one peer keep their order: both ends post them alike.
    for tensor, peer, at in zip(tensors, traffic.peer.tolist(), traffic.round.tolist(), strict=True):
        # Bytes, so that every dtype travels over every backend.
        (rounds[at].sends if sending else rounds[at].receives).append((peer, tensor.view(torch.uint8)))
    return rounds


def _replication(part: RankPart, layout: RankLayout, rows: IntArray, scratch: torch.Tensor) -> tuple[CopyBatch, int]:
    """Copies from the region that received a box to the further ones that hold it, and their bytes."""
    rows = rows[shape_order(part.operations.size[rows])]
    ops = part.operations.take(rows)
    keep = ops.size.prod(axis=1) > 0
    ops = ops.take(np.flatnonzero(keep))
    source_base, source_start, source_stride, size = _in_memory(layout, ops.src_region, ops.offset, ops.size)
    base, start, stride, _ = _in_memory(layout, ops.dst_region, ops.offset, ops.size)
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
