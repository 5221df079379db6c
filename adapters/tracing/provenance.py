"""The origin of a tensor's content: boxes of logical tensors, copied together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightcast.adapters.tracing.strided import Aligned, Base, Box, Copy, Dim, NotABoxError, intersect, subtract

__all__ = [
    "Piece",
    "Record",
    "Temporary",
    "as_allocated",
    "check_lossless",
    "constant_piece",
    "pieces_of",
    "same_memory",
    "storage_id",
]


@dataclass(slots=True)
class Piece:
    """A box of a record that holds logical `tensor` from element `offset` on, `stride` per dimension of the record.

    A number in place of a name is a constant. `through` are the dtypes that the values had on the way.
    """

    box: Box
    tensor: str | float
    offset: int
    stride: tuple[int, ...]
    through: tuple[torch.dtype, ...] = ()


@dataclass(slots=True)
class Record:
    """A storage with known content; of overlapping pieces the later holds.

    `computed` names the logical tensors that its content was computed from, if it is no mere copy of them.
    """

    base: Base
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    computed: frozenset[str] | None = None
    alive: StorageWeakRef = field(kw_only=True)
    """A weak reference, which keeps the storage's address from being used for another one."""


@dataclass(slots=True)
class Temporary:
    """A real storage made during the trace. `alive` keeps its address from being used for another one."""

    alive: StorageWeakRef
    base: Base
    dtype: torch.dtype
    constant: float | None
    """The number in all of its elements; NaN for several numbers, None for values that depend on anything."""
    parameter: str | None
    """The parameter whose values it was computed from, if any."""


def storage_id(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def as_allocated(t: torch.Tensor) -> Base:
    return Base(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))


def constant_piece(base: Base, value: float) -> Piece:
    return Piece(Box((0,) * len(base.size), base.size), value, 0, (0,) * len(base.size))


def pieces_of(part: Aligned, record: Record) -> Iterator[tuple[str | float, Copy, tuple[torch.dtype, ...]]]:
    """Splits a copy from a box of a record into copies from its pieces. Raises NotABoxError for memory nobody wrote."""
    boxes = [part.box]
    for piece in reversed(record.pieces):
        gaps: list[Box] = []
        for box in boxes:
            overlap = intersect(box, piece.box)
            if overlap is None:
                gaps.append(box)
                continue
            gaps.extend(subtract(box, overlap))
            dst = part.copy.dst_offset + _dot(overlap.start, part.box.start, part.other)
            src = piece.offset + _dot(overlap.start, piece.box.start, piece.stride)
            steps = zip(overlap.size, part.other, piece.stride, strict=True)
            yield piece.tensor, Copy(dst, src, tuple(Dim(*step) for step in steps if step[0] > 1)), piece.through
        boxes = gaps
    if boxes:
        raise NotABoxError(f"memory that nothing was written to (box {boxes[0].start}, {boxes[0].size})")


def _dot(at: tuple[int, ...], start: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return sum((a - s) * t for a, s, t in zip(at, start, stride, strict=True))


def check_lossless(logical: torch.dtype, through: tuple[torch.dtype, ...], final: torch.dtype) -> None:
    """Raises NotABoxError where values are rounded more on the way than by the final conversion."""
    for dtype in through:
        if dtype != final and not _holds(dtype, logical):
            raise NotABoxError(f"values of {logical} rounded to {dtype} on the way to {final}")


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if wide == narrow:
        return True
    if wide.is_floating_point and narrow.is_floating_point:
        a, b = torch.finfo(wide), torch.finfo(narrow)
        return bool(a.eps <= b.eps and a.max >= b.max and a.smallest_normal <= b.smallest_normal)
    return False


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_id(a) == storage_id(b) and as_allocated(a) == as_allocated(b) and a.dtype == b.dtype
