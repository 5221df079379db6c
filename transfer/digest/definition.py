"""Digests that do not depend on how a logical tensor is cut into boxes.

The digest of a box is, in each of two families of weights, the residue modulo P of

    sum over its elements of (word(element) + BIAS) * w(index),    w(index) = c(0, index[0]) * c(1, index[1]) * ...

Here `index` is the position in the *logical* tensor and `word` the element's bits as a signed integer. c(dimension, i)
is a pseudo-random number in [1, 2^24], and P the prime 2^32 - 5. The two residues are joined to 64 bits. So:

- The digests of the boxes of any partition add up, residue by residue, whatever their memory layout.
- No weight is 0 modulo P, because P is prime and larger than every c. A flipped bit changes a word by a power of two,
  which is no multiple of P, so it changes both residues, always. So does any change of one element of 8 or 16 bits.
- Swapping two unequal elements along one dimension changes a residue unless both indices have the same constant in
  that family. No two of the first 2^20 indices of a dimension share it in both (a test checks that).
- At most (n / 2^24)^2 of all choices of constants miss a given change of a tensor with n dimensions. This is Schwartz
  and Zippel's bound: the change of a residue is a polynomial of degree n in the constants, and not zero. Odd weights
  modulo 2^32 have no such bound: two float32 numbers that differ only in sign could be swapped unseen.
- BIAS tells zeros from nothing: word + BIAS is never 0 for words of 8 and 16 bits.

Bits count, not values: -0.0 is not 0.0 and every NaN is itself. An element of 64 bits is two words, each with a weight.
Values may be digested as another type, as `Tensor.to` casts them. torch chooses the bits of a NaN that is cast: on CPU
`to` and `copy_` into a view with gaps do not agree. So such NaNs are digested as `settle_nan` leaves them, and the
sender of a cast box has to settle them too.

This module computes them with torch's own operations, on any device. A word of 16 bits times a constant of 24, summed
over 8192 elements, stays within 2^53. So do words of 32 bits times the halves of constants over 1024 elements. The sum
over the inner dimension is therefore a matrix product in float64, exact in any order. Only one number per row remains
to be reduced in integers. `gpu_kernel` on GPUs and `cpu_loops` on CPUs give the same several times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import DigestArray, IntArray
from weightcast.transfer.copy.nan import settle_nan
from weightcast.transfer.digest.constants import BIAS, HALF_BITS, constants
from weightcast.transfer.digest.residues import PRIME
from weightcast.transfer.layout.dtypes import from_torch

__all__ = ["block_limit", "blocks", "box_residues", "join", "scale"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TILE = {1: 1 << 13, 2: 1 << 13, 4: 1 << 10}
"""Elements of 1, 2 and 4 bytes whose sum of products stays exact in float64."""
_WORD_DIMENSION = 1 << 16
"""A dimension past any real one, whose constants weigh the two words of a 64-bit element."""
_NO_DIMENSION = -1
"""Stands for the dimensions of a box of one element; its constant is 1."""

_CHUNK = 1 << 14
_CHUNKS_KEPT = 64
_BLOCK = {"cpu": 1 << 20}
_BLOCK_ELSEWHERE = 1 << 21
"""Elements whose row sums are reduced together."""
_STEP = 1 << 19
"""Elements that a CPU widens to 8 bytes at a time: they stay in its cache. A GPU takes whole blocks."""
_LONGEST = 1 << 16
"""Elements of the inner dimension taken at once: their constants need up to 64 bytes each while they are made."""
_NARROW = 64
"""An inner dimension shorter than this leaves many rows to reduce in integers, which is slower."""


# ---- boxes of one shape at one offset


@torch.no_grad()
def box_residues(
    boxes: torch.Tensor, offset: Sequence[int], step: Sequence[int], dtype: torch.dtype | None, with_peaks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums (2, n) int64 of boxes (n, *size) at the same offset, to be reduced modulo the prime, and peaks (n,) int64.

    Both are on the boxes' device. With `dtype` values are digested as that type; they are never cast all at once. A
    peak is the largest word without its sign, as digested; 0 without `with_peaks`. Raises LayoutError for dtypes that
    weightcast does not move.

    Index i of a dimension of a box is index offset + i * step of the tensor. The constants of dimensions of size 1 are
    left out, so that the boxes may differ there; `scale` has them.
    """
    target = boxes.dtype if dtype is None else dtype
    for kind in (boxes.dtype, target):
        from_torch(kind)
    total = torch.zeros((2, boxes.shape[0]), dtype=torch.int64, device=boxes.device)
    peaks = torch.zeros_like(total[0])
    if boxes.numel() == 0:
        return total, peaks
    dims = [(d, offset[d], step[d]) for d, size in enumerate(boxes.shape[1:]) if size > 1]
    values = boxes.squeeze([d for d in range(1, boxes.ndim) if boxes.shape[d] == 1])
    if dims:
        inner_dim = _inner_dimension(values)
        values = values.movedim(inner_dim, -1)
        dims.append(dims.pop(inner_dim - 1))
    else:
        values, dims = values[:, None], [(_NO_DIMENSION, 0, 1)]
    inner: _Inner | None = None
    for cut in blocks(tuple(values.shape), block_limit(boxes.device)):
        if inner is None or inner.cut != cut[-1]:
            inner = _Inner.of(dims[-1], cut[-1], boxes.device, target.itemsize)
        sums, largest = _row_sums(values[cut], target, inner, with_peaks)
        for position in reversed(range(len(cut) - 2)):
            outer = _range_constants(dims[position], cut[position + 1], boxes.device)
            sums = (sums * outer.reshape(2, *[1] * (sums.ndim - 2), -1) % PRIME).sum(dim=-1) % PRIME
        total[:, cut[0]] += sums
        if largest is not None:
            peaks[cut[0]] = torch.maximum(peaks[cut[0]], largest.reshape(sums.shape[1], -1).amax(dim=1))
    return total, peaks


