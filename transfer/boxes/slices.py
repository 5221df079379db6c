"""Pieces of boxes: a box cut at places in its row-major order, so that each piece is one run of it.

A run is a box, or a few where it begins or ends inside a slice. Places that may move a little are put between the
largest slices near enough, so that most pieces are single boxes.
"""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges

__all__ = ["between_slices", "boxes_of_runs", "contiguous_strides", "shape_order", "split_boxes"]


def contiguous_strides(size: IntArray) -> IntArray:
    """Strides (k, D) of boxes that lie in row-major order without gaps: the elements in a slice of each dimension."""
    inner = np.ones_like(size)
    inner[:, :-1] = np.cumprod(size[:, :0:-1], axis=1)[:, ::-1]
    return inner


def split_boxes(size: IntArray, itemsize: IntArray, limit: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts boxes of `size` (n, D) into pieces of at most `limit` bytes: rows (k,), offsets in the box and sizes (k, D).

    Pieces of a box come in its row-major order and tile it. One dimension is cut into even steps; those before it
    become single indices, and those after it stay whole. Boxes without elements give no piece.
    """
    n, width = size.shape
    inner = contiguous_strides(size) * itemsize[:, None]
    # The outermost dimension whose single index, with all that is inside it, fits.
    axis = (inner <= limit).argmax(axis=1)
    rows = np.arange(n)
    extent = size[rows, axis]
    capacity = np.maximum(limit // np.maximum(inner[rows, axis], 1), 1)
    parts = np.maximum(-(-extent // capacity), 1)
    step = np.maximum(-(-extent // parts), 1)
    parts = np.maximum(-(-extent // step), 1)

    dims = np.arange(width)[None, :]
    grid = np.where(dims < axis[:, None], size, 1)
    grid[rows, axis] = parts
    count = np.where((size > 0).all(axis=1), grid.prod(axis=1), 0)
    row = np.repeat(rows, count)
    index = ranges(np.zeros_like(count), count)

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
    """Stable order (n,) that brings boxes of one shape together.

    `before` are keys that count more than the shape, the last of them most.
    """
    return np.lexsort((*size.T[::-1], *before))


def between_slices(place: FloatArray, size: IntArray, slack: FloatArray) -> IntArray:
    """Boundaries (n,) between slices near places in the row-major order of boxes of `size` (n, D), in whole elements.

    A place goes to the nearest boundary of the first dimension with one at most `slack` (n,) elements away, else to the
    nearest element. Places in one box with one slack never overtake each other.
    """
    cut = np.rint(place).astype(np.int64)
    unit = contiguous_strides(size)
    for dim in range(size.shape[1] - 1, -1, -1):
        boundary = np.rint(place / unit[:, dim]).astype(np.int64) * unit[:, dim]
        cut = np.where(np.abs(boundary - place) <= slack, boundary, cut)
    return cut


def boxes_of_runs(size: IntArray, begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Boxes of which runs consist, in the order of the runs: run (m,) of 0..n-1, offset and size (m, D).

    Run i has the elements `begin[i]` to `end[i]` - 1, at least one, of a box of `size[i]` in row-major order.
    """
    unit, volume = contiguous_strides(size), size.prod(axis=1)
    full_rows = np.flatnonzero((begin == 0) & (end == volume))
    pieces = [(full_rows, begin[full_rows], np.zeros_like(size[full_rows]), size[full_rows])]
    rows = np.flatnonzero((begin > 0) | (end < volume))
    size, unit, begin, end = size[rows], unit[rows], begin[rows], end[rows]
    # From the finest dimension outwards: what begins or ends inside a slice of the next one is cut off.
    for dim in range(size.shape[1] - 1, 0, -1):
        outer = unit[:, dim - 1]
        head = np.where(begin % outer > 0, np.minimum(end, -(-begin // outer) * outer), begin)
        tail = np.maximum(head, np.where(end % outer > 0, end // outer * outer, end))
        for low, high in ((begin, head), (tail, end)):
            runs = np.flatnonzero(high > low)
            pieces.append((rows[runs], low[runs], *_box(size[runs], unit[runs], dim, low[runs], high[runs])))
        begin, end = head, tail
    runs = np.flatnonzero(end > begin)
    pieces.append((rows[runs], begin[runs], *_box(size[runs], unit[runs], 0, begin[runs], end[runs])))
    run, low, offset, extent = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order, _ = lex_sort([run, low])
    return run[order], np.take(offset, order, axis=0), np.take(extent, order, axis=0)


def _box(size: IntArray, unit: IntArray, dim: int, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Offset and size of runs of whole slices of `dim` that stay inside one slice of the dimension before."""
    offset = low[:, None] // unit % size
    offset[:, dim + 1 :] = 0
    extent = size.copy()
    extent[:, :dim] = 1
    extent[:, dim] = (high - low) // unit[:, dim]
    return offset, extent
