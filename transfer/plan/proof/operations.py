"""Proves of a finished plan that it writes every byte of every region once, from a rank that holds it.

For every instance:
- each region is tiled exactly once by sends, relays and copies: no gap, no overlap, nothing outside;
- the box of a send lies in the named region of a trainer rank;
- the box of a copy or relay lies in what its source rank itself received;
- a rank receives no element of a logical tensor twice, so that it receives as many bytes as it needs and no more;
- the digest rows tile each region once, equal cells are equal boxes, and the cells of a tensor tile the tensor.
The trainer's digest cells tile each tensor once for every dtype in which some instance holds it.

None of this trusts the planner: it looks at the columns of the plan and at the tables alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from weightcast.transfer.boxes.algebra import intersect, overlaps
from weightcast.transfer.boxes.columns import any_column, volumes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.joined import JoinedPair, JoinedRanks, Ranks, join_pair
from weightcast.transfer.plan.operations import Kind, Operations, TransferPlan
from weightcast.transfer.plan.proof.digests import check_digests
from weightcast.transfer.plan.proof.relays import check_relays
from weightcast.transfer.plan.proof.tiling import (
    box_text,
    outside,
    refuse_rows,
    region_rows,
    same_columns,
    spans,
    tiling_fault,
)

__all__ = ["check_joined", "check_plan"]


def check_plan(plan: TransferPlan, trainer: Ranks, instances: Mapping[str, Ranks]) -> None:
    """Proves the plan for these tables. Raises PlanError naming tensor, instance, rank, region and what is wrong."""
    check_joined(plan, join_pair(trainer, instances))


def check_joined(plan: TransferPlan, pair: JoinedPair) -> None:
    """Proves a plan like `check_plan`, for tables that are joined already."""
    _check_header(plan, pair)
    _check_ranges(plan)
    proofs: dict[tuple[str, ...], Operations] = {}
    spans_of_parties = spans(plan.operations.dst_party, len(pair.sides))
    for index, (side, rows) in enumerate(zip(pair.instances, spans_of_parties[1:], strict=True), start=1):
        proof = _Instance(plan, pair, index, side, plan.operations.take(rows))
        # What was proved of one instance holds for all with the same tables and the same rows.
        if side.fingerprints in proofs and proof.is_like(proofs[side.fingerprints]):
            proof.check_sources()
        else:
            proof.check()
            proofs[side.fingerprints] = proof.o
    check_relays(plan, pair)
    check_digests(plan, pair)


def _check_header(plan: TransferPlan, pair: JoinedPair) -> None:
    for name, rows in (("operations", plan.operations), ("digests", plan.digests)):
        for column in rows.__slots__:
            shape = (len(rows), plan.tensors.width) if column in ("offset", "size") else (len(rows),)
            if getattr(rows, column).shape != shape:
                raise PlanError(f"column {column} of the {name} has shape {getattr(rows, column).shape}, not {shape}")
    equal_tensors = plan.tensors is pair.tensors or (
        plan.tensors.names == pair.tensors.names and np.array_equal(plan.tensors.shape, pair.tensors.shape)
    )
    if not equal_tensors:
        raise PlanError("the plan's tensors are not those of the tables; make a new plan")
    names, side_names = ([side.name for side in sides] for sides in (plan.parties, pair.sides))
    if names != side_names:
        raise PlanError(f"the plan is for instances {names[1:]}, not {side_names[1:]}")
    for party, side in zip(plan.parties, pair.sides, strict=True):
        if party.fingerprints != side.fingerprints:
            raise PlanError(f"the plan was made for other tables of {side} than those given; make a new plan")
        fault = np.flatnonzero(party.dtype != side.dtype)
        if fault.size:
            raise PlanError(f"tensor {plan.tensors.names[int(fault[0])]!r}: the plan has another dtype in {side}")


def _check_ranges(plan: TransferPlan) -> None:
    """Kinds, instances and tensors are in range, boxes are not empty."""
    o = plan.operations
    parties, tensors = len(plan.parties), len(plan.tensors)
    faults = {
        "kind": (o.kind < Kind.SEND) | (o.kind > Kind.RELAY),
        "dst_party": (o.dst_party < 1) | (o.dst_party >= parties),
        "tensor": (o.tensor < 0) | (o.tensor >= tensors),
        "src_party": np.where(o.kind == Kind.SEND, o.src_party != 0, (o.src_party < 1) | (o.src_party >= parties)),
        "size": any_column(o.size <= 0),
    }
    refuse_rows(o, "operation", faults)


class _Instance:
    """The operations of one instance, under proof."""

    def __init__(
        self, plan: TransferPlan, pair: JoinedPair, index: int, side: JoinedRanks, operations: Operations
    ) -> None:
        self.plan, self.pair, self.index, self.side, self.o = plan, pair, index, side, operations

    def is_like(self, other: Operations) -> bool:
        """True if all but the sources of sends is as in another instance, and there are no relays."""
        if not same_columns(self.o, other, ("kind", "tensor", "dst_rank", "dst_region", "offset", "size")):
            return False
        inner_rows = np.flatnonzero(self.o.kind != Kind.SEND)
        return same_columns(self.o.take(inner_rows), other.take(inner_rows), ("src_rank", "src_region")) and not bool(
            (self.o.kind == Kind.RELAY).any()
        )

    def check(self) -> None:
        self.row, self.known = region_rows(self.side, self.o.dst_rank, self.o.dst_region)
        self._destinations()
        self.check_sources()
        self._tiling()
        self._copies_of_received()
        self._received_once()

    def _fail(self, operation: int, what: str) -> NoReturn:
        o = self.o
        raise PlanError(
            f"tensor {self._name(int(o.tensor[operation]))!r}, {self.side.name} rank {int(o.dst_rank[operation])} "
            f"region {int(o.dst_region[operation])}: the {self._kind(operation)} of "
            f"{box_text(o.offset[operation], o.size[operation])} from {self._source(operation)} {what}"
        )

    def _name(self, tensor: int) -> str:
        return self.plan.tensors.names[tensor]

    def _kind(self, operation: int) -> str:
        return Kind(int(self.o.kind[operation])).name.lower()

    def _source(self, operation: int) -> str:
        o = self.o
        side = self.plan.parties[int(o.src_party[operation])]
        return f"{side} rank {int(o.src_rank[operation])} region {int(o.src_region[operation])}"

    def _destinations(self) -> None:
        o = self.o
        bad = outside(self.side, self.row, self.known, (o.tensor, o.offset, o.size))
        if bad.any():
            self._fail(int(bad.argmax()), "does not lie in the region it writes")

    def check_sources(self) -> None:
        """Sends come from a trainer region that has the box, copies and relays from such a region of an instance."""
        o = self.o
        strays = (o.kind == Kind.COPY) & ((o.src_party != self.index) | (o.src_rank != o.dst_rank))
        if strays.any():
            self._fail(int(strays.argmax()), "has its source on another rank")
        for index in np.flatnonzero(np.bincount(o.src_party, minlength=1)).tolist():
            side = self.pair.sides[index]
            rows = np.flatnonzero(o.src_party == index)
            operations = o if rows.shape[0] == len(o) else o.take(rows)
            row, valid = region_rows(side, operations.src_rank, operations.src_region)
            bad = outside(side, row, valid, (operations.tensor, operations.offset, operations.size))
            if bad.any():
                self._fail(int(rows[bad.argmax()]), "takes what that region does not hold")

    def _tiling(self) -> None:
        overlap, gap = tiling_fault(self.side, self.row, self.o.offset, self.o.size)
        if overlap is not None:
            first, second = overlap
            box = box_text(self.o.offset[first], self.o.size[first])
            self._fail(second, f"overlaps the {self._kind(first)} of {box} from {self._source(first)}")
        if gap is not None:
            side = self.side
            filled = int(volumes(self.o.size)[self.row == gap].sum())
            raise PlanError(
                f"tensor {self._name(int(side.tensor[gap]))!r}, {side.name} rank {int(side.rank[gap])} region "
                f"{int(side.region[gap])}, box {box_text(side.offset[gap], side.size[gap])}: only {filled} of "
                f"{int(side.size[gap].prod())} elements are written"
            )

    def _copies_of_received(self) -> None:
        """Copies read what their rank received, not what another copy wrote: no copy waits for a copy."""
        o = self.o
        copies = np.flatnonzero(o.kind == Kind.COPY)
        if copies.size:
            source = region_rows(self.side, o.src_rank[copies], o.src_region[copies])[0]
            boxes = (np.take(o.offset, copies, axis=0), np.take(o.size, copies, axis=0))
            reader = intersect((source, *boxes), (self.row[copies], *boxes))[0]
            if reader.size:
                self._fail(int(copies[reader[0]]), "reads what that region does not receive but copies itself")

    def _received_once(self) -> None:
        o = self.o
        arrivals = np.flatnonzero(o.kind != Kind.COPY)
        key = o.dst_rank[arrivals] * len(self.plan.tensors) + o.tensor[arrivals]
        a, b = overlaps(key, np.take(o.offset, arrivals, axis=0), np.take(o.size, arrivals, axis=0))
        if a.size:
            first = int(arrivals[a[0]])
            self._fail(
                int(arrivals[b[0]]),
                f"sends what the rank receives in region {int(o.dst_region[first])} already: copy it there",
            )