def _inner_dimension(values: torch.Tensor) -> int:
    """The dimension to sum first: the one most nearly contiguous among those that are long enough, else the longest."""
    dims = range(1, values.ndim)
    long = [d for d in dims if values.shape[d] >= _NARROW]
    return min(long, key=values.stride) if long else max(dims, key=lambda d: int(values.shape[d]))


def block_limit(device: torch.device) -> int:
    """Most elements of a block on a device, for `blocks`."""
    return _BLOCK.get(device.type, _BLOCK_ELSEWHERE)


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cuts a box into boxes of at most `limit` elements and _LONGEST along the inner dimension."""
    *outer, size = shape
    for start in range(0, size, _LONGEST):
        inner = slice(start, min(start + _LONGEST, size))
        for cut in _outer_blocks(outer, max(1, limit // (inner.stop - inner.start))):
            yield *cut, inner


def _outer_blocks(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cuts a box into boxes of at most `limit` elements, each a range of one dimension with those after it whole."""
    dim = 0
    while prod(shape[dim + 1 :]) > limit:
        dim += 1
    step = limit // prod(shape[dim + 1 :])
    inner_slices = [slice(0, size) for size in shape[dim + 1 :]]
    for index in product(*map(range, shape[:dim])):
        single = [slice(i, i + 1) for i in index]
        for start in range(0, shape[dim], step):
            yield (*single, slice(start, min(start + step, shape[dim])), *inner_slices)


class _Inner(NamedTuple):
    """Factors of a range `cut` of the inner dimension.

    `constants` are (2, size) int64, and as `columns` (2 or 4, size) in float64: for 32-bit words in two halves. `bias`
    (2, 1) is what BIAS adds to each row.
    """

    cut: slice
    constants: torch.Tensor
    columns: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, dim: tuple[int, int, int], cut: slice, device: torch.device, itemsize: int) -> _Inner:
        table = _range_constants(dim, cut, device)
        columns = torch.cat([table >> HALF_BITS, table & (1 << HALF_BITS) - 1]) if itemsize >= 4 else table
        return cls(cut, table, columns.to(torch.float64), table.sum(dim=1, keepdim=True) % PRIME * BIAS)


