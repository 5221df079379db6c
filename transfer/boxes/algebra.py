"""Algebra of boxes: intersection, disjointness, cells and coverage, on numpy columns.

A set of boxes is three columns: `key` (n,), `offset` and `size` (n, D). The key is any integer >= 0, for example the
number of the tensor: boxes with different keys never meet. Boxes of zero size hold nothing: they are dropped everywhere
and never overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import any_column, changes, lex_sort, ranges, shared, starts_of, volumes
from weightcast.transfer.errors import LayoutError

__all__ = ["Cells", "decompose", "intersect", "overlaps", "uncovered"]

PAIR_CHUNK = 1 << 22
"""Candidate pairs examined at a time; bounds the memory of a join."""
PAIR_LIMIT = 1 << 30
CELL_LIMIT = 1 << 23
"""Box-in-cell incidences that a grid may make (its memory is about 100 bytes each)."""
_SPLIT_ROUNDS = 64


Boxes: TypeAlias = tuple[IntArray, IntArray, IntArray]
"""Key, offset and size of boxes."""
Pairs: TypeAlias = tuple[IntArray, IntArray, IntArray, IntArray]
"""Pairs of boxes: left row, right row, and offset and size of the box that the two share."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a set of boxes: the m disjoint boxes it is made of, ordered by (key, offset).

    Every box of the set is the union of the cells it contains. `row[start[i]:start[i + 1]]` are the rows of the set
    whose box contains cell i, ascending. `key` (m,), `offset` and `size` (m, D), `start` (m + 1,), `row` (pairs,).
    """

    key: IntArray
    offset: IntArray
    size: IntArray
    start: IntArray
    row: IntArray

    def __len__(self) -> int:
        return int(self.key.shape[0])

    @property
    def cell(self) -> IntArray:
        """Number (pairs,) of the cell of each entry of `row`."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.start))


def intersect(left: Boxes, right: Boxes) -> Pairs:
    """Pairs of a left and a right box that share an element, ordered by right row, then left row."""
    left_key, right_key = left[0], right[0]
    keys = 1 + max(int(left_key.max(initial=-1)), int(right_key.max(initial=-1)))
    count = np.bincount(left_key, minlength=keys)
    left_row = np.empty(keys, dtype=np.int64)
    left_row[left_key] = np.arange(left_key.shape[0], dtype=np.int64)
    left_count = count[right_key]
    rows = np.flatnonzero(left_count == 1)
    pairs = [_meet(left, right, left_row[right_key[rows]], rows)]
    join_rows = np.flatnonzero(left_count > 1)
    if join_rows.size:
        candidates = np.flatnonzero(count[left_key] > 1)
        pairs.extend(_join(left, right, candidates, join_rows))
    if len(pairs) == 1:
        return pairs[0]
    a, b, offset, size = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order, _ = lex_sort([b, a])
    return a[order], b[order], np.take(offset, order, axis=0), np.take(size, order, axis=0)


def _meet(left: Boxes, right: Boxes, a: IntArray, b: IntArray) -> Pairs:
    """Those of the candidate pairs `a`, `b` that share an element, with the box they share."""
    low_a, low_b = np.take(left[1], a, axis=0), np.take(right[1], b, axis=0)
    offset = np.maximum(low_a, low_b)
    size, high = np.take(left[2], a, axis=0), np.take(right[2], b, axis=0)
    size += low_a
    high += low_b
    np.minimum(size, high, out=size)
    size -= offset
    meets = np.ones(a.shape[0], dtype=np.bool_)
    for dim in range(size.shape[1]):
        meets &= size[:, dim] > 0
    if meets.all():
        return a, b, offset, size
    rows = np.flatnonzero(meets)
    return a[rows], b[rows], np.take(offset, rows, axis=0), np.take(size, rows, axis=0)


