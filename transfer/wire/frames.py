"""Frames: fields, integer columns and string tables as bytes, the inner layer of `weightcast.transfer.wire.messages`.

    magic 4s | version u16 | kind u16 | body length u64 | zlib(header length u32 | msgpack header | payload)

Numbers are little-endian. The header has the scalar fields and one short descriptor for each column. The payload has
the raw bytes of the columns one after the other, in the header's order. Everything long is in the payload: the header,
whose Python objects cost many times their bytes, is limited to 64 KiB.

Reading trusts nothing. A frame, its body and the memory of what it decodes to are each limited to `max_bytes`. Memory
is allocated only after its size was checked against that.
"""

from __future__ import annotations

import struct
import sys
import zlib
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import WireError
from weightcast.transfer.wire.integers import (
    STRINGS,
    Descriptor,
    decode_column,
    encode_column,
    encode_words,
    is_descriptor,
    is_words,
    payload_bytes,
)

__all__ = ["DEFAULT_MAX_BYTES", "MAX_HEADER_BYTES", "MAX_WIDTH", "FrameReader", "FrameWriter"]

DEFAULT_MAX_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 10
MAX_WIDTH = 16
"""Most dimensions a box may have on the wire."""

_MAGIC = b"WCST"
_FRAME = struct.Struct("<4sHHQ")
_HEADER = struct.Struct("<I")
_STRING_OVERHEAD = 64
"""Bytes that a short Python string costs beside its characters."""


class FrameWriter:
    """Collects fields and columns under distinct names and makes the bytes of one frame."""

    def __init__(self, version: int, kind: int) -> None:
        self._version, self._kind = version, kind
        self._fields: dict[str, int | str | bool | None] = {}
        self._columns: dict[str, Descriptor] = {}
        self._payload: list[bytes] = []

    def field(self, name: str, value: int | str | bool | None) -> None:
        """Adds a scalar under a name."""
        self._fields[name] = value

    def column(self, name: str, values: IntArray) -> None:
        """Adds a column of (n,) int64."""
        descriptor, raw = encode_column(np.asarray(values, dtype=np.int64))
        self._columns[name] = descriptor
        self._payload.append(raw)

    def matrix(self, name: str, values: IntArray) -> None:
        """Adds (n, D) int64, one column per dimension."""
        for d in range(values.shape[1]):
            self.column(f"{name}.{d}", values[:, d])

    def words(self, name: str, values: npt.NDArray[np.uint64]) -> None:
        """Adds (n,) uint64 without any regularity, as they are."""
        descriptor, raw = encode_words(values)
        self._columns[name] = descriptor
        self._payload.append(raw)

    def text(self, name: str, value: str) -> None:
        """Adds a table of one text."""
        self.strings(name, (value,))

    def strings(self, name: str, values: tuple[str, ...]) -> None:
        """Adds texts without control characters. Raises WireError for others."""
        for text in values:
            if not text.isprintable():
                raise WireError(f"{name} has {text[:80]!r}, which has control characters and cannot be sent")
        raw = "\0".join(values).encode("utf-8")
        self._columns[name] = [STRINGS, len(values), len(raw)]
        self._payload.append(raw)

    def finish(self) -> bytes:
        """Gives the bytes of the frame. Raises WireError for a header that is too long."""
        header = msgpack.packb([self._fields, self._columns])
        if len(header) > MAX_HEADER_BYTES:
            raise WireError(f"a message has a header of {len(header)} bytes, more than {MAX_HEADER_BYTES}")
        body = b"".join([_HEADER.pack(len(header)), header, *self._payload])
        return _FRAME.pack(_MAGIC, self._version, self._kind, len(body)) + zlib.compress(body, 1)


