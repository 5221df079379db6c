"""A transfer plan: columns for the whole pair, and the part of it that one rank needs.

Every box in a plan is in the coordinates of a logical tensor. `region` columns index the table that the rank reported.
So a part is valid only for that table, and carries its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import Columns, volumes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.layout.tables import TensorTable
from weightcast.transfer.plan.verification import Verify

__all__ = ["DigestRows", "Kind", "Operations", "Party", "RankPart", "Rows", "TransferPlan", "join_made", "join_rows"]


Rows = TypeVar("Rows", "Operations", "DigestRows")


def join_rows(kind: type[Rows], parts: Sequence[Rows]) -> Rows:
    """Rows of several tables, one after the other; at least one table."""
    return join_made(kind, sum(map(len, parts)), parts)


def join_made(kind: type[Rows], count: int, parts: Iterable[Rows]) -> Rows:
    """Joins tables like `join_rows`, while they are made one by one: the next takes the memory of the one before.

    They have `count` rows in all, or PlanError is raised. A large plan would otherwise be written twice, both times
    into memory that no cache has.
    """
    columns: list[IntArray] = []
    position = 0
    for part in parts:
        part_columns: list[IntArray] = [getattr(part, name) for name in kind.__slots__]
        columns = columns or _empty_columns(part_columns, count)
        if position + len(part) > count:
            raise PlanError(f"tables of {position + len(part)} rows and more were made, expected {count}")
        for column, source in zip(columns, part_columns, strict=True):
            column[position : position + len(part)] = source
        position += len(part)
    if position < count or not columns:
        raise PlanError(f"tables of {position} rows were made, expected {count}")
    return kind(*columns)


def _empty_columns(like: Sequence[IntArray], count: int) -> list[IntArray]:
    return [np.empty((count, *column.shape[1:]), dtype=np.int64) for column in like]


class Kind(IntEnum):
    """Kinds of operations: send, copy and relay."""

    SEND = 0
    """A rank of the first party, which has the weights, sends a box to a rank of another."""
    COPY = 1
    """A rank copies a box that it received into a further region of its own: a replica on the same rank."""
    RELAY = 2
    """A rank sends on a box that it received."""


@dataclass(frozen=True, slots=True)
class Operations(Columns):
    """m operations in columns, all int64, (m,) unless said otherwise.

    `kind`; `tensor` row of the plan's tensors; `src_party`, `src_rank`, `src_region`; `dst_party`,
    `dst_rank`, `dst_region`; `offset` and `size` (m, D), the box. Parties are numbers of the plan's. For a copy the
    source party and rank are the destination's.

    Rows are sorted by (dst_party, dst_rank, kind, tensor, offset, dst_region). So the boxes that two ranks exchange are
    in one order on both sides, and equal instances have equal rows but for their sources.
    """

    kind: IntArray
    tensor: IntArray
    src_party: IntArray
    src_rank: IntArray
    src_region: IntArray
    dst_party: IntArray
    dst_rank: IntArray
    dst_region: IntArray
    offset: IntArray
    size: IntArray


@dataclass(frozen=True, slots=True)
class DigestRows(Columns):
    """k boxes to digest after an update, in columns, all int64, (k,) unless said otherwise.

    `party`, `rank`, `region`, `tensor`, `offset` and `size` (k, D), `dtype` code to
    digest in, and `cell`.

    Cells are numbered per party over (tensor, dtype). Rows with the same (party, cell) hold the same box and must
    have equal digests. The cells of one (party, tensor, dtype) are disjoint and cover the tensor. So one digest of
    each cell adds up to the digest of the logical tensor. On the trainer every holder of a cell has a row.
    """

    party: IntArray
    rank: IntArray
    region: IntArray
    tensor: IntArray
    offset: IntArray
    size: IntArray
    dtype: IntArray
    cell: IntArray


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a plan that one rank needs for the updates of one instance.

    `instance` is the instance whose communicator this is, `instance_party` its number; `party` is that of the rank's
    side. The communicator numbers the trainer ranks that send to the instance, ascending, then all ranks of the
    instance, ascending. `trainer_ranks` lists the former, `instance_ranks` counts the latter, `group_rank` is this
    rank's number.

    `operations` are those in which the rank takes part, in the plan's order. `wire_dtype` (len(operations),) is the
    dtype code in which each box travels, the destination's. `stage` (len(operations),) is the stage of each, of
    `stages` stages (`weightcast.transfer.plan.stages`), None where there is one.

    `digests` are the rank's own rows, of which `verify` says how much counts. A trainer rank has the same ones in the
    parts of all instances. `table_fingerprint` is that of the table the rank reported.
    """

    instance: str
    instance_party: int
    party: int
    rank: int
    trainer_ranks: tuple[int, ...]
    instance_ranks: int
    table_fingerprint: str
    tensors: TensorTable
    operations: Operations
    wire_dtype: IntArray
    digests: DigestRows
    bucket_bytes: int
    stage: IntArray | None = None
    stages: int = 1
    verify: Verify = Verify.FULL

    def take(self, rows: IntArray) -> RankPart:
        """The part with only the operations at `rows`; every member has to leave out the same."""
        stage = None if self.stage is None else self.stage[rows]
        return replace(self, operations=self.operations.take(rows), wire_dtype=self.wire_dtype[rows], stage=stage)

    @property
    def is_trainer(self) -> bool:
        """True if the rank is one of those that have the weights, and false for the instance's."""
        return self.party != self.instance_party

    @property
    def most_peers(self) -> int:
        """The most messages that any member of the communicator may have under way in one round."""
        direct = max(len(self.trainer_ranks), self.instance_ranks)
        return direct if self.stages == 1 else direct + 2 * self.instance_ranks

    @property
    def group_size(self) -> int:
        """Number of members of the communicator, trainer ranks and instance ranks."""
        return len(self.trainer_ranks) + self.instance_ranks

    @property
    def group_rank(self) -> int:
        """This rank's number in the communicator."""
        if self.is_trainer:
            return self.trainer_ranks.index(self.rank)
        return len(self.trainer_ranks) + self.rank


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a plan: the trainer, whose name is empty, or an instance.

    `dtype` (T,) has the dtype code of each tensor there. `fingerprints` are, by rank, those of the tables planned for.
    """

    name: str
    dtype: IntArray
    fingerprints: tuple[str, ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.fingerprints)

    def __str__(self) -> str:
        return self.name or "trainer"


@dataclass(frozen=True)
class TransferPlan:
    """The whole plan of a pair: every operation, and every box to digest.

    `tensors` has the logical tensors with the trainer's dtype. `parties` are the sides, in the order of the party
    columns: first the trainer, which has the weights, then each instance.
    """

    tensors: TensorTable
    parties: tuple[Party, ...]
    operations: Operations
    digests: DigestRows

    @property
    def trainer(self) -> Party:
        return self.parties[0]

    @property
    def instances(self) -> tuple[Party, ...]:
        return self.parties[1:]

    def number(self, instance: str) -> int:
        """The number of an instance among the parties. Raises PlanError naming the instances that there are."""
        names = [party.name for party in self.parties]
        if instance not in names[1:]:
            raise PlanError(f"the plan has no instance {instance!r}; it has {', '.join(names[1:])}")
        return names.index(instance)

    @property
    def wire_dtype(self) -> IntArray:
        """(m,) dtype code in which the box of each operation travels: the destination's."""
        dtype = np.stack([party.dtype for party in self.parties])
        return dtype[self.operations.dst_party, self.operations.tensor]

    @property
    def nbytes(self) -> IntArray:
        """(m,) bytes of the box of each operation, as it travels."""
        return np.asarray(volumes(self.operations.size) * ITEMSIZE[self.wire_dtype])