def _join(left: Boxes, right: Boxes, a: IntArray, b: IntArray) -> Iterator[Pairs]:
    """Pairs of left rows `a` and right rows `b` that share an element, in chunks.

    For each right row, candidates are those whose intervals meet along the dimension that leaves the fewest.
    """
    keys = np.unique(left[0][a])
    key_a, key_b = np.searchsorted(keys, left[0][a]), np.searchsorted(keys, right[0][b])
    best: IntArray | None = None
    for dim in range(left[1].shape[1]):
        low_a, low_b = left[1][a, dim], right[1][b, dim]
        high_a, high_b = low_a + left[2][a, dim], low_b + right[2][b, dim]
        order, low, high = _candidates((key_a, low_a, high_a), (key_b, low_b, high_b))
        count = np.maximum(high - low, 0)
        if best is None:
            best, start, orders = count, low, [order]
            from_dim = np.zeros(b.shape[0], dtype=np.int64)
        else:
            better = count < best
            best, start = np.where(better, count, best), np.where(better, low, start)
            from_dim[better] = dim
            orders.append(order)
    assert best is not None
    by_dim = np.stack(orders)
    for part in _chunks(best):
        rows = by_dim[np.repeat(from_dim[part], best[part]), ranges(start[part], best[part])]
        yield _meet(left, right, a[rows], np.repeat(b[part], best[part]))


def _candidates(left: Boxes, right: Boxes) -> Boxes:
    """Interval join of (key, low, high) columns, keys dense: an order of left rows, and two positions per right row.

    All left rows whose interval meets that of the right row lie in the order between them: first, and last + 1.
    """
    key, low, high = left
    span = 1 + max(int(high.max(initial=0)), int(right[2].max(initial=0)))
    if (1 + int(key.max(initial=0))) * span >= 1 << 62:
        edges = np.unique(np.concatenate([low, high, right[1], right[2]]))
        low, high = np.searchsorted(edges, low), np.searchsorted(edges, high)
        right = (right[0], np.searchsorted(edges, right[1]), np.searchsorted(edges, right[2]))
        span = edges.shape[0] + 1
    order, _ = lex_sort([key, low])
    starts = key[order] * span + low[order]
    reach = np.maximum.accumulate(key[order] * span + high[order])
    return (
        order,
        np.searchsorted(reach, right[0] * span + right[1], side="right"),
        np.searchsorted(starts, right[0] * span + right[2], side="left"),
    )


def _chunks(count: IntArray) -> Iterator[slice]:
    """Slices of rows with about PAIR_CHUNK candidates each. Raises LayoutError for more than PAIR_LIMIT in all."""
    total = np.cumsum(count)
    if not total.size or not total[-1]:
        return
    if int(total[-1]) > PAIR_LIMIT:
        raise LayoutError(
            f"boxes overlap in {int(total[-1])} ways, more than {PAIR_LIMIT}; describe them in larger boxes"
        )
    cuts = np.searchsorted(total, np.arange(PAIR_CHUNK, int(total[-1]), PAIR_CHUNK))
    bounds = np.unique(np.concatenate([[0], cuts, [count.shape[0]]])).tolist()
    for start, stop in itertools.pairwise(bounds):
        yield slice(start, stop)


def _take(boxes: Boxes, rows: IntArray) -> Boxes:
    key, offset, size = boxes
    return key[rows], np.take(offset, rows, axis=0), np.take(size, rows, axis=0)


