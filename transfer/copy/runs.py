"""Many runs of memory of one length moved by one call, wherever in the process they lie.

A call per region costs a microsecond, which is what copying some KiB takes. On a CPU all tensors share one address
space, so regions of different tensors can be rows of one view. Such a *window* begins at the lowest of their addresses,
and its row i begins i bytes further. Rows overlap, and most cover memory that belongs to no tensor: only those that are
regions are ever selected. Selecting rows moves runs of any length at the speed of memory, at some nanoseconds a run.

The addresses are good as long as the tensors' storages are: an executor checks them before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from operator import setitem
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.strided import StridedCopies, unroll
from weightcast.transfer.copy.spacing import find_stretches

__all__ = ["SCRATCH_BYTES", "Runs", "Step", "find_runs", "gather_boxes", "make_steps", "memory_at"]

SCRATCH_BYTES = 1 << 20
"""Memory for runs on their way between two places that are both scattered; fits a CPU's cache."""

_FEW = 16
"""A strided copy of at most so many runs is dearer as a call of its own."""
_LONG_BYTES = 1 << 10
"""Runs of at least so many bytes are worth an index of 8 bytes each, however many a copy has."""
_TWICE_BYTES = 1 << 14
"""Runs of at least so many bytes scattered on both sides are cheaper as calls of their own than moved twice."""
_WORTH_A_CALL = 3
"""Fewer runs of a length than this stay copies of their own."""

Step: TypeAlias = Callable[[], object]
"""A prepared step, which can be called many times."""


@dataclass(frozen=True, slots=True)
class Runs:
    """r runs in columns, in the order of the copies they are from.

    `copy` (r,) numbers the copy, `address` (r, 2) is the first byte on both sides, `elements` (r,) the length.
    """

    copy: IntArray
    address: IntArray
    elements: IntArray


def find_runs(
    copies: StridedCopies, origin: IntArray, itemsize: IntArray, allowed: BoolArray, packed: int | None
) -> Runs:
    """The runs of those copies that are better moved by runs. Copies must come from `join`.

    `origin` (k, 2) are the addresses of the flat tensors of both sides, `itemsize` (k, 2) the bytes of their elements.
    Only copies that are `allowed` (k,) are considered. `packed` is as for `make_steps`.
    """
    inner = copies.size[:, -1]
    count = copies.size[:, :-1].prod(axis=1)
    unit_stride = (copies.stride[:, -1] == 1).all(axis=1) | (inner == 1)
    long_runs = inner * itemsize.min(axis=1) >= _LONG_BYTES
    run_mask = (count <= _FEW) | (long_runs & (packed is not None))
    rows = np.flatnonzero(allowed & unit_stride & run_mask)
    copy, start = unroll(copies, rows)
    return Runs(copy, origin[copy] + start * itemsize[copy], inner[copy])


def make_steps(
    runs: Runs,
    group: IntArray,
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
    dtype: IntArray,
    packed: int | None,
    scratch: torch.Tensor,
) -> tuple[list[tuple[int, Step]], BoolArray]:
    """Steps for the runs that are worth one, as (first run, step) in order, and a mask (r,) of those runs.

    Runs go from side 0 to side 1. Those of a group lie one after the other on side `packed`, which is None if they do
    on neither. Only runs of one `group` (r,) may share a step. `dtype` (r,) numbers the pair in `dtypes`, the element
    types of both sides, which differ only if side 1 is packed. `scratch` has SCRATCH_BYTES.
    """
    in_step = np.zeros(len(runs.copy), dtype=bool)
    steps: list[tuple[int, Step]] = []
    sizes = np.array([[t.itemsize for t in pair] for pair in dtypes], dtype=np.int64).reshape(-1, 2)
    nbytes = runs.elements[:, None] * sizes[dtype]
    for low, high in _alike(runs, group, dtype, nbytes, packed):
        length, rows = int(nbytes[low].max()), np.arange(low, high)
        if length > SCRATCH_BYTES or high - low < _WORTH_A_CALL or not _fits(runs.address[rows], length):
            continue
        if packed is None:
            # Runs that pass through the scratch memory are copied twice; those of a stretch are not.
            for stretch, side in find_stretches(runs.address, rows, length):
                in_step[stretch] = True
                steps.append((low, _straight(runs.address[stretch], length, side)))
            rows = rows[~in_step[rows]]
            if length >= _TWICE_BYTES or len(rows) < _WORTH_A_CALL:
                continue
        in_step[rows] = True
        capacity = SCRATCH_BYTES // length
        for first in range(0, len(rows), capacity):
            address = runs.address[rows[first : first + capacity]]
            calls = _steps(address, nbytes[low].tolist(), dtypes[int(dtype[low])], packed, scratch)
            steps.extend((low, step) for step in calls)
    return steps, in_step


def _straight(address: IntArray, nbytes: int, even: int) -> Step:
    """One step for runs that lie at one distance on side `even`: nothing is copied twice."""
    count, first, distance = len(address), int(address[0, even]), int(address[1, even] - address[0, even])
    if even == 0:
        return _scatter(_items(first, count, nbytes, distance), address[:, 1])
    return _gather(address[:, 0], _rows(first, count, nbytes, distance))


