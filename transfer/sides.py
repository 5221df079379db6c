"""The tables of the ranks of one side, joined: one set of columns with one numbering of tensors for the whole pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightcast.transfer.columns import concatenate, volumes
from weightcast.transfer.dtypes import ITEMSIZE, dtype_name
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout import IntArray, RegionTable, TensorTable, pad_boxes

__all__ = ["UNKNOWN", "Pair", "Side", "join_sides"]

UNKNOWN = -1
"""Value of a dtype column where a side does not declare the tensor."""

_SIZE_LIMIT = float(1 << 60)


@dataclass(frozen=True)
class Side:
    """All regions of the trainer or of one instance, ordered by (rank, region).

    `name` is "" for the trainer. `rank`, `region` and `tensor` are (n,), `offset` and `size` (n, D); `tensor` numbers
    the pair's tensors. Region i of rank r is row `first[r] + i`; `first` is (world + 1,). `dtype` (T,) has the side's
    element types, UNKNOWN for tensors that it does not declare.
    """

    name: str
    first: IntArray
    tensor: IntArray
    offset: IntArray
    size: IntArray
    dtype: IntArray
    fingerprints: tuple[str, ...]

    @property
    def world(self) -> int:
        return int(self.first.shape[0]) - 1

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @cached_property
    def rank(self) -> IntArray:
        return np.repeat(np.arange(self.world, dtype=np.int64), np.diff(self.first))

    @cached_property
    def region(self) -> IntArray:
        return np.arange(len(self), dtype=np.int64) - self.first[self.rank]

    def __str__(self) -> str:
        return self.name or "the trainer"


@dataclass(frozen=True)
class Pair:
    """The trainer, the instances, and the logical tensors of both: `tensors` has the trainer's dtypes."""

    tensors: TensorTable
    trainer: Side
    instances: tuple[Side, ...]


class _Names:
    """Numbers names in order of first appearance."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self._known: dict[tuple[str, ...], IntArray] = {}

    def rows(self, names: tuple[str, ...]) -> IntArray:
        rows = self._known.get(names)
        if rows is None:
            index = self.index
            found = list(map(index.get, names))
            if None in found:
                found = [index.setdefault(name, len(index)) for name in names]
            rows = self._known[names] = np.array(found, dtype=np.int64)
        return rows


def join_sides(trainer: Sequence[RegionTable], instances: Mapping[str, Sequence[RegionTable]]) -> Pair:
    """Joins the tables, rank i of a side is its i-th table.

    Raises LayoutError, naming tensor, rank and instance, where two ranks disagree about a shape, two ranks of one side
    about a dtype, for sides without ranks and for tensors too large to count in bytes.
    """
    if not instances:
        raise LayoutError("there is no instance to plan for")
    sides = {"": list(trainer)} | {name: list(tables) for name, tables in instances.items()}
    if len(sides) != len(instances) + 1:
        raise LayoutError("an instance has an empty name")
    for name, tables in sides.items():
        if not tables:
            raise LayoutError(f"{name or 'the trainer'} has no ranks")
    names = _Names()
    rows = {name: [names.rows(table.tensors.names) for table in tables] for name, tables in sides.items()}
    width = max(table.tensors.width for tables in sides.values() for table in tables)
    shapes = _Shapes(tuple(names.index), width)
    joined = [_side(name, tables, rows[name], shapes) for name, tables in sides.items()]
    dtype = joined[0].dtype.copy()
    for side in joined[1:]:
        dtype = np.where(dtype == UNKNOWN, side.dtype, dtype)
    tensors = TensorTable(shapes.names, shapes.shape, shapes.ndim, dtype)
    bad = volumes(shapes.shape.astype(np.float64)) * ITEMSIZE[dtype] > _SIZE_LIMIT
    if bad.any():
        row = int(bad.argmax())
        raise LayoutError(
            f"tensor {shapes.names[row]!r} of shape {list(tensors.spec(row).shape)} is too large to address"
        )
    return Pair(tensors, joined[0], tuple(joined[1:]))


class _Shapes:
    """The shape of every tensor, with who declared it first."""

    def __init__(self, names: tuple[str, ...], width: int) -> None:
        self.names = names
        self.shape = np.ones((len(names), width), dtype=np.int64)
        self.ndim = np.full(len(names), -1, dtype=np.int64)
        self._declarer = np.empty(len(names), dtype=np.int64)
        self._declarers: list[str] = []

    def add(self, table: TensorTable, rows: IntArray, who: str) -> None:
        shape = pad_boxes(table.shape, self.shape.shape[1], 1)
        fresh = self.ndim[rows] < 0
        if fresh.any():
            new = rows[fresh]
            self.shape[new], self.ndim[new], self._declarer[new] = shape[fresh], table.ndim[fresh], len(self._declarers)
            self._declarers.append(who)
        differs = (self.ndim[rows] != table.ndim) | (np.take(self.shape, rows, axis=0) != shape).any(axis=1)
        if differs.any():
            own = int(differs.argmax())
            row = int(rows[own])
            raise LayoutError(
                f"tensor {self.names[row]!r} has shape {[int(n) for n in shape[own, : table.ndim[own]]]} on {who} "
                f"but shape {[int(n) for n in self.shape[row, : self.ndim[row]]]} on "
                f"{self._declarers[int(self._declarer[row])]}"
            )


def _side(name: str, tables: list[RegionTable], rows: list[IntArray], shapes: _Shapes) -> Side:
    dtype = np.full(len(shapes.names), UNKNOWN, dtype=np.int64)
    seen: set[int] = set()
    for rank, (table, index) in enumerate(zip(tables, rows, strict=True)):
        if id(table.tensors) in seen:
            continue
        seen.add(id(table.tensors))
        who = f"{name} rank {rank}" if name else f"trainer rank {rank}"
        shapes.add(table.tensors, index, who)
        known = dtype[index]
        differs = (known != UNKNOWN) & (known != table.tensors.dtype)
        if differs.any():
            own = int(differs.argmax())
            raise LayoutError(
                f"tensor {table.tensors.names[own]!r} has dtype {dtype_name(int(table.tensors.dtype[own]))} on {who} "
                f"but {dtype_name(int(known[own]))} on a lower rank of {name or 'the trainer'}"
            )
        dtype[index] = table.tensors.dtype
    width = shapes.shape.shape[1]
    none, no_boxes = np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.int64)
    return Side(
        name,
        np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64),
        concatenate([index[table.tensor] for table, index in zip(tables, rows, strict=True)], none),
        concatenate([pad_boxes(table.offset, width, 0) for table in tables], no_boxes),
        concatenate([pad_boxes(table.size, width, 1) for table in tables], no_boxes),
        dtype,
        tuple(table.fingerprint for table in tables),
    )