def _row_sums(
    values: torch.Tensor, target: torch.dtype, inner: _Inner, with_peaks: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Residues (2, ...) of sum((word + BIAS) * constant) over the inner dimension of values (..., size).

    Peaks (...) come second, if they are asked for.
    """
    cast = None if values.dtype == target else target
    # As words before anything is copied: a copy of bools would settle on one pattern for true.
    values = values if cast else values.view(_WORDS[target.itemsize])
    rows = values.reshape(-1, values.shape[-1])
    if target.itemsize < 8:
        sums, peaks = _sums(rows, cast, inner, with_peaks)
    else:
        # Two words of 4 bytes each, the low one first on every machine that torch runs on.
        pairs = _words(rows, cast).contiguous()
        words, peaks = pairs.view(torch.int32), _peaks(pairs) if with_peaks else None
        weights = _constants(_WORD_DIMENSION, 0, 2, words.device)[:, :, None]
        low, high = (_sums(words[:, i::2], None, inner, False)[0] * weights[:, i] % PRIME for i in (0, 1))
        sums = (low + high) % PRIME
    return sums.reshape(2, *values.shape[:-1]), peaks


@cache
def _has_kernel() -> bool:
    return find_spec("triton") is not None


def _words(values: torch.Tensor, cast: torch.dtype | None) -> torch.Tensor:
    """The words of values that are to be cast; without a cast they are words already."""
    return settle_nan(values.to(cast)).view(_WORDS[cast.itemsize]) if cast else values


def _peaks(words: torch.Tensor) -> torch.Tensor:
    """Peaks (r,) int64 of words (r, size): the largest of each row without its sign."""
    return (words & torch.iinfo(words.dtype).max).amax(dim=1).to(torch.int64)


def _sums(
    rows: torch.Tensor, cast: torch.dtype | None, inner: _Inner, with_peaks: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Residues (2, r) of the sums of rows (r, size), and peaks (r,) if they are asked for.

    Rows have words, or values to cast to at most 4 bytes.
    """
    if rows.is_cuda and _has_kernel():
        from weightcast.transfer.digest.gpu_kernel import row_sums

        raw_sums, largest = row_sums(_words(rows, cast), inner.constants)
        return (raw_sums + inner.bias) % PRIME, largest
    count, size = rows.shape
    itemsize = cast.itemsize if cast else rows.itemsize
    tiles = [slice(a, a + _TILE[itemsize]) for a in range(0, size, _TILE[itemsize])]
    products = torch.empty((len(tiles), len(inner.columns), count), dtype=torch.float64, device=rows.device)
    peaks = torch.empty(count, dtype=torch.int64, device=rows.device) if with_peaks else None
    step = min(count, max(1, (_STEP if rows.device.type == "cpu" else _BLOCK_ELSEWHERE) // size))
    buffer = torch.empty((step, size), dtype=torch.float64, device=rows.device)
    for first in range(0, count, step):
        batch = rows[first : first + step]
        words = _words(batch, cast)
        wide = buffer[: len(batch)].copy_(words)
        if peaks is not None:
            peaks[first : first + step] = _peaks(words)
        for tile, out in zip(tiles, products, strict=True):
            torch.mm(inner.columns[:, tile], wide[:, tile].t(), out=out[:, first : first + step])
    sums = products.to(torch.int64).sum(dim=0)
    if itemsize == 4:
        sums = (sums[:2] % PRIME << HALF_BITS) + sums[2:]
    return (sums + inner.bias) % PRIME, peaks


def join(sums: torch.Tensor, factors: IntArray) -> DigestArray:
    """Digests (n,) from sums (2, n) and factors (2, n). Waits for the device."""
    residues = sums.cpu().numpy() % PRIME
    products = residues.astype(np.uint64) * factors.astype(np.uint64) % np.uint64(PRIME)
    return np.asarray(products[0] << np.uint64(32) | products[1])


# ---- constants


@lru_cache(maxsize=_CHUNKS_KEPT)
def _chunk(dim: int, number: int, device: torch.device) -> torch.Tensor:
    index = np.arange(number * _CHUNK, (number + 1) * _CHUNK, dtype=np.int64)
    return torch.from_numpy(constants(dim, index)).to(device)


def _constants(dim: int, start: int, size: int, device: torch.device) -> torch.Tensor:
    """Constants (2, size) int64 of the indices of a dimension from `start`, on a device."""
    first, last = start // _CHUNK, (start + size - 1) // _CHUNK
    chunks = [_chunk(dim, number, device) for number in range(first, last + 1)]
    table = chunks[0] if first == last else torch.cat(chunks, dim=1)
    return table[:, start - first * _CHUNK :][:, :size]


def _range_constants(dim: tuple[int, int, int], cut: slice, device: torch.device) -> torch.Tensor:
    """Constants (2, size) int64 of a range of a box's indices; `dim` is (dimension, offset of the box, step)."""
    number, offset, step = dim
    if number == _NO_DIMENSION:
        return torch.ones((2, 1), dtype=torch.int64, device=device)
    extent = (cut.stop - cut.start - 1) * step + 1
    return _constants(number, offset + cut.start * step, extent, device)[:, ::step]


def scale(offset: IntArray, size: IntArray, ndim: IntArray) -> IntArray:
    """Products (2, k) of the constants of the dimensions of size 1 of boxes (k, D), padding left out."""
    factors = np.ones((2, offset.shape[0]), dtype=np.int64)
    for dim in range(offset.shape[1]):
        single = (size[:, dim] == 1) & (ndim > dim)
        if single.any():
            factors[:, single] = factors[:, single] * constants(dim, offset[single, dim]) % PRIME
    return factors