def _alike(
    runs: Runs, group: IntArray, dtype: IntArray, nbytes: IntArray, packed: int | None
) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive runs of one group, type and length, without gaps on the packed side."""
    n = len(runs.copy)
    if not n:
        return
    differs = np.zeros(n - 1, dtype=bool)
    for column in (group, dtype, runs.elements):
        differs |= column[1:] != column[:-1]
    if packed is not None:
        differs |= np.diff(runs.address[:, packed]) != nbytes[:-1, packed]
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), n]
    yield from pairwise(edges)


def _steps(
    address: IntArray,
    nbytes: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    packed: int | None,
    scratch: torch.Tensor,
) -> list[Step]:
    """Steps for runs at `address` (r, 2), `nbytes` long on each side."""
    count, (reads, writes) = len(address), address.T
    buffer = scratch[: count * nbytes[0]].view(count, nbytes[0])
    if packed == 0:
        return [_scatter(_items(int(reads[0]), count, nbytes[0]), writes)]
    if packed is None:
        return [_gather(reads, buffer), _scatter(buffer.view(-1).numpy().view(f"V{nbytes[0]}"), writes)]
    rows = _rows(int(writes[0]), count, nbytes[1])
    if dtypes[0] == dtypes[1]:
        return [_gather(reads, rows)]
    return [_gather(reads, buffer), partial(rows.view(dtypes[1]).copy_, buffer.view(dtypes[0]))]


def _gather(reads: IntArray, target: torch.Tensor) -> Step:
    """Moves the runs at `reads` (r,) into the rows of `target` (r, n), all bytes."""
    low, span, index = _span(reads)
    window = torch.from_numpy(memory_at(low, (span, target.shape[1]), "|u1", (1, 1)))
    return partial(torch.index_select, window, 0, torch.from_numpy(index), out=target)


def _scatter(items: np.ndarray[Any, Any], writes: IntArray) -> Step:
    """Moves the runs `items` (r,) to the places `writes` (r,), by numpy: torch takes 6 us a row."""
    low, span, index = _span(writes)
    return partial(setitem, memory_at(low, (span,), items.dtype.str, (1,)), index, items)


def memory_at(
    address: int, shape: tuple[int, ...], item: str, strides: tuple[int, ...] | None = None
) -> np.ndarray[Any, Any]:
    """The memory at an address as an array, which does not keep it alive."""
    interface = {"data": (address, False), "shape": shape, "typestr": item, "strides": strides, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def gather_boxes(
    address: IntArray, size: list[int], stride: list[int], dtype: torch.dtype, into: torch.Tensor
) -> torch.Tensor | None:
    """Copies the boxes at n addresses of a CPU's memory into a tensor (n, *size); their strides count elements.

    `into` are bytes to copy to, at least as many as needed. Returns None if no window holds all boxes.
    """
    low, span, distance = _span(address)
    sizes, steps = _merged(size, stride)
    extent = sum((n - 1) * s for n, s in zip(sizes, steps, strict=True)) + 1
    if (distance % dtype.itemsize).any() or not _fits(address, max(extent, prod(sizes)) * dtype.itemsize):
        return None
    item = "|u1" if dtype.itemsize == 1 else f"<i{dtype.itemsize}"
    strides = tuple(s * dtype.itemsize for s in (1, *steps))
    window = torch.from_numpy(memory_at(low, (span // dtype.itemsize + 1, *sizes), item, strides))
    copy = into[: len(address) * prod(sizes) * dtype.itemsize].view(window.dtype).view(len(address), *sizes)
    torch.index_select(window, 0, torch.from_numpy(distance // dtype.itemsize), out=copy)
    return copy.view(dtype).view(len(address), *size)


def _merged(size: list[int], stride: list[int]) -> tuple[list[int], list[int]]:
    """Merges dimensions that continue each other: torch (2.13) selects ten times more slowly from several."""
    sizes, steps = [1], [1]
    for n, s in zip(size, stride, strict=True):
        if n == 1:
            continue
        if sizes == [1]:
            sizes, steps = [n], [s]
        elif steps[-1] == n * s:
            sizes[-1], steps[-1] = sizes[-1] * n, s
        else:
            sizes.append(n)
            steps.append(s)
    return sizes, steps


def _fits(address: IntArray, nbytes: int) -> bool:
    """True if a window over these addresses has fewer than 2^62 bytes, with every overlapping row counted."""
    return (int(address.max()) - int(address.min()) + 1) * nbytes < 1 << 62


def _span(address: IntArray) -> tuple[int, int, IntArray]:
    low = int(address.min())
    return low, int(address.max()) - low + 1, address - low


def _rows(address: int, count: int, nbytes: int, distance: int = 0) -> torch.Tensor:
    return torch.from_numpy(memory_at(address, (count, nbytes), "|u1", (distance or nbytes, 1)))


def _items(address: int, count: int, nbytes: int, distance: int = 0) -> np.ndarray[Any, Any]:
    return memory_at(address, (count,), f"|V{nbytes}", (distance or nbytes,))
