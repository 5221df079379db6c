"""Proves of a finished plan that it writes every byte of every region once, from a rank that holds it.

For every instance:
- each region is tiled exactly once by sends, relays and copies: no gap, no overlap, nothing outside;
- the box of a send lies in the named region of a trainer rank, that of a copy or relay in what its rank itself
received;
- a rank receives no element of a logical tensor twice, so that it receives as many bytes as it needs and no more;
- the digest rows tile each region once, equal cells are equal boxes, and the cells of a tensor tile the tensor.
The trainer's digest cells tile each tensor once for every dtype in which some instance holds it.

None of this trusts the planner: it looks at the columns of the plan and at the tables alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from weightcast.transfer.columns import BoolArray, lex_sort, volumes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout import IntArray, RegionTable
from weightcast.transfer.plan import TRAINER, DigestRows, Kind, Operations, TransferPlan
from weightcast.transfer.regions import intersect, overlaps, uncovered
from weightcast.transfer.sides import UNKNOWN, Pair, Side, join_sides

__all__ = ["check_joined", "check_plan"]


def check_plan(
    plan: TransferPlan, trainer: Sequence[RegionTable], instances: Mapping[str, Sequence[RegionTable]]
) -> None:
    """Proves the plan for these tables. Raises PlanError naming tensor, instance, rank, region and what is wrong."""
    check_joined(plan, join_sides(trainer, instances))


def check_joined(plan: TransferPlan, pair: Pair) -> None:
    """check_plan for tables that are joined already."""
    _check_header(plan, pair)
    _check_ranges(plan)
    for index, side in enumerate(pair.instances):
        mine = np.flatnonzero(plan.operations.instance == index)
        _Instance(plan, pair, index, side, plan.operations.take(mine)).check()
        rows = plan.digests.take(np.flatnonzero(plan.digests.instance == index))
        _check_instance_digests(plan, side, rows)
    _check_trainer_digests(plan, pair)


def _check_header(plan: TransferPlan, pair: Pair) -> None:
    if plan.tensors.names != pair.tensors.names or not np.array_equal(plan.tensors.shape, pair.tensors.shape):
        raise PlanError("the plan's tensors are not those of the tables; make a new plan")
    if plan.instances != tuple(side.name for side in pair.instances):
        raise PlanError(
            f"the plan is for instances {list(plan.instances)}, not {[side.name for side in pair.instances]}"
        )
    fingerprints = (plan.trainer_fingerprints, *plan.instance_fingerprints)
    for planned, side in zip(fingerprints, (pair.trainer, *pair.instances), strict=True):
        if planned != side.fingerprints:
            raise PlanError(f"the plan was made for other tables of {side} than those given; make a new plan")


def _check_ranges(plan: TransferPlan) -> None:
    """Kinds, instances and tensors are in range, boxes are not empty."""
    o, d = plan.operations, plan.digests
    instances, tensors = len(plan.instances), len(plan.tensors)
    faults = {
        "kind": (o.kind < Kind.SEND) | (o.kind > Kind.RELAY),
        "instance": (o.instance < 0) | (o.instance >= instances),
        "tensor": (o.tensor < 0) | (o.tensor >= tensors),
        "src_instance": np.where(
            o.kind == Kind.SEND, o.src_instance != TRAINER, (o.src_instance < 0) | (o.src_instance >= instances)
        ),
        "size": (o.size <= 0).any(axis=1),
    }
    for name, bad in faults.items():
        if bad.any():
            row = int(bad.argmax())
            raise PlanError(f"operation {row} has {name} {getattr(o, name)[row].tolist()}, which is out of range")
    bad = (d.instance < TRAINER) | (d.instance >= instances) | (d.tensor < 0) | (d.tensor >= tensors) | (d.cell < 0)
    bad |= (d.size <= 0).any(axis=1)
    if bad.any():
        row = int(bad.argmax())
        raise PlanError(
            f"digest row {row} has instance {int(d.instance[row])}, tensor row {int(d.tensor[row])}, cell "
            f"{int(d.cell[row])} and size {d.size[row].tolist()}, of which one is out of range"
        )


def _rows_of(side: Side, rank: IntArray, region: IntArray) -> tuple[IntArray, BoolArray]:
    """Row of each (rank, region) of a side, and which of them exist; row 0 for those that do not."""
    known = (rank >= 0) & (rank < side.world) & (region >= 0)
    safe = np.where(known, rank, 0)
    row = side.first[safe] + region
    known &= row < side.first[safe + 1]
    return np.where(known, row, 0), known


def _not_inside(side: Side, row: IntArray, known: BoolArray, boxes: tuple[IntArray, IntArray, IntArray]) -> BoolArray:
    """Which boxes (tensor, offset, size) are not inside the region of their row, or are of another tensor."""
    tensor, offset, size = boxes
    if not len(side):
        return np.ones(row.shape[0], dtype=np.bool_)
    low = offset - np.take(side.offset, row, axis=0)
    high = low + size - np.take(side.size, row, axis=0)
    bad: BoolArray = ~known | (side.tensor[row] != tensor)
    for dim in range(low.shape[1]):
        bad |= (low[:, dim] < 0) | (high[:, dim] > 0)
    return bad


def _untiled(side: Side, row: IntArray, offset: IntArray, size: IntArray) -> tuple[tuple[int, int] | None, int | None]:
    """Two boxes that overlap in one region of the side, if there are; else a region that is not filled, if there is."""
    writes = np.bincount(row, minlength=len(side))
    shared = np.flatnonzero(writes[row] > 1)
    a, b = overlaps(row[shared], np.take(offset, shared, axis=0), np.take(size, shared, axis=0))
    if a.size:
        return (int(shared[a[0]]), int(shared[b[0]])), None
    short = uncovered(row, offset, size, side.size)
    return None, int(short[0]) if short.size else None


def _box(offset: IntArray, size: IntArray) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset.tolist(), size.tolist(), strict=True)) + "]"


class _Instance:
    """The operations of one instance, under proof."""

    def __init__(self, plan: TransferPlan, pair: Pair, index: int, side: Side, operations: Operations) -> None:
        self.plan, self.pair, self.index, self.side, self.o = plan, pair, index, side, operations
        self.row, self.known = _rows_of(side, operations.dst_rank, operations.dst_region)

    def check(self) -> None:
        self._destinations()
        self._sources()
        self._tiling()
        self._copies_of_received()
        self._received_once()

    def _fail(self, operation: int, what: str) -> NoReturn:
        o = self.o
        raise PlanError(
            f"tensor {self._name(int(o.tensor[operation]))!r}, {self.side.name} rank {int(o.dst_rank[operation])} "
            f"region {int(o.dst_region[operation])}: the {self._kind(operation)} of "
            f"{_box(o.offset[operation], o.size[operation])} from {self._source(operation)} {what}"
        )

    def _name(self, tensor: int) -> str:
        return self.plan.tensors.names[tensor]

    def _kind(self, operation: int) -> str:
        return Kind(int(self.o.kind[operation])).name.lower()

    def _source(self, operation: int) -> str:
        o = self.o
        index = int(o.src_instance[operation])
        where = "trainer" if index == TRAINER else self.plan.instances[index]
        return f"{where} rank {int(o.src_rank[operation])} region {int(o.src_region[operation])}"

    def _destinations(self) -> None:
        o = self.o
        bad = _not_inside(self.side, self.row, self.known, (o.tensor, o.offset, o.size))
        if bad.any():
            self._fail(int(bad.argmax()), "does not lie in the region it writes")

    def _sources(self) -> None:
        """Sends come from a trainer region that has the box, copies and relays from such a region of an instance."""
        o = self.o
        stray = (o.kind == Kind.COPY) & ((o.src_instance != self.index) | (o.src_rank != o.dst_rank))
        if stray.any():
            self._fail(int(stray.argmax()), "has its source on another rank")
        for index in np.unique(o.src_instance).tolist():
            side = self.pair.trainer if index == TRAINER else self.pair.instances[index]
            mine = np.flatnonzero(o.src_instance == index)
            row, known = _rows_of(side, o.src_rank[mine], o.src_region[mine])
            bad = _not_inside(
                side, row, known, (o.tensor[mine], np.take(o.offset, mine, axis=0), np.take(o.size, mine, axis=0))
            )
            if bad.any():
                self._fail(int(mine[bad.argmax()]), "takes what that region does not hold")

    def _tiling(self) -> None:
        twice, short = _untiled(self.side, self.row, self.o.offset, self.o.size)
        if twice is not None:
            first, second = twice
            box = _box(self.o.offset[first], self.o.size[first])
            self._fail(second, f"overlaps the {self._kind(first)} of {box} from {self._source(first)}")
        if short is not None:
            side = self.side
            filled = int(volumes(self.o.size)[self.row == short].sum())
            raise PlanError(
                f"tensor {self._name(int(side.tensor[short]))!r}, {side.name} rank {int(side.rank[short])} region "
                f"{int(side.region[short])}, box {_box(side.offset[short], side.size[short])}: only {filled} of "
                f"{int(side.size[short].prod())} elements are written"
            )

    def _copies_of_received(self) -> None:
        """What a copy or relay reads was sent to that rank, not made by another copy: no copy waits for a copy."""
        o = self.o
        copies = np.flatnonzero(o.kind == Kind.COPY)
        if copies.size:
            source = _rows_of(self.side, o.src_rank[copies], o.src_region[copies])[0]
            boxes = (np.take(o.offset, copies, axis=0), np.take(o.size, copies, axis=0))
            reader = intersect((source, *boxes), (self.row[copies], *boxes))[0]
            if reader.size:
                self._fail(int(copies[reader[0]]), "reads what that region does not receive but copies itself")
        if (o.kind == Kind.RELAY).any():
            self._relays_of_sent()

    def _relays_of_sent(self) -> None:
        everything = self.plan.operations
        for index in np.unique(self.o.src_instance[self.o.kind == Kind.RELAY]).tolist():
            side = self.pair.instances[index]
            relays = np.flatnonzero((self.o.kind == Kind.RELAY) & (self.o.src_instance == index))
            unsent = everything.take(np.flatnonzero((everything.instance == index) & (everything.kind != Kind.SEND)))
            source = _rows_of(side, self.o.src_rank[relays], self.o.src_region[relays])[0]
            target = _rows_of(side, unsent.dst_rank, unsent.dst_region)[0]
            reader = intersect(
                (source, np.take(self.o.offset, relays, axis=0), np.take(self.o.size, relays, axis=0)),
                (target, unsent.offset, unsent.size),
            )[0]
            if reader.size:
                self._fail(int(relays[reader[0]]), "passes on what the trainer did not send there")

    def _received_once(self) -> None:
        o = self.o
        over = np.flatnonzero(o.kind != Kind.COPY)
        key = o.dst_rank[over] * len(self.plan.tensors) + o.tensor[over]
        a, b = overlaps(key, np.take(o.offset, over, axis=0), np.take(o.size, over, axis=0))
        if a.size:
            first = int(over[a[0]])
            self._fail(
                int(over[b[0]]),
                f"sends what the rank receives in region {int(o.dst_region[first])} already: copy it there",
            )


def _digest_fault(plan: TransferPlan, side: Side, rows: DigestRows, at: int, what: str) -> NoReturn:
    raise PlanError(
        f"tensor {plan.tensors.names[int(rows.tensor[at])]!r}, {side} rank {int(rows.rank[at])} region "
        f"{int(rows.region[at])}: the digest of {_box(rows.offset[at], rows.size[at])} {what}"
    )


def _check_digest_boxes(plan: TransferPlan, side: Side, rows: DigestRows) -> IntArray:
    """Every row lies in its region, and equal cells are equal boxes. Gives the region row of each digest row."""
    row, known = _rows_of(side, rows.rank, rows.region)
    bad = _not_inside(side, row, known, (rows.tensor, rows.offset, rows.size))
    if bad.any():
        _digest_fault(plan, side, rows, int(bad.argmax()), "does not lie in that region")
    return row


def _check_instance_digests(plan: TransferPlan, side: Side, rows: DigestRows) -> None:
    row = _check_digest_boxes(plan, side, rows)
    bad = rows.dtype != side.dtype[rows.tensor]
    if bad.any():
        _digest_fault(
            plan, side, rows, int(bad.argmax()), f"is in dtype code {int(rows.dtype[bad.argmax()])}, not the region's"
        )
    twice, short = _untiled(side, row, rows.offset, rows.size)
    if twice is not None:
        _digest_fault(plan, side, rows, twice[1], "overlaps another of the same region")
    if short is not None:
        raise PlanError(
            f"tensor {plan.tensors.names[int(side.tensor[short])]!r}, {side.name} rank {int(side.rank[short])} region "
            f"{int(side.region[short])}: a part of it is in no digest"
        )
    order, begins = lex_sort([rows.cell])
    sorted_rows = rows.take(order)
    differs = (sorted_rows.tensor[1:] != sorted_rows.tensor[:-1]) | (
        sorted_rows.offset[1:] != sorted_rows.offset[:-1]
    ).any(axis=1)
    differs |= (sorted_rows.size[1:] != sorted_rows.size[:-1]).any(axis=1)
    differs &= ~begins[1:]
    if differs.any():
        _digest_fault(plan, side, sorted_rows, int(differs.argmax()) + 1, "has the cell number of another box")
    _check_cells_tile(plan, side, sorted_rows.take(np.flatnonzero(begins)))


def _check_trainer_digests(plan: TransferPlan, pair: Pair) -> None:
    rows = plan.digests.take(np.flatnonzero(plan.digests.instance == TRAINER))
    _check_digest_boxes(plan, pair.trainer, rows)
    order, begins = lex_sort([rows.cell])
    if not begins.all():
        _digest_fault(
            plan, pair.trainer, rows, int(order[np.flatnonzero(~begins)[0]]), "has the cell number of another row"
        )
    _check_cells_tile(plan, pair.trainer, rows)
    made = set(np.unique(rows.dtype * len(plan.tensors) + rows.tensor).tolist())
    for side in pair.instances:
        held = np.unique(side.tensor[(side.size > 0).all(axis=1)])
        for key in np.flatnonzero(~np.isin(side.dtype[held] * len(plan.tensors) + held, list(made)))[:1].tolist():
            raise PlanError(
                f"tensor {plan.tensors.names[int(held[key])]!r}: the trainer has no digest in the dtype of {side.name}"
            )
    if (rows.dtype == UNKNOWN).any():
        _digest_fault(plan, pair.trainer, rows, int((rows.dtype == UNKNOWN).argmax()), "has no dtype")


def _check_cells_tile(plan: TransferPlan, side: Side, cells: DigestRows) -> None:
    """Of rows with different cell numbers: those of one tensor and dtype tile the tensor."""
    tensors = len(plan.tensors)
    key = cells.dtype * tensors + cells.tensor
    a, _ = overlaps(key, cells.offset, cells.size)
    if a.size:
        _digest_fault(plan, side, cells, int(a[0]), "overlaps that of another cell of the tensor")
    keys, dense = np.unique(key, return_inverse=True)
    short = uncovered(dense, cells.offset, cells.size, np.take(plan.tensors.shape, keys % tensors, axis=0))
    if short.size:
        raise PlanError(
            f"tensor {plan.tensors.names[int(keys[short[0]] % tensors)]!r}: the digests of {side} do not cover it"
        )
