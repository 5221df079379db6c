"""Byte coverage of one parameter: every element is written by exactly one region or is declared padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weightcast.adapters.tracing.strided import Box
from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.errors import DescribeError

__all__ = ["check_coverage"]


def check_coverage(parameter: str, shape: Sequence[int], regions: Sequence[Box], fills: Sequence[Box]) -> int:
    """Checks that `regions` are disjoint and, with `fills`, cover the parameter.

    Returns the number of elements of padding: covered by a fill, and by no region. Raises DescribeError naming
    parameter and box.
    """
    edges = [_edges(d, extent, (*regions, *fills)) for d, extent in enumerate(shape)]
    region_counts, fill_counts = _count(edges, regions), _count(edges, fills)
    _refuse(parameter, shape, edges, region_counts > 1, "is written by two regions")
    _refuse(parameter, shape, edges, (region_counts == 0) & (fill_counts == 0), "is written by no checkpoint tensor")
    return math.prod(shape) - sum(box.numel for box in regions)


def _edges(dim: int, extent: int, boxes: Sequence[Box]) -> list[int]:
    """Sorted coordinates of the ends of boxes and of the parameter along one dimension."""
    starts = {b.start[dim] for b in boxes}
    return sorted({0, extent} | starts | {b.start[dim] + b.size[dim] for b in boxes})


def _count(edges: list[list[int]], boxes: Sequence[Box]) -> IntArray:
    """Number of boxes over each cell of the grid of edges."""
    places = [{edge: place for place, edge in enumerate(of_dim)} for of_dim in edges]
    counts = np.zeros([len(of_dim) - 1 for of_dim in edges], dtype=np.int64)
    for box in boxes:
        sides = zip(places, box.start, box.size, strict=True)
        counts[tuple(slice(place[start], place[start + size]) for place, start, size in sides)] += 1
    return counts


def _refuse(parameter: str, shape: Sequence[int], edges: list[list[int]], bad: BoolArray, what: str) -> None:
    if not bad.any():
        return
    cell = np.argwhere(bad)[0]
    start = [of_dim[i] for of_dim, i in zip(edges, cell, strict=True)]
    size = [of_dim[i + 1] - of_dim[i] for of_dim, i in zip(edges, cell, strict=True)]
    raise DescribeError(
        f"parameter {parameter!r} of shape {list(shape)}: box at {start} of size {size} {what}; "
        f"{int(bad.sum())} such boxes"
    )
