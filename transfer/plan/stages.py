"""Stages of a plan with relays: in each stage a rank passes on what it received in the ones before.

A box that has gone through h ranks cannot move before it has reached the last of them. The tensors of a plan are
divided into waves of about equal bytes. Hop h of wave w moves in stage w + h. So while the trainer sends one wave, the
ranks pass on the waves before. Both ends of a pair have the stage from the plan, because neither could work it out from
its own operations. Without relays there is one stage.
"""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.algebra import intersect
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import ranges, volumes
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.plan.operations import Kind, TransferPlan

__all__ = ["hops", "stages"]

_WAVE_BYTES = 64 << 20
"""A rank receives about so much in a wave: less would leave links idle between stages."""
_MOST_WAVES = 32


def hops(plan: TransferPlan) -> IntArray:
    """(m,) hops that the box of each operation has made on arrival: 1 for sends, 0 for copies."""
    o = plan.operations
    depth = np.where(o.kind == Kind.SEND, 1, 0)
    relays = np.flatnonzero(o.kind == Kind.RELAY)
    if not relays.size:
        return depth
    regions = int(max(o.dst_region.max(), o.src_region.max())) + 1
    ranks = max(party.world for party in plan.instances)
    target_region = (o.dst_party * ranks + o.dst_rank) * regions + o.dst_region
    source_region = (o.src_party * ranks + o.src_rank) * regions + o.src_region
    writers = np.flatnonzero(np.isin(target_region, source_region[relays]) & (o.kind != Kind.COPY))
    writer, reader, _, _ = intersect(
        (target_region[writers], np.take(o.offset, writers, axis=0), np.take(o.size, writers, axis=0)),
        (source_region[relays], np.take(o.offset, relays, axis=0), np.take(o.size, relays, axis=0)),
    )
    writer, reader = writers[writer], relays[reader]
    order = np.argsort(writer, kind="stable")
    start = np.searchsorted(writer[order], np.arange(len(o) + 1))
    frontier = np.flatnonzero(depth == 1)
    # Each pass follows only the relays of what the last pass reached.
    while frontier.size:
        count = start[frontier + 1] - start[frontier]
        successors = reader[order[ranges(start[frontier], count)]]
        np.maximum.at(depth, successors, np.repeat(depth[frontier], count) + 1)
        frontier = np.unique(successors)
    return depth


def stages(plan: TransferPlan) -> tuple[IntArray, IntArray]:
    """(m,) the stage in which each operation moves, and (P,) the number of stages of each party."""
    o = plan.operations
    counts = np.ones(len(plan.parties), dtype=np.int64)
    stage = np.zeros(len(o), dtype=np.int64)
    depth = hops(plan)
    for index in np.unique(o.dst_party[o.kind == Kind.RELAY]).tolist():
        rows = np.flatnonzero((o.dst_party == index) & (o.kind != Kind.COPY))
        nbytes = volumes(o.size[rows]) * ITEMSIZE[plan.parties[index].dtype[o.tensor[rows]]]
        peak_bytes = int(np.bincount(o.dst_rank[rows], weights=nbytes).max())
        waves = min(max(peak_bytes // _WAVE_BYTES, 1), _MOST_WAVES)
        tensor_bytes = np.bincount(o.tensor[rows], weights=nbytes, minlength=len(plan.tensors))
        start_bytes = np.cumsum(tensor_bytes) - tensor_bytes
        wave = (start_bytes * waves / max(tensor_bytes.sum(), 1.0)).astype(np.int64)
        stage[rows] = wave[o.tensor[rows]] + depth[rows] - 1
        counts[index] = stage[rows].max(initial=0) + 1
    return stage, counts
