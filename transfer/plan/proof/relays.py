"""Proves that every relay of a plan passes on what its rank has received by then, in a few passes over all relays.

It is called when the operations of every instance are proved: they write and read inside regions, and tile every region
once. Then what is written of a relay's box in its source region is all of it.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from weightcast.transfer.boxes.algebra import intersect
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import ranges
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.joined import JoinedPair
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.proof.tiling import box_text, region_rows

__all__ = ["check_relays"]


def check_relays(plan: TransferPlan, pair: JoinedPair) -> None:
    """Raises PlanError for a relay of what its region copies itself, and for relays that wait for each other."""
    o = plan.operations
    relays = np.flatnonzero(o.kind == Kind.RELAY)
    if not relays.size:
        return
    source = _region_number(pair, o.src_party[relays], o.src_rank[relays], o.src_region[relays])
    target = _region_number(pair, o.dst_party, o.dst_rank, o.dst_region)
    writers = np.flatnonzero(np.isin(target, source))
    reader, writer, _, _ = intersect(
        (source, np.take(o.offset, relays, axis=0), np.take(o.size, relays, axis=0)),
        (target[writers], np.take(o.offset, writers, axis=0), np.take(o.size, writers, axis=0)),
    )
    writer = writers[writer]
    copy_reads = np.flatnonzero(o.kind[writer] == Kind.COPY)
    if copy_reads.size:
        _fail(plan, int(relays[reader[copy_reads[0]]]), "passes on what that region does not receive but copies itself")
    relay_reads = np.flatnonzero(o.kind[writer] == Kind.RELAY)
    stuck_relays = _never_ready(reader[relay_reads], np.searchsorted(relays, writer[relay_reads]), relays.shape[0])
    if stuck_relays.size:
        _fail(plan, int(relays[stuck_relays[0]]), "waits for a relay that waits for it")


def _region_number(pair: JoinedPair, party: IntArray, rank: IntArray, region: IntArray) -> IntArray:
    """(n,) number of each (party, rank, region), counted over the regions of all parties."""
    number = np.empty(party.shape[0], dtype=np.int64)
    first = 0
    for index, side in enumerate(pair.sides):
        rows = np.flatnonzero(party == index)
        number[rows] = first + region_rows(side, rank[rows], region[rows])[0]
        first += len(side)
    return number


def _never_ready(waiting: IntArray, awaited: IntArray, count: int) -> IntArray:
    """Relays that never get their turn, ascending, of `count` where `waiting[i]` needs `awaited[i]` first."""
    pending = np.bincount(waiting, minlength=count)
    order = np.argsort(awaited, kind="stable")
    start = np.searchsorted(awaited[order], np.arange(count + 1))
    ready = np.flatnonzero(pending == 0)
    # Each pass looks only at what waits for the relays that have just become ready.
    while ready.size:
        successors = waiting[order[ranges(start[ready], start[ready + 1] - start[ready])]]
        np.subtract.at(pending, successors, 1)
        ready = np.unique(successors[pending[successors] == 0])
    return np.flatnonzero(pending > 0)


def _fail(plan: TransferPlan, row: int, what: str) -> NoReturn:
    o = plan.operations
    raise PlanError(
        f"tensor {plan.tensors.names[int(o.tensor[row])]!r}, {plan.parties[int(o.dst_party[row])]} rank "
        f"{int(o.dst_rank[row])} region {int(o.dst_region[row])}: the relay of "
        f"{box_text(o.offset[row], o.size[row])} from {plan.parties[int(o.src_party[row])]} rank "
        f"{int(o.src_rank[row])} region {int(o.src_region[row])} {what}"
    )
