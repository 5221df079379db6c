"""The region tables of many ranks, joined: one set of columns and one numbering of tensors, of a side or of a pair.

Names are looked up once, when the tables of a side are joined. The gateway joins the ranks of an instance with the
trainer's tensors as a catalog. The side then remembers the row of each of its tensors there, and joining the pair looks
up no name again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import (
    Columns,
    find_names,
    number_names,
    pad_boxes,
    ranges,
    stable_order,
    volumes,
)
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_name
from weightcast.transfer.layout.tables import RegionTable, TensorTable
from weightcast.transfer.layout.tensor_names import NONE, parse_layers

__all__ = [
    "UNKNOWN",
    "JoinedPair",
    "JoinedRanks",
    "JoinedRegions",
    "Ranks",
    "SideName",
    "as_joined",
    "join_pair",
    "join_ranks",
]

UNKNOWN = -1
"""Value of a dtype column where a side does not declare the tensor."""

_SIZE_LIMIT = float(1 << 60)


@dataclass(frozen=True, slots=True)
class SideName:
    """The trainer (`name` is empty) or one instance, for messages."""

    name: str

    def __str__(self) -> str:
        return self.name or "the trainer"

    def rank(self, rank: int) -> str:
        """Names one of its ranks."""
        return f"rank {rank} of {self}"


@dataclass(frozen=True, slots=True)
class JoinedRegions(Columns):
    """Some regions of a side: (n,) columns, `offset` and `size` (n, D). `tensor` numbers the tensors of the side."""

    rank: IntArray
    tensor: IntArray
    offset: IntArray
    size: IntArray
    slot: IntArray

    @property
    def volume(self) -> IntArray:
        """(n,) elements of each region."""
        return np.asarray(self.size.prod(axis=1))


@dataclass(frozen=True)
class JoinedRanks:
    """All regions of the trainer or of one instance, ordered by (rank, region), nothing left out.

    `name` is "" for the trainer. `rank`, `region`, `tensor` and `slot` are (n,), `offset` and `size` (n, D). Region i
    of rank r is row `first[r] + i`; `first` is (world + 1,). `tensor` numbers the T `tensors`: those of the side in the
    order in which its ranks first declare them, or those of the pair once the side is in one.

    `dtype` (T,) has the side's element types, UNKNOWN for tensors that it does not declare. `fingerprints` has one for
    each rank's table. `catalog_row` (T,) is the row of each tensor in `catalog`, -1 for none, where the side was joined
    with one.
    """

    name: str
    tensors: TensorTable
    first: IntArray
    rank: IntArray
    region: IntArray
    tensor: IntArray
    offset: IntArray
    size: IntArray
    slot: IntArray
    dtype: IntArray
    fingerprints: tuple[str, ...]
    catalog: TensorTable | None = None
    catalog_row: IntArray | None = None

    @property
    def world(self) -> int:
        """Number of ranks of the side."""
        return int(self.first.shape[0]) - 1

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @cached_property
    def volume(self) -> IntArray:
        """(n,) elements of each region."""
        return volumes(self.size)

    @cached_property
    def holds(self) -> BoolArray:
        """(T,) true where the side holds any element of the tensor."""
        holds = np.zeros(self.dtype.shape[0], dtype=np.bool_)
        holds[self.tensor[self.volume > 0]] = True
        return holds

    @property
    def regions(self) -> JoinedRegions:
        """The same columns, to take some rows of."""
        return JoinedRegions(self.rank, self.tensor, self.offset, self.size, self.slot)

    def renamed(self, name: str) -> JoinedRanks:
        """Returns the same columns under another name, with the values computed from them so far."""
        twin = replace(self, name=name)
        twin.__dict__.update(volume=self.volume, holds=self.holds)
        return twin

    def rows_in(self, catalog: TensorTable) -> IntArray:
        """Returns the (T,) row of each tensor in a catalog, -1 for those that it does not have."""
        if self.catalog is catalog and self.catalog_row is not None:
            return self.catalog_row
        return find_names(catalog.index, self.tensors.names)

    def renumbered(self, tensors: TensorTable, row: IntArray) -> JoinedRanks:
        """Returns the same regions where tensor i is tensor `row[i]` (T,) of `tensors`."""
        dtype = np.full(len(tensors), UNKNOWN, dtype=np.int64)
        dtype[row] = self.dtype
        return replace(
            self,
            tensors=tensors,
            tensor=row[self.tensor],
            offset=pad_boxes(self.offset, tensors.width, 0),
            size=pad_boxes(self.size, tensors.width, 1),
            dtype=dtype,
            catalog=None,
            catalog_row=None,
        )

    def __str__(self) -> str:
        return self.name or "the trainer"


Ranks: TypeAlias = "JoinedRanks | Sequence[RegionTable]"
"""The ranks of a side: joined already, or the table of each."""


@dataclass(frozen=True)
class JoinedPair:
    """The logical tensors of a pair, in the trainer's dtypes, and its sides: the trainer, then each instance.

    Tensors are ordered by the layer in their names, those without one first.
    """

    tensors: TensorTable
    sides: tuple[JoinedRanks, ...]

    @property
    def trainer(self) -> JoinedRanks:
        return self.sides[0]

    @property
    def instances(self) -> tuple[JoinedRanks, ...]:
        return self.sides[1:]


def join_ranks(name: str, tables: Sequence[RegionTable], catalog: TensorTable | None = None) -> JoinedRanks:
    """Joins the tables of all ranks of one side by the names of their tensors; rank i has the i-th table.

    Raises LayoutError for a side without ranks. It also does where two ranks differ about a shape or dtype, or the side
    and the trainer's `catalog` about a shape. The message then names the tensor, both holders and both values.
    """
    if not tables:
        raise LayoutError(f"{SideName(name)} has no ranks")
    fingerprints = tuple(table.fingerprint for table in tables)
    distinct_tables = {fingerprint: table.tensors for fingerprint, table in zip(fingerprints, tables, strict=True)}
    names, numbers, catalog_row = _number(tuple(distinct_tables.values()), catalog)
    rows = dict(zip(distinct_tables, numbers, strict=True))
    declarations = _Declared(SideName(name), names, max(tensors.width for tensors in distinct_tables.values()))
    for rank, (fingerprint, table) in enumerate(zip(fingerprints, tables, strict=True)):
        if distinct_tables.pop(fingerprint, None) is not None:
            declarations.add(rank, table.tensors, rows[fingerprint])
    tensors, width = declarations.table(), declarations.width
    if catalog is not None and catalog_row is not None:
        _require_shapes(SideName(name), tensors, catalog, catalog_row)
    count = np.array([len(table) for table in tables], dtype=np.int64)
    pairs = list(zip(fingerprints, tables, strict=True))
    return JoinedRanks(
        name=name,
        tensors=tensors,
        first=np.append(0, np.cumsum(count)),
        rank=np.repeat(np.arange(count.shape[0], dtype=np.int64), count),
        region=ranges(np.zeros_like(count), count),
        tensor=np.concatenate([rows[fingerprint][table.tensor] for fingerprint, table in pairs]),
        offset=np.concatenate([pad_boxes(table.offset, width, 0) for table in tables]),
        size=np.concatenate([pad_boxes(table.size, width, 1) for table in tables]),
        slot=np.concatenate([table.slot for table in tables]),
        dtype=tensors.dtype,
        fingerprints=fingerprints,
        catalog=catalog,
        catalog_row=catalog_row,
    )


def as_joined(name: str, ranks: Ranks, catalog: TensorTable | None = None) -> JoinedRanks:
    """Returns the ranks of a side, joined by `join_ranks` where they are not yet."""
    return ranks if isinstance(ranks, JoinedRanks) else join_ranks(name, ranks, catalog)


def join_pair(trainer: Ranks, instances: Mapping[str, Ranks]) -> JoinedPair:
    """Joins both sides of a pair; sides that are no JoinedRanks yet are joined first.

    Raises the errors of `join_ranks`. Raises LayoutError also for a pair without instances and an instance without a
    name. So it does where sides differ about a shape, and for tensors too large to count in bytes.
    """
    if not instances:
        raise LayoutError("there is no instance to plan for")
    if "" in instances:
        raise LayoutError("an instance has an empty name")
    sender = as_joined("", trainer)
    catalog = sender.tensors
    receivers = [as_joined(name, ranks, catalog) for name, ranks in instances.items()]
    side_rows = {side.fingerprints: side.rows_in(catalog) for side in receivers}
    union = _everything(catalog, receivers, side_rows)
    layer = parse_layers(union.names)
    order = stable_order(layer - NONE, int(layer.max(initial=NONE)) - NONE + 1)
    pair_row = np.empty_like(order)
    pair_row[order] = np.arange(order.shape[0], dtype=np.int64)
    tensors = TensorTable(
        tuple(map(union.names.__getitem__, order.tolist())),
        np.take(union.shape, order, axis=0),
        union.ndim[order],
        union.dtype[order],
    )
    _require_addressable(tensors)
    renumberings: dict[tuple[str, ...], JoinedRanks] = {}
    sides = []
    for name, side in zip(instances, receivers, strict=True):
        if side.fingerprints not in renumberings:
            _require_shapes(SideName(name), side.tensors, union, side_rows[side.fingerprints])
            renumberings[side.fingerprints] = side.renumbered(tensors, pair_row[side_rows[side.fingerprints]])
        twin = renumberings[side.fingerprints]
        sides.append(twin if twin.name == name else twin.renamed(name))
    return JoinedPair(tensors, (sender.renumbered(tensors, pair_row[: len(catalog)]), *sides))


def _everything(
    catalog: TensorTable, sides: Sequence[JoinedRanks], known: dict[tuple[str, ...], IntArray]
) -> TensorTable:
    """Returns the trainer's tensors and then those that only instances declare, whose rows it writes to `known`."""
    width = max([catalog.width, *(side.tensors.width for side in sides)])
    shape, ndim, dtype = [pad_boxes(catalog.shape, width, 1)], [catalog.ndim], [catalog.dtype]
    additions: dict[str, int] = {}
    for side in sides:
        row = known[side.fingerprints]
        if not (row < 0).any():
            continue
        table, first = side.tensors, len(catalog) + len(additions)
        strangers = np.flatnonzero(row < 0)
        names = [table.names[i] for i in strangers.tolist()]
        newcomers = strangers[[name not in additions for name in names]]
        additions |= {table.names[i]: first + number for number, i in enumerate(newcomers.tolist())}
        shape.append(pad_boxes(table.shape[newcomers], width, 1))
        ndim.append(table.ndim[newcomers])
        dtype.append(table.dtype[newcomers])
        row = row.copy()
        row[strangers] = [additions[name] for name in names]
        known[side.fingerprints] = row
    return TensorTable((*catalog.names, *additions), np.concatenate(shape), np.concatenate(ndim), np.concatenate(dtype))


