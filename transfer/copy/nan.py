"""One bit pattern for NaN in values that are cast on the way.

The bits that torch gives a NaN when it converts to a narrower type depend on the layout of the copy. For bfloat16 on a
CPU they are 0xffff or 0x7fc0 (torch 2.13). The trainer's digest converts in another layout than the packing does, so
both settle on torch's own NaN afterwards. Values that are not cast keep their bits.
"""

from __future__ import annotations

import math

import torch

__all__ = ["settle_nan"]

_WITH_MANY_NANS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def settle_nan(cast: torch.Tensor) -> torch.Tensor:
    """Gives every NaN of `cast` the same bits, in place, and returns `cast`. Types of 8 bits are left as they are."""
    if cast.dtype in _WITH_MANY_NANS:
        cast.masked_fill_(cast != cast, math.nan)
    return cast
