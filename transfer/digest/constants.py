"""The constants of a digest, without torch: two pseudo-random numbers in [1, 2^24] for each index of each dimension."""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray

__all__ = ["BIAS", "CONSTANT_BITS", "HALF_BITS", "LINE_BYTES", "constants"]

BIAS = 0x9E3779
"""Added to every word."""
CONSTANT_BITS = 24
HALF_BITS = 12
"""Bits of the lower half of a constant: products of narrow types stay exact with its halves."""
LINE_BYTES = 64
"""Bytes that a processor loads, or fetches ahead, at once."""


def constants(dim: int, index: IntArray) -> IntArray:
    """Constants (2, n) in [1, 2^24] of indices (n,) of a dimension, one row per family (splitmix64)."""
    z = (index.astype(np.uint64) + np.uint64((dim << 44) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    families = np.stack(
        [z >> np.uint64(64 - CONSTANT_BITS), z << np.uint64(CONSTANT_BITS) >> np.uint64(64 - CONSTANT_BITS)]
    )
    return families.astype(np.int64) + 1
