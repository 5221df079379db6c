"""What tests of digests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightcast.transfer.digest.definition import box_residues, join, scale
from weightcast.transfer.digest.residues import PRIME
from weightcast.transfer.layout.dtypes import NAMES, to_torch

DTYPES = [to_torch(name) for name in NAMES]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern of a dtype, NaNs of all kinds among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, size=max(count, 1), dtype=np.uint8)[:count].copy()
    )
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def digest(view: torch.Tensor, offset: Sequence[int], dtype: torch.dtype | None = None) -> int:
    """The digest of the box at `offset` of a logical tensor whose memory is `view`, digested as `dtype` if given.

    digest(whole, (0, 0)) == add(digest(top, (0, 0)), digest(bottom, (len(top), 0)))
    """
    sums, _ = box_residues(view[None], offset, [1] * view.ndim, dtype)
    origin, size = (np.array([numbers], dtype=np.int64).reshape(1, view.ndim) for numbers in (offset, view.shape))
    return int(join(sums, scale(origin, size, np.array([view.ndim])))[0])


def add(*digests: int) -> int:
    """The digest of a union of disjoint boxes from their digests; 0 for none."""
    high = sum(term >> 32 for term in digests) % PRIME
    low = sum(term & 0xFFFFFFFF for term in digests) % PRIME
    return high << 32 | low
