"""Verification of an update: every element, a sample of the rows, or nothing.

A sample is one row in SAMPLE_STEP of every tensor: the same rows on both sides, and other ones in the next version. So
SAMPLE_STEP versions in a row cover everything. Tensors with fewer than twice SAMPLE_STEP rows have two or three in it.
Rows run along the last dimension but one, so that every expert and every replica has rows in every sample.

A sample cannot miss an unwritten slot that holds half of the rows of its tensor, or SAMPLE_STEP of them. It can miss a
thinner one, and a single wrong element, in versions in which none of its rows is due.
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
    """The part of an update that both sides digest."""

    FULL = "full"
    """Every element; the default."""
    SAMPLED = "sampled"
    """A sample of the rows of every region."""
    OFF = "off"
    """Nothing: an update is committed unverified."""


class ValueCounts(NamedTuple):
    """Counts of values that are not finite, by row, in int64 columns (m,).

    Of the values of `row`, `nan` are no number and `inf` are infinite. `overflow` are finite, but not in the type that
    they are cast to. Rows ascend; other rows have no such values.
    """

    row: IntArray
    nan: IntArray
    inf: IntArray
    overflow: IntArray

    @classmethod
    def of(cls, counts: Mapping[int, tuple[int, int, int]]) -> ValueCounts:
        """Makes columns of (nan, inf, overflow) by row; rows of three zeros are left out."""
        rows = [(row, *counts[row]) for row in sorted(counts) if any(counts[row])]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def sampled_rows(shape: IntArray, ndim: IntArray) -> tuple[IntArray, IntArray]:
    """(k,) the dimension along which tensors of `shape` (k, D) and `ndim` (k,) are sampled, and (k,) the step in it."""
    dim = np.maximum(ndim - 2, 0)
    return dim, np.clip(shape[np.arange(len(ndim)), dim] // 2, 1, SAMPLE_STEP)


@dataclass(frozen=True, slots=True)
class Sample:
    """The indices that are `turn` modulo a step, in one dimension of every tensor."""

    turn: int

    @classmethod
    def of(cls, verify: Verify, version: int) -> Sample | None:
        """The sample of a version; None unless rows are sampled."""
        return cls(version) if verify is Verify.SAMPLED else None

    def thin(
        self, dim: IntArray, every: IntArray, offset: IntArray, size: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The sample's share of boxes (k, D): offset of the first index, number of indices and step, each (k, D).

        `dim` and `every` (k,) are what `sampled_rows` says of their tensors. A box may be left with size 0.
        """
        index = np.arange(len(dim)), dim
        offset, size, step = offset.copy(), size.copy(), np.ones_like(size)
        end = offset[index] + size[index]
        offset[index] += (self.turn - offset[index]) % every
        size[index] = np.maximum(-(-(end - offset[index]) // every), 0)
        step[index] = every
        return offset, size, step
