"""How much of an update is verified: every element, a sample of the rows, or nothing.

A sample is one row in SAMPLE_STEP of every tensor, the same rows on both sides, and other ones in the next version: so
that many versions in a row cover everything. Tensors with fewer than twice as many rows have two or three in it. Rows
run along the last dimension but one, so that every expert and every replica has rows in every sample. What a sample
cannot miss is a slot that was not written, if it holds half of the rows of its tensor or SAMPLE_STEP of them; what it
can miss is a thinner one, and a single wrong element, in versions in which none of its rows is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray

__all__ = ["SAMPLE_STEP", "Sample", "ValueCounts", "Verify", "sampled_rows"]

SAMPLE_STEP = 16
"""A sample has one row of so many, of small tensors more."""


class Verify(StrEnum):
    """What both sides digest after an update."""

    FULL = "full"
    """Every element; the default."""
    SAMPLED = "sampled"
    """A sample of the rows of every region."""
    OFF = "off"
    """Nothing: an update is committed unverified."""


class ValueCounts(NamedTuple):
    """Values of some rows that are not finite, in int64 columns (m,): of `row`, how many are no number, infinite, and
    finite but not in the type that they are cast to. Rows ascend; other rows have none of them.
    """

    row: IntArray
    nan: IntArray
    inf: IntArray
    overflow: IntArray

    @classmethod
    def of(cls, counts: Mapping[int, tuple[int, int, int]]) -> ValueCounts:
        """From (nan, inf, overflow) by row; rows of three zeros are left out."""
        rows = [(row, *counts[row]) for row in sorted(counts) if any(counts[row])]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def sampled_rows(shape: IntArray, ndim: IntArray) -> tuple[IntArray, IntArray]:
    """Along which dimension tensors of `shape` (k, D) and `ndim` (k,) are sampled, and one index of how many."""
    dim = np.maximum(ndim - 2, 0)
    return dim, np.clip(shape[np.arange(len(ndim)), dim] // 2, 1, SAMPLE_STEP)


@dataclass(frozen=True, slots=True)
class Sample:
    """The indices that are `turn` modulo a step, in one dimension of every tensor."""

    turn: int

    @classmethod
    def of(cls, verify: Verify, version: int) -> Sample | None:
        """The sample of a version; None where everything is digested."""
        return cls(version) if verify is Verify.SAMPLED else None

    def thin(
        self, dim: IntArray, every: IntArray, offset: IntArray, size: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """What boxes (k, D) have in common with the sample: offset of the first index, how many, and at which steps.

        `dim` and `every` (k,) are what `sampled_rows` says of their tensors. A box may be left with size 0.
        """
        where = np.arange(len(dim)), dim
        offset, size, step = offset.copy(), size.copy(), np.ones_like(size)
        end = offset[where] + size[where]
        offset[where] += (self.turn - offset[where]) % every
        size[where] = np.maximum(-(-(end - offset[where]) // every), 0)
        step[where] = every
        return offset, size, step
