"""Runs of memory that lie at one distance: a rank scatters or gathers them straight, without copying them twice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray

__all__ = ["find_stretches"]

_FEWEST, _LEAST_BYTES = 3, 1 << 15
"""A stretch of fewer runs, or of fewer bytes together, is not worth a step of its own, which takes microseconds."""


def find_stretches(address: IntArray, rows: IntArray, nbytes: int) -> list[tuple[IntArray, int]]:
    """Stretches of rows that lie at one distance on a side, by address there, each with its side; no row twice.

    `address` (r, 2) is where each run is read and written; `rows` are those to search, all `nbytes` long. The side with
    more rows in stretches has them all; the other has its stretches of the remaining rows.
    """
    write_stretches, read_stretches = _evenly(address[:, 1], rows, nbytes), _evenly_read(address, rows, nbytes)
    if sum(map(len, write_stretches)) >= sum(map(len, read_stretches)):
        read_stretches = _evenly_read(address, _without(rows, write_stretches), nbytes)
    else:
        write_stretches = _evenly(address[:, 1], _without(rows, read_stretches), nbytes)
    return [(stretch, 1) for stretch in write_stretches] + [(stretch, 0) for stretch in read_stretches]


def _without(rows: IntArray, stretches: list[IntArray]) -> IntArray:
    return np.setdiff1d(rows, np.concatenate([rows[:0], *stretches]))


def _evenly_read(address: IntArray, rows: IntArray, nbytes: int) -> list[IntArray]:
    """Stretches on the side that is read.

    numpy (2.4) first copies runs that lie within the reach of its writes. So rows written below everything that is read
    and rows written above it are searched separately, and rows between not at all.
    """
    if not len(rows):
        return []
    reads, writes = address[rows].T
    lower, upper = rows[writes < reads.min()], rows[writes >= reads.max() + nbytes]
    return [stretch for part in (lower, upper) for stretch in _evenly(address[:, 0], part, nbytes)]


def _evenly(address: IntArray, rows: IntArray, nbytes: int) -> list[IntArray]:
    """The stretches of one side, whose addresses are `address` (r,)."""
    rows = rows[np.argsort(address[rows], kind="stable")]
    distance = np.diff(address[rows])
    edges = [0, *(np.flatnonzero(np.diff(distance)) + 1).tolist(), len(distance)]
    stretches, next_row = [], 0
    for start, end in pairwise(edges):
        first = max(start, next_row)  # the last row of a stretch may be the first of the next
        count = end + 1 - first
        if count >= _FEWEST and count * nbytes >= _LEAST_BYTES and distance[start] >= nbytes:
            stretches.append(rows[first : end + 1])
            next_row = end + 1
    return stretches
