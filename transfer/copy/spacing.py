"""Runs of memory that lie at one distance: what a rank scatters or gathers straight, without copying it twice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray

__all__ = ["find_stretches"]

_FEWEST, _LEAST_BYTES = 3, 1 << 15
"""A stretch of fewer runs, or of fewer bytes together, is not worth a step of its own, which takes microseconds."""


def find_stretches(address: IntArray, rows: IntArray, nbytes: int) -> list[tuple[IntArray, int]]:
    """Rows that lie at one distance on a side, by address there, and that side; no row twice.

    `address` (r, 2) is where each run is read and written, `rows` those to look at, all `nbytes` long. The side where
    more of them lie so is taken first, and of the rest what lies so on the other.
    """
    writing, reading = _evenly(address[:, 1], rows, nbytes), _evenly_read(address, rows, nbytes)
    if sum(map(len, writing)) >= sum(map(len, reading)):
        reading = _evenly_read(address, _without(rows, writing), nbytes)
    else:
        writing = _evenly(address[:, 1], _without(rows, reading), nbytes)
    return [(some, 1) for some in writing] + [(some, 0) for some in reading]


def _without(rows: IntArray, stretches: list[IntArray]) -> IntArray:
    return np.setdiff1d(rows, np.concatenate([rows[:0], *stretches]))


def _evenly_read(address: IntArray, rows: IntArray, nbytes: int) -> list[IntArray]:
    """Stretches that are read. numpy (2.4) first copies what lies within the reach of what it writes.

    So what is written below all that is read, and what above, are looked at apart, and nothing between.
    """
    if not len(rows):
        return []
    read, written = address[rows].T
    below, above = rows[written < read.min()], rows[written >= read.max() + nbytes]
    return [some for part in (below, above) for some in _evenly(address[:, 0], part, nbytes)]


def _evenly(address: IntArray, rows: IntArray, nbytes: int) -> list[IntArray]:
    """The stretches of one side, whose addresses are `address` (r,)."""
    rows = rows[np.argsort(address[rows], kind="stable")]
    distance = np.diff(address[rows])
    edges = [0, *(np.flatnonzero(np.diff(distance)) + 1).tolist(), len(distance)]
    found, free = [], 0
    for begin, end in pairwise(edges):
        first = max(begin, free)  # the last row of a stretch may be the first of the next
        count = end + 1 - first
        if count >= _FEWEST and count * nbytes >= _LEAST_BYTES and distance[begin] >= nbytes:
            found.append(rows[first : end + 1])
            free = end + 1
    return found
