"""Runs of consecutive indices that a rank of a device mesh holds of one dimension. Pure; no torch.

A DTensor dimension may be split over several mesh dimensions. `Shard` cuts the remaining indices into ceil chunks.
`_StridedShard` with split factor s first cuts them into s pieces, then each piece into chunks, and joins the chunks of
one rank. So a rank can hold several runs (torch 2.13, torch/distributed/tensor/placement_types.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Cut", "IndexRun", "mesh_runs", "possible_runs", "total"]


class IndexRun(NamedTuple):
    """Global indices start..stop-1 of a dimension."""

    start: int
    stop: int


class Cut(NamedTuple):
    """One mesh dimension that splits the dimension over its `ranks`; this rank is number `place` of them.

    `split` is the split factor of a `_StridedShard`, 1 for a `Shard`.
    """

    ranks: int
    place: int
    split: int = 1


Runs = tuple[IndexRun, ...]


def total(runs: Sequence[IndexRun]) -> int:
    """Number of indices in the runs."""
    return sum(run.stop - run.start for run in runs)


def mesh_runs(size: int, cuts: Sequence[Cut]) -> Runs:
    """The runs that remain of 0..size-1 when the cuts are made in this order. Empty for a rank that holds nothing.

    >>> mesh_runs(12, [Cut(2, 0, split=3), Cut(2, 0)])
    (IndexRun(start=0, stop=2), IndexRun(start=4, stop=5))
    """
    runs: Runs = (IndexRun(0, size),) if size else ()
    for cut in cuts:
        piece = _ceil(total(runs), cut.split)
        chunks = [_chunk(_slice(runs, piece * j, piece * (j + 1)), cut) for j in range(cut.split)]
        runs = _join(run for part in chunks for run in part)
    return runs


def possible_runs(size: int, cuts: Sequence[Cut]) -> list[Runs]:
    """Every reading of placements given from the first mesh dimension to the last; distinct, torch's own first.

    Where a split factor is the product of later cuts, the placements say that those were made first. FSDP2 really cuts
    in that order, while DTensor evaluates the strided placement from left to right. Both agree for sizes that divide,
    but not for all others (7 rows over 3 x 2 ranks). There only the size of the local tensor tells who made it.
    """
    readings = [mesh_runs(size, cuts)]
    order = _order_of_cuts(cuts)
    if order is not None:
        runs = mesh_runs(size, [Cut(cut.ranks, cut.place) for cut in order])
        if runs not in readings:
            readings.append(runs)
    return readings


def _order_of_cuts(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The order in which plain cuts give these placements; None where a split factor is no product of later cuts."""
    order: list[Cut] = []
    for cut in reversed(cuts):
        product, position = 1, 0
        while product < cut.split and position < len(order):
            product *= order[position].ranks
            position += 1
        if product != cut.split:
            return None
        order.insert(position, cut)
    return order


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts)


def _chunk(runs: Runs, cut: Cut) -> Runs:
    length = _ceil(total(runs), cut.ranks)
    return _slice(runs, length * cut.place, length * (cut.place + 1))


def _slice(runs: Sequence[IndexRun], begin: int, end: int) -> Runs:
    """Positions begin..end-1 of the concatenated runs."""
    pieces, position = [], 0
    for start, stop in runs:
        low, high = max(begin - position, 0), min(end - position, stop - start)
        if low < high:
            pieces.append(IndexRun(start + low, start + high))
        position += stop - start
    return tuple(pieces)


def _join(runs: Iterable[IndexRun]) -> Runs:
    joined: list[IndexRun] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = IndexRun(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)
