"""Checks that boxes lie in the regions that they name and fill them; proofs of operations and digests share them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from weightcast.transfer.boxes.algebra import overlaps
from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import volumes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.joined import JoinedRanks
from weightcast.transfer.plan.operations import Rows

__all__ = ["box_text", "filled", "outside", "refuse_rows", "region_rows", "same_columns", "spans", "tiling_fault"]


def refuse_rows(rows: Rows, what: str, faults: Mapping[str, BoolArray]) -> None:
    """Raises PlanError for the first row with a fault; `faults` has a mask of the rows for each column."""
    for name, mask in faults.items():
        if mask.any():
            row = int(mask.argmax())
            raise PlanError(f"{what} {row} has {name} {getattr(rows, name)[row].tolist()}, which is out of range")


def region_rows(side: JoinedRanks, rank: IntArray, region: IntArray) -> tuple[IntArray, BoolArray]:
    """Row of each (rank, region) of a side, and a mask of those that exist; row 0 for those that do not."""
    valid = (rank >= 0) & (rank < side.world) & (region >= 0)
    safe_rank = np.where(valid, rank, 0)
    row = side.first[safe_rank] + region
    valid &= row < side.first[safe_rank + 1]
    return np.where(valid, row, 0), valid


def outside(
    side: JoinedRanks, row: IntArray, known: BoolArray, boxes: tuple[IntArray, IntArray, IntArray]
) -> BoolArray:
    """Mask of the boxes (tensor, offset, size) that are not inside the region of their row, or of another tensor."""
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
    side: JoinedRanks, row: IntArray, offset: IntArray, size: IntArray, wanted: BoolArray | None = None
) -> tuple[tuple[int, int] | None, int | None]:
    """Two boxes that overlap in one region of the side, or None; else a region that is not filled, or None.

    `wanted` (T,) are the tensors whose regions have to be filled, by default all.
    """
    writes = np.bincount(row, minlength=len(side))
    shared_rows = np.flatnonzero(writes[row] > 1)
    if shared_rows.size:
        a, b = overlaps(row[shared_rows], np.take(offset, shared_rows, axis=0), np.take(size, shared_rows, axis=0))
        if a.size:
            return (int(shared_rows[a[0]]), int(shared_rows[b[0]])), None
    gaps = np.flatnonzero(filled(row, size, len(side)) != side.volume)
    if gaps.size and wanted is not None:
        gaps = gaps[wanted[side.tensor[gaps]]]
    return None, int(gaps[0]) if gaps.size else None


def filled(key: IntArray, size: IntArray, keys: int) -> IntArray:
    """(keys,) elements in the boxes of each key."""
    elements = np.zeros(keys, dtype=np.int64)
    np.add.at(elements, key, volumes(size))
    return elements


def spans(party: IntArray, parties: int) -> list[IntArray | slice]:
    """The rows of each of so many parties: slices where rows are ordered by party."""
    if (party[1:] >= party[:-1]).all():
        return [slice(*bounds) for bounds in pairwise(np.searchsorted(party, np.arange(parties + 1)).tolist())]
    return [np.flatnonzero(party == number) for number in range(parties)]


def same_columns(left: Rows, right: Rows, names: Iterable[str]) -> bool:
    """True if two tables have the same values in these columns."""
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def box_text(offset: IntArray, size: IntArray) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset.tolist(), size.tolist(), strict=True)) + "]"
