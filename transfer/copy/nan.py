"""One bit pattern for NaN in values that are cast on the way.

What bits torch's conversion to a narrower type gives a NaN depends on the layout of the copy: 0xffff or 0x7fc0 for
bfloat16 on a CPU (torch 2.13). The digest on the trainer converts in another layout than the packing does, so both
settle on torch's own NaN afterwards. Values that are not cast keep their bits.
"""

from __future__ import annotations

import math

import torch

__all__ = ["settle_nan"]

_WITH_MANY_NANS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def settle_nan(cast: torch.Tensor) -> torch.Tensor:
    """Every NaN of `cast`, in place, becomes the same; the tensor itself. Types of 8 bits are left as they are."""
    if cast.dtype in _WITH_MANY_NANS:
        cast.masked_fill_(cast != cast, math.nan)
    return cast
