"""The reports of all ranks of one side in one set of columns, with one numbering of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from weightcast.transfer.columns import find_names, number_names
from weightcast.transfer.dtypes import dtype_name
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout import IntArray, RankReport, TensorTable, pad_boxes
from weightcast.transfer.names import number_ranges

__all__ = ["JoinedRegions", "SideName", "join_reports", "order_reports"]


@dataclass(frozen=True, slots=True)
class SideName:
    """The trainer (`instance` is None) or one instance, for messages."""

    instance: str | None

    def __str__(self) -> str:
        return self.instance or "the trainer"

    def rank(self, rank: int) -> str:
        """One rank of it."""
        return f"rank {rank} of {self}"


@dataclass(frozen=True, slots=True)
class JoinedRegions:
    """All regions of one side, ordered by (rank, region), nothing left out: (n,) columns, `offset` and `size` (n, D).

    `tensor` numbers the tensors of the side.
    """

    rank: IntArray
    tensor: IntArray
    offset: IntArray
    size: IntArray
    slot: IntArray

    def __len__(self) -> int:
        return int(self.rank.shape[0])

    def take(self, rows: IntArray) -> JoinedRegions:
        """The regions at `rows` (indices or a mask), in that order."""
        return JoinedRegions(*(getattr(self, name)[rows] for name in self.__slots__))

    @property
    def volume(self) -> IntArray:
        """(n,) elements of each region."""
        return np.asarray(self.size.prod(axis=1))


def order_reports(side: SideName, reports: Iterable[RankReport]) -> tuple[RankReport, ...]:
    """The reports by rank. Raises LayoutError naming missing, repeated and disagreeing ranks."""
    by_rank: dict[int, RankReport] = {}
    first: RankReport | None = None
    for report in reports:
        first = first or report
        if report.world_size != first.world_size:
            raise LayoutError(
                f"{side.rank(report.rank)} says there are {report.world_size} ranks, "
                f"{side.rank(first.rank)} says {first.world_size}"
            )
        if not 0 <= report.rank < report.world_size:
            raise LayoutError(f"{side.rank(report.rank)} is not in 0..{report.world_size - 1}")
        if report.rank in by_rank:
            hosts = f"{by_rank[report.rank].host or 'unknown'} and {report.host or 'unknown'}"
            raise LayoutError(f"{side.rank(report.rank)} reported twice (hosts {hosts}); each process has its own")
        by_rank[report.rank] = report
    if first is None:
        raise LayoutError(f"no rank of {side} reported")
    if missing := set(range(first.world_size)) - by_rank.keys():
        raise LayoutError(f"of the {first.world_size} ranks of {side} these did not report: {number_ranges(missing)}")
    return tuple(by_rank[rank] for rank in range(first.world_size))


def join_reports(
    side: SideName, reports: Sequence[RankReport], catalog: TensorTable | None = None
) -> tuple[TensorTable, JoinedRegions]:
    """Joins by name the tables of reports that stand in the order of their ranks; each learns its place in the whole,
    and the whole its place in the `catalog` if that has all of its tensors.

    Raises LayoutError, naming tensor, both ranks and both values, where two ranks differ about a shape or dtype.
    """
    tables = [report.table for report in reports]
    names, rows, known = _number([table.tensors for table in tables], catalog)
    width = max(table.tensors.width for table in tables)
    joined = _Joined(side, names, width)
    for rank, (table, own) in enumerate(zip(tables, rows, strict=True)):
        joined.add(rank, table.tensors, own)
    regions = JoinedRegions(
        np.repeat(np.arange(len(tables), dtype=np.int64), [len(table) for table in tables]),
        np.concatenate([own[table.tensor] for table, own in zip(tables, rows, strict=True)]),
        np.concatenate([pad_boxes(table.offset, width, 0) for table in tables]),
        np.concatenate([pad_boxes(table.size, width, 1) for table in tables]),
        np.concatenate([table.slot for table in tables]),
    )
    whole = joined.table()
    for table, own in zip(tables, rows, strict=True):
        table.tensors.place_in(whole, own)
    if catalog is not None and known is not None:
        whole.place_in(catalog, known)
    return whole, regions


def _number(
    tables: Sequence[TensorTable], catalog: TensorTable | None
) -> tuple[tuple[str, ...], list[IntArray], IntArray | None]:
    """The names of all tables, in the order in which they first appear; the number of each of a table's; and, if the
    catalog has all of them, the row of each there.

    Looking up names is most of the work of a merge, so each is looked up once where there is a catalog.
    """
    if catalog is not None:
        found = [find_names(catalog.index, table.names) for table in tables]
        every = np.concatenate(found)
        if (every >= 0).all():
            known = _in_order(every, len(catalog))
            number = np.empty(len(catalog), dtype=np.int64)
            number[known] = np.arange(known.shape[0], dtype=np.int64)
            return tuple(map(catalog.names.__getitem__, known.tolist())), [number[rows] for rows in found], known
    names = tuple(dict.fromkeys(chain.from_iterable(table.names for table in tables)))
    index = dict(zip(names, range(len(names)), strict=True))
    return names, [number_names(index, table.names) for table in tables], None


def _in_order(rows: IntArray, extent: int) -> IntArray:
    """The distinct values, all less than `extent`, in the order in which they first appear."""
    first = np.full(extent, -1, dtype=np.int64)
    # Written backwards, so that the first place of each stays.
    first[rows[::-1]] = np.arange(rows.shape[0] - 1, -1, -1, dtype=np.int64)
    return rows[np.sort(first[first >= 0])]


class _Joined:
    """Shapes and dtypes of the joined tensors, and which rank declared each first."""

    def __init__(self, side: SideName, names: tuple[str, ...], width: int) -> None:
        self._side, self._names = side, names
        self._shape = np.ones((len(names), width), dtype=np.int64)
        self._ndim = np.zeros(len(names), dtype=np.int64)
        self._dtype = np.zeros(len(names), dtype=np.int64)
        self._declarer = np.full(len(names), -1, dtype=np.int64)

    def add(self, rank: int, tensors: TensorTable, rows: IntArray) -> None:
        """What one rank declares. Raises LayoutError where it differs from a lower rank."""
        shape = pad_boxes(tensors.shape, self._shape.shape[1], 1)
        new = self._declarer[rows] < 0
        fresh = rows[new]
        self._shape[fresh], self._ndim[fresh], self._dtype[fresh] = shape[new], tensors.ndim[new], tensors.dtype[new]
        self._declarer[fresh] = rank
        differs = (self._ndim[rows] != tensors.ndim) | (self._shape[rows] != shape).any(axis=1)
        if differs.any():
            at = int(differs.argmax())
            row, found = int(rows[at]), list(tensors.spec(at).shape)
            known = self._shape[row, : self._ndim[row]].tolist()
            raise self._disagreement(row, rank, f"shape {known}", f"shape {found}")
        differs = self._dtype[rows] != tensors.dtype
        if differs.any():
            at = int(differs.argmax())
            row = int(rows[at])
            before = dtype_name(int(self._dtype[row]))
            raise self._disagreement(row, rank, f"dtype {before}", f"dtype {tensors.spec(at).dtype}")

    def _disagreement(self, row: int, rank: int, known: str, found: str) -> LayoutError:
        other = self._side.rank(int(self._declarer[row]))
        return LayoutError(f"tensor {self._names[row]!r} has {known} on {other} and {found} on rank {rank}")

    def table(self) -> TensorTable:
        """The joined table."""
        return TensorTable(self._names, self._shape, self._ndim, self._dtype)
