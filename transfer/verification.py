"""How much of an update is verified: every element, a sample of the rows, or nothing.

A sample is one row in SAMPLE_STEP of every region, the same rows on both sides, and other ones in the next version: so
that many versions in a row cover everything. Rows run along the last dimension but one, so that every expert and every
replica has rows in every sample. What a sample cannot miss is a slot that was not written; what it can miss is a single
wrong element.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from weightcast.transfer.layout import IntArray

__all__ = ["SAMPLE_STEP", "Sample", "Verify"]

SAMPLE_STEP = 16
"""A sample has one row of so many."""


class Verify(StrEnum):
    """What both sides digest after an update."""

    FULL = "full"
    """Every element; the default."""
    SAMPLED = "sampled"
    """A sample of the rows of every region."""
    OFF = "off"
    """Nothing: an update is committed unverified."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The indices that are `turn` modulo `step`, in one dimension of every tensor that is long enough there."""

    turn: int
    step: int = SAMPLE_STEP

    @classmethod
    def of(cls, verify: Verify, version: int) -> Sample | None:
        """The sample of a version; None where everything is digested."""
        return cls(version) if verify is Verify.SAMPLED else None

    def thin(
        self, shape: IntArray, ndim: IntArray, offset: IntArray, size: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """What boxes (k, D) have in common with the sample: offset of the first index, how many, and at which steps.

        `shape` (k, D) and `ndim` (k,) are those of their logical tensors. A box may be left with size 0.
        """
        rows = np.arange(len(ndim))
        dim = np.maximum(ndim - 2, 0)
        thinned = rows[shape[rows, dim] >= 2 * self.step]
        where = thinned, dim[thinned]
        offset, size, step = offset.copy(), size.copy(), np.ones_like(size)
        end = offset[where] + size[where]
        offset[where] += (self.turn - offset[where]) % self.step
        size[where] = np.maximum(-(-(end - offset[where]) // self.step), 0)
        step[where] = self.step
        return offset, size, step
