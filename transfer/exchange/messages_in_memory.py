"""All messages of one rank in columns: with whom, in which round, in which direction, and where each box lies.

The messages of a pair follow from the rows that both ends have (`messages`), a stage after the other; rounds are their
order by (stage, number in the pair), which is the same at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import pad_boxes
from weightcast.transfer.boxes.slices import contiguous_strides
from weightcast.transfer.boxes.strided import StridedCopies, join
from weightcast.transfer.errors import PlanError
from weightcast.transfer.exchange.messages import LARGE_BYTES, cut_messages, message_limit
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_name, to_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind, RankPart

__all__ = ["MEMORY", "WIRE", "Traffic", "check_operations", "find_traffic", "in_memory"]

MEMORY, WIRE = 0, 1
"""The sides of the copies of messages."""

SPAN_BYTES = 1 << 11
"""Runs of at least so many bytes are sent and received as they lie: the kernel takes 0.1 us and 24 bytes for each."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """m messages of one rank, and the copies between them and its memory.

    Of messages, in columns: `peer`, `leaves` (bool), `stage`, `round`, `dtype`, `nbytes`. `copies` has groups that are
    message numbers; side MEMORY is memory, side WIRE the message. `direct` (k,) says which copies need not be made,
    because the transport reads or writes memory as it lies there; with `scatters` in as many places as it may be.
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
        """(m,) the messages of which nothing is copied."""
        found = np.ones(len(self.dtype), dtype=bool)
        found[self.copies.group[~self.direct]] = False
        return found


def _departures(part: RankPart) -> BoolArray:
    """Which operations this rank sends, as a trainer rank or as one that passes boxes on."""
    ops = part.operations
    if part.is_trainer:
        return np.asarray(ops.kind == Kind.SEND)
    return np.asarray((ops.kind == Kind.RELAY) & (ops.src_rank == part.rank))


def check_operations(part: RankPart, layout: RankLayout) -> None:
    """A part came over a network: what it names must lie where this rank holds it."""
    ops, where = part.operations, f"{part.instance} {'trainer' if part.is_trainer else 'rank'} {part.rank}"
    if part.is_trainer and (ops.kind != Kind.SEND).any():
        i = int((ops.kind != Kind.SEND).argmax())
        raise PlanError(f"{where}: operation {i} has kind {int(ops.kind[i])}, expected {int(Kind.SEND)}, a send")
    for rows, regions in _ends(part):
        if ((regions < 0) | (regions >= len(layout.table))).any():
            raise PlanError(f"{where}: an operation names a region outside 0..{len(layout.table) - 1}")
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
            _check_dtypes(part, layout, rows, regions, where)


def _check_dtypes(part: RankPart, layout: RankLayout, rows: IntArray, regions: IntArray, where: str) -> None:
    held = layout.table.tensors.dtype[layout.table.tensor[regions]]
    wire = part.wire_dtype[rows]
    if (held != wire).any():
        i = int((held != wire).argmax())
        raise PlanError(
            f"{where}: tensor {part.tensors.names[int(part.operations.tensor[rows[i]])]!r} travels as "
            f"{dtype_name(int(wire[i]))}, expected {dtype_name(int(held[i]))} as it is held"
        )


def _ends(part: RankPart) -> Iterable[tuple[IntArray, IntArray]]:
    """Rows of operations and the regions of this rank that they touch."""
    ops, leaves = part.operations, _departures(part)
    arrivals, departures = np.flatnonzero(~leaves), np.flatnonzero(leaves)
    copies = np.flatnonzero(ops.kind == Kind.COPY)
    if part.is_trainer:
        return [(np.arange(len(ops)), ops.src_region)]
    read = np.concatenate([departures, copies])
    return [(arrivals, ops.dst_region[arrivals]), (read, ops.src_region[read])]


