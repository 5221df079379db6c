"""Row sums of a digest on a GPU, in one pass over memory: a Triton kernel.

`definition` widens words to 8 bytes and multiplies matrices; this reads each word once and multiplies integers. The
words of several rows share the constants of a block, so that these cost little bandwidth. Sums stay below 2^63: 2^23
products of a half word of 16 bits and a constant of at most 2^24 fit. Rows from `blocks` have at most 2^16 words.

The module needs triton, which CUDA builds of torch bring along, and is imported only where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from weightcast.transfer.digest.residues import PRIME

__all__ = ["row_sums"]

_ROWS = 16
_COLUMNS = 256


@triton.jit
def _row_sums_kernel(
    words: Any,
    constants: Any,
    sums: Any,
    peaks: Any,
    rows: Any,
    size: Any,
    row_stride: Any,
    column_stride: Any,
    PRIME: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    MAGNITUDE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    low_a = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    low_b = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    high_a = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    high_b = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    peak = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < size
        offset = row[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
        word = tl.load(words + offset, mask=(row < rows)[:, None] & inside[None, :], other=0).to(tl.int32)
        peak = tl.maximum(peak, word & MAGNITUDE)
        a = tl.load(constants + column, mask=inside, other=0).to(tl.int64)[None, :]
        b = tl.load(constants + size + column, mask=inside, other=0).to(tl.int64)[None, :]
        if WIDE:
            low, high = (word & 0xFFFF).to(tl.int64), (word >> 16).to(tl.int64)
            high_a += high * a
            high_b += high * b
        else:
            low = word.to(tl.int64)
        low_a += low * a
        low_b += low * b
    sum_a, sum_b = tl.sum(low_a, axis=1) % PRIME, tl.sum(low_b, axis=1) % PRIME
    if WIDE:
        sum_a += (tl.sum(high_a, axis=1) % PRIME) * 65536
        sum_b += (tl.sum(high_b, axis=1) % PRIME) * 65536
    tl.store(sums + row, sum_a, mask=row < rows)
    tl.store(sums + rows + row, sum_b, mask=row < rows)
    tl.store(peaks + row, tl.max(peak, axis=1).to(tl.int64), mask=row < rows)


def row_sums(words: torch.Tensor, constants: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums (2, r) int64 of rows (r, size) of signed words of 1, 2 or 4 bytes times constants (2, size) int64.

    Peaks (r,) int64 come second: the largest word of each row without its sign. The sums are congruent to the exact
    ones modulo the prime, but not reduced to one residue.
    """
    rows, size = words.shape
    sums = torch.empty((2, rows), dtype=torch.int64, device=words.device)
    peaks = torch.empty(rows, dtype=torch.int64, device=words.device)
    narrow = constants.to(torch.int32).contiguous()
    grid = (-(-rows // _ROWS),)
    _row_sums_kernel[grid](
        words, narrow, sums, peaks, rows, size, *words.stride(), PRIME=PRIME, WIDE=words.itemsize == 4,
        MAGNITUDE=torch.iinfo(words.dtype).max, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return sums, peaks
