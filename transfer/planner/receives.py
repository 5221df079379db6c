"""Boxes that the ranks of an instance receive, whoever sends them: slots bound to the trainer's cells.

This is the part of a plan that depends on the expert placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.algebra import Cells, decompose, intersect
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges
from weightcast.transfer.layout.joined import JoinedRanks
from weightcast.transfer.plan.operations import DigestRows, Kind

__all__ = ["Receives", "bind", "cells_of", "digest_rows", "plan_order"]


@dataclass(frozen=True, slots=True)
class Receives:
    """Boxes that the ranks of an instance receive or copy, n of them, in the order of the plan.

    `kind`, `tensor`, `row` and `source` are (n,), `offset` and `size` (n, D). `row` is the row of the side that is
    written, `source` for a copy the row that it is copied from. `sends` (sends,) are the places of the sends, `cell`
    (sends,) the trainer's cell of each.
    """

    kind: IntArray
    tensor: IntArray
    row: IntArray
    source: IntArray
    offset: IntArray
    size: IntArray
    sends: IntArray
    cell: IntArray


def cells_of(side: JoinedRanks, label: Callable[[int], str]) -> Cells:
    """The cells of all rows of a side."""
    return decompose(side.tensor, side.offset, side.size, label)


def bind(side: JoinedRanks, cells: Cells, tensors: int, label: Callable[[int], str]) -> Receives:
    """Binds regions to cells: a rank receives each of its cells once, into its first region, and copies it to others.

    `cells` are the trainer's, of `tensors` tensors.
    """
    boxes = decompose(side.rank * tensors + side.tensor, side.offset, side.size, label)
    row = boxes.row
    count = np.diff(boxes.start)
    first = row[boxes.start[:-1]]
    cell, box, offset, size = intersect(
        (cells.key, cells.offset, cells.size), (side.tensor[first], boxes.offset, boxes.size)
    )
    copy_box = np.repeat(np.arange(len(boxes), dtype=np.int64), count - 1)
    copy_rows = row[ranges(boxes.start[:-1] + 1, count - 1)]
    sends = cell.shape[0]
    target_rows = np.concatenate([first[box], copy_rows])
    kind = np.repeat(np.array([Kind.SEND, Kind.COPY], dtype=np.int64), [sends, copy_rows.shape[0]])
    tensor = side.tensor[target_rows]
    offset = np.concatenate([offset, np.take(boxes.offset, copy_box, axis=0)])
    size = np.concatenate([size, np.take(boxes.size, copy_box, axis=0)])
    order = plan_order(side.rank[target_rows], kind, tensor, offset, side.region[target_rows])
    send_places = np.flatnonzero(order < sends)
    return Receives(
        kind[order],
        tensor[order],
        target_rows[order],
        np.concatenate([target_rows[:sends], first[copy_box]])[order],
        np.take(offset, order, axis=0),
        np.take(size, order, axis=0),
        send_places,
        cell[order[send_places]],
    )


def plan_order(
    dst_rank: IntArray, kind: IntArray, tensor: IntArray, offset: IntArray, dst_region: IntArray
) -> IntArray:
    """The order of the operations of one instance in a plan."""
    return lex_sort([dst_rank, kind, tensor, *offset.T, dst_region])[0]


def digest_rows(index: int, side: JoinedRanks, cells: Cells) -> DigestRows:
    """Digest rows of an instance: its regions, cut into cells where they overlap partly, by (rank, region, cell)."""
    order, _ = lex_sort([cells.row])
    cell, row = cells.cell[order], cells.row[order]
    tensor = cells.key[cell]
    return DigestRows(
        np.full(row.shape[0], index, dtype=np.int64),
        side.rank[row],
        side.region[row],
        tensor,
        np.take(cells.offset, cell, axis=0),
        np.take(cells.size, cell, axis=0),
        side.dtype[tensor],
        cell,
    )
