"""Proves of a plan's digest rows that they look at every element once; `operations` proves the rest of a plan."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from weightcast.transfer.boxes.algebra import overlaps
from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import any_column
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.dtypes import NAMES, dtype_name
from weightcast.transfer.layout.joined import JoinedPair, JoinedRanks
from weightcast.transfer.plan.operations import DigestRows, TransferPlan
from weightcast.transfer.plan.proof.tiling import (
    box_text,
    filled,
    outside,
    refuse_rows,
    region_rows,
    same_columns,
    spans,
    tiling_fault,
)

__all__ = ["check_digests"]


def check_digests(plan: TransferPlan, pair: JoinedPair) -> None:
    """Proves the digest rows of all sides. Raises PlanError naming tensor, side, rank, region and what is wrong."""
    _check_ranges(plan)
    proofs: dict[tuple[str, ...], DigestRows] = {}
    side_rows = [plan.digests.take(rows) for rows in spans(plan.digests.party, len(pair.sides))]
    for side, rows in zip(pair.instances, side_rows[1:], strict=True):
        twin = proofs.get(side.fingerprints)
        if not (twin and same_columns(rows, twin, DigestRows.__slots__[1:])):
            _Side(plan, side, rows).check_instance()
            proofs[side.fingerprints] = rows
    _Side(plan, pair.trainer, side_rows[0]).check_trainer(pair)


def _check_ranges(plan: TransferPlan) -> None:
    d = plan.digests
    faults = {
        "party": (d.party < 0) | (d.party >= len(plan.parties)),
        "tensor": (d.tensor < 0) | (d.tensor >= len(plan.tensors)),
        "dtype": (d.dtype < 0) | (d.dtype >= len(NAMES)),
        "size": any_column(d.size <= 0),
        "cell": d.cell < 0,
    }
    refuse_rows(d, "digest row", faults)


class _Side:
    """The digest rows of one side, under proof."""

    def __init__(self, plan: TransferPlan, side: JoinedRanks, rows: DigestRows) -> None:
        self.plan, self.side, self.rows = plan, side, rows
        self.row, valid = region_rows(side, rows.rank, rows.region)
        bad = outside(side, self.row, valid, (rows.tensor, rows.offset, rows.size))
        if bad.any():
            self._fail(int(bad.argmax()), "does not lie in that region")

    def _fail(self, at: int, what: str) -> NoReturn:
        rows = self.rows
        raise PlanError(
            f"tensor {self._name(int(rows.tensor[at]))!r}, {self.side} rank {int(rows.rank[at])} region "
            f"{int(rows.region[at])}: the digest of {box_text(rows.offset[at], rows.size[at])} {what}"
        )

    def _name(self, tensor: int) -> str:
        return self.plan.tensors.names[tensor]

    def check_instance(self) -> None:
        """Regions are tiled, equal cells are equal boxes, and the cells of a tensor tile it."""
        rows, side = self.rows, self.side
        bad = rows.dtype != side.dtype[rows.tensor]
        if bad.any():
            at = int(bad.argmax())
            self._fail(at, f"is in {dtype_name(int(rows.dtype[at]))}, which is not the dtype there")
        self._check_regions(np.arange(len(rows), dtype=np.int64), None)
        self._check_cells(self._distinct_cells(), side.holds)

    def _distinct_cells(self) -> IntArray:
        """The first row of each cell, proven to be the same box as the others of the cell."""
        rows, first = self.rows, self._first_of_cell()
        difference = (rows.tensor != rows.tensor[first]) | (rows.dtype != rows.dtype[first])
        difference |= any_column(rows.offset != np.take(rows.offset, first, axis=0))
        difference |= any_column(rows.size != np.take(rows.size, first, axis=0))
        if difference.any():
            at = int(difference.argmax())
            self._fail(at, f"has cell {int(rows.cell[at])}, which is another box on rank {int(rows.rank[first[at]])}")
        return np.flatnonzero(first == np.arange(len(rows)))

    def check_trainer(self, pair: JoinedPair) -> None:
        """Equal cells are equal boxes, and cells tile every tensor in each dtype in which an instance has it."""
        cell_rows = self._distinct_cells()
        demand = np.zeros((len(NAMES), len(self.plan.tensors)), dtype=np.bool_)
        for side in pair.instances:
            tensors = np.flatnonzero(side.holds)
            demand[side.dtype[tensors], tensors] = True
        row_counts = np.bincount(self.rows.dtype, minlength=len(NAMES))
        for dtype in np.flatnonzero(demand.any(axis=1) | (row_counts > 0)).tolist():
            self._check_cells(cell_rows[self.rows.dtype[cell_rows] == dtype], demand[dtype])
            self._check_regions(np.flatnonzero(self.rows.dtype == dtype), demand[dtype])

    def _check_regions(self, at: IntArray, wanted: BoolArray | None) -> None:
        """Rows `at` fill the regions of the wanted tensors, and overlap in none."""
        rows, side = self.rows, self.side
        offset, size = np.take(rows.offset, at, axis=0), np.take(rows.size, at, axis=0)
        overlap, gap = tiling_fault(side, self.row[at], offset, size, wanted)
        if overlap is not None:
            self._fail(int(at[overlap[1]]), f"overlaps that of {box_text(offset[overlap[0]], size[overlap[0]])}")
        if gap is not None:
            raise PlanError(
                f"tensor {self._name(int(side.tensor[gap]))!r}, {side} rank {int(side.rank[gap])} region "
                f"{int(side.region[gap])}: a part of it is in no digest"
            )

    def _first_of_cell(self) -> IntArray:
        """(rows,) the first row that has the cell number of each row."""
        cell = self.rows.cell
        if int(cell.max(initial=0)) > 4 * cell.shape[0]:
            cell = np.unique(cell, return_inverse=True)[1]
        first = np.empty(int(cell.max(initial=-1)) + 1, dtype=np.int64)
        # Written backwards, so that of several rows the first one stays.
        first[cell[::-1]] = np.arange(cell.shape[0] - 1, -1, -1, dtype=np.int64)
        return first[cell]

    def _check_cells(self, cells: IntArray, wanted: np.ndarray) -> None:
        """The rows `cells`, of one dtype a tensor, are disjoint in each tensor and cover each wanted one."""
        tensor = self.rows.tensor[cells]
        offset, size = np.take(self.rows.offset, cells, axis=0), np.take(self.rows.size, cells, axis=0)
        a, b = overlaps(tensor, offset, size)
        if a.size:
            first = int(cells[a[0]])
            self._fail(int(cells[b[0]]), f"overlaps that of {box_text(self.rows.offset[first], self.rows.size[first])}")
        gaps = np.flatnonzero(wanted & (filled(tensor, size, wanted.shape[0]) != self.plan.tensors.elements))
        if gaps.size:
            raise PlanError(f"tensor {self._name(int(gaps[0]))!r}: the digests of {self.side} do not cover it")
