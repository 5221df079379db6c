"""Memory that a trainer rank exports to ranks of its host: that of its weights, or a buffer into which it packs
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.colocated import host_memory
from weightcast.transfer.colocated.offers import Offer
from weightcast.transfer.colocated.segment import CPU, Segment
from weightcast.transfer.copy.runs import SCRATCH_BYTES
from weightcast.transfer.exchange.messages_in_memory import find_traffic, in_memory
from weightcast.transfer.exchange.schedule import Round, make_rounds, place_messages
from weightcast.transfer.layout.dtypes import dtype_code, from_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart

__all__ = ["Staging", "in_place_offer", "make_staging", "only_rows", "open_segment"]


@dataclass(frozen=True, slots=True)
class Staging:
    """A buffer that importers open, the rounds in which it is filled, and the offer for each importer."""

    buffer: torch.Tensor
    rounds: list[Round]
    offers: dict[int, Offer]


def only_rows(part: RankPart, rows: IntArray) -> RankPart:
    """The part with these operations alone, all in one stage."""
    return replace(part.take(rows), stage=None)


def make_staging(part: RankPart, layout: RankLayout, rows: Mapping[int, IntArray], device: torch.device) -> Staging:
    """Makes a buffer for messages as between hosts, which importers unpack there. It has at most
    `part.bucket_bytes`."""
    shared_part = only_rows(part, np.sort(np.concatenate(list(rows.values()))))
    traffic = find_traffic(shared_part, layout, device, staged=True)
    nbytes, places = place_messages(traffic)
    buffer = (
        host_memory.allocate(nbytes) if device.type == CPU else torch.empty(nbytes, dtype=torch.uint8, device=device)
    )
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        rounds = make_rounds(traffic, layout, buffer, places, scratch)
    segment, first = segment_of(buffer.untyped_storage())
    offers = {}
    for peer in rows:
        start = places[traffic.peer == peer]
        unit_stride = np.ones((len(start), 1), dtype=np.int64)
        offers[peer] = Offer(
            staged=True,
            segments=(segment,),
            segment=np.array([0]),
            first=np.array([first]),
            elements=np.array([nbytes]),
            dtype=np.array([dtype_code("uint8")]),
            base=np.zeros_like(start),
            start=start,
            stride=unit_stride,
        )
    return Staging(buffer, rounds, offers)


def in_place_offer(part: RankPart, layout: RankLayout, rows: IntArray) -> Offer:
    """The offer of the boxes of `rows` in this rank's own memory. Raises TransferError when that is not shared."""
    ops = part.operations
    boxes, _ = in_memory(layout, ops.src_region[rows], ops.offset[rows], ops.size[rows])
    bases, base = np.unique(boxes.base, return_inverse=True)
    places: list[tuple[int, int, int, int]] = []
    segments: dict[Segment, int] = {}
    segment_at: dict[int, tuple[Segment, int]] = {}
    for number in bases.tolist():
        flat = layout.memory.bases[number]
        storage = flat.untyped_storage()
        if storage.data_ptr() not in segment_at:
            segment_at[storage.data_ptr()] = segment_of(storage)
        segment, first = segment_at[storage.data_ptr()]
        index = segments.setdefault(segment, len(segments))
        places.append((index, first, flat.numel(), dtype_code(from_torch(flat.dtype))))
    columns = np.array(places, dtype=np.int64).reshape(-1, 4).T
    box = (base.astype(np.int64), boxes.start, boxes.stride)
    return Offer(False, tuple(segments), columns[0], columns[1], columns[2], columns[3], *box)


def segment_of(storage: torch.UntypedStorage) -> tuple[Segment, int]:
    """The segment that a storage lies in, and its first byte there."""
    if not storage.nbytes():
        return Segment(CPU, 0, b""), 0
    if storage.device.type == CPU:
        return host_memory.segment_of(storage)
    from weightcast.transfer.colocated import cuda_ipc

    return cuda_ipc.segment_of(storage)


def open_segment(segment: Segment) -> torch.Tensor:
    """(nbytes,) uint8: the segment of another process."""
    if not segment.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if segment.device == CPU:
        return host_memory.open_segment(segment)
    from weightcast.transfer.colocated import cuda_ipc

    return cuda_ipc.open_segment(segment)