class FrameReader:
    """Fields and columns of one frame, each asked for once, by name. Every method raises WireError.

    `what` names the message in errors. `finish` must be called last: it refuses what nobody asked for.
    """

    def __init__(self, data: bytes, *, version: int, kind: int, what: str, max_bytes: int) -> None:
        self._what, self._budget = what, max_bytes
        body = self._unpack_frame(data, version, kind, max_bytes)
        if len(body) < _HEADER.size:
            raise self.error("ends before its header")
        (length,) = _HEADER.unpack_from(body)
        if length > MAX_HEADER_BYTES or _HEADER.size + length > len(body):
            raise self.error(f"has a header of {length} bytes, expected at most {MAX_HEADER_BYTES} and {len(body)}")
        self._fields, self._columns = self._unpack_header(body[_HEADER.size : _HEADER.size + length])
        self._payload = self._slice_payload(memoryview(body)[_HEADER.size + length :])

    def error(self, fault: str) -> WireError:
        """The error for a fault of this message."""
        return WireError(f"{self._what} {fault}")

    def _unpack_frame(self, data: bytes, version: int, kind: int, max_bytes: int) -> bytes:
        if len(data) > max_bytes:
            raise self.error(f"has {len(data)} bytes, more than the limit of {max_bytes}")
        if len(data) < _FRAME.size:
            raise self.error(f"has {len(data)} bytes; it is cut off or no message of weightcast")
        magic, frame_version, frame_kind, length = _FRAME.unpack_from(data)
        if magic != _MAGIC:
            raise self.error(f"starts with {magic!r}, expected {_MAGIC!r}: no message of weightcast")
        if frame_version != version:
            raise self.error(f"has version {frame_version}, expected {version}; run the same weightcast on all sides")
        if frame_kind != kind:
            raise self.error(f"is of kind {frame_kind}, expected {kind}")
        if length > max_bytes:
            raise self.error(f"unpacks to {length} bytes, more than the limit of {max_bytes}")
        inflater = zlib.decompressobj()
        try:
            body = inflater.decompress(memoryview(data)[_FRAME.size :], length + 1)
        except zlib.error as fault:
            raise self.error(f"is damaged: {fault}") from None
        if not inflater.eof or inflater.unused_data or inflater.unconsumed_tail or len(body) != length:
            raise self.error(f"declares {length} bytes but holds another number; it is cut off or damaged")
        return body

    def _unpack_header(self, raw: bytes) -> tuple[dict[str, Any], dict[str, Descriptor]]:
        try:
            header = msgpack.unpackb(
                raw,
                strict_map_key=True,
                max_ext_len=0,
                max_bin_len=0,
                max_str_len=len(raw),
                max_array_len=64,
                max_map_len=512,
            )
        except Exception as fault:  # msgpack raises ValueError, its own classes and those of UTF-8
            raise self.error(f"has a damaged header: {type(fault).__name__}") from None
        if not isinstance(header, list) or len(header) != 2 or not all(isinstance(part, dict) for part in header):
            raise self.error("has a header that is not two maps")
        fields, columns = header
        for name, descriptor in columns.items():
            if not is_descriptor(descriptor):
                raise self.error(f"has a malformed descriptor of column {name!r:.80}")
        return fields, columns

    def _slice_payload(self, payload: memoryview) -> dict[str, memoryview]:
        slices, start = {}, 0
        for name, descriptor in self._columns.items():
            end = start + payload_bytes(descriptor)
            if not start <= end <= len(payload):
                raise self.error(f"does not hold the bytes of column {name!r:.80} of {descriptor[1]} entries")
            slices[name] = payload[start:end]
            start = end
        if start != len(payload):
            raise self.error(f"has {len(payload) - start} bytes that belong to no column")
        return slices

    def integer(self, name: str, low: int, high: int) -> int:
        """A scalar with low <= value <= high."""
        value = self._field(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(f"has {name} {value!r:.80}, expected a whole number in {low}..{high}")
        return value

    def flag(self, name: str) -> bool:
        """A scalar that is true or false."""
        value = self._field(name)
        if type(value) is not bool:
            raise self.error(f"has {name} {value!r:.80}, expected true or false")
        return value

    def _field(self, name: str) -> object:
        if name not in self._fields:
            raise self.error(f"has no field {name}")
        return self._fields.pop(name)

    def count(self, name: str) -> int:
        """Declared number of entries of a column or string table; nothing was allocated for it yet."""
        return int(self._descriptor(name)[1])

    def width(self, name: str) -> int:
        """Number of dimensions of a matrix, at least 1."""
        width = 0
        while f"{name}.{width}" in self._columns:
            width += 1
        if not 1 <= width <= MAX_WIDTH:
            raise self.error(f"has {width} dimensions in {name}, expected 1..{MAX_WIDTH}")
        return width

    def _descriptor(self, name: str) -> Descriptor:
        if name not in self._columns:
            raise self.error(f"has no column {name}")
        return self._columns[name]

    def _take(self, name: str, count: int, nbytes: int) -> tuple[Descriptor, memoryview]:
        descriptor = self._descriptor(name)
        if descriptor[1] != count:
            raise self.error(f"has {descriptor[1]} entries in column {name}, expected {count}")
        self._budget -= nbytes
        if self._budget < 0:
            raise self.error(f"needs more memory than the limit allows at column {name} of {count} entries")
        del self._columns[name]
        return descriptor, self._payload[name]

    def column(self, name: str, count: int, low: int | None = None, high: int | None = None) -> IntArray:
        """The column of that name, (count,) int64, with low <= value <= high where these are given."""
        descriptor, raw = self._take(name, count, 8 * count)
        if descriptor[0] == STRINGS or is_words(descriptor):
            raise self.error(f"has column {name} in another form than whole numbers")
        values = decode_column(descriptor, raw)
        if values is None:
            raise self.error(f"has numbers beyond 64 bits in column {name}")
        if low is not None and high is not None:
            outside = (values < low) | (values > high)
            if outside.any():
                row = int(outside.argmax())
                raise self.error(f"has {name} {int(values[row])} in row {row}, expected {low}..{high}")
        return values

    def matrix(self, name: str, count: int, width: int, low: int | None = None, high: int | None = None) -> IntArray:
        """The columns of a matrix, as (count, width) int64, with bounds like `column`."""
        if not 1 <= width <= MAX_WIDTH:
            raise self.error(f"has {width} dimensions in {name}, expected 1..{MAX_WIDTH}")
        self._budget -= 8 * count * width
        if self._budget < 0:
            raise self.error(f"needs more memory than the limit allows at {name} of {count} x {width} entries")
        # Each column is checked against the limits before the matrix is allocated.
        return np.stack([self.column(f"{name}.{d}", count, low, high) for d in range(width)], axis=1)

    def words(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        """The column of that name, (count,) uint64."""
        descriptor, raw = self._take(name, count, 8 * count)
        if not is_words(descriptor):
            raise self.error(f"has column {name} in another form than 64-bit words")
        return np.frombuffer(raw, dtype="<u8").astype(np.uint64)

    def strings(self, name: str) -> tuple[str, ...]:
        """A table of texts without control characters."""
        count = self.count(name)
        if self._descriptor(name)[0] != STRINGS:
            raise self.error(f"has column {name} in another form than texts")
        _, raw = self._take(name, count, _STRING_OVERHEAD * count)
        raw_texts = bytes(raw)
        if count != (raw_texts.count(b"\0") + 1 if count or raw_texts else 0):
            raise self.error(f"has another number of texts in {name} than the declared {count}")
        if not count:
            return ()
        try:
            text = raw_texts.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"has texts in {name} that are not UTF-8") from None
        if not text.replace("\0", "").isprintable():
            raise self.error(f"has texts in {name} with control characters")
        # Ranks name the same tensors: one string for all keeps look-ups in the cache and saves most of the memory.
        return tuple(map(sys.intern, text.split("\0")))

    def text(self, name: str) -> str:
        """The text of a table of one."""
        texts = self.strings(name)
        if len(texts) != 1:
            raise self.error(f"has {len(texts)} texts in {name}, expected 1")
        return texts[0]

    def finish(self) -> None:
        """Refuses a message with fields or columns that were not asked for."""
        for name in (*self._fields, *self._columns):
            raise self.error(f"has {name!r:.80}, which is no part of it")
