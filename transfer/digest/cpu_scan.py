"""Boxes in a CPU's memory prepared for the compiled loops of `cpu_loops`: once for a layout, run for every version.

Boxes become columns of addresses, sizes and places in a table of constants. So a run is one call for all boxes of an
element type, whatever their tensors, and samples need no index work. Large boxes are cut into pieces, which several
threads share.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, DigestArray, IntArray
from weightcast.transfer.boxes.columns import ranges
from weightcast.transfer.copy.runs import memory_at
from weightcast.transfer.digest.boxes import Boxes
from weightcast.transfer.digest.constants import HALF_BITS, LINE_BYTES, constants
from weightcast.transfer.digest.residues import add_runs
from weightcast.transfer.layout.dtypes import ITEMSIZE, NAMES, dtype_code, from_torch
from weightcast.transfer.layout.memory import RankLayout

__all__ = ["Scan", "scannable"]

log = logging.getLogger("weightcast.transfer")

_SIZES = (1, 2, 4)
_CAST, _FLOAT8 = 0, 8
_WORDS = {1: "|i1", 2: "<i2", 4: "<i4", _CAST: "<u4", _FLOAT8: "|u1"}
"""numpy types of words for `cpu_loops`, by the size of the words. _CAST is for float32 to be rounded to bfloat16, and
_FLOAT8 for words of 8 bits that may not be finite."""
_FLOATS8 = [code for code, name in enumerate(NAMES) if name.startswith("float8")]
_FARTHEST = 1 << 20
"""Constants are kept for indices below this; torch digests boxes that reach farther."""
_COLUMNS = LINE_BYTES // 2
"""Columns of a table of constants whose numbers of 2 bytes fill a line of the cache. Each dimension begins at a line,
because a vector that lies in two takes twice as long to load."""
_LONG = 16
"""A contiguous dimension of so many elements is read in vectors."""
_PIECE_BYTES = 4 << 20
_PIECE_ALIGNMENT = 128
"""Elements of whole vectors: pieces of rows end at multiples of them."""
_WORTH_A_THREAD = 8 << 20
"""Bytes for each thread beside the first."""


@cache
def _loops() -> ModuleType | None:
    """The compiled loops, None where numba is missing or does not fit this numpy."""
    try:
        from weightcast.transfer.digest import cpu_loops
    except ImportError as error:
        log.warning("digests on the CPU are several times slower without numba (weightcast[cpu]): %s", error)
        return None
    return cpu_loops


def scannable(layout: RankLayout, boxes: Boxes) -> BoolArray:
    """Mask (k,) of boxes to scan: aligned in a CPU's memory, of a type that the loops know, with elements in them."""
    words = _word_codes(boxes)
    if (words < 0).all() or _loops() is None:
        return np.zeros(len(boxes), dtype=bool)
    item = np.array([dtype.itemsize for _, dtype in boxes.kinds], dtype=np.int64)[boxes.kind]
    aligned = layout.memory.address[boxes.base] % item == 0
    in_reach = (boxes.offset + boxes.size <= _FARTHEST).all(axis=1)
    return np.asarray((words >= 0) & aligned & in_reach & (boxes.size > 0).all(axis=1))


def _word_codes(boxes: Boxes) -> IntArray:
    """Keys (k,) of _WORDS, -1 for boxes that the loops cannot read."""
    memory_dtype = np.array([dtype_code(from_torch(dtype)) for _, dtype in boxes.kinds], dtype=np.int64)[boxes.kind]
    on_cpu = np.array([device.type == "cpu" for device, _ in boxes.kinds], dtype=bool)[boxes.kind]
    codes = np.where(
        (memory_dtype == boxes.dtype) & np.isin(ITEMSIZE[memory_dtype], _SIZES), ITEMSIZE[memory_dtype], -1
    )
    codes[(codes == 1) & np.isin(memory_dtype, _FLOATS8)] = _FLOAT8
    codes[(memory_dtype == dtype_code("float32")) & (boxes.dtype == dtype_code("bfloat16"))] = _CAST
    codes[~on_cpu] = -1
    return codes


