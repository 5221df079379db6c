"""The constants of a digest, without torch: two pseudo-random numbers in [1, 2^24] for each index of each dimension."""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray

__all__ = ["BIAS", "CONSTANT_BITS", "HALF_BITS", "LINE_BYTES", "constants"]

BIAS = 0x9E3779
"""Added to every word."""
CONSTANT_BITS = 24
HALF_BITS = 12
"""Where constants are taken apart into two factors, so that products of narrow types stay exact."""
LINE_BYTES = 64
"""What a processor loads and fetches ahead at once."""


def constants(dim: int, index: IntArray) -> IntArray:
    """(n,) indices of a dimension -> (2, n) constants in [1, 2^24], one row per family (splitmix64)."""
    z = (index.astype(np.uint64) + np.uint64((dim << 44) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    families = np.stack(
        [z >> np.uint64(64 - CONSTANT_BITS), z << np.uint64(CONSTANT_BITS) >> np.uint64(64 - CONSTANT_BITS)]
    )
    return families.astype(np.int64) + 1
