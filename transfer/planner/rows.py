"""Rows of a plan, from what an instance receives (`receives`) and where it comes from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weightcast.transfer.layout.joined import JoinedRanks
from weightcast.transfer.plan.operations import Kind, Operations, join_rows
from weightcast.transfer.planner.receives import Receives, plan_order
from weightcast.transfer.planner.routes import Routes

__all__ = ["instance_rows"]


def instance_rows(index: int, side: JoinedRanks, receives: Receives, routes: Routes, first: int) -> Operations:
    """Rows of an instance that receives boxes, whole or in parts, from trainer ranks or relays, with copies.

    The instance's sends are the needs from `first` on.
    """
    rows = _rows(index, side, receives)
    sends = receives.sends
    if routes.need.shape == sends.shape and (routes.kind == Kind.SEND).all():  # whole boxes, in the order of the plan
        rows.src_party[sends] = 0
        rows.src_rank[sends], rows.src_region[sends] = routes.src_rank, routes.src_region
        return rows
    arrivals = replace(
        rows.take(sends[routes.need - first]),
        kind=routes.kind,
        src_party=routes.src_party,
        src_rank=routes.src_rank,
        src_region=routes.src_region,
        offset=routes.offset,
        size=routes.size,
    )
    o = join_rows(Operations, [arrivals, rows.take(receives.kind == Kind.COPY)])
    return o.take(plan_order(o.dst_rank, o.kind, o.tensor, o.offset, o.dst_region))


def _rows(index: int, side: JoinedRanks, receives: Receives) -> Operations:
    """All rows of an instance, with the rank that they write as their source."""
    dst_rank = side.rank[receives.row]
    party = np.full(dst_rank.shape[0], index, dtype=np.int64)
    return Operations(
        kind=receives.kind,
        tensor=receives.tensor,
        src_party=party.copy(),
        src_rank=dst_rank.copy(),
        src_region=side.region[receives.source],
        dst_party=party,
        dst_rank=dst_rank,
        dst_region=side.region[receives.row],
        offset=receives.offset,
        size=receives.size,
    )
