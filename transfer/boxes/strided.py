"""Many small strided copies made few.

A row is one copy between two sides, each a strided box in a flat tensor: from a parameter into a message, from a
message into a parameter, or between two parameters. Rows are in an order that their makers fixed; what this module may
do is to see that neighbours are one copy. Everything is columns: numpy for the rows, and a Python object only for each
copy that is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray

__all__ = ["StridedCopies", "join", "unroll"]


@dataclass(frozen=True, slots=True)
class StridedCopies:
    """k copies in columns. Side 0 is read and side 1 written, or the other way round: the module does not care.

    `group` (k,): only rows of one group, which are consecutive, may be joined. `size` (k, D) is the box; for each side
    `base` (k, 2) says in which flat tensor, `start` (k, 2) at which element, and `stride` (k, D, 2) with which
    strides. Dimensions of size 1 may have any stride. No row is empty.
    """

    group: IntArray
    size: IntArray
    base: IntArray
    start: IntArray
    stride: IntArray

    def __len__(self) -> int:
        return int(self.group.shape[0])

    def take(self, rows: IntArray | BoolArray) -> StridedCopies:
        """The copies at `rows` (indices or a mask), in that order."""
        return StridedCopies(*(getattr(self, name)[rows] for name in self.__slots__))

    def turned(self) -> StridedCopies:
        """The same with the sides changed."""
        return StridedCopies(
            self.group,
            self.size,
            self.base[:, ::-1],
            self.start[:, ::-1],
            np.ascontiguousarray(self.stride[:, :, ::-1]),
        )

    def bounds(self, groups: int) -> list[int]:
        """(groups + 1) ints: rows of group i are those from `bounds[i]` to `bounds[i + 1]`; groups must ascend."""
        found: list[int] = np.searchsorted(self.group, np.arange(groups + 1)).tolist()
        return found

    def contiguous(self, side: int) -> BoolArray:
        """(k,) whether a row of `join` is one run of elements on that side, where the other is contiguous too."""
        return np.asarray((self.size[:, :-1] == 1).all(axis=1) & (self.stride[:, -1, side] == 1))


def unroll(copies: StridedCopies, rows: IntArray) -> tuple[IntArray, IntArray]:
    """What is left of the copies `rows` without all dimensions but the innermost, in row-major order.

    (r,) the copy of each, and (r, 2) the element at which it starts on both sides.
    """
    count = copies.size[rows, :-1].prod(axis=1)
    copy = np.repeat(rows, count)
    index = np.arange(len(copy)) - np.repeat(np.cumsum(count) - count, count)
    start = copies.start[copy]
    for d in reversed(range(copies.size.shape[1] - 1)):
        start += (index % copies.size[copy, d])[:, None] * copies.stride[copy, d]
        index //= copies.size[copy, d]
    return copy, start


def join(copies: StridedCopies) -> StridedCopies:
    """The same copies in fewer rows.

    First each box loses the dimensions that are no steps of their own on either side. Then rows that continue the one
    before on both sides are appended to it, and rows of one shape at even distances become one row with a dimension
    more.
    """
    if not len(copies):
        return copies
    return _join_even(_join_adjacent(_collapse(copies)))


def _collapse(copies: StridedCopies) -> StridedCopies:
    """Merges dimensions; the rest is right-aligned, with one free column before it for a dimension to come."""
    k, width = copies.size.shape
    size = np.ones((k, width + 1), dtype=np.int64)
    stride = np.ones((k, width + 1, 2), dtype=np.int64)
    # Column of the outermost dimension placed so far. The innermost starts as size 1 with stride 1: a single element.
    top = np.full(k, width)
    fresh = np.ones(k, dtype=bool)
    rows = np.arange(k)
    for d in reversed(range(width)):
        live = copies.size[:, d] != 1
        reach = size[rows, top][:, None] * stride[rows, top]
        merge = live & ~fresh & (copies.stride[:, d] == reach).all(axis=1)
        size[rows[merge], top[merge]] *= copies.size[merge, d]
        place = live & ~merge
        top = np.where(place & ~fresh, top - 1, top)
        size[rows[place], top[place]] = copies.size[place, d]
        stride[rows[place], top[place]] = copies.stride[place, d]
        fresh &= ~live
    return StridedCopies(copies.group, size, copies.base, copies.start, stride)


def _join_adjacent(copies: StridedCopies) -> StridedCopies:
    """Rows alike but for the length of their outermost dimension, each beginning where the one before ends."""
    k, width = copies.size.shape
    outer = np.minimum((copies.size != 1).argmax(axis=1), width - 1)
    outer = np.where((copies.size == 1).all(axis=1), width - 1, outer)
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
    """Rows of one shape whose distance, on both sides, is that of the two rows before."""
    k = len(copies)
    distance = np.zeros((k, 2), dtype=np.int64)
    distance[1:] = np.diff(copies.start, axis=0)
    alike = np.zeros(k, dtype=bool)
    alike[1:] = _same(copies.group, copies.base, copies.size, copies.stride) & (distance[1:] > 0).all(axis=1)
    turns = np.zeros(k, dtype=bool)
    turns[1:] = alike[1:] & alike[:-1] & (distance[1:] != distance[:-1]).any(axis=1)
    # Where the distance changes a new row begins, and takes its own distance from its second member: so of several
    # changes in a row every other one counts.
    count = np.cumsum(turns)
    streak = count - np.maximum.accumulate(np.where(turns, 0, count))
    first = np.flatnonzero(~alike | (turns & (streak % 2 == 1)))
    members = np.diff(np.append(first, k))
    size, stride = copies.size[first], copies.stride[first]
    second = np.minimum(first + 1, k - 1)
    several = members > 1
    # _collapse left the outermost column free.
    size[several, 0] = members[several]
    stride[several, 0] = distance[second][several]
    return StridedCopies(copies.group[first], size, copies.base[first], copies.start[first], stride)


def _same(*columns: IntArray) -> BoolArray:
    """(k - 1,) whether each row equals the one before it in all columns."""
    same = np.ones(len(columns[0]) - 1, dtype=bool)
    for column in columns:
        same &= (column[1:] == column[:-1]).all(axis=tuple(range(1, column.ndim)))
    return same
