"""Many small strided copies made few.

A row is one copy between two sides, each a strided box in a flat tensor. The sides are a parameter and a message, or
two parameters. The caller fixes the order of the rows; this module only joins neighbours that are one copy. Rows are
numpy columns; only the copies that are left become Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import Columns, ranges

__all__ = ["Places", "StridedCopies", "join", "unroll"]


class Places(NamedTuple):
    """One side of k copies, or boxes alone: `base` (k,), `start` (k,) and `stride` (k, D), as in StridedCopies."""

    base: IntArray
    start: IntArray
    stride: IntArray


@dataclass(frozen=True, slots=True)
class StridedCopies(Columns):
    """k copies in columns. Side 0 is read and side 1 written, or the other way round: the module does not care.

    Rows of one `group` (k,) are consecutive, and only they may be joined. `size` (k, D) is the box. For each side
    `base` (k, 2) numbers the flat tensor, `start` (k, 2) the first element, and `stride` (k, D, 2) has the strides.
    Dimensions of size 1 may have any stride. No row is empty.
    """

    group: IntArray
    size: IntArray
    base: IntArray
    start: IntArray
    stride: IntArray

    @classmethod
    def of_sides(cls, group: IntArray, size: IntArray, first: Places, second: Places) -> StridedCopies:
        """Copies between two sides that are given one by one; strides have the width of `size`."""
        base, start = np.stack([first.base, second.base], axis=1), np.stack([first.start, second.start], axis=1)
        return cls(group, size, base, start, np.stack([first.stride, second.stride], axis=2))

    def turned(self) -> StridedCopies:
        """The same copies with their sides exchanged."""
        return StridedCopies(
            self.group,
            self.size,
            self.base[:, ::-1],
            self.start[:, ::-1],
            np.ascontiguousarray(self.stride[:, :, ::-1]),
        )

    def bounds(self, groups: int) -> list[int]:
        """Bounds (groups + 1) of the groups, which must ascend: group i has rows `bounds[i]` to `bounds[i + 1]` - 1."""
        edges: list[int] = np.searchsorted(self.group, np.arange(groups + 1)).tolist()
        return edges

    def contiguous(self, side: int) -> BoolArray:
        """Mask (k,) of rows of `join` that are one run of elements on that side.

        A run is recognised only if the other side is contiguous too.
        """
        return np.asarray((self.size[:, :-1] == 1).all(axis=1) & (self.stride[:, -1, side] == 1))


def unroll(copies: StridedCopies, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Unrolls all dimensions but the innermost of the copies `rows`, in row-major order, into r copies.

    Gives the old copy (r,) of each, and the element (r, 2) at which it starts on both sides.
    """
    count = copies.size[rows, :-1].prod(axis=1)
    copy = np.repeat(rows, count)
    index = ranges(np.zeros_like(count), count)
    start = copies.start[copy]
    for d in reversed(range(copies.size.shape[1] - 1)):
        start += (index % copies.size[copy, d])[:, None] * copies.stride[copy, d]
        index //= copies.size[copy, d]
    return copy, start


def join(copies: StridedCopies) -> StridedCopies:
    """The same copies in fewer rows.

    First, dimensions that continue each other on both sides are merged. Then a row that continues the one before on
    both sides is appended to it. Rows of one shape at even distances become one row with a dimension more.
    """
    if not len(copies):
        return copies
    return _join_even(_join_adjacent(_collapse(copies)))


def _collapse(copies: StridedCopies) -> StridedCopies:
    """Merges dimensions, and aligns them to the right behind one free column, for a dimension to come."""
    k, width = copies.size.shape
    size = np.ones((k, width + 1), dtype=np.int64)
    stride = np.ones((k, width + 1, 2), dtype=np.int64)
    # Column of the outermost dimension placed so far. The innermost starts as size 1 with stride 1: a single element.
    top = np.full(k, width)
    fresh = np.ones(k, dtype=bool)
    rows = np.arange(k)
    for d in reversed(range(width)):
        steps = copies.size[:, d] != 1
        reach = size[rows, top][:, None] * stride[rows, top]
        merge = steps & ~fresh & (copies.stride[:, d] == reach).all(axis=1)
        size[rows[merge], top[merge]] *= copies.size[merge, d]
        opens = steps & ~merge
        top = np.where(opens & ~fresh, top - 1, top)
        size[rows[opens], top[opens]] = copies.size[opens, d]
        stride[rows[opens], top[opens]] = copies.stride[opens, d]
        fresh &= ~steps
    return StridedCopies(copies.group, size, copies.base, copies.start, stride)


def _join_adjacent(copies: StridedCopies) -> StridedCopies:
    """Joins rows that differ only in the length of their outermost dimension and begin where the one before ends."""
    k, width = copies.size.shape
    outer = np.where((copies.size == 1).all(axis=1), width - 1, (copies.size != 1).argmax(axis=1))
    rows = np.arange(k)
    length = copies.size[rows, outer]
    inner = copies.size.copy()
    inner[rows, outer] = 1
    end = copies.start + length[:, None] * copies.stride[rows, outer]
    follows = _same(copies.group, copies.base, inner, copies.stride, outer) & (copies.start[1:] == end[:-1]).all(axis=1)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    size = copies.size[first]
    size[np.arange(len(first)), outer[first]] = np.add.reduceat(length, first)
    return StridedCopies(copies.group[first], size, copies.base[first], copies.start[first], copies.stride[first])


def _join_even(copies: StridedCopies) -> StridedCopies:
    """Joins rows of one shape whose distance, on both sides, is that of the two rows before."""
    k = len(copies)
    distance = np.zeros((k, 2), dtype=np.int64)
    distance[1:] = np.diff(copies.start, axis=0)
    match = np.zeros(k, dtype=bool)
    match[1:] = _same(copies.group, copies.base, copies.size, copies.stride) & (distance[1:] > 0).all(axis=1)
    turns = np.zeros(k, dtype=bool)
    turns[1:] = match[1:] & match[:-1] & (distance[1:] != distance[:-1]).any(axis=1)
    # Where the distance changes a new row begins, and its second member sets its distance. So of several changes one
    # after the other, every other one counts.
    count = np.cumsum(turns)
    streak = count - np.maximum.accumulate(np.where(turns, 0, count))
    first = np.flatnonzero(~match | (turns & (streak % 2 == 1)))
    members = np.diff(np.append(first, k))
    size, stride = copies.size[first], copies.stride[first]
    second = np.minimum(first + 1, k - 1)
    is_run = members > 1
    # _collapse left the outermost column free.
    size[is_run, 0] = members[is_run]
    stride[is_run, 0] = distance[second][is_run]
    return StridedCopies(copies.group[first], size, copies.base[first], copies.start[first], stride)


def _same(*columns: IntArray) -> BoolArray:
    """Mask (k - 1,) of rows that equal the one before in all columns."""
    mask = np.ones(len(columns[0]) - 1, dtype=bool)
    for column in columns:
        mask &= (column[1:] == column[:-1]).all(axis=tuple(range(1, column.ndim)))
    return mask
