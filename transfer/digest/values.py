"""Values that are infinite or no number: counts of those that boxes hold, and of those that a cast makes.

Digests find them on the way. The *peak* of a box is the largest of its words without the sign. In every type with a
sign bit, a value is finite if its word without the sign is less than a bound. Only boxes whose peak is not less are
read again, and counted.
"""

from __future__ import annotations

import torch

from weightcast.transfer.digest.definition import blocks
from weightcast.transfer.layout.dtypes import from_torch

__all__ = ["count_values", "least_suspect"]

_NEVER = 1 << 62
_BLOCK = 1 << 20
"""Elements that are counted at a time."""
_FIRST = {
    "float64": 0x7FF << 52, "float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C,
    # NaN is minus zero, or all ones where there is no sign: no peak tells, so such boxes are always counted.
    "float8_e4m3fnuz": 0, "float8_e5m2fnuz": 0, "float8_e8m0fnu": 0,
}  # fmt: skip
"""The least word without the sign that is not finite; integers have none."""
_ROUNDS_UP = 0x7F7F8000
"""The least word of float32 that bfloat16 has as infinite: halfway to the number that would follow its largest."""
_LARGEST, _TOO_LARGE = 0x7E, 464.0
"""The largest word of float8_e4m3fn, 448, and the least value too large for it, halfway to 480, which would follow. The
type has no infinity: torch (2.13) casts larger values to 448, and infinite ones too.
"""


def least_suspect(held: torch.dtype, dtype: torch.dtype, as_stored: bool) -> int:
    """The least peak of a box that may have values which are not finite, or too large for the cast to `dtype`.

    It is 2^62 if no box has such values. Peaks are of words as they are stored, or else as they are digested.
    """
    if held == dtype or not as_stored:
        saturates = held != dtype and dtype == torch.float8_e4m3fn
        return _LARGEST if saturates else _FIRST.get(from_torch(dtype), _NEVER)
    return _ROUNDS_UP  # of float32 as bfloat16, the one cast for which words are looked at as they are stored


@torch.no_grad()
def count_values(box: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Counts of elements that are no number, that are infinite, and that are finite but too large for `dtype`."""
    if not box.dtype.is_floating_point or not box.numel():
        return 0, 0, 0
    total = torch.zeros(3, dtype=torch.int64, device=box.device)
    values = box.reshape(1, 1) if box.ndim == 0 else box[None]
    for cut in blocks(tuple(values.shape), _BLOCK):
        wide = _wide(values[cut])
        nan, inf = wide.isnan(), wide.isinf()
        if dtype == torch.float8_e4m3fn:
            overflow = wide.abs() >= _TOO_LARGE
        else:
            overflow = ~_wide(values[cut].to(dtype)).isfinite()
        total += torch.stack([nan.sum(), inf.sum(), (overflow & ~(nan | inf)).sum()])
    nan_count, inf_count, overflow_count = total.tolist()
    return nan_count, inf_count, overflow_count


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same values in a type for which torch can tell what is finite."""
    return values.float() if values.itemsize == 1 else values
