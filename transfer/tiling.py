"""Whether boxes that name a region lie in it and fill it: what the proofs of operations and of digests share."""

from __future__ import annotations

import numpy as np

from weightcast.transfer.columns import BoolArray
from weightcast.transfer.layout import IntArray
from weightcast.transfer.regions import overlaps, uncovered
from weightcast.transfer.sides import Side

__all__ = ["box_text", "outside", "region_rows", "tiling_fault"]


def region_rows(side: Side, rank: IntArray, region: IntArray) -> tuple[IntArray, BoolArray]:
    """Row of each (rank, region) of a side, and which of them exist; row 0 for those that do not."""
    known = (rank >= 0) & (rank < side.world) & (region >= 0)
    safe = np.where(known, rank, 0)
    row = side.first[safe] + region
    known &= row < side.first[safe + 1]
    return np.where(known, row, 0), known


def outside(side: Side, row: IntArray, known: BoolArray, boxes: tuple[IntArray, IntArray, IntArray]) -> BoolArray:
    """Which boxes (tensor, offset, size) are not inside the region of their row, or are of another tensor."""
    tensor, offset, size = boxes
    if not len(side):
        return np.ones(row.shape[0], dtype=np.bool_)
    low = offset - np.take(side.offset, row, axis=0)
    high = low + size - np.take(side.size, row, axis=0)
    bad: BoolArray = ~known | (side.tensor[row] != tensor)
    for dim in range(low.shape[1]):
        bad |= (low[:, dim] < 0) | (high[:, dim] > 0)
    return bad


def tiling_fault(
    side: Side, row: IntArray, offset: IntArray, size: IntArray, wanted: BoolArray | None = None
) -> tuple[tuple[int, int] | None, int | None]:
    """Two boxes that overlap in one region of the side, if there are; else a region that is not filled, if there is.

    `wanted` (len(side),) says which regions have to be filled; all of them without it.
    """
    writes = np.bincount(row, minlength=len(side))
    shared = np.flatnonzero(writes[row] > 1)
    a, b = overlaps(row[shared], np.take(offset, shared, axis=0), np.take(size, shared, axis=0))
    if a.size:
        return (int(shared[a[0]]), int(shared[b[0]])), None
    short = uncovered(row, offset, size, side.size)
    if wanted is not None:
        short = short[wanted[short]]
    return None, int(short[0]) if short.size else None


def box_text(offset: IntArray, size: IntArray) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset.tolist(), size.tolist(), strict=True)) + "]"
