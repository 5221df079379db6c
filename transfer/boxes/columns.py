"""Sorting and grouping rows of integer columns, without a Python loop over the rows.

Several columns are packed into one int64 where they fit: numpy sorts one integer column several times faster than a
list of keys. Only ties need the remaining columns, and they are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, Self

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray

__all__ = [
    "Columns",
    "any_column",
    "changes",
    "find_names",
    "lex_sort",
    "number_names",
    "pad_boxes",
    "ranges",
    "shared",
    "stable_order",
    "starts_of",
    "volumes",
]


_LIMIT = 1 << 62


class Columns:
    """Base of frozen dataclasses whose fields are columns: arrays of n rows, (n,) or (n, D)."""

    __slots__: ClassVar[Any] = ()

    def __len__(self) -> int:
        return int(getattr(self, self.__slots__[0]).shape[0])

    def take(self, rows: IntArray | BoolArray | slice) -> Self:
        """The rows at `rows` (indices, a mask or a slice), in that order; those of a slice are not copied."""
        if isinstance(rows, slice):
            return self.between(rows.start, rows.stop)
        # np.take is several times faster than indexing for (n, D) columns.
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return type(self)(*(np.take(getattr(self, name), index, axis=0) for name in self.__slots__))

    def between(self, begin: int, end: int) -> Self:
        """Rows `begin` to `end` - 1, not copied."""
        return type(self)(*(getattr(self, name)[begin:end] for name in self.__slots__))


def stable_order(key: IntArray, extent: int) -> IntArray:
    """Indices that sort `key` stably; its values lie in 0..extent-1."""
    n = key.shape[0]
    if n == 0 or bool((key[1:] >= key[:-1]).all()):
        return np.arange(n, dtype=np.int64)
    if extent <= 1 << 16:
        # Sorted by radix.
        return np.argsort(key.astype(np.uint16), kind="stable").astype(np.int64)
    bits = n.bit_length()
    if extent << bits > _LIMIT:
        return np.argsort(key, kind="stable").astype(np.int64)
    codes: IntArray = (key << bits) | np.arange(n, dtype=np.int64)
    codes.sort()
    codes &= (1 << bits) - 1
    return codes


def lex_sort(columns: Sequence[IntArray]) -> tuple[IntArray, BoolArray]:
    """Stable order of rows by columns[0], then columns[1] and so on; and marks (n,) bool of sorted rows.

    A row is marked if it differs from the one before. The first is always marked: each mark begins a run of equal rows.
    """
    n = columns[0].shape[0]
    if not n:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    codes, extent, width = _pack(columns, np.zeros(n, dtype=np.int64), 1)
    order = stable_order(codes, extent)
    begins = changes(codes[order])
    tail = columns[width:]
    positions, starts = np.arange(n, dtype=np.int64), begins
    while tail:
        mask = shared(starts)
        positions, group = positions[mask], np.cumsum(starts[mask]) - 1
        if not positions.size:
            break
        rows = order[positions]
        codes, extent, width = _pack([column[rows] for column in tail], group, int(group[-1]) + 1)
        tail = tail[width:]
        suborder = stable_order(codes, extent)
        order[positions] = rows[suborder]
        starts = begins[positions] = changes(codes[suborder])
    return order, begins


def _pack(columns: Sequence[IntArray], group: IntArray, groups: int) -> tuple[IntArray, int, int]:
    """One integer a row from its group and as many columns as fit; their extent, and how many columns went in."""
    codes, extent, width = group, groups, 0
    for values in columns:
        low = int(values.min())
        span = int(values.max()) - low + 1
        if extent * span > _LIMIT:
            if width:
                break
            # There are at most as many ranks as rows, so ranks always fit beside the group.
            values, low = np.unique(values, return_inverse=True)[1].astype(np.int64), 0
            span = int(values.max()) + 1
        if span > 1:
            codes = codes * span + (values - low)
            extent *= span
        width += 1
    return codes, extent, width


def changes(values: IntArray) -> BoolArray:
    """Mask of values that differ from the one before; true for the first."""
    mask = np.ones(values.shape[0], dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=mask[1:])
    return mask


def shared(begins: BoolArray) -> BoolArray:
    """Mask of the rows in a run of more than one row."""
    mask = ~begins
    mask[:-1] |= ~begins[1:]
    return mask


def starts_of(begins: BoolArray) -> IntArray:
    """Starts of runs, then the number of rows: run i is rows starts[i]..starts[i+1]-1."""
    return np.append(np.flatnonzero(begins), begins.shape[0])


def ranges(start: IntArray, count: IntArray) -> IntArray:
    """Ranges one after the other: start[0], start[0]+1, ... (count[0] numbers), and the same for each further row."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(start - (ends - count), count) + np.arange(total, dtype=np.int64)


def any_column(table: BoolArray) -> BoolArray:
    """Mask (n,) of rows with a true column; for few columns several times faster than `any(axis=1)`."""
    mask = table[:, 0].copy()
    for column in range(1, table.shape[1]):
        mask |= table[:, column]
    return mask


def volumes(size: IntArray) -> IntArray:
    """Number of elements (n,) of each box of sizes (n, D)."""
    volume = size[:, 0].copy()
    for dim in range(1, size.shape[1]):
        volume *= size[:, dim]
    return volume


def number_names(index: Mapping[str, int], names: Sequence[str]) -> IntArray:
    """Number (n,) of each name. Raises KeyError for an unknown one."""
    return np.fromiter(map(index.__getitem__, names), dtype=np.int64, count=len(names))


def find_names(index: Mapping[str, int], names: Sequence[str]) -> IntArray:
    """Number (n,) of each name, -1 for an unknown one."""
    return np.fromiter(map(index.get, names, repeat(-1)), dtype=np.int64, count=len(names))


def pad_boxes(column: IntArray, width: int, fill: int) -> IntArray:
    """Pads (n, D) to (n, width) with columns of `fill` at the end (0 for offsets, 1 for sizes and shapes)."""
    padding = width - column.shape[1]
    if padding <= 0:
        return column
    return np.pad(column, ((0, 0), (0, padding)), constant_values=fill)