class Scan:
    """k boxes, all `scannable`, whose digests are made again and again. The layout has to be kept meanwhile.

    The first one on a machine compiles the loops, which takes seconds.
    """

    def __init__(self, layout: RankLayout, boxes: Boxes) -> None:
        self._count, codes = len(boxes), _word_codes(boxes)
        self._constants = _Constants.up_to((boxes.offset + boxes.size).max(axis=0, initial=0))
        self._kinds: list[tuple[IntArray, _Pieces]] = []
        for code in np.unique(codes).tolist():
            rows = np.flatnonzero(codes == code)
            rows = rows[np.argsort(layout.memory.address[boxes.base[rows]] + boxes.start[rows], kind="stable")]
            pieces = _Pieces.of(layout, boxes.take(rows), self._constants, _WORDS[code])
            pieces.sum(self._constants, -1, 0, 0)
            self._kinds.append((rows, pieces))

    def run(self, turn: int | None, threads: int) -> tuple[DigestArray, IntArray]:
        """Digests (k,) of what lies in memory now, and peaks (k,); with `turn` of the sample of that turn alone.

        A peak is the largest word of a box as it is stored, without its sign, or less where all are finite.
        """
        digests, peaks = np.empty(self._count, dtype=np.uint64), np.empty(self._count, dtype=np.int64)
        for rows, pieces in self._kinds:
            digests[rows], peaks[rows] = pieces.run(self._constants, -1 if turn is None else turn, threads)
        return digests, peaks