def find_traffic(
    part: RankPart, layout: RankLayout, device: torch.device, *, scatters: bool = False, staged: bool = False
) -> Traffic:
    """Cuts the boxes that this rank exchanges with each peer and finds them in memory.

    A transport that `scatters` takes messages that lie in many places, others those that are one run of memory. With
    `staged` everything is copied.
    """
    ops, leaves = part.operations, _departures(part)
    trainers = len(part.trainer_ranks)
    sent = np.flatnonzero(ops.kind == Kind.SEND)
    other = np.where(leaves, ops.dst_rank, ops.src_rank)
    peer = trainers + other
    if not part.is_trainer:
        peer[sent] = np.searchsorted(np.array(part.trainer_ranks, dtype=np.int64), other[sent])
    region = np.where(leaves, ops.src_region, ops.dst_region)

    limit = message_limit(part.bucket_bytes, part.most_peers)
    moved = np.flatnonzero(ops.kind != Kind.COPY)
    due = np.zeros(len(ops), dtype=np.int64) if part.stage is None else part.stage
    keys = np.stack([peer, leaves, due], axis=1)[moved]
    columns: list[list[IntArray]] = []
    messages = 0
    for key in np.unique(keys, axis=0):
        mine = moved[(keys == key).all(axis=1)]
        made = cut_messages(ops.size[mine], part.wire_dtype[mine], limit, limit if scatters else LARGE_BYTES)
        boxes = mine[made.box]
        columns.append(
            [
                *np.repeat(key[:, None], len(made), axis=1), made.round, made.dtype, made.nbytes,
                made.message + messages, region[boxes], ops.offset[boxes] + made.offset, made.size, made.start,
            ]
        )  # fmt: skip
        messages += len(made)
    if not columns:
        columns = [[np.zeros((0, ops.size.shape[1]) if i in (8, 9) else 0, dtype=np.int64) for i in range(11)]]
    peers, leaving, stage, number, dtype, nbytes, message, held, offset, size, start = (
        np.concatenate(c) for c in zip(*columns, strict=True)
    )
    base, first, stride, size = in_memory(layout, held, offset, size)
    copies = join(
        StridedCopies(
            message,
            size,
            np.stack([base, message], axis=1),
            np.stack([first, start], axis=1),
            np.stack([stride, contiguous_strides(size)], axis=2),
        )
    )
    _, rounds = np.unique(np.stack([stage, number], axis=1), axis=0, return_inverse=True)
    direct = np.zeros(len(copies), dtype=bool) if staged else _direct(copies, dtype, layout, device, scatters)
    return Traffic(peers, leaving.astype(bool), stage, rounds.ravel(), dtype, nbytes, copies, direct, scatters)


def in_memory(
    layout: RankLayout, region: IntArray, offset: IntArray, size: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Base, first element, strides and size of boxes inside regions; all of one width."""
    table, memory = layout.table, layout.memory
    width = max(table.tensors.width, offset.shape[1])
    stride = pad_boxes(memory.stride[region], width, 0)
    inside = pad_boxes(offset, width, 0) - pad_boxes(table.offset[region], width, 0)
    return memory.base[region], memory.start[region] + (inside * stride).sum(axis=1), stride, pad_boxes(size, width, 1)


def _direct(
    copies: StridedCopies, dtype: IntArray, layout: RankLayout, device: torch.device, scatters: bool
) -> BoolArray:
    """(k,) copies whose memory has the dtype of the wire, is on the device of the wire, and as compact as it takes."""
    if not len(copies):
        return np.zeros(0, dtype=bool)
    bases = layout.memory.bases
    wire = np.array([to_torch(dtype_name(int(code))) for code in dtype], dtype=object)[copies.group]
    held = np.array([b.dtype for b in bases], dtype=object)[copies.base[:, MEMORY]]
    here = np.array([b.device == device for b in bases], dtype=bool)[copies.base[:, MEMORY]]
    alone = np.bincount(copies.group, minlength=len(dtype))[copies.group] == 1
    compact = alone & copies.contiguous(MEMORY)
    if scatters:
        inner = copies.size[:, -1]
        run = (copies.stride[:, -1, MEMORY] == 1) | (inner == 1)
        compact |= run & (inner * ITEMSIZE[dtype[copies.group]] >= SPAN_BYTES)
    return np.asarray(compact & (wire == held) & here)
