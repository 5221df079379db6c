"""What tests of digests share."""

from __future__ import annotations

import numpy as np
import torch

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
