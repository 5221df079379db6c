"""Columns of whole numbers in as few bytes as is cheap.

A column is stored as an arithmetic progression (three numbers), as its values, or as its differences. The last two are
stored less their smallest in 1, 2 or 4 bytes each, or in 8 bytes as they are. The frame's compression does the rest.

A descriptor is a list of a form, the number of entries, and numbers of that form:

    ["a", n, first, step]            first + step * i
    ["v", n, type, base]             payload of n entries, each less base
    ["d", n, type, base, first]      payload of n - 1 differences, each less base
    ["s", n, bytes]                  texts, joined by NUL: not decoded here

Types are u1, u2, u4, i8 and, only for 64-bit words without any order, u8; all little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray

__all__ = [
    "STRINGS",
    "Descriptor",
    "decode_column",
    "encode_column",
    "encode_words",
    "is_descriptor",
    "is_words",
    "payload_bytes",
]

Descriptor = list[Any]

STRINGS = "s"

_PROGRESSION, _VALUES, _DIFFERENCES = "a", "v", "d"
_NUMBERS = {_PROGRESSION: 3, _VALUES: 2, _DIFFERENCES: 3, STRINGS: 2}
"""Whole numbers in a descriptor of each form, the type not counted."""

_NARROW = ("u1", "u2", "u4")
_WORDS = "u8"
_TYPES: dict[str, np.dtype[np.integer]] = {code: np.dtype(f"<{code}") for code in (*_NARROW, "i8", _WORDS)}
_LEAST, _MOST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


def encode_words(values: npt.NDArray[np.uint64]) -> tuple[Descriptor, bytes]:
    """Descriptor and payload of (n,) uint64, stored as they are."""
    return [_VALUES, len(values), _WORDS, 0], np.ascontiguousarray(values, dtype=_TYPES[_WORDS]).tobytes()


def is_words(descriptor: Descriptor) -> bool:
    """True if a checked descriptor is of 64-bit words."""
    return bool(descriptor[0] == _VALUES and descriptor[2] == _WORDS)


def encode_column(values: IntArray) -> tuple[Descriptor, bytes]:
    """Descriptor and payload of a column (n,) int64."""
    n = len(values)
    if n == 0:
        return [_PROGRESSION, 0, 0, 0], b""
    low, high, first = int(values.min()), int(values.max()), int(values[0])
    if low == high:
        return [_PROGRESSION, n, first, 0], b""
    if not _fits(high - low):
        return [_VALUES, n, "i8", 0], values.astype(_TYPES["i8"]).tobytes()
    steps = np.diff(values)
    if (steps == steps[0]).all():
        return [_PROGRESSION, n, first, int(steps[0])], b""
    low_step, high_step = int(steps.min()), int(steps.max())
    # Differences pay where they change much less often than the values do, as in row numbers with a few repetitions.
    regular = 2 * np.count_nonzero(steps[1:] != steps[:-1]) < np.count_nonzero(steps)
    if regular and _sums_fit(n, first, low_step, high_step):
        code, raw = _narrow(steps, low_step, high_step)
        return [_DIFFERENCES, n, code, low_step if code != "i8" else 0, first], raw
    code, raw = _narrow(values, low, high)
    return [_VALUES, n, code, low if code != "i8" else 0], raw


def _narrow(values: IntArray, low: int, high: int) -> tuple[str, bytes]:
    for code in _NARROW:
        if high - low <= np.iinfo(_TYPES[code]).max:
            return code, (values - low).astype(_TYPES[code]).tobytes()
    return "i8", values.astype(_TYPES["i8"]).tobytes()


def is_descriptor(found: object) -> bool:
    """True if an unpacked object is a descriptor, its numbers in int64 and its counts not negative."""
    if not isinstance(found, list) or len(found) < 3 or not isinstance(found[0], str):
        return False
    form, numbers = found[0], found[1:]
    if form in (_VALUES, _DIFFERENCES):
        code = numbers.pop(1)
        if not isinstance(code, str) or code not in _TYPES or (code == _WORDS and form != _VALUES):
            return False
    if len(numbers) != _NUMBERS.get(form):
        return False
    for number in numbers:
        if type(number) is not int or not _LEAST <= number <= _MOST:
            return False
    return bool(numbers[0] >= (form == _DIFFERENCES) and (form != STRINGS or numbers[1] >= 0))


def payload_bytes(descriptor: Descriptor) -> int:
    """Bytes of payload that a checked descriptor declares."""
    form, count = descriptor[:2]
    if form == _PROGRESSION:
        return 0
    if form == STRINGS:
        return int(descriptor[2])
    return int((count - (form == _DIFFERENCES)) * _TYPES[descriptor[2]].itemsize)


def decode_column(descriptor: Descriptor, raw: memoryview) -> IntArray | None:
    """Column (n,) int64 of a checked descriptor and its `payload_bytes` of payload; None if a number leaves int64."""
    form, count, *numbers = descriptor
    if form == _PROGRESSION:
        first, step = numbers
        if not _fits(first + step * max(count - 1, 0)):
            return None
        values: IntArray = np.full(count, first, dtype=np.int64)
        if step:
            values += step * np.arange(count, dtype=np.int64)
        return values
    entries = np.frombuffer(raw, dtype=_TYPES[numbers[0]])
    base = numbers[1]
    low, high = (int(entries.min()) + base, int(entries.max()) + base) if len(entries) else (0, 0)
    if not _fits(low, high):
        return None
    values = entries.astype(np.int64)
    values += base
    if form == _VALUES:
        return values
    return np.cumsum(np.append(numbers[2], values)) if _sums_fit(count, numbers[2], low, high) else None


def _fits(*numbers: int) -> bool:
    return min(numbers) >= _LEAST and max(numbers) <= _MOST


def _sums_fit(n: int, first: int, least: int, most: int) -> bool:
    """True when no partial sum of n steps between `least` and `most` leaves int64."""
    return _fits(first + (n - 1) * min(least, 0), first + (n - 1) * max(most, 0))
