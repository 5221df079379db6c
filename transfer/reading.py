"""Reads boxes in place, out of another process's memory into this rank's, prepared like the rounds of messages.

What keeps its dtype goes from parameter to parameter in one copy. What is cast is packed first, by the same calls by
which the sender would pack it, so that the bits are the same; a message at a time, in memory that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.transfer.copying import CopyBatch, make_copies
from weightcast.transfer.dtypes import ITEMSIZE, dtype_name, to_torch
from weightcast.transfer.handles import Offer, Segment
from weightcast.transfer.layout import IntArray, RankLayout, pad_boxes
from weightcast.transfer.messages import MAX_MESSAGE_BYTES, cut_messages, shape_order
from weightcast.transfer.plan import RankPart
from weightcast.transfer.rounds import in_memory
from weightcast.transfer.strided import BoolArray, StridedCopies, contiguous_strides, join

__all__ = ["bases_of", "cast_bytes", "read_in_place"]

_CAST_BYTES = 1 << 20
"""Bytes that are cast at a time: what was just packed is still in the CPU's cache when it is unpacked."""


def bases_of(offer: Offer, opened: Mapping[Segment, torch.Tensor]) -> list[torch.Tensor]:
    """The flat tensors of an offer's bases."""
    columns = (offer.segment, offer.first, offer.elements, offer.dtype)
    found = []
    for segment, first, elements, code in zip(*(c.tolist() for c in columns), strict=True):
        memory = opened[offer.segments[segment]]
        found.append(memory[first : first + elements * int(ITEMSIZE[code])].view(to_torch(dtype_name(code))))
    return found


@dataclass(frozen=True, slots=True)
class _Ends:
    """k boxes in two memories, in columns: side 0 is read, side 1 written. As in StridedCopies, but in no group."""

    size: IntArray
    base: IntArray
    start: IntArray
    stride: IntArray

    def take(self, rows: IntArray | BoolArray) -> _Ends:
        return _Ends(*(getattr(self, name)[rows] for name in self.__slots__))


def read_in_place(
    part: RankPart,
    layout: RankLayout,
    rows: IntArray,
    offer: Offer,
    sources: Sequence[torch.Tensor],
    scratch: torch.Tensor,
    staging: torch.Tensor,
) -> list[CopyBatch]:
    """The copies, in order, that bring operations `rows` of `part` from `sources` into `layout`.

    `offer` says where the boxes lie in `sources`, and was checked. `staging` is for what is cast: all messages use it,
    one after the other. `scratch` has SCRATCH_BYTES.
    """
    ends, wire = _ends(part, layout, rows, offer)
    targets = layout.memory.bases
    held = np.array([s.dtype for s in sources] + [None], dtype=object)[ends.base[:, 0]]
    kept = held == np.array([t.dtype for t in targets] + [None], dtype=object)[ends.base[:, 1]]
    direct = CopyBatch()
    alike = ends.take(kept)
    copies = _joined(alike.take(shape_order(alike.size)))
    make_copies(copies, (sources, targets), None, [direct], np.zeros(len(copies), dtype=np.int64), scratch)
    return [direct, *_cast(ends.take(~kept), wire[~kept], sources, targets, scratch, staging)]


def _ends(part: RankPart, layout: RankLayout, rows: IntArray, offer: Offer) -> tuple[_Ends, IntArray]:
    """The boxes that are not empty, and (k,) the dtype code in which each arrives."""
    ops = part.operations
    base, start, stride, size = in_memory(layout, ops.dst_region[rows], ops.offset[rows], ops.size[rows])
    width = max(stride.shape[1], offer.stride.shape[1])
    strides = [pad_boxes(s, width, 0) for s in (offer.stride, stride)]
    ends = _Ends(
        pad_boxes(size, width, 1),
        np.stack([offer.base, base], axis=1),
        np.stack([offer.start, start], axis=1),
        np.stack(strides, axis=2),
    )
    some = size.prod(axis=1) > 0
    return ends.take(some), part.wire_dtype[rows][some]


def _joined(ends: _Ends) -> StridedCopies:
    return join(StridedCopies(np.zeros(len(ends.size), dtype=np.int64), ends.size, ends.base, ends.start, ends.stride))


def _cast(
    ends: _Ends,
    wire: IntArray,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scratch: torch.Tensor,
    staging: torch.Tensor,
) -> list[CopyBatch]:
    """For each message a batch that packs it and one that unpacks it."""
    if not len(wire):
        return []
    made = cut_messages(ends.size, wire, min(staging.nbytes, MAX_MESSAGE_BYTES))
    box, message = made.box, made.message
    start = ends.start[box] + (made.offset[:, :, None] * ends.stride[box]).sum(axis=1)
    messages = [
        staging[:nbytes].view(to_torch(dtype_name(code)))
        for nbytes, code in zip(made.nbytes.tolist(), made.dtype.tolist(), strict=True)
    ]
    batches = [CopyBatch() for _ in range(2 * len(messages))]
    flat = contiguous_strides(made.size)
    for side, memory in ((0, sources), (1, targets)):
        copies = join(
            StridedCopies(
                message,
                made.size,
                np.stack([ends.base[box, side], message], axis=1),
                np.stack([start[:, side], made.start], axis=1),
                np.stack([ends.stride[box, :, side], flat], axis=2),
            )
        )
        if side == 0:
            make_copies(copies, (memory, messages), 1, batches[::2], copies.group, scratch)
        else:
            make_copies(copies.turned(), (messages, memory), 0, batches[1::2], copies.group, scratch)
    return batches


def cast_bytes(part: RankPart) -> int:
    """Staging memory for what is cast, within the part's bucket."""
    return min(part.bucket_bytes, _CAST_BYTES)
