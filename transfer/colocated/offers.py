"""Offers of a trainer rank to a rank of the same host: the memory to open, and the places of its boxes there.

An offer is one frame of columns (`wire.frames`), sent over the communicator of the instance. Reading trusts nothing: a
box outside its memory is refused before anybody reads it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import pad_boxes
from weightcast.transfer.colocated.segment import Segment
from weightcast.transfer.errors import InputError, PlanError
from weightcast.transfer.layout.dtypes import ITEMSIZE, NAMES
from weightcast.transfer.wire.frames import FrameReader, FrameWriter

__all__ = ["MAX_OFFER_BYTES", "Offer", "Share", "check_share", "decode_offer", "encode_offer", "fingerprint_of"]


MAX_OFFER_BYTES = 64 << 20

_Exports = Literal["in_place", "staged"]
Share: TypeAlias = _Exports | None
"""Memory that a trainer rank exports: its weights where they lie, a buffer into which it packs them, or none."""

_VERSION, _KIND = 1, 4
_MAX = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Offer:
    """Segments, bases in them, and the places in the bases of the k boxes that a rank is to read, in the plan's order.

    Of bases: `segment` (b,), `first` (b,) byte in it, `elements` (b,), `dtype` (b,) code. Of boxes: `base` (k,),
    `start` (k,) and `stride` (k, D) in elements. In a staged offer a box is a whole message: base 0, bytes, stride 1.
    """

    staged: bool
    segments: tuple[Segment, ...]
    segment: IntArray
    first: IntArray
    elements: IntArray
    dtype: IntArray
    base: IntArray
    start: IntArray
    stride: IntArray

    def check(self, size: IntArray, where: str) -> None:
        """Checks that each box of `size` (k, D) is inside its base; `where` names the offer. Raises PlanError."""
        if self.base.shape[0] != size.shape[0]:
            raise PlanError(f"{where} offers {self.base.shape[0]} boxes, the plan has {size.shape[0]}; connect again")
        width = max(size.shape[1], self.stride.shape[1])
        reach = (pad_boxes(size, width, 1) - 1).astype(np.float64) * pad_boxes(self.stride, width, 0)
        last = self.start + reach.sum(axis=1)  # in floating point, where nothing wraps around
        fault = (size.prod(axis=1) > 0) & (last >= self.elements[self.base])
        if fault.any():
            row = int(fault.argmax())
            raise PlanError(
                f"{where} offers box {row} up to element {int(last[row])} of "
                f"{int(self.elements[self.base[row]])}; nothing outside a storage is read"
            )


def check_share(share: object) -> None:
    """Raises InputError for what a trainer rank cannot export."""
    if share is not None and share not in get_args(_Exports):
        raise InputError(f"share is {share!r}, expected {', '.join(map(repr, get_args(_Exports)))} or None")


def fingerprint_of(frame: bytes) -> int:
    """A number that stands for the contents of an offer: another memory, another number."""
    return int.from_bytes(hashlib.blake2b(frame, digest_size=8).digest(), "little", signed=True)


def encode_offer(offer: Offer) -> bytes:
    """Encodes an offer as one frame."""
    w = FrameWriter(_VERSION, _KIND)
    w.field("staged", offer.staged)
    w.strings("device", tuple(s.device for s in offer.segments))
    w.column("nbytes", np.array([s.nbytes for s in offer.segments], dtype=np.int64))
    w.column("key_bytes", np.array([len(s.key) for s in offer.segments], dtype=np.int64))
    w.column("key", np.frombuffer(b"".join(s.key for s in offer.segments), dtype=np.uint8).astype(np.int64))
    for name in ("segment", "first", "elements", "dtype", "base", "start"):
        w.column(name, getattr(offer, name))
    w.matrix("stride", offer.stride)
    return w.finish()


def decode_offer(data: bytes) -> Offer:
    """The offer in a frame. Raises WireError."""
    r = FrameReader(data, version=_VERSION, kind=_KIND, what="offer of shared memory", max_bytes=MAX_OFFER_BYTES)
    staged, devices = r.flag("staged"), r.strings("device")
    nbytes, lengths = r.column("nbytes", len(devices), 0, _MAX), r.column("key_bytes", len(devices), 0, 1 << 16)
    raw = r.column("key", r.count("key"), 0, 255)
    if int(lengths.sum()) != len(raw):
        raise r.error(f"has {len(raw)} bytes of keys, expected {int(lengths.sum())}")
    keys, ends = raw.astype(np.uint8).tobytes(), np.cumsum(lengths).tolist()
    segments = tuple(
        Segment(device, int(n), keys[end - int(length) : end])
        for device, n, length, end in zip(devices, nbytes, lengths, ends, strict=True)
    )
    bases, boxes = r.count("segment"), r.count("base")
    segment, first = r.column("segment", bases, 0, len(segments) - 1), r.column("first", bases, 0, _MAX)
    elements, dtype = r.column("elements", bases, 0, _MAX >> 4), r.column("dtype", bases, 0, len(NAMES) - 1)
    base, start = r.column("base", boxes, 0, bases - 1), r.column("start", boxes, 0, _MAX >> 4)
    stride = r.matrix("stride", boxes, r.width("stride"), 0, 1 << 40)
    if (first + elements * ITEMSIZE[dtype] > nbytes[segment]).any() or (first % ITEMSIZE[dtype]).any():
        raise r.error("has a base that is not inside its segment")
    r.finish()
    return Offer(staged, segments, segment, first, elements, dtype, base, start, stride)
