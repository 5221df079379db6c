"""Sorting and grouping rows of integer columns, without a Python loop over the rows.

Everything here packs several columns into one int64 where they fit: numpy sorts one integer column several times faster
than it sorts by a list of keys, and ties, the only rows that need the remaining columns, are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray

if TYPE_CHECKING:
    pass


__all__ = [
    "any_column",
    "concatenate",
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
    packed: IntArray = (key << bits) | np.arange(n, dtype=np.int64)
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def lex_sort(columns: Sequence[IntArray]) -> tuple[IntArray, BoolArray]:
    """Order that sorts rows by columns[0], then columns[1] and so on, stably; and which sorted rows differ from the one
    before.

    The first sorted row always counts as different, so the second result marks where a run of equal rows begins.
    """
    n = columns[0].shape[0]
    if not n:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    packed, extent, used = _pack(columns, np.zeros(n, dtype=np.int64), 1)
    order = stable_order(packed, extent)
    begins = _changes(packed[order])
    left = columns[used:]
    place, new = np.arange(n, dtype=np.int64), begins
    while left:
        tied = shared(new)
        place, group = place[tied], np.cumsum(new[tied]) - 1
        if not place.size:
            break
        rows = order[place]
        packed, extent, used = _pack([column[rows] for column in left], group, int(group[-1]) + 1)
        left = left[used:]
        sub = stable_order(packed, extent)
        order[place] = rows[sub]
        new = begins[place] = _changes(packed[sub])
    return order, begins


def _pack(columns: Sequence[IntArray], group: IntArray, groups: int) -> tuple[IntArray, int, int]:
    """One integer a row from its group and as many columns as fit; their extent, and how many columns went in."""
    packed, extent, used = group, groups, 0
    for values in columns:
        low = int(values.min())
        span = int(values.max()) - low + 1
        if extent * span > _LIMIT:
            if used:
                break
            # Ranks are at most as many as rows, so they always fit beside the group.
            values, low = np.unique(values, return_inverse=True)[1].astype(np.int64), 0
            span = int(values.max()) + 1
        if span > 1:
            packed = packed * span + (values - low)
            extent *= span
        used += 1
    return packed, extent, used


def _changes(values: IntArray) -> BoolArray:
    """Where a value differs from the one before it; true for the first."""
    new = np.ones(values.shape[0], dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return new


def shared(begins: BoolArray) -> BoolArray:
    """Which rows are in a run of more than one row."""
    found = ~begins
    found[:-1] |= ~begins[1:]
    return found


def starts_of(begins: BoolArray) -> IntArray:
    """Run starts and the number of rows at the end: run i is rows starts[i]..starts[i+1]-1."""
    return np.append(np.flatnonzero(begins), begins.shape[0])


def ranges(start: IntArray, count: IntArray) -> IntArray:
    """start[0], start[0]+1, ... (count[0] numbers), then the same for each further row."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(start - (ends - count), count) + np.arange(total, dtype=np.int64)


def any_column(table: BoolArray) -> BoolArray:
    """(n,) whether any of a row's few columns is true; several times faster than `any(axis=1)`."""
    found = table[:, 0].copy()
    for column in range(1, table.shape[1]):
        found |= table[:, column]
    return found


def volumes(size: IntArray) -> IntArray:
    """(n,) elements of each box of sizes (n, D)."""
    volume = size[:, 0].copy()
    for dim in range(1, size.shape[1]):
        volume *= size[:, dim]
    return volume


def number_names(index: Mapping[str, int], names: Sequence[str]) -> IntArray:
    """(n,) the number of each name. Raises KeyError for an unknown one."""
    return np.fromiter(map(index.__getitem__, names), dtype=np.int64, count=len(names))


def find_names(index: Mapping[str, int], names: Sequence[str]) -> IntArray:
    """(n,) the number of each name, -1 for an unknown one."""
    return np.fromiter(map(index.get, names, repeat(-1)), dtype=np.int64, count=len(names))


def concatenate(parts: Sequence[IntArray], like: IntArray) -> IntArray:
    """np.concatenate that gives zero rows of `like`'s shape for no parts."""
    return np.concatenate(parts) if parts else like[:0]


def pad_boxes(column: IntArray, width: int, fill: int) -> IntArray:
    """(n, D) -> (n, width), new columns at the end filled with `fill` (0 for offsets, 1 for sizes and shapes)."""
    missing = width - column.shape[1]
    if missing <= 0:
        return column
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill)
