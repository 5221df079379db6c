"""What changed in the tables of instances since they were joined: rows, not names, where names stayed the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weightcast.transfer.columns import any_column, number_names
from weightcast.transfer.layout import IntArray, RegionTable, TensorTable, pad_boxes
from weightcast.transfer.sides import UNKNOWN, Pair, Side

__all__ = ["changed_layers", "named_by_trainer", "new_sides"]

Bytes = npt.NDArray[np.uint8]

_COMPARED = 1 << 15
"""Bytes of names compared at a time, from the end."""


def named_by_trainer(pair: Pair) -> bool:
    """Whether the trainer's tables alone say which tensors there are, in which order and how wide boxes are."""
    tight = pair.tensors.width == max(1, int(pair.tensors.ndim.max(initial=1)))
    return tight and not bool((pair.trainer.dtype == UNKNOWN).any())


def new_sides(pair: Pair, instances: Mapping[str, Sequence[RegionTable]]) -> list[Side] | None:
    """The sides of new tables: the old ones where nothing changed; None where one is not of the old structure."""
    made: dict[tuple[tuple[str, ...], tuple[str, ...]], Side] = {}
    sides: list[Side] = []
    for old, tables in zip(pair.instances, instances.values(), strict=True):
        fingerprints = tuple(table.fingerprint for table in tables)
        if fingerprints == old.fingerprints:
            sides.append(old)
            continue
        key = old.fingerprints, fingerprints
        if key not in made:
            side = _new_side(pair, old, tables, fingerprints)
            if side is None:
                return None
            made[key] = side
        sides.append(made[key] if made[key].name == old.name else made[key].renamed(old.name))
    return sides


def _new_side(pair: Pair, old: Side, tables: Sequence[RegionTable], fingerprints: tuple[str, ...]) -> Side | None:
    """`old` with the tables of those ranks that changed; None where counts, tensors, shapes or dtypes did."""
    if [len(table) for table in tables] != np.diff(old.first).tolist():
        return None
    columns = {name: getattr(old, name).copy() for name in ("tensor", "offset", "size", "slot")}
    width, declarations = pair.tensors.width, list(old.declared)
    for rank, (table, known, found) in enumerate(zip(tables, old.fingerprints, fingerprints, strict=True)):
        if known == found:
            continue
        rows = _declared(pair, old, rank, table.tensors)
        if rows is None:
            return None
        declarations[rank] = rows
        span = slice(int(old.first[rank]), int(old.first[rank + 1]))
        columns["tensor"][span], columns["slot"][span] = rows[table.tensor], table.slot
        columns["offset"][span] = pad_boxes(table.offset, width, 0)
        columns["size"][span] = pad_boxes(table.size, width, 1)
    declared = np.zeros(len(pair.tensors), dtype=np.bool_)
    declared[columns["tensor"]] = True
    if not np.array_equal(declared, old.dtype != UNKNOWN):
        return None
    return replace(
        old,
        fingerprints=fingerprints,
        tables=tuple(table.tensors for table in tables),
        declared=tuple(declarations),
        **columns,
    )


def _declared(pair: Pair, old: Side, rank: int, new: TensorTable) -> IntArray | None:
    """The pair's tensor for each of a rank's new ones; None for an unknown name, and where a shape or dtype changed.

    Only what lies between the first and the last name that changed is looked up.
    """
    known, same = old.tables[rank], old.declared[rank]
    length = min(len(known.joined_names), len(new.joined_names))
    left, right = (np.frombuffer(table.joined_names, dtype=np.uint8) for table in (known, new))
    before = int(np.count_nonzero(right[: _first_difference(left, right, length)] == 0))
    after = int(np.count_nonzero(right[right.shape[0] - length + _last_difference(left, right, length) :] == 0))
    after = min(after, min(len(new), len(known)) - before)
    try:
        rows = number_names(pair.index, new.names[before : len(new) - after])
    except KeyError:
        return None
    kept = (slice(0, before), slice(0, before)), (slice(len(known) - after, None), slice(len(new) - after, None))
    ours = slice(before, len(new) - after)
    width = pair.tensors.width
    for name in ("shape", "ndim", "dtype"):
        mine, theirs = getattr(new, name), getattr(known, name)
        if not all(np.array_equal(theirs[was], mine[now]) for was, now in kept):
            return None
    if not (
        np.array_equal(pad_boxes(new.shape[ours], width, 1), np.take(pair.tensors.shape, rows, axis=0))
        and np.array_equal(new.ndim[ours], pair.tensors.ndim[rows])
        and np.array_equal(new.dtype[ours], old.dtype[rows])
    ):
        return None
    return np.concatenate([same[:before], rows, same[len(known) - after :]])


def _first_difference(left: Bytes, right: Bytes, length: int) -> int:
    """Where two texts begin to differ in their first `length` bytes; `length` where they do not."""
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _last_difference(left: Bytes, right: Bytes, length: int) -> int:
    """Where the bytes begin, among the last `length` of two texts, from which on these are the same."""
    left, right = left[left.shape[0] - length :], right[right.shape[0] - length :]
    for end in range(length, 0, -_COMPARED):
        begin = max(end - _COMPARED, 0)
        differs = np.flatnonzero(left[begin:end] != right[begin:end])
        if differs.size:
            return begin + int(differs[-1]) + 1
    return 0


def changed_layers(pair: Pair, old: Side, new: Side) -> IntArray:
    """Which of the pair's layers have other rows in one side than in the other, ascending."""
    differs = (old.tensor != new.tensor) | (old.slot != new.slot)
    differs |= any_column(old.offset != new.offset) | any_column(old.size != new.size)
    rows = np.flatnonzero(differs)
    return np.unique(pair.layer[np.concatenate([old.tensor[rows], new.tensor[rows]])])