def overlaps(key: IntArray, offset: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs of rows of one key whose boxes share an element; at least one pair for each connected set of such boxes.

    Of k equal boxes k - 1 pairs are given.
    """
    rows, begins = _distinct(key, offset, size)
    equal = np.flatnonzero(~begins)
    first = rows[begins]
    a, b = _crossing(*_take((key, offset, size), first))[:2]
    return np.concatenate([rows[equal - 1], first[a]]), np.concatenate([rows[equal], first[b]])


def _distinct(key: IntArray, offset: IntArray, size: IntArray) -> tuple[IntArray, BoolArray]:
    """Rows with a volume, ordered by (key, offset, size, row), and marks of the first of each run of equal boxes."""
    rows = np.flatnonzero(~any_column(size <= 0))
    columns = [key, *offset.T, *size.T]
    if rows.shape[0] < key.shape[0]:
        columns = [column[rows] for column in columns]
    order, begins = lex_sort(columns)
    return rows[order], begins


def _crossing(key: IntArray, offset: IntArray, size: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pairs that share an element among distinct boxes sorted by key; and rows and groups of the boxes near a pair.

    A group is a set of boxes that no cut through all of it, from side to side, can take apart. Different groups never
    meet. A box is near a pair if its group has one.
    """
    rows, group = _crowded(np.arange(key.shape[0], dtype=np.int64), changes(key))
    idle_turns = turn = 0
    dims = offset.shape[1]
    while rows.size and idle_turns < dims and turn < _SPLIT_ROUNDS:
        groups = int(group[-1]) + 1
        dim = turn % dims
        low = offset[rows, dim]
        order, begins = _runs(group, low, low + size[rows, dim])
        idle_turns = idle_turns + 1 if int(begins.sum()) == groups else 0
        rows, group = _crowded(rows[order], begins)
        turn += 1
    if not rows.size:
        return rows, rows, rows, group
    a, b = _pairs_within(group, np.take(offset, rows, axis=0), np.take(size, rows, axis=0))
    group_hit = np.zeros(int(group[-1]) + 1, dtype=np.bool_)
    group_hit[group[a]] = True
    row_hit = group_hit[group]
    return rows[a], rows[b], rows[row_hit], (np.cumsum(group_hit) - 1)[group[row_hit]]


def _crowded(rows: IntArray, begins: BoolArray) -> tuple[IntArray, IntArray]:
    """Rows in runs of more than one, and the dense number of each row's run."""
    mask = shared(begins)
    return rows[mask], np.cumsum(begins[mask]) - 1


def _runs(group: IntArray, low: IntArray, high: IntArray) -> tuple[IntArray, BoolArray]:
    """Order by (group, low), and marks of intervals that meet none before them in their group."""
    span = int(high.max()) + 1
    if (int(group[-1]) + 1) * span >= 1 << 62:
        edges = np.unique(np.concatenate([low, high]))
        low, high, span = np.searchsorted(edges, low), np.searchsorted(edges, high), edges.shape[0] + 1
    order, _ = lex_sort([group, low])
    base = group[order] * span
    reach = np.maximum.accumulate(base + high[order])
    begins = np.ones(order.shape[0], dtype=np.bool_)
    np.greater_equal(base[1:] + low[order[1:]], reach[:-1], out=begins[1:])
    return order, begins


def _pairs_within(group: IntArray, offset: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of rows of one group that share an element, each once."""
    boxes = (group, offset, size)
    rows = np.arange(group.shape[0], dtype=np.int64)
    pairs = list(_join(boxes, boxes, rows, rows))
    a, b = (np.concatenate([rows[:0], *(pair[side] for pair in pairs)]) for side in (0, 1))
    return a[a < b], b[a < b]


def decompose(key: IntArray, offset: IntArray, size: IntArray, label: Callable[[int], str] = str) -> Cells:
    """The cells of a set of boxes: its distinct boxes where they are disjoint, else the grid of their edges.

    The grid is made only for the boxes that overlap partly and those entangled with them. Raises LayoutError, naming
    `label(key)`, when a grid would not fit into memory.
    """
    row, begins = _distinct(key, offset, size)
    start = starts_of(begins)
    boxes = _take((key, offset, size), row[begins])
    _, _, tangled, group = _crossing(*boxes)
    if not tangled.size:
        return Cells(*boxes, start, row)
    return _with_grid(boxes, start, row, tangled, group, label)


def _with_grid(
    boxes: Boxes, start: IntArray, row: IntArray, tangled: IntArray, group: IntArray, label: Callable[[int], str]
) -> Cells:
    """Cells of distinct boxes of which the `tangled` ones are cut along the edges of their group."""
    key, offset, size = boxes
    names, tangled_offset, tangled_size = _take(boxes, tangled)
    cells, box = _grid(group, tangled_offset, tangled_size, lambda i: label(int(names[i])))
    plain_mask = np.ones(key.shape[0], dtype=np.bool_)
    plain_mask[tangled] = False
    plain = np.flatnonzero(plain_mask)
    # From here on "piece" is a (cell, distinct box) pair: all plain boxes, then all grid incidences.
    piece_box = np.concatenate([plain, tangled[box]])
    piece_offset = np.concatenate([np.take(offset, plain, axis=0), cells[0]])
    piece_size = np.concatenate([np.take(size, plain, axis=0), cells[1]])
    piece_key = key[piece_box]
    # Rows of a box stay together but a cell's boxes interleave, hence the sort by row inside each cell.
    count = np.diff(start)[piece_box]
    piece = np.repeat(np.arange(piece_box.shape[0], dtype=np.int64), count)
    rows = row[ranges(start[piece_box], count)]
    order, begins = lex_sort([piece_key[piece], *piece_offset[piece].T])
    cell = np.cumsum(begins) - 1
    inner, _ = lex_sort([cell, rows[order]])
    order = order[inner]
    first = piece[order[begins]]
    return Cells(piece_key[first], piece_offset[first], piece_size[first], starts_of(begins), rows[order])


def _grid(
    group: IntArray, offset: IntArray, size: IntArray, label: Callable[[int], str]
) -> tuple[tuple[IntArray, IntArray], IntArray]:
    """Grid cells in each box: ((offset, size) of the cells, the box of each)."""
    dims = offset.shape[1]
    low, high = np.empty_like(offset), np.empty_like(offset)
    edges: list[IntArray] = []
    incidences = np.ones(group.shape[0])
    for dim in range(dims):
        start, stop = offset[:, dim], offset[:, dim] + size[:, dim]
        order, begins = lex_sort([np.concatenate([group, group]), np.concatenate([start, stop])])
        index = np.empty_like(order)
        index[order] = np.cumsum(begins) - 1
        low[:, dim], high[:, dim] = index[: group.shape[0]], index[group.shape[0] :]
        edges.append(np.concatenate([start, stop])[order[begins]])
        incidences *= high[:, dim] - low[:, dim]
    if incidences.sum() > CELL_LIMIT:
        worst = int(incidences.argmax())
        raise LayoutError(
            f"{label(worst)}: its boxes overlap partly and cut each other into more than {CELL_LIMIT} cells; "
            "describe it in boxes that are equal or disjoint"
        )
    count = incidences.astype(np.int64)
    box = np.repeat(np.arange(group.shape[0], dtype=np.int64), count)
    number = ranges(np.zeros_like(count), count)
    cell_offset, cell_size = np.empty((2, box.shape[0], dims), dtype=np.int64)
    for dim in reversed(range(dims)):
        length = (high[:, dim] - low[:, dim])[box]
        edge = low[box, dim] + number % length
        number //= length
        cell_offset[:, dim] = edges[dim][edge]
        cell_size[:, dim] = edges[dim][edge + 1] - edges[dim][edge]
    return (cell_offset, cell_size), box


def uncovered(key: IntArray, offset: IntArray, size: IntArray, shape: IntArray) -> IntArray:
    """Keys in 0..len(shape)-1, ascending, of boxes of `shape[key]` that the given boxes do not fill.

    The given boxes are disjoint and lie inside them.
    """
    filled = np.zeros(shape.shape[0], dtype=np.int64)
    np.add.at(filled, key, volumes(size))
    return np.flatnonzero(filled != volumes(shape))
