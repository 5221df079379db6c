"""The digests that a rank reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightcast.transfer.boxes.arrays import DigestArray, IntArray
from weightcast.transfer.plan.verification import ValueCounts

__all__ = ["DigestReport"]


@dataclass(frozen=True, slots=True)
class DigestReport:
    """Digests that one rank computed in an update, in columns.

    `instance` is None for a trainer rank. `cell` (k,) int64 are the cells of the plan's DigestRows, in the order of the
    rank's rows; `digest` (k,) uint64 are two residues each, see residues.py. `values` counts those of the rows that are
    not finite, where they were counted: in a trainer rank's first pass.
    """

    instance: str | None
    rank: int
    cell: IntArray
    digest: DigestArray
    values: ValueCounts = field(default_factory=lambda: ValueCounts.of({}))

    def __len__(self) -> int:
        return int(self.cell.shape[0])