def _number(
    tables: Sequence[TensorTable], catalog: TensorTable | None
) -> tuple[tuple[str, ...], list[IntArray], IntArray | None]:
    """Numbers the names of all tables in the order in which they first appear.

    Returns the names, the numbers of each table's names, and with a catalog the row of each name there, -1 for none.
    Looking up names is most of the work of a join, so each is looked up once where the catalog has all of them.
    """
    if catalog is not None:
        rows = [find_names(catalog.index, table.names) for table in tables]
        all_rows = np.concatenate(rows)
        if (all_rows >= 0).all():
            order = _in_order(all_rows, len(catalog))
            number = np.empty(len(catalog), dtype=np.int64)
            number[order] = np.arange(order.shape[0], dtype=np.int64)
            return tuple(map(catalog.names.__getitem__, order.tolist())), [number[row] for row in rows], order
    names = tuple(dict.fromkeys(chain.from_iterable(table.names for table in tables)))
    index = dict(zip(names, range(len(names)), strict=True))
    numbers = [number_names(index, table.names) for table in tables]
    return names, numbers, None if catalog is None else find_names(catalog.index, names)


def _in_order(rows: IntArray, extent: int) -> IntArray:
    """The distinct values, all less than `extent`, in the order in which they first appear."""
    first = np.full(extent, -1, dtype=np.int64)
    # Written backwards, so that the first place of each stays.
    first[rows[::-1]] = np.arange(rows.shape[0] - 1, -1, -1, dtype=np.int64)
    return rows[np.sort(first[first >= 0])]


