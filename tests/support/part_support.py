"""Parts of plans made by hand: every pair of boxes intersected in a Python loop, sources taken in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import pad_boxes
from weightcast.transfer.layout.tables import RegionTable, TensorTable
from weightcast.transfer.plan.operations import DigestRows, Kind, Operations, RankPart

__all__ = ["make_parts"]

Row = tuple[int, int, int, int, int, int, int, int, list[int], list[int]]


def make_parts(
    trainer: Sequence[RegionTable], instance: Sequence[RegionTable], bucket_bytes: int, name: str = "rollout-0"
) -> tuple[list[RankPart | None], list[RankPart]]:
    """The parts of all ranks for one instance; None for a trainer rank that sends nothing.

    On each side, boxes of one tensor that differ must be disjoint.
    """
    tensors = TensorTable.from_specs({n: spec for table in trainer for n, spec in table.tensors.specs().items()})
    width = tensors.width
    rows: list[Row] = []
    for rank, table in enumerate(instance):
        rows += _received(trainer, tensors, rank, table, width)
    rows.sort(key=lambda r: (r[5], r[6], r[0], r[3], r[1], r[8]))
    columns = [np.array([r[i] for r in rows], dtype=np.int64) for i in range(8)]
    offset = np.array([r[8] for r in rows], dtype=np.int64).reshape(len(rows), width)
    size = np.array([r[9] for r in rows], dtype=np.int64).reshape(len(rows), width)
    ops = Operations(*columns, offset=offset, size=size)
    wire = np.array([_dtype(instance[r[6]], tensors.names[r[1]]) for r in rows], dtype=np.int64)
    senders = tuple(sorted({r[3] for r in rows if r[0] == Kind.SEND}))
    nothing = DigestRows(*(np.zeros((0, width) if i in (4, 5) else 0, dtype=np.int64) for i in range(8)))

    def part(is_trainer: bool, rank: int, table: RegionTable) -> RankPart:
        if is_trainer:
            mine = np.flatnonzero((ops.kind == Kind.SEND) & (ops.src_rank == rank))
        else:
            mine = np.flatnonzero(ops.dst_rank == rank)
        return RankPart(
            name, 1, int(not is_trainer), rank, senders, len(instance), table.fingerprint, tensors, ops.take(mine),
            wire[mine], nothing, bucket_bytes,
        )  # fmt: skip

    return (
        [part(True, r, t) if r in senders else None for r, t in enumerate(trainer)],
        [part(False, r, t) for r, t in enumerate(instance)],
    )


def _received(
    trainer: Sequence[RegionTable], tensors: TensorTable, rank: int, table: RegionTable, width: int
) -> list[Row]:
    rows: list[Row] = []
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    for i in range(len(table)):
        region = table.region(i)
        tensor = tensors.names.index(region.tensor)
        low, size = _box(table, i, width)
        key = (region.tensor, region.offset, region.size)
        if key in first:
            rows.append((Kind.COPY, tensor, 1, rank, first[key], 1, rank, i, low.tolist(), size.tolist()))
            continue
        first[key] = i
        cells: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
        for source, held in enumerate(trainer):
            for j in range(len(held)):
                if held.region(j).tensor != region.tensor:
                    continue
                at, extent_of = _box(held, j, width)
                begin = np.maximum(low, at)
                extent = np.minimum(low + size, at + extent_of) - begin
                if (extent >= 0).all() and (extent.all() or not size.all()):
                    cells.setdefault((tuple(begin.tolist()), tuple(extent.tolist())), []).append((source, j))
        for turn, ((begin_, extent_), holders) in enumerate(sorted(cells.items())):
            source, j = holders[(turn + i + rank) % len(holders)]
            rows.append((Kind.SEND, tensor, 0, source, j, 1, rank, i, list(begin_), list(extent_)))
    return rows


def _box(table: RegionTable, row: int, width: int) -> tuple[IntArray, IntArray]:
    """One box in the width of the plan, which may be less than the table's where only this rank names wider tensors."""
    offset, size = pad_boxes(table.offset[row : row + 1], width, 0), pad_boxes(table.size[row : row + 1], width, 1)
    return offset[0, :width], size[0, :width]


def _dtype(table: RegionTable, name: str) -> int:
    return int(table.tensors.dtype[table.tensors.names.index(name)])
