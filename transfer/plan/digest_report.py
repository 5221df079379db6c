"""The report of a rank's digests in an update."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightcast.transfer.boxes.arrays import DigestArray, IntArray
from weightcast.transfer.plan.verification import ValueCounts

__all__ = ["DigestReport"]


@dataclass(frozen=True, slots=True)
class DigestReport:
    """Digests that one rank computed in an update, in columns.

    `instance` is None for a trainer rank. `cell` (k,) int64 are the cells of the plan's DigestRows, in the order of the
    rank's rows. `digest` (k,) uint64 are two residues each, see `weightcast.transfer.digest.residues`. `values` counts
    the values that are not finite, by row; only a trainer rank's first pass counts them.
    """

    instance: str | None
    rank: int
    cell: IntArray
    digest: DigestArray
    values: ValueCounts = field(default_factory=lambda: ValueCounts.of({}))

    def __len__(self) -> int:
        return int(self.cell.shape[0])
