"""Copies out of another process's memory into this rank's, prepared like the rounds of messages.

A box that keeps its dtype goes from parameter to parameter in one copy. A box that is cast is packed first, by
the calls that the sender would use, so that the bits are the same. That takes a message at a time, in memory that stays
in the cache. From a staging buffer messages are unpacked as if they had arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import pad_boxes
from weightcast.transfer.boxes.slices import contiguous_strides, shape_order
from weightcast.transfer.boxes.strided import Places, StridedCopies, join
from weightcast.transfer.colocated.exporter import only_rows
from weightcast.transfer.colocated.offers import Offer
from weightcast.transfer.colocated.segment import Segment
from weightcast.transfer.copy.batch import CopyBatch, make_copies
from weightcast.transfer.copy.runs import SCRATCH_BYTES
from weightcast.transfer.exchange.messages import Messages, cut_messages
from weightcast.transfer.exchange.messages_in_memory import find_traffic, in_memory
from weightcast.transfer.exchange.schedule import make_rounds
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_name, to_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart

__all__ = ["ImportedBoxes"]

_CAST_BYTES = 1 << 20
"""Bytes that are cast at a time: packed bytes are still in the CPU's cache when they are unpacked."""


class ImportedBoxes:
    """Makes the copies of one rank of an instance; all of them share its memory for what is cast."""

    def __init__(self, part: RankPart, layout: RankLayout, device: torch.device) -> None:
        self._part, self._layout, self._device = part, layout, device
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def staging_bytes(self) -> int:
        """Memory for what is cast; within the part's bucket."""
        return self._staging.nbytes

    def prepare(
        self, rows: IntArray, offer: Offer, opened: Mapping[Segment, torch.Tensor], whose: str
    ) -> list[CopyBatch]:
        """Copies for operations `rows` from the memory of an offer: in place all in order, staged those of each round.
        Raises PlanError when the offer does not fit the plan."""
        if not self._scratch.nbytes:
            self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        with torch.no_grad():
            if offer.staged:
                return self._unpacking(rows, offer, opened, whose)
            offer.check(self._part.operations.size[rows], whose)
            return self._in_place(rows, offer, _bases(offer, opened))

    def _unpacking(
        self, rows: IntArray, offer: Offer, opened: Mapping[Segment, torch.Tensor], whose: str
    ) -> list[CopyBatch]:
        traffic = find_traffic(only_rows(self._part, rows), self._layout, self._device, staged=True)
        offer.check(traffic.nbytes[:, None], whose)
        (buffer,) = _bases(offer, opened)
        rounds = make_rounds(traffic, self._layout, buffer, offer.start, self._scratch)
        return [step.unpack for step in rounds]

    def _in_place(self, rows: IntArray, offer: Offer, sources: Sequence[torch.Tensor]) -> list[CopyBatch]:
        boxes, wire = self._copies(rows, offer), self._part.wire_dtype[rows]
        targets, batch = self._layout.memory.bases, CopyBatch()
        kinds = [np.array([t.dtype for t in side] + [None], dtype=object)[boxes.base[:, i]]
                 for i, side in enumerate((sources, targets))]  # fmt: skip
        has_elements, dtype_match = (boxes.size > 0).all(axis=1), np.asarray(kinds[0] == kinds[1], dtype=bool)
        plain = boxes.take(has_elements & dtype_match)
        copies = join(plain.take(shape_order(plain.size)))
        make_copies(copies, (sources, targets), None, [batch], np.zeros(len(copies), dtype=np.int64), self._scratch)
        casts = has_elements & ~dtype_match
        return [batch, *self._cast(boxes.take(casts), wire[casts], sources)]

    def _copies(self, rows: IntArray, offer: Offer) -> StridedCopies:
        """The boxes of `rows` from the offer's memory to this rank's, all in one group."""
        ops = self._part.operations
        target, size = in_memory(self._layout, ops.dst_region[rows], ops.offset[rows], ops.size[rows])
        width = max(size.shape[1], offer.stride.shape[1])
        source, target = (
            places._replace(stride=pad_boxes(places.stride, width, 0))
            for places in (Places(offer.base, offer.start, offer.stride), target)
        )
        group = np.zeros(len(rows), dtype=np.int64)
        return StridedCopies.of_sides(group, pad_boxes(size, width, 1), source, target)

    def _cast(self, boxes: StridedCopies, wire: IntArray, sources: Sequence[torch.Tensor]) -> list[CopyBatch]:
        """For each message a batch that packs it and one that unpacks it. `wire` (k,) are codes of dtypes."""
        if not len(boxes):
            return []
        if not self._staging.nbytes:
            nbytes = min(self._part.bucket_bytes, _CAST_BYTES)
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        pieces = cut_messages(boxes.size, wire, self._staging.nbytes)
        columns = pieces.nbytes.tolist(), pieces.dtype.tolist()
        messages = [self._staging[:n].view(to_torch(dtype_name(code))) for n, code in zip(*columns, strict=True)]
        batches = [CopyBatch() for _ in range(2 * len(messages))]
        packing, unpacking = _to_messages(boxes, pieces, 0), _to_messages(boxes, pieces, 1).turned()
        make_copies(packing, (sources, messages), 1, batches[::2], packing.group, self._scratch)
        memory = self._layout.memory.bases
        make_copies(unpacking, (messages, memory), 0, batches[1::2], unpacking.group, self._scratch)
        return batches


def _to_messages(boxes: StridedCopies, pieces: Messages, side: int) -> StridedCopies:
    """The pieces of boxes as they lie in the memory of a side, and in messages."""
    stride = boxes.stride[pieces.box, :, side]
    start = boxes.start[pieces.box, side] + (pieces.offset * stride).sum(axis=1)
    memory = Places(boxes.base[pieces.box, side], start, stride)
    message = Places(pieces.message, pieces.start, contiguous_strides(pieces.size))
    return join(StridedCopies.of_sides(pieces.message, pieces.size, memory, message))


def _bases(offer: Offer, opened: Mapping[Segment, torch.Tensor]) -> list[torch.Tensor]:
    """The flat tensors of an offer's bases."""
    columns = (offer.segment, offer.first, offer.elements, offer.dtype)
    tensors = []
    for segment, first, elements, code in zip(*(c.tolist() for c in columns), strict=True):
        memory = opened[offer.segments[segment]]
        tensors.append(memory[first : first + elements * int(ITEMSIZE[code])].view(to_torch(dtype_name(code))))
    return tensors
