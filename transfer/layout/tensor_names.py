"""Layer and expert numbers in checkpoint names.

Checkpoints name a tensor of a layer `<stem>.layers.<L>.<part>` and a tensor of a routed expert
`<stem>.layers.<L>.<block>.experts.<E>.<part>`. Nothing else of a name is interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import changes

__all__ = ["NONE", "ParsedNames", "parse_layers", "parse_names"]

NONE = -1
"""Layer or expert number of a name that has none."""

_MAX_DIGITS = 9
"""Longer numbers are no numbers: a hostile name must not become an integer that fits no column."""
_DOT, _END, _ZERO = ord("."), ord("\n"), ord("0")

_Bytes = npt.NDArray[np.uint8]


class ParsedNames(NamedTuple):
    """Numbers in names, in (n,) columns: layer and routed expert, NONE where a name has no such number.

    `family` numbers the names with the expert number taken out: one part of all experts of a layer is a family.
    """

    layer: IntArray
    expert: IntArray
    family: IntArray

    def take(self, rows: IntArray) -> ParsedNames:
        """The numbers of some of the names, in that order."""
        return ParsedNames(self.layer[rows], self.expert[rows], self.family[rows])


class _Found(NamedTuple):
    """The first number of each name: its value or NONE, and where its digits begin and end in the name, in bytes."""

    value: IntArray
    begin: IntArray
    end: IntArray


def parse_names(names: Sequence[str]) -> ParsedNames:
    """Layer, expert and family of each name; a hundred thousand names take a few hundredths of a second."""
    if not names:
        return ParsedNames(*[np.empty(0, dtype=np.int64)] * 3)
    raw, start, names = _bytes_of(names)
    layer, expert = _first_numbers(raw, start, b"layers."), _first_numbers(raw, start, b"experts.")
    families: dict[str, int] = {}
    family = [
        families.setdefault(name[:first] + name[end:], len(families))
        for name, first, end in zip(names, expert.begin.tolist(), expert.end.tolist(), strict=True)
    ]
    return ParsedNames(layer.value, expert.value, np.array(family, dtype=np.int64))


def parse_layers(names: Sequence[str]) -> IntArray:
    """(n,) the layer of each name, NONE where it has none; several times faster than all of `parse_names`."""
    if not names:
        return np.empty(0, dtype=np.int64)
    raw, start, _ = _bytes_of(names)
    return _first_numbers(raw, start, b"layers.").value


def _bytes_of(names: Sequence[str]) -> tuple[_Bytes, IntArray, Sequence[str]]:
    """The names as lines of bytes, the position of each, and the names with one letter a byte."""
    text = "\n".join(names)
    if not text.isascii() or text.count("\n") >= len(names):
        # Positions count bytes and lines, so a name needs one letter a byte and one line.
        names = [name.replace("\n", " ").encode("utf-8", "surrogatepass").decode("latin-1") for name in names]
        text = "\n".join(names)
    raw = np.frombuffer(f"\n{text}\n".encode("latin-1"), dtype=np.uint8)
    return raw, np.flatnonzero(raw == _END)[:-1] + 1, names


def _first_numbers(raw: _Bytes, start: IntArray, word: bytes) -> _Found:
    """The number after the first `word` of each name that begins a part of the name and is followed by a number."""
    at = _occurrences(raw, word)
    at = at[(raw[at - 1] == _DOT) | (raw[at - 1] == _END)]
    low = at + len(word)
    high, value = low.copy(), np.zeros(len(at), dtype=np.int64)
    in_number = np.ones(len(at), dtype=bool)
    for _ in range(_MAX_DIGITS + 1):
        digit = raw[high].astype(np.int64) - _ZERO
        in_number &= (digit >= 0) & (digit <= 9)
        value = np.where(in_number, value * 10 + digit, value)
        high += in_number
    length = high - low
    valid = (length > 0) & (length <= _MAX_DIGITS) & ((raw[high] == _DOT) | (raw[high] == _END))
    low, high, value = low[valid], high[valid], value[valid]
    name = np.searchsorted(start, low, side="right") - 1
    first = changes(name)
    name = name[first]
    numbers = _Found(np.full(len(start), NONE, dtype=np.int64), np.zeros_like(start), np.zeros_like(start))
    numbers.value[name] = value[first]
    numbers.begin[name] = low[first] - start[name]
    numbers.end[name] = high[first] - start[name]
    return numbers


def _occurrences(raw: _Bytes, word: bytes) -> IntArray:
    """Positions of `word` in `raw`, ascending; raw begins and ends with a byte that is in no word."""
    letters = np.frombuffer(word, dtype=np.uint8)
    rarest = int(np.bincount(raw, minlength=256)[letters].argmin())
    at = np.flatnonzero(raw == letters[rarest]) - rarest
    at = at[(at > 0) & (at + len(word) < len(raw))]
    for i, letter in enumerate(letters):
        at = at[raw[at + i] == letter]
    return at