class _Declared:
    """Shapes and dtypes of the tensors of a side, and the first rank to declare each."""

    def __init__(self, side: SideName, names: tuple[str, ...], width: int) -> None:
        self._side, self._names, self.width = side, names, width
        self._shape = np.ones((len(names), width), dtype=np.int64)
        self._ndim = np.zeros(len(names), dtype=np.int64)
        self._dtype = np.zeros(len(names), dtype=np.int64)
        self._declarer = np.full(len(names), -1, dtype=np.int64)

    def add(self, rank: int, tensors: TensorTable, rows: IntArray) -> None:
        """Adds the declarations of one rank. Raises LayoutError where it differs from a lower rank."""
        shape = pad_boxes(tensors.shape, self.width, 1)
        is_new = self._declarer[rows] < 0
        new_rows = rows[is_new]
        self._shape[new_rows], self._ndim[new_rows], self._dtype[new_rows] = (
            shape[is_new],
            tensors.ndim[is_new],
            tensors.dtype[is_new],
        )
        self._declarer[new_rows] = rank
        differs = (self._ndim[rows] != tensors.ndim) | (np.take(self._shape, rows, axis=0) != shape).any(axis=1)
        if differs.any():
            at = int(differs.argmax())
            row = int(rows[at])
            first_shape = self._shape[row, : self._ndim[row]].tolist()
            raise self._disagreement(row, rank, f"shape {first_shape}", f"shape {list(tensors.spec(at).shape)}")
        differs = self._dtype[rows] != tensors.dtype
        if differs.any():
            at = int(differs.argmax())
            row = int(rows[at])
            first_dtype = dtype_name(int(self._dtype[row]))
            raise self._disagreement(row, rank, f"dtype {first_dtype}", f"dtype {tensors.spec(at).dtype}")

    def _disagreement(self, row: int, rank: int, known: str, differing: str) -> LayoutError:
        first = self._side.rank(int(self._declarer[row]))
        return LayoutError(f"tensor {self._names[row]!r} has {known} on {first} and {differing} on rank {rank}")

    def table(self) -> TensorTable:
        """Returns the tensors of the side."""
        return TensorTable(self._names, self._shape, self._ndim, self._dtype)


