"""The part of a plan that one rank needs, cut out without looking at the rest of the plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weightcast.transfer.columns import lex_sort
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout import IntArray, TensorTable
from weightcast.transfer.plan import TRAINER, DigestRows, Kind, Operations, RankPart, TransferPlan

__all__ = ["BUCKET_BYTES", "PlanParts", "instance_part", "trainer_part"]

BUCKET_BYTES = 64 << 20
"""Bytes that a rank packs at a time unless told otherwise."""


class _Index:
    """Rows of a table by two numbers: one sort, then each look-up is a binary search. Rows of a group keep their
    order."""

    def __init__(self, rows: IntArray, outer: IntArray, inner: IntArray) -> None:
        order, _ = lex_sort([outer[rows], inner[rows]])
        self._rows = rows[order]
        self._stride = int(inner.max(initial=0)) + 1
        self._key = outer[self._rows] * self._stride + inner[self._rows]

    def find(self, outer: int, inner: int) -> IntArray:
        if inner >= self._stride:
            return self._rows[:0]
        key = outer * self._stride + inner
        begin, end = np.searchsorted(self._key, [key, key + 1])
        return self._rows[begin:end]


class PlanParts:
    """All parts of a plan. Making one sorts the plan's rows by rank once; each part then costs only its own size.

    Raises PlanError for a plan that relays from one instance to another, because their ranks share no communicator.
    """

    def __init__(self, plan: TransferPlan, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._plan, self._bucket_bytes = plan, bucket_bytes
        o = plan.operations
        foreign = np.flatnonzero((o.kind == Kind.RELAY) & (o.src_instance != o.instance))
        if foreign.size:
            row = int(foreign[0])
            raise PlanError(
                f"operation {row} relays {plan.tensors.names[int(o.tensor[row])]!r} from "
                f"{plan.instances[int(o.src_instance[row])]} to {plan.instances[int(o.instance[row])]}, which share no "
                "communicator"
            )
        self._sends = _Index(np.flatnonzero(o.kind == Kind.SEND), o.instance, o.src_rank)
        self._relays = _Index(np.flatnonzero(o.kind == Kind.RELAY), o.instance, o.src_rank)
        self._arrivals = _Index(np.arange(len(o), dtype=np.int64), o.instance, o.dst_rank)
        self._digests = _Index(
            np.arange(len(plan.digests), dtype=np.int64), plan.digests.instance - TRAINER, plan.digests.rank
        )
        senders = lex_sort([o.instance[o.kind == Kind.SEND], o.src_rank[o.kind == Kind.SEND]])
        heads = np.flatnonzero(o.kind == Kind.SEND)[senders[0][senders[1]]]
        self._senders = [tuple(o.src_rank[heads[o.instance[heads] == i]].tolist()) for i in range(len(plan.instances))]

    def trainer_ranks(self, instance: str) -> tuple[int, ...]:
        """Trainer ranks that send to an instance, ascending."""
        return self._senders[self._number(instance)]

    def trainer_part(self, instance: str, rank: int) -> RankPart:
        """Part of a trainer rank for the updates of one instance.

        A rank that sends nothing to the instance has no operations and is not in `trainer_ranks`, but it has its
        digests.
        """
        index = self._number(instance)
        self._in_world(rank, self._plan.trainer_world, "the trainer")
        return self._part(index, rank, True, self._sends.find(index, rank))

    def instance_part(self, instance: str, rank: int) -> RankPart:
        """Part of a rank of an instance."""
        index = self._number(instance)
        self._in_world(rank, self._plan.instance_world[index], instance)
        rows = np.union1d(self._arrivals.find(index, rank), self._relays.find(index, rank))
        return self._part(index, rank, False, rows)

    def _number(self, instance: str) -> int:
        if instance not in self._plan.instances:
            raise PlanError(f"the plan has no instance {instance!r}, only {', '.join(self._plan.instances)}")
        return self._plan.instances.index(instance)

    @staticmethod
    def _in_world(rank: int, world: int, side: str) -> None:
        if not 0 <= rank < world:
            raise PlanError(f"the plan has no rank {rank} of {side}, which has {world} ranks")

    def _part(self, index: int, rank: int, is_trainer: bool, rows: IntArray) -> RankPart:
        plan = self._plan
        operations = plan.operations.take(rows)
        digests = plan.digests.take(self._digests.find(0 if is_trainer else index - TRAINER, rank))
        wire_dtype = plan.instance_dtype[index, operations.tensor]
        fingerprints = plan.trainer_fingerprints if is_trainer else plan.instance_fingerprints[index]
        tensors, operations, digests = _own_tensors(plan.tensors, operations, digests)
        return RankPart(
            instance=plan.instances[index],
            instance_index=index,
            is_trainer=is_trainer,
            rank=rank,
            trainer_ranks=self._senders[index],
            instance_ranks=plan.instance_world[index],
            table_fingerprint=fingerprints[rank],
            tensors=tensors,
            operations=operations,
            wire_dtype=wire_dtype,
            digests=digests,
            bucket_bytes=self._bucket_bytes,
        )


def _own_tensors(
    tensors: TensorTable, operations: Operations, digests: DigestRows
) -> tuple[TensorTable, Operations, DigestRows]:
    """Only the tensors that the rows mention, in the plan's order, and the rows renumbered to them."""
    used, number = np.unique(np.concatenate([operations.tensor, digests.tensor]), return_inverse=True)
    names = tuple(map(tensors.names.__getitem__, used.tolist()))
    own = TensorTable(names, np.take(tensors.shape, used, axis=0), tensors.ndim[used], tensors.dtype[used])
    number = number.astype(np.int64)
    count = len(operations)
    return own, replace(operations, tensor=number[:count]), replace(digests, tensor=number[count:])


def trainer_part(plan: TransferPlan, instance: str, rank: int, bucket_bytes: int = BUCKET_BYTES) -> RankPart:
    """One part of a plan; for several make a PlanParts once."""
    return PlanParts(plan, bucket_bytes).trainer_part(instance, rank)


def instance_part(plan: TransferPlan, instance: str, rank: int, bucket_bytes: int = BUCKET_BYTES) -> RankPart:
    """One part of a plan; for several make a PlanParts once."""
    return PlanParts(plan, bucket_bytes).instance_part(instance, rank)
