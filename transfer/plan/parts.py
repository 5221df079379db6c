"""The part of a plan that one rank needs, cut out without looking at the rest of the plan."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import numpy as np

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import stable_order
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.tables import TensorTable
from weightcast.transfer.plan.operations import DigestRows, Kind, Party, RankPart, TransferPlan
from weightcast.transfer.plan.stages import stages
from weightcast.transfer.plan.verification import Verify

__all__ = ["BUCKET_BYTES", "PlanParts"]

BUCKET_BYTES = 64 << 20
"""Bytes that a rank packs at a time unless told otherwise."""

_FEW = 32
"""Sorting rows takes about so many times as long as going through as many tensors."""


class _Index:
    """Rows of a table by two numbers, outer and inner: one sort, then each look-up is two reads.

    Rows with the same numbers keep their order. `rows` None means all rows; where these are in order already, a look-up
    gives a slice of them.
    """

    def __init__(self, rows: IntArray | None, outer: IntArray, inner: IntArray, extent: tuple[int, int]) -> None:
        self._inner = extent[1]
        key = outer * extent[1] + inner
        if rows is not None:
            key = key[rows]
        self._rows = rows
        if not (key[1:] >= key[:-1]).all():
            order = stable_order(key, extent[0] * extent[1])
            self._rows = order if rows is None else rows[order]
            key = key[order]
        self._first = np.searchsorted(key, np.arange(extent[0] * extent[1] + 1))

    def find(self, outer: int, inner: int) -> IntArray | slice:
        """The rows with these two numbers."""
        return self._between(outer * self._inner + inner, outer * self._inner + inner + 1)

    def find_all(self, outer: int) -> IntArray | slice:
        """The rows with this outer number."""
        return self._between(outer * self._inner, (outer + 1) * self._inner)

    def _between(self, begin: int, end: int) -> IntArray | slice:
        span = slice(int(self._first[begin]), int(self._first[end]))
        return span if self._rows is None else self._rows[span]

    def filled(self) -> BoolArray:
        """(outer, inner) mask of the numbers that have rows."""
        return (np.diff(self._first) > 0).reshape(-1, self._inner)


class _Numbered(NamedTuple):
    """Tensors of a rank's part: their rows in the plan, their table, and the rank's digest rows in its numbers."""

    tensor_rows: IntArray
    tensors: TensorTable
    digests: DigestRows


class PlanParts:
    """All parts of a plan. The plan's rows are sorted by rank once; each part then costs only its own size.

    `verify` says how much the ranks digest.

    Raises PlanError for a plan that relays from one instance to another, because their ranks share no communicator.
    """

    def __init__(self, plan: TransferPlan, bucket_bytes: int = BUCKET_BYTES, verify: Verify = Verify.FULL) -> None:
        self._plan, self._bucket_bytes, self._verify = plan, bucket_bytes, verify
        o, d = plan.operations, plan.digests
        extent = len(plan.parties), max(party.world for party in plan.parties)
        self._relays = _relays(plan)
        self._stage: IntArray | None = None
        self._stages = np.ones(len(plan.parties), dtype=np.int64)
        if self._relays is not None:
            self._stage, self._stages = stages(plan)
        sends = np.flatnonzero(o.kind == Kind.SEND)
        self._sends = _Index(sends, o.src_rank, o.dst_party, (plan.trainer.world, len(plan.parties)))
        self._arrivals = _Index(None, o.dst_party, o.dst_rank, extent)
        self._digests = _Index(None, d.party, d.rank, extent)
        self._senders = [tuple(np.flatnonzero(senders).tolist()) for senders in self._sends.filled().T]
        self._number = np.empty(len(plan.tensors), dtype=np.int64)
        self._numbering = Lock()
        self._trainer: dict[int, _Numbered] = {}
        self._tables: dict[bytes, TensorTable] = {}

    def trainer_ranks(self, instance: str) -> tuple[int, ...]:
        """Trainer ranks that send to an instance, ascending."""
        return self._senders[self._plan.number(instance)]

    def trainer_part(self, instance: str, rank: int) -> RankPart:
        """Part of a trainer rank for the updates of one instance.

        A rank that sends nothing to the instance has no operations and is not in `trainer_ranks`, but it has its
        digests.
        """
        index = self._plan.number(instance)
        _check_rank(self._plan.trainer, rank)
        if rank not in self._trainer:
            send_tensors = self._plan.operations.tensor[self._sends.find_all(rank)]
            self._trainer[rank] = self._numbered(0, rank, send_tensors)
        return self._part(index, 0, rank, self._sends.find(rank, index), self._trainer[rank])

    def instance_part(self, instance: str, rank: int) -> RankPart:
        """Part of a rank of an instance, for the updates of that instance."""
        plan = self._plan
        index = plan.number(instance)
        _check_rank(plan.parties[index], rank)
        rows = self._arrivals.find(index, rank)
        if self._relays is not None:
            rows = np.union1d(_numbers(rows), _numbers(self._relays.find(index, rank)))
        return self._part(index, index, rank, rows, self._numbered(index, rank, plan.operations.tensor[rows]))

    def _numbered(self, party: int, rank: int, tensor: IntArray) -> _Numbered:
        """Numbers the tensors of a rank's operations and digest rows from 0 on."""
        digests = self._plan.digests.take(self._digests.find(party, rank))
        tensor_rows = self._used(digests.tensor, tensor)
        digests = replace(digests, tensor=self._renumber(tensor_rows, digests.tensor))
        return _Numbered(tensor_rows, self._own(tensor_rows), digests)

    def _used(self, *tensor: IntArray) -> IntArray:
        """The tensors that rows mention, ascending."""
        if sum(column.shape[0] for column in tensor) * _FEW < len(self._plan.tensors):
            return np.unique(np.concatenate(tensor))
        mask = np.zeros(len(self._plan.tensors), dtype=np.bool_)
        for column in tensor:
            mask[column] = True
        return np.flatnonzero(mask)

    def _own(self, used: IntArray) -> TensorTable:
        """Table of the tensors `used` alone; equal ranks of equal instances share one."""
        key, tensors = used.tobytes(), self._plan.tensors
        if key not in self._tables:
            names = tuple(map(tensors.names.__getitem__, used.tolist()))
            self._tables[key] = TensorTable(
                names, np.take(tensors.shape, used, axis=0), tensors.ndim[used], tensors.dtype[used]
            )
        return self._tables[key]

    def _renumber(self, used: IntArray, tensor: IntArray) -> IntArray:
        """Positions of the tensors `tensor` in `used`."""
        with self._numbering:  # parts are made in several threads
            self._number[used] = np.arange(used.shape[0])
            return self._number[tensor]

    def _part(self, index: int, party: int, rank: int, rows: IntArray | slice, numbered: _Numbered) -> RankPart:
        plan = self._plan
        operations, instance = plan.operations.take(rows), plan.parties[index]
        stage = self._stage if self._stages[index] > 1 else None
        return RankPart(
            instance=instance.name,
            instance_party=index,
            party=party,
            rank=rank,
            trainer_ranks=self._senders[index],
            instance_ranks=instance.world,
            table_fingerprint=plan.parties[party].fingerprints[rank],
            tensors=numbered.tensors,
            operations=replace(operations, tensor=self._renumber(numbered.tensor_rows, operations.tensor)),
            wire_dtype=instance.dtype[operations.tensor],
            digests=numbered.digests,
            bucket_bytes=self._bucket_bytes,
            stage=None if stage is None else stage[rows],
            stages=int(self._stages[index]),
            verify=self._verify,
        )


def _relays(plan: TransferPlan) -> _Index | None:
    """The relays by (instance, rank that passes them on), if there are any."""
    o = plan.operations
    rows = np.flatnonzero(o.kind == Kind.RELAY)
    if not rows.size:
        return None
    strays = rows[o.src_party[rows] != o.dst_party[rows]]
    if strays.size:
        row = int(strays[0])
        raise PlanError(
            f"operation {row} relays {plan.tensors.names[int(o.tensor[row])]!r} from "
            f"{plan.parties[int(o.src_party[row])]} to {plan.parties[int(o.dst_party[row])]}, which share no "
            "communicator"
        )
    extent = len(plan.parties), max(party.world for party in plan.parties)
    return _Index(rows, o.dst_party, o.src_rank, extent)


def _check_rank(party: Party, rank: int) -> None:
    if not 0 <= rank < party.world:
        side = party.name or "the trainer"
        raise PlanError(f"the plan has no rank {rank} of {side}, which has {party.world} ranks")


def _numbers(rows: IntArray | slice) -> IntArray:
    return np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, slice) else rows
