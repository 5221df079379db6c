"""Sums of digests, without torch: `weightcast.transfer.digest.definition` makes digests, the gateway compares sums.

A digest is 64 bits, two residues modulo PRIME, the first in the high half. Digests of disjoint boxes add residue by
residue to the digest of their union.
"""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import DigestArray, IntArray

__all__ = ["PRIME", "add_runs", "subtract"]


PRIME = 2**32 - 5
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def add_runs(digests: DigestArray, start: IntArray) -> DigestArray:
    """Sums of runs of digests: run i begins at start[i] and ends where the next begins; none is empty."""
    if not len(start):
        return np.empty(0, dtype=np.uint64)
    # Sums of fewer than 2^32 halves stay within 64 bits.
    low = np.add.reduceat(digests & _LOW, start) % np.uint64(PRIME)
    high = np.add.reduceat(digests >> _HALF, start) % np.uint64(PRIME)
    return np.asarray((high << _HALF) | low)


def subtract(total: int, part: int) -> int:
    """The digest of what is left of a box without a part of it."""
    high = ((total >> 32) - (part >> 32)) % PRIME
    low = ((total & 0xFFFFFFFF) - (part & 0xFFFFFFFF)) % PRIME
    return high << 32 | low