@dataclass(frozen=True, slots=True)
class _Constants:
    """Constants of all dimensions, one after the other, in the forms that `cpu_loops.box_sums` takes.

    `begin` (D,) is the column of a dimension's index 0. Column 0 is for dimensions that a tensor lacks: its constant
    is 1.
    """

    begin: IntArray
    whole: np.ndarray[Any, Any]
    halves: np.ndarray[Any, Any]
    prefix: np.ndarray[Any, Any]

    @classmethod
    def up_to(cls, extent: IntArray) -> _Constants:
        """Constants of the indices of each dimension below `extent` (D,)."""
        room = -(-extent // _COLUMNS) * _COLUMNS
        starts = _COLUMNS + np.cumsum(room) - room
        families = np.zeros((2, _row_length(_COLUMNS + int(room.sum()))), dtype=np.int64)
        families[:, 0] = 1
        for dim, (first, n) in enumerate(zip(starts.tolist(), extent.tolist(), strict=True)):
            families[:, first : first + n] = constants(dim, np.arange(n))
        halves = np.stack([families[0] >> HALF_BITS, families[0], families[1] >> HALF_BITS, families[1]])
        halves[1::2] &= (1 << HALF_BITS) - 1
        prefix = np.zeros((2, families.shape[1] + 1), dtype=np.int64)
        np.cumsum(families, axis=1, out=prefix[:, 1:])
        return cls(starts, _from_a_line(families, np.int32), _from_a_line(halves, np.int16), prefix)


def _row_length(columns: int) -> int:
    """Columns of a row, at least `columns`, so that equal columns of several rows have different places in the cache.

    A processor's places repeat after 4 KiB.
    """
    return columns + (17 * _COLUMNS - columns) % (64 * _COLUMNS)


def _from_a_line(table: IntArray, dtype: type[np.integer[Any]]) -> np.ndarray[Any, Any]:
    """A copy that begins where a line of the cache does."""
    room = np.empty(table.size + LINE_BYTES, dtype=dtype)
    first = -room.ctypes.data % LINE_BYTES // room.itemsize
    copy = room[first : first + table.size].reshape(table.shape)
    copy[:] = table
    return copy


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of boxes with words of one type, in the order of their boxes; columns as `cpu_loops.box_sums` has them.

    `words` is a window over all of them. `first` (k,) is the first piece of each box, and `nbytes` (n,) the bytes of
    each piece.
    """

    words: np.ndarray[Any, Any]
    first: IntArray
    nbytes: IntArray
    start: IntArray
    size: IntArray
    stride: IntArray
    place: IntArray
    thin: IntArray

    @classmethod
    def of(cls, layout: RankLayout, boxes: Boxes, table: _Constants, item: str) -> _Pieces:
        """Pieces of boxes that all have elements."""
        itemsize = np.dtype(item).itemsize
        address = layout.memory.address[boxes.base] + boxes.start * itemsize
        low = int(address.min())
        end = int((address + ((boxes.size - 1) * boxes.stride).sum(axis=1) * itemsize).max()) + itemsize
        words = memory_at(low, ((end - low) // itemsize,), item)
        order = _order(boxes)
        size, stride = (np.take_along_axis(column, order, axis=1) for column in (boxes.size, boxes.stride))
        padding = np.arange(boxes.size.shape[1]) >= boxes.ndim[:, None]
        columns = np.take_along_axis(np.where(padding, 0, table.begin + boxes.offset), order, axis=1)
        rows = np.arange(len(boxes))
        thin = np.stack(
            [(order == boxes.thin[:, None]).argmax(axis=1), boxes.every, boxes.offset[rows, boxes.thin]], axis=1
        )
        if size.shape[1] == 1:  # box_sums takes at least two dimensions
            size, stride, columns = (
                np.insert(c, 0, fill, axis=1) for c, fill in ((size, 1), (stride, 0), (columns, 0))
            )
            thin[:, 0] += 1
        start, nbytes = (address - low) // itemsize, size.prod(axis=1) * itemsize
        return cls(words, rows, nbytes, start, size, stride, columns, thin)._cut()

    def _cut(self) -> _Pieces:
        """Cuts boxes of more than _PIECE_BYTES along their outermost dimension."""
        rows, last = self.first, self.size.shape[1] - 1
        dim = (self.size > 1).argmax(axis=1)
        dim[(self.size == 1).all(axis=1)] = last
        extent = self.size[rows, dim]
        capacity = np.maximum(_PIECE_BYTES // (self.nbytes // extent), 1)
        capacity = np.where(dim == last, -(-capacity // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT, capacity)
        count = -(-extent // capacity)
        box, number = np.repeat(rows, count), ranges(np.zeros_like(count), count)
        offset, cut_entry = number * capacity[box], (np.arange(len(box)), dim[box])
        start, size, place, thin = (column[box] for column in (self.start, self.size, self.place, self.thin))
        start += offset * self.stride[box, dim[box]]
        size[cut_entry] = np.minimum(capacity[box], extent[box] - offset)
        place[cut_entry] += offset
        thin[:, 2] += np.where(thin[:, 0] == dim[box], offset, 0)
        nbytes = size.prod(axis=1) * self.words.itemsize
        return _Pieces(self.words, np.cumsum(count) - count, nbytes, start, size, self.stride[box], place, thin)

    def run(self, table: _Constants, turn: int, threads: int) -> tuple[DigestArray, IntArray]:
        """Digests (k,) of the boxes, and peaks (k,)."""
        shares = _shares(self.nbytes, threads)
        if len(shares) == 1:
            sums, peaks = self.sum(table, turn, *shares[0])
        else:
            with ThreadPoolExecutor(len(shares)) as pool:
                parts = list(pool.map(lambda share: self.sum(table, turn, *share), shares))
            sums, peaks = (np.concatenate([part[i] for part in parts], axis=-1) for i in (0, 1))
        digests = sums[0].astype(np.uint64) << np.uint64(32) | sums[1].astype(np.uint64)
        if len(self.first) == len(digests):
            return digests, peaks
        return add_runs(digests, self.first), np.maximum.reduceat(peaks, self.first)

    def sum(self, table: _Constants, turn: int, begin: int, end: int) -> tuple[IntArray, IntArray]:
        """Residues (2, end - begin) of pieces `begin` to `end` - 1, and their peaks."""
        loops = _loops()
        assert loops is not None
        sums, peaks = np.empty((2, end - begin), dtype=np.int64), np.empty(end - begin, dtype=np.int64)
        loops.box_sums(
            self.words, self.start, self.size, self.stride, self.place, self.thin, turn,
            table.whole, table.halves, table.prefix, begin, end, sums, peaks,
        )  # fmt: skip
        return sums, peaks


def _order(boxes: Boxes) -> IntArray:
    """Dimensions (k, D) of each box, from the outermost to the one that is summed first.

    The last is a contiguous one, if one is long enough, else the longest. Those of size 1 come before all others, which
    are in order of falling strides.
    """
    vectors = (boxes.stride == 1) & (boxes.size >= _LONG)
    inner = np.where(vectors, boxes.size + _FARTHEST, boxes.size).argmax(axis=1)
    key = np.where(boxes.size == 1, np.iinfo(np.int64).min, -boxes.stride)
    key[np.arange(len(boxes)), inner] = np.iinfo(np.int64).max
    return np.argsort(key, axis=1, kind="stable")


def _shares(nbytes: IntArray, threads: int) -> Sequence[tuple[int, int]]:
    """Runs of pieces with about equally many bytes, one for each thread; fewer where there is little to do."""
    total = np.cumsum(nbytes)
    shares = max(1, min(threads, int(total[-1]) // _WORTH_A_THREAD if len(total) else 1))
    edges = np.searchsorted(total, [int(total[-1]) * i // shares for i in range(1, shares)], side="left") + 1
    return [(a, b) for a, b in pairwise([0, *edges.tolist(), len(nbytes)]) if a < b]
