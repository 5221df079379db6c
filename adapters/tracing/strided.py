"""Strided copies between boxes: the arithmetic behind a loader trace. Pure Python, no torch.

A `Base` is a tensor as it was allocated: its sizes and strides, in any order of dimensions, without overlap. A `Copy`
walks a destination and a source with one common index space. `align` splits and merges dimensions on both sides at
once, until one side is a box of its base. So nothing has to be guessed from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["Aligned", "Base", "Box", "Copy", "Dim", "NotABoxError", "align", "intersect", "subtract"]

UNROLL_LIMIT = 64
"""A dimension that cannot be expressed as part of a box is written index by index, up to this many."""


class NotABoxError(Exception):
    """A strided view that is no union of a few boxes of its base; the tracer turns it into an opaque write."""


class Box(NamedTuple):
    """A box: its start and its size, one number per dimension of the base."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.size)


class Base(NamedTuple):
    """A tensor as allocated; `offset` is its storage offset. All in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Dim(NamedTuple):
    """One dimension of a copy: its size, and the step of each side in elements."""

    size: int
    dst: int
    src: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`dst[dst_offset + sum(i * d.dst)] = src[src_offset + sum(i * d.src)]` for every index i over `dims`.

    Every dimension has size 2 or more.
    """

    dst_offset: int
    src_offset: int
    dims: tuple[Dim, ...]

    def step(self, dim: int, index: int) -> Copy:
        """The copy with one dimension fixed at `index` and dropped."""
        d = self.dims[dim]
        dims = self.dims[:dim] + self.dims[dim + 1 :]
        return Copy(self.dst_offset + index * d.dst, self.src_offset + index * d.src, dims)


class Aligned(NamedTuple):
    """A copy one side of which is the box `box` of its base; `other` has the other side's stride per base dimension."""

    copy: Copy
    box: Box
    other: tuple[int, ...]


def align(copy: Copy, base: Base, side: str) -> Iterator[Aligned]:
    """Splits a copy into copies whose `side` ("dst" or "src") is a box of `base`. Raises NotABoxError.

    As a rule one copy comes out; only broadcasts and steps are unrolled into more.
    """
    todo = [_merge(copy)]
    while todo:
        part = todo.pop()
        lower = _lower(part.dst_offset if side == "dst" else part.src_offset, base)
        size = [1] * len(base.size)
        other_strides = [0] * len(base.size)
        for k, dim in enumerate(part.dims):
            stride = dim.dst if side == "dst" else dim.src
            row = _base_dim(stride, base)
            if row is None or stride != base.stride[row] or size[row] != 1:
                if dim.size > UNROLL_LIMIT:
                    raise NotABoxError(f"a step of {stride} elements, {dim.size} times")
                todo.extend(part.step(k, i) for i in reversed(range(dim.size)))
                break
            if lower[row] + dim.size > base.size[row]:
                todo.append(_split(part, k, base.size[row], lower[row]))
                break
            size[row], other_strides[row] = dim.size, dim.src if side == "dst" else dim.dst
        else:
            yield Aligned(part, Box(tuple(lower), tuple(size)), tuple(other_strides))


def _lower(offset: int, base: Base) -> list[int]:
    """The index of the element at `offset` of the base's storage."""
    remainder = offset - base.offset
    lower = [0] * len(base.size)
    for row in sorted(range(len(base.size)), key=lambda d: (base.stride[d], base.size[d]), reverse=True):
        if base.size[row] > 1:
            lower[row], remainder = divmod(remainder, base.stride[row])
    if remainder != 0 or any(not 0 <= lo < n for lo, n in zip(lower, base.size, strict=True)):
        raise NotABoxError(f"element {offset} of the storage is not in the tensor")
    return lower


def _base_dim(stride: int, base: Base) -> int | None:
    """The dimension of the base that a step of `stride` elements moves in."""
    match: int | None = None
    for row, n in enumerate(base.size):
        if n > 1 and 0 < base.stride[row] <= stride and (match is None or base.stride[row] > base.stride[match]):
            match = row
    return match


def _merge(copy: Copy) -> Copy:
    """Joins dimensions that both sides walk as if they were one, outer dimension first; the order is kept otherwise."""
    dims = sorted(copy.dims, key=lambda d: (d.src, d.dst), reverse=True)
    merged: list[Dim] = []
    for dim in dims:
        if merged and merged[-1].src == dim.src * dim.size and merged[-1].dst == dim.dst * dim.size and dim.dst:
            merged[-1] = Dim(merged[-1].size * dim.size, dim.dst, dim.src)
        else:
            merged.append(dim)
    return replace(copy, dims=tuple(merged))


def _split(copy: Copy, k: int, inner: int, lower: int) -> Copy:
    """Cuts dimension k, which runs over the end of a base dimension of `inner` elements, into whole rows of it."""
    dim = copy.dims[k]
    if lower != 0 or dim.size % inner:
        raise NotABoxError(f"{dim.size} elements from index {lower} run over the end of a dimension of {inner}")
    outer = Dim(dim.size // inner, dim.dst * inner, dim.src * inner)
    return replace(copy, dims=(*copy.dims[:k], outer, Dim(inner, dim.dst, dim.src), *copy.dims[k + 1 :]))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one base, or None."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True))
    if any(e <= s for s, e in zip(start, end, strict=True)):
        return None
    return Box(start, tuple(e - s for s, e in zip(start, end, strict=True)))


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """The parts of `box` outside `hole`, which lies inside it, as disjoint boxes."""
    start, size = list(box.start), list(box.size)
    for d in range(len(start)):
        low_size = hole.start[d] - start[d]
        high_size = start[d] + size[d] - (hole.start[d] + hole.size[d])
        if low_size:
            yield Box(tuple(start), (*size[:d], low_size, *size[d + 1 :]))
        if high_size:
            tail = (*start[:d], hole.start[d] + hole.size[d], *start[d + 1 :])
            yield Box(tail, (*size[:d], high_size, *size[d + 1 :]))
        start[d], size[d] = hole.start[d], hole.size[d]