def _require_shapes(side: SideName, tensors: TensorTable, catalog: TensorTable, row: IntArray) -> None:
    """Checks that a tensor of a side has the shape of row `row[i]` of a catalog, -1 for none. Raises LayoutError."""
    index = np.flatnonzero(row >= 0)
    row = row[index]
    width = max(tensors.width, catalog.width)
    shape, catalog_shape = (
        pad_boxes(tensors.shape[index], width, 1),
        pad_boxes(np.take(catalog.shape, row, axis=0), width, 1),
    )
    differs = (shape != catalog_shape).any(axis=1) | (tensors.ndim[index] != catalog.ndim[row])
    if differs.any():
        at = int(differs.argmax())
        i = int(index[at])
        raise LayoutError(
            f"tensor {tensors.names[i]!r} has shape {list(catalog.spec(int(row[at])).shape)} on the trainer "
            f"and {list(tensors.spec(i).shape)} on {side}"
        )


def _require_addressable(tensors: TensorTable) -> None:
    fault = volumes(tensors.shape.astype(np.float64)) * ITEMSIZE[tensors.dtype] > _SIZE_LIMIT
    if fault.any():
        row = int(fault.argmax())
        raise LayoutError(
            f"tensor {tensors.names[row]!r} of shape {list(tensors.spec(row).shape)} is too large to address"
        )
