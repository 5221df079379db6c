"""The tables of the ranks of one side, joined: one set of columns with one numbering of tensors for the whole pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from weightcast.transfer.columns import BoolArray, find_names, ranges, stable_order, volumes
from weightcast.transfer.dtypes import ITEMSIZE, dtype_name
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.expert_names import NONE, parse_layers
from weightcast.transfer.layout import IntArray, RegionTable, TensorTable, pad_boxes

__all__ = ["UNKNOWN", "Pair", "Side", "join_sides"]

UNKNOWN = -1
"""Value of a dtype column where a side does not declare the tensor."""

_SIZE_LIMIT = float(1 << 60)
_PLACES = 2
"""From a rank's table to its instance's, and from there to the trainer's. A table may also be its own catalog."""


@dataclass(frozen=True)
class Side:
    """All regions of the trainer or of one instance, ordered by (rank, region).

    `name` is "" for the trainer. `rank`, `region`, `tensor` and `slot` are (n,), `offset` and `size` (n, D); `tensor`
    numbers the pair's tensors. Region i of rank r is row `first[r] + i`; `first` is (world + 1,). `dtype` (T,) has the
    side's element types, UNKNOWN for tensors that it does not declare; `declared` the pair's tensor for each of a
    rank's `tables`. Instances with equal tables share all columns.
    """

    name: str
    first: IntArray
    rank: IntArray
    region: IntArray
    tensor: IntArray
    offset: IntArray
    size: IntArray
    slot: IntArray
    dtype: IntArray
    fingerprints: tuple[str, ...]
    tables: tuple[TensorTable, ...]
    declared: tuple[IntArray, ...]

    @property
    def world(self) -> int:
        return int(self.first.shape[0]) - 1

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @cached_property
    def volume(self) -> IntArray:
        """(n,) elements of each region."""
        return volumes(self.size)

    @cached_property
    def held(self) -> BoolArray:
        """(T,) whether the side holds any element of each tensor."""
        held = np.zeros(self.dtype.shape[0], dtype=np.bool_)
        held[self.tensor[self.volume > 0]] = True
        return held

    def renamed(self, name: str) -> Side:
        """The same columns under another name, with what was worked out from them already."""
        twin = replace(self, name=name)
        twin.__dict__.update(volume=self.volume, held=self.held)
        return twin

    def __str__(self) -> str:
        return self.name or "the trainer"


@dataclass(frozen=True)
class Pair:
    """The trainer, the instances, and the logical tensors of both: `tensors` has the trainer's dtypes.

    Tensors are ordered by layer: `layers` (L,) are the layer numbers in their names, ascending, first NONE for names
    without one; those of layer `layers[i]` are rows `layer_start[i]` to `layer_start[i + 1] - 1`. `index` has the row
    of each name.
    """

    tensors: TensorTable
    trainer: Side
    instances: tuple[Side, ...]
    layers: IntArray
    layer_start: IntArray
    index: Mapping[str, int]

    @cached_property
    def layer(self) -> IntArray:
        """(T,) which of `layers` each tensor belongs to."""
        return np.repeat(np.arange(self.layers.shape[0], dtype=np.int64), np.diff(self.layer_start))


class _Names:
    """Numbers the names of a pair: by layer, and within a layer in the order in which they first appear."""

    def __init__(self, trainer: Sequence[RegionTable], instances: Iterable[Sequence[RegionTable]]) -> None:
        self._number(trainer)
        self._rows: dict[str, IntArray] = {}
        # With the table, so that no other one comes to have its id.
        self._wholes: dict[int, tuple[TensorTable, IntArray]] = {}
        for tables in instances:
            try:
                for table in tables:
                    self.rows(table)
            except KeyError:
                # Only now, because an instance rarely has a tensor that the trainer does not have.
                self._rows.clear()
                self._wholes.clear()
                self._number([*trainer, *(table for more in instances for table in more)])

    def _number(self, tables: Sequence[RegionTable]) -> None:
        distinct = {table.fingerprint: table.tensors.names for table in tables}
        names = tuple(dict.fromkeys(chain.from_iterable(distinct.values())))
        layer = parse_layers(names)
        order = stable_order(layer - NONE, int(layer.max(initial=NONE)) - NONE + 1)
        self.names = tuple(map(names.__getitem__, order.tolist()))
        self.index = dict(zip(self.names, range(len(names)), strict=True))
        self.layers, start = np.unique(layer[order], return_index=True)
        self.layer_start = np.append(start, len(names)).astype(np.int64)

    def rows(self, table: RegionTable) -> IntArray:
        """The pair's tensor for each of a table's. Raises KeyError for an unknown name."""
        rows = self._rows.get(table.fingerprint)
        if rows is None:
            rows = self._find(table.tensors)
            if (rows < 0).any():
                raise KeyError(table.tensors.names[int(rows.argmin())])
            self._rows[table.fingerprint] = rows
        return rows

    def _find(self, tensors: TensorTable, hops: int = _PLACES) -> IntArray:
        """(T,) the pair's tensor, -1 for none, by way of the table that a table has its place in: looking up the names
        of hundreds of ranks one by one is most of the work otherwise, and all of it misses the processor's caches.
        """
        place = tensors.place
        if place is None or not hops:
            return find_names(self.index, tensors.names)
        whole, rows = place
        if id(whole) not in self._wholes:
            self._wholes[id(whole)] = whole, self._find(whole, hops - 1)
        return np.take(self._wholes[id(whole)][1], rows)


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
    names = _Names(sides[""], [sides[name] for name in instances])
    width = max(table.tensors.width for tables in sides.values() for table in tables)
    shapes = _Shapes(names.names, width)
    made: dict[tuple[str, ...], Side] = {}
    joined: list[Side] = []
    for name, tables in sides.items():
        fingerprints = tuple(table.fingerprint for table in tables)
        if name and fingerprints in made:
            joined.append(made[fingerprints].renamed(name))
            continue
        joined.append(_side(name, tables, [names.rows(table) for table in tables], shapes))
        if name:
            made[fingerprints] = joined[-1]
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
    return Pair(tensors, joined[0], tuple(joined[1:]), names.layers, names.layer_start, names.index)


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
    seen: set[str] = set()
    for rank, (table, index) in enumerate(zip(tables, rows, strict=True)):
        if table.fingerprint in seen:
            continue
        seen.add(table.fingerprint)
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
    count = np.array([len(table) for table in tables], dtype=np.int64)
    return Side(
        name,
        np.append(0, np.cumsum(count)),
        np.repeat(np.arange(count.shape[0], dtype=np.int64), count),
        ranges(np.zeros_like(count), count),
        np.concatenate([index[table.tensor] for table, index in zip(tables, rows, strict=True)]),
        np.concatenate([pad_boxes(table.offset, width, 0) for table in tables]),
        np.concatenate([pad_boxes(table.size, width, 1) for table in tables]),
        np.concatenate([table.slot for table in tables]),
        dtype,
        tuple(table.fingerprint for table in tables),
        tuple(table.tensors for table in tables),
        tuple(rows),
    )
