"""Values that are infinite or no number: how many of them boxes hold, and how many a cast makes.

Digests find them on the way. The *peak* of a box is the largest of its words without the sign, and in every type with a
sign bit a value is finite where its word is less than `first_non_finite` of the type. Only boxes whose peak is not are
looked at again, and counted.
"""

from __future__ import annotations

import torch

from weightcast.transfer.digest import blocks
from weightcast.transfer.dtypes import dtype_code, from_torch

__all__ = ["count_values", "first_non_finite"]

_NEVER = 1 << 62
_BLOCK = 1 << 20
"""Elements that are counted at a time."""
_FIRST = {
    "float64": 0x7FF << 52, "float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C,
    # NaN is minus zero, or all ones where there is no sign: no peak tells, so such boxes are always counted.
    "float8_e4m3fnuz": 0, "float8_e5m2fnuz": 0, "float8_e8m0fnu": 0,
}  # fmt: skip
_ROUNDS_UP = 0x7F7F8000
"""The first word of float32 that bfloat16 has as infinite: halfway to the number that would follow its largest."""


def first_non_finite(dtype: torch.dtype, stored: torch.dtype | None = None) -> int:
    """The least word without the sign that is not finite, or 2^62 for integers, which are always.

    With `stored`, float32, of its words that are not finite as `dtype`, bfloat16.
    """
    return _ROUNDS_UP if stored not in (None, dtype) else _FIRST.get(from_torch(dtype), _NEVER)


@torch.no_grad()
def count_values(box: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """How many elements are no number, are infinite, and are finite but not finite as `dtype`."""
    if dtype_code(from_torch(box.dtype)) >= dtype_code("uint8") or not box.numel():
        return 0, 0, 0
    total = torch.zeros(3, dtype=torch.int64, device=box.device)
    values = box if box.ndim else box[None]
    for cut in blocks(tuple(values.shape), _BLOCK):
        some = values[cut]
        held, cast = _wide(some), _wide(some.to(dtype))
        nan, inf = held.isnan(), held.isinf()
        overflow = ~cast.isfinite() & ~(nan | inf)
        total += torch.stack([nan.sum(), inf.sum(), overflow.sum()])
    nan_count, inf_count, overflow_count = total.tolist()
    return nan_count, inf_count, overflow_count


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same values in a type for which torch can tell what is finite."""
    return values.float() if values.itemsize == 1 else values
