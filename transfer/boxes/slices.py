"""Pieces of boxes: a box cut at places in its row-major order, so that each piece is one run of it.

A run is a box, or a few where it begins or ends inside a slice. Places that may be moved a little are put between the
largest slices that are near enough, so that most pieces are single boxes.
"""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort

__all__ = ["between_slices", "boxes_of_runs", "contiguous_strides", "shape_order", "split_boxes"]


def contiguous_strides(size: IntArray) -> IntArray:
    """(k, D) strides of boxes that lie in row-major order without gaps."""
    inner = np.ones_like(size)
    inner[:, :-1] = np.cumprod(size[:, :0:-1], axis=1)[:, ::-1]
    return inner


def split_boxes(size: IntArray, itemsize: IntArray, limit: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts boxes of `size` (n, D) into pieces of at most `limit` bytes: rows (k,), offsets in the box and sizes (k, D).

    Pieces of a box come in its row-major order and tile it: all dimensions before one are cut to single indices, that
    one into even steps, and those after it stay whole. Boxes without elements give no piece.
    """
    n, width = size.shape
    inner = np.ones((n, width + 1), dtype=np.int64)
    inner[:, :-1] = np.cumprod(size[:, ::-1], axis=1)[:, ::-1]
    inner *= itemsize[:, None]
    # The outermost dimension whose single index, with all that is inside it, fits.
    axis = (inner[:, 1:] <= limit).argmax(axis=1)
    rows = np.arange(n)
    extent = size[rows, axis]
    most = np.maximum(limit // np.maximum(inner[rows, axis + 1], 1), 1)
    parts = np.maximum(-(-extent // most), 1)
    step = np.maximum(-(-extent // parts), 1)
    parts = np.maximum(-(-extent // step), 1)

    dims = np.arange(width)[None, :]
    grid = np.where(dims < axis[:, None], size, 1)
    grid[rows, axis] = parts
    count = np.where(inner[:, 0] > 0, grid.prod(axis=1), 0)
    row = np.repeat(rows, count)
    index = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)

    offset = np.zeros((len(row), width), dtype=np.int64)
    for d in reversed(range(width)):
        offset[:, d] = index % grid[row, d]
        index = index // grid[row, d]
    cut = np.arange(len(row)), axis[row]
    offset[cut] *= step[row]
    piece = np.where(dims < axis[row][:, None], 1, size[row])
    piece[cut] = np.minimum(step[row], extent[row] - offset[cut])
    return row, offset, piece


def shape_order(size: IntArray, *before: IntArray) -> IntArray:
    """(n,) the order that brings boxes of one shape together; boxes alike keep theirs.

    `before` are keys that count more than the shape, the last of them most.
    """
    return np.lexsort((*size.T[::-1], *before))


def between_slices(place: FloatArray, size: IntArray, slack: FloatArray) -> IntArray:
    """(n,) for each place in the row-major order of a box of `size` (n, D) a whole number of elements: the nearest
    boundary between slices of the first dimension that has one at most `slack` (n,) elements away, else the nearest
    element. Of places in one box with one slack none overtakes another.
    """
    near = np.rint(place).astype(np.int64)
    unit = _units(size)
    for dim in range(size.shape[1] - 1, -1, -1):
        boundary = np.rint(place / unit[:, dim]).astype(np.int64) * unit[:, dim]
        near = np.where(np.abs(boundary - place) <= slack, boundary, near)
    return near


def boxes_of_runs(size: IntArray, begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The boxes of which runs consist: run (of 0..n-1, ascending), offset and size (m, D), in the order of the runs.

    Run i are the elements `begin[i]` to `end[i]` - 1, at least one, of a box of `size[i]` in row-major order.
    """
    unit, volume = _units(size), size.prod(axis=1)
    whole = np.flatnonzero((begin == 0) & (end == volume))
    made = [(whole, begin[whole], np.zeros_like(size[whole]), size[whole])]
    rows = np.flatnonzero((begin > 0) | (end < volume))
    size, unit, begin, end = size[rows], unit[rows], begin[rows], end[rows]
    # From the finest dimension outwards: what begins or ends inside a slice of the next one is cut off.
    for dim in range(size.shape[1] - 1, 0, -1):
        outer = unit[:, dim - 1]
        head = np.where(begin % outer > 0, np.minimum(end, -(-begin // outer) * outer), begin)
        tail = np.maximum(head, np.where(end % outer > 0, end // outer * outer, end))
        for low, high in ((begin, head), (tail, end)):
            some = np.flatnonzero(high > low)
            made.append((rows[some], low[some], *_box(size[some], unit[some], dim, low[some], high[some])))
        begin, end = head, tail
    some = np.flatnonzero(end > begin)
    made.append((rows[some], begin[some], *_box(size[some], unit[some], 0, begin[some], end[some])))
    run, low, offset, extent = (np.concatenate(column) for column in zip(*made, strict=True))
    order, _ = lex_sort([run, low])
    return run[order], np.take(offset, order, axis=0), np.take(extent, order, axis=0)


def _units(size: IntArray) -> IntArray:
    """(n, D) the elements of a slice of each dimension."""
    unit = np.ones_like(size)
    unit[:, :-1] = np.cumprod(size[:, :0:-1], axis=1)[:, ::-1]
    return unit


def _box(size: IntArray, unit: IntArray, dim: int, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Offset and size of runs of whole slices of `dim` that stay inside one slice of the dimension before."""
    offset = low[:, None] // unit % size
    offset[:, dim + 1 :] = 0
    extent = size.copy()
    extent[:, :dim] = 1
    extent[:, dim] = (high - low) // unit[:, dim]
    return offset, extent
