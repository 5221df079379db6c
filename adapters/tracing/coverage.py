"""Byte coverage of one parameter: every element is written by exactly one region or is declared padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from weightcast.adapters.tracing.strided import Box
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import DescribeError

__all__ = ["check_coverage"]


def check_coverage(parameter: str, shape: Sequence[int], regions: Sequence[Box], fills: Sequence[Box]) -> int:
    """Checks that `regions` are disjoint and, with `fills`, cover the parameter.

    Returns the number of elements of padding: covered by a fill, and by no region. Raises DescribeError naming
    parameter and box.
    """
    ndim = len(shape)
    edges = [_edges(d, shape[d], (*regions, *fills)) for d in range(ndim)]
    region_counts, fill_counts = _count(edges, regions), _count(edges, fills)
    _refuse(parameter, shape, edges, region_counts > 1, "is written by two regions")
    _refuse(parameter, shape, edges, (region_counts == 0) & (fill_counts == 0), "is written by no checkpoint tensor")
    padding = (region_counts == 0).astype(np.int64)
    for d in range(ndim):
        padding = padding * np.diff(edges[d]).reshape([-1 if k == d else 1 for k in range(ndim)])
    return int(padding.sum())


def _edges(dim: int, extent: int, boxes: Sequence[Box]) -> IntArray:
    """Sorted coordinates of the ends of boxes and of the parameter along one dimension."""
    starts = [b.start[dim] for b in boxes]
    ends = [b.start[dim] + b.size[dim] for b in boxes]
    return np.unique(np.array([0, extent, *starts, *ends], dtype=np.int64))


def _count(edges: list[IntArray], boxes: Sequence[Box]) -> IntArray:
    """Number of boxes over each cell of the grid of edges."""
    if not edges:
        return np.array(len(boxes), dtype=np.int64)
    delta = np.zeros([len(e) for e in edges], dtype=np.int64)
    if boxes:
        start = np.array([b.start for b in boxes], dtype=np.int64).reshape(len(boxes), len(edges))
        end = start + np.array([b.size for b in boxes], dtype=np.int64).reshape(start.shape)
        corners = [(np.searchsorted(e, start[:, d]), np.searchsorted(e, end[:, d])) for d, e in enumerate(edges)]
        for corner in product((0, 1), repeat=len(edges)):
            index = tuple(pair[side] for pair, side in zip(corners, corner, strict=True))
            np.add.at(delta, index, (-1) ** sum(corner))
    for d in range(len(edges)):
        delta = delta.cumsum(axis=d)
    return delta[tuple(slice(0, -1) for _ in edges)]


def _refuse(parameter: str, shape: Sequence[int], edges: list[IntArray], bad: npt.NDArray[np.bool_], what: str) -> None:
    if not bad.any():
        return
    cell = np.argwhere(bad)[0]
    start = [int(e[i]) for e, i in zip(edges, cell, strict=True)]
    size = [int(e[i + 1] - e[i]) for e, i in zip(edges, cell, strict=True)]
    raise DescribeError(
        f"parameter {parameter!r} of shape {list(shape)}: box at {start} of size {size} {what}; "
        f"{int(bad.sum())} such boxes"
    )
