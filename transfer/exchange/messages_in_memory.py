"""Messages of one rank in columns: peer, round and direction of each, and the memory of each box.

The messages of a pair follow, stage after stage, from the rows that both ends have (`messages`). Rounds are their order
by (stage, number in the pair), which is the same at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import pad_boxes
from weightcast.transfer.boxes.slices import contiguous_strides
from weightcast.transfer.boxes.strided import Places, StridedCopies, join
from weightcast.transfer.errors import PlanError
from weightcast.transfer.exchange.messages import LARGE_BYTES, cut_messages, message_limit
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_name, to_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind, RankPart

__all__ = ["MEMORY", "WIRE", "RankMessages", "check_operations", "find_traffic", "in_memory"]

MEMORY, WIRE = 0, 1
"""The sides of the copies of messages."""

SPAN_BYTES = 1 << 11
"""Runs of at least so many bytes are sent and received as they lie: the kernel takes 0.1 us and 24 bytes for each."""


@dataclass(frozen=True, slots=True)
class RankMessages:
    """m messages of one rank, and the copies between them and its memory.

    Columns (m,) of messages are `peer`, `leaves` (true for sent ones), `stage`, `round`, `dtype`, `nbytes`. Groups of
    `copies` are message numbers; side MEMORY is memory, side WIRE the message. `direct` (k,) marks copies that need not
    be made, because the transport reads or writes memory as it lies there. With `scatters` that may be many places.
    """

    peer: IntArray
    leaves: BoolArray
    stage: IntArray
    round: IntArray
    dtype: IntArray
    nbytes: IntArray
    copies: StridedCopies
    direct: BoolArray
    scatters: bool

    @property
    def straight(self) -> BoolArray:
        """Mask (m,) of the messages of which nothing is copied."""
        mask = np.ones(len(self.dtype), dtype=bool)
        mask[self.copies.group[~self.direct]] = False
        return mask


def _departures(part: RankPart) -> BoolArray:
    """Mask of the operations that this rank sends, as a trainer rank or as one that passes boxes on."""
    ops = part.operations
    if part.is_trainer:
        return np.asarray(ops.kind == Kind.SEND)
    return np.asarray((ops.kind == Kind.RELAY) & (ops.src_rank == part.rank))


def check_operations(part: RankPart, layout: RankLayout) -> None:
    """Checks that a part, which came over a network, names only what this rank holds. Raises PlanError."""
    ops, rank_name = part.operations, f"{part.instance} {'trainer' if part.is_trainer else 'rank'} {part.rank}"
    if part.is_trainer and (ops.kind != Kind.SEND).any():
        i = int((ops.kind != Kind.SEND).argmax())
        raise PlanError(f"{rank_name}: operation {i} has kind {int(ops.kind[i])}, expected {int(Kind.SEND)}, a send")
    for rows, regions in _ends(part):
        if ((regions < 0) | (regions >= len(layout.table))).any():
            raise PlanError(f"{rank_name}: an operation names a region outside 0..{len(layout.table) - 1}")
        table = layout.table
        width = max(table.tensors.width, ops.offset.shape[1])
        low, size = pad_boxes(ops.offset[rows], width, 0), pad_boxes(ops.size[rows], width, 1)
        corner, extent = pad_boxes(table.offset[regions], width, 0), pad_boxes(table.size[regions], width, 1)
        names = np.array(part.tensors.names, dtype=object)[ops.tensor[rows]]
        own_names = np.array(table.tensors.names, dtype=object)[table.tensor[regions]]
        bad = (names != own_names) | ((low < corner) | (size < 0) | (low + size > corner + extent)).any(axis=1)
        if bad.any():
            i = int(bad.argmax())
            raise PlanError(
                f"{rank_name}: operation {int(rows[i])} moves {names[i]!r} offset {low[i].tolist()} "
                f"size {size[i].tolist()}, but region {int(regions[i])} is {table.region(int(regions[i]))}"
            )
        memory_dtype, wire_dtype = table.tensors.dtype[table.tensor[regions]], part.wire_dtype[rows]
        cast = memory_dtype != wire_dtype
        if not part.is_trainer and cast.any():
            i = int(cast.argmax())
            raise PlanError(
                f"{rank_name}: tensor {names[i]!r} travels as {dtype_name(int(wire_dtype[i]))}, expected "
                f"{dtype_name(int(memory_dtype[i]))} as it is held"
            )


def _ends(part: RankPart) -> Iterable[tuple[IntArray, IntArray]]:
    """Rows of operations and the regions of this rank that they touch."""
    ops, leaves = part.operations, _departures(part)
    if part.is_trainer:
        return [(np.arange(len(ops)), ops.src_region)]
    writes, reads = np.flatnonzero(~leaves), np.flatnonzero(leaves | (ops.kind == Kind.COPY))
    return [(writes, ops.dst_region[writes]), (reads, ops.src_region[reads])]


def find_traffic(
    part: RankPart, layout: RankLayout, device: torch.device, *, scatters: bool = False, staged: bool = False
) -> RankMessages:
    """Cuts the boxes that this rank exchanges with each peer and finds them in memory.

    A transport that `scatters` takes messages that lie in many places, others only those that are one run of memory.
    With `staged` everything is copied.
    """
    ops, leaves = part.operations, _departures(part)
    trainers = len(part.trainer_ranks)
    send_rows = np.flatnonzero(ops.kind == Kind.SEND)
    remote_rank = np.where(leaves, ops.dst_rank, ops.src_rank)
    peer = trainers + remote_rank
    if not part.is_trainer:
        peer[send_rows] = np.searchsorted(np.array(part.trainer_ranks, dtype=np.int64), remote_rank[send_rows])
    region = np.where(leaves, ops.src_region, ops.dst_region)

    limit = message_limit(part.bucket_bytes, part.most_peers)
    exchange_rows = np.flatnonzero(ops.kind != Kind.COPY)
    stage_of_row = np.zeros(len(ops), dtype=np.int64) if part.stage is None else part.stage
    keys = np.stack([peer, leaves, stage_of_row], axis=1)[exchange_rows]
    columns: list[list[IntArray]] = []
    messages = 0
    for key in np.unique(keys, axis=0):
        rows = exchange_rows[(keys == key).all(axis=1)]
        group = cut_messages(ops.size[rows], part.wire_dtype[rows], limit, limit if scatters else LARGE_BYTES)
        boxes = rows[group.box]
        columns.append(
            [
                *np.repeat(key[:, None], len(group), axis=1), group.round, group.dtype, group.nbytes,
                group.message + messages, region[boxes], ops.offset[boxes] + group.offset, group.size, group.start,
            ]
        )  # fmt: skip
        messages += len(group)
    if not columns:
        columns = [[np.zeros((0, ops.size.shape[1]) if i in (8, 9) else 0, dtype=np.int64) for i in range(11)]]
    peers, departs, stage, number, dtype, nbytes, message, regions, offset, size, start = (
        np.concatenate(c) for c in zip(*columns, strict=True)
    )
    memory, size = in_memory(layout, regions, offset, size)
    copies = join(StridedCopies.of_sides(message, size, memory, Places(message, start, contiguous_strides(size))))
    _, rounds = np.unique(np.stack([stage, number], axis=1), axis=0, return_inverse=True)
    direct = np.zeros(len(copies), dtype=bool) if staged else _direct(copies, dtype, layout, device, scatters)
    return RankMessages(peers, departs.astype(bool), stage, rounds.ravel(), dtype, nbytes, copies, direct, scatters)


def in_memory(layout: RankLayout, region: IntArray, offset: IntArray, size: IntArray) -> tuple[Places, IntArray]:
    """The places of boxes inside regions, and their sizes; all of one width."""
    table, memory = layout.table, layout.memory
    width = max(table.tensors.width, offset.shape[1])
    stride = pad_boxes(memory.stride[region], width, 0)
    inside = pad_boxes(offset, width, 0) - pad_boxes(table.offset[region], width, 0)
    start = memory.start[region] + (inside * stride).sum(axis=1)
    return Places(memory.base[region], start, stride), pad_boxes(size, width, 1)


def _direct(
    copies: StridedCopies, dtype: IntArray, layout: RankLayout, device: torch.device, scatters: bool
) -> BoolArray:
    """Mask (k,) of copies whose memory has the dtype and device of the wire and is as compact as it takes."""
    if not len(copies):
        return np.zeros(0, dtype=bool)
    bases = layout.memory.bases
    wire_dtype = np.array([to_torch(dtype_name(int(code))) for code in dtype], dtype=object)[copies.group]
    memory_dtype = np.array([b.dtype for b in bases], dtype=object)[copies.base[:, MEMORY]]
    on_device = np.array([b.device == device for b in bases], dtype=bool)[copies.base[:, MEMORY]]
    sole_copy = np.bincount(copies.group, minlength=len(dtype))[copies.group] == 1
    compact = sole_copy & copies.contiguous(MEMORY)
    if scatters:
        inner = copies.size[:, -1]
        run = (copies.stride[:, -1, MEMORY] == 1) | (inner == 1)
        compact |= run & (inner * ITEMSIZE[dtype[copies.group]] >= SPAN_BYTES)
    return np.asarray(compact & (wire_dtype == memory_dtype) & on_device)
