"""Makes a transfer plan from the tables of both sides. Pure: no torch, no I/O, equal input gives an equal plan.

How, and why so: docs/architecture.md, "How a plan is made".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.columns import lex_sort, ranges
from weightcast.transfer.coverage import require_cover
from weightcast.transfer.dtypes import ITEMSIZE
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.invariants import check_joined
from weightcast.transfer.layout import IntArray, RegionTable
from weightcast.transfer.plan import TRAINER, DigestRows, Kind, Operations, TransferPlan
from weightcast.transfer.regions import Cells, decompose, intersect
from weightcast.transfer.routing import Needs, Routes, route
from weightcast.transfer.sides import Pair, Side, join_sides
from weightcast.transfer.sources import Sources, find_sources
from weightcast.transfer.topology import Hosts, Topology

__all__ = ["plan_transfer"]


def plan_transfer(
    trainer: Sequence[RegionTable],
    instances: Mapping[str, Sequence[RegionTable]],
    *,
    check: bool = True,
    required: Collection[str] = (),
    left_out: Mapping[str, Collection[str]] | None = None,
    hosts: Hosts | None = None,
    topology: Topology | None = None,
) -> TransferPlan:
    """Who sends which box to whom, who copies what, and what each rank digests.

    `trainer[i]` is the table of trainer rank i, `instances[name][i]` that of rank i of an instance. Each instance must
    hold the whole of every tensor that it holds part of, and of those in `required` but for the ones in
    `left_out[name]`; the trainer must hold all that some instance holds. `check` also proves the invariants of the
    finished plan. With `hosts` a rank gets what it can from trainer ranks on its own host; with a `topology` as well,
    ranks of the instances pass on to each other what they receive alike where its cost model finds that faster.

    Raises LayoutError where tables contradict each other, CoverageError where something is missing (named in compact
    ranges), and PlanError if the plan were wrong.
    """
    pair = join_sides(trainer, instances)
    if hosts is not None:
        hosts.require([side.world for side in (pair.trainer, *pair.instances)])
    label = _Label(pair)
    sources = find_sources(pair.trainer, label)
    classes: dict[tuple[str, ...], _Receives] = {}
    cells: dict[tuple[str, ...], Cells] = {}
    for side in pair.instances:
        if side.fingerprints not in cells:
            cells[side.fingerprints] = decompose(side.tensor, side.offset, side.size, label)
    by_name = {side.name: cells[side.fingerprints] for side in pair.instances}
    require_cover(pair.tensors, sources.cells, by_name, _required(pair, required, left_out or {}))
    for side in pair.instances:
        if side.fingerprints not in classes:
            classes[side.fingerprints] = _receive(side, sources.cells, len(pair.tensors), label)
    receives = [classes[side.fingerprints] for side in pair.instances]
    plan = TransferPlan(
        tensors=pair.tensors,
        instances=tuple(side.name for side in pair.instances),
        instance_dtype=np.stack([side.dtype for side in pair.instances]),
        trainer_world=pair.trainer.world,
        instance_world=tuple(side.world for side in pair.instances),
        trainer_fingerprints=pair.trainer.fingerprints,
        instance_fingerprints=tuple(side.fingerprints for side in pair.instances),
        operations=_operations(pair, sources, receives, hosts, topology),
        digests=_digests(pair, sources, list(by_name.values())),
    )
    if check:
        check_joined(plan, pair)
    return plan


class _Label:
    """Names a tensor row in the message of an error."""

    def __init__(self, pair: Pair) -> None:
        self._names = pair.tensors.names

    def __call__(self, row: int) -> str:
        return f"tensor {self._names[row % len(self._names)]!r}"


def _required(pair: Pair, required: Collection[str], left_out: Mapping[str, Collection[str]]) -> dict[str, IntArray]:
    """Rows of the tensors that each instance has to hold."""
    index = {name: row for row, name in enumerate(pair.tensors.names)} if required else {}
    unknown = [name for name in required if name not in index]
    if unknown:
        raise LayoutError(f"tensor {unknown[0]!r} is required but no rank declares it")
    strangers = set(left_out) - {side.name for side in pair.instances}
    if strangers:
        raise LayoutError(f"tensors are left out for {min(strangers)!r}, which is no instance")
    rows = {}
    for side in pair.instances:
        exempt = frozenset(left_out.get(side.name, ()))
        rows[side.name] = np.array([index[name] for name in required if name not in exempt], dtype=np.int64)
    return rows


@dataclass(frozen=True, slots=True)
class _Receives:
    """What the ranks of a class of equal instances get, whoever sends it.

    Sends: trainer cell, receiving rank and region, and the box. Copies: rank, region that received, further region, and
    the box. Both ordered by rank.
    """

    cell: IntArray
    rank: IntArray
    region: IntArray
    offset: IntArray
    size: IntArray
    copy_rank: IntArray
    copy_source: IntArray
    copy_region: IntArray
    copy_tensor: IntArray
    copy_offset: IntArray
    copy_size: IntArray


def _receive(side: Side, cells: Cells, tensors: int, label: _Label) -> _Receives:
    """Each rank receives each of its cells once, into the first region that holds it, and copies it into the others."""
    boxes = decompose(side.rank * tensors + side.tensor, side.offset, side.size, label)
    count = np.diff(boxes.start)
    first = boxes.row[boxes.start[:-1]]
    tensor = side.tensor[first]
    cell, box, offset, size = intersect((cells.key, cells.offset, cells.size), (tensor, boxes.offset, boxes.size))
    further = np.repeat(np.arange(len(boxes), dtype=np.int64), count - 1)
    row = boxes.row[ranges(boxes.start[:-1] + 1, count - 1)]
    return _Receives(
        cell,
        side.rank[first[box]],
        side.region[first[box]],
        offset,
        size,
        side.rank[row],
        side.region[first[further]],
        side.region[row],
        side.tensor[row],
        np.take(boxes.offset, further, axis=0),
        np.take(boxes.size, further, axis=0),
    )


def _operations(
    pair: Pair, sources: Sources, receives: list[_Receives], hosts: Hosts | None, topology: Topology | None
) -> Operations:
    """Sends from chosen holders, relays and copies, in the order of the plan."""
    cell = np.concatenate([part.cell for part in receives])
    count = [part.cell.shape[0] for part in receives]
    dtype = [side.dtype[sources.cells.key[part.cell]] for part, side in zip(receives, pair.instances, strict=True)]
    rank, region, offset, size = (
        np.concatenate([getattr(part, name) for part in receives]) for name in ("rank", "region", "offset", "size")
    )
    instance = np.repeat(np.arange(len(receives), dtype=np.int64), count)
    code = np.concatenate(dtype)
    needs = Needs(cell, instance, rank, region, offset, size, code, ITEMSIZE[code])
    routes = route(sources, needs, pair.trainer.world, hosts, topology)
    tensor = sources.cells.key[cell]
    bounds = np.searchsorted(instance[routes.need], np.arange(len(receives) + 1))
    parts = [
        _of_instance(index, part, needs, tensor, routes, slice(int(bounds[index]), int(bounds[index + 1])))
        for index, part in enumerate(receives)
    ]
    return Operations(*(np.concatenate([getattr(part, name) for part in parts]) for name in Operations.__slots__))


def _of_instance(
    index: int, part: _Receives, needs: Needs, tensor: IntArray, routes: Routes, mine: slice
) -> Operations:
    need, copies = routes.need[mine], part.copy_rank.shape[0]
    operations = Operations(
        kind=np.concatenate([routes.kind[mine], np.full(copies, Kind.COPY, dtype=np.int64)]),
        tensor=np.concatenate([tensor[need], part.copy_tensor]),
        src_instance=np.concatenate([routes.src_instance[mine], np.full(copies, index, dtype=np.int64)]),
        src_rank=np.concatenate([routes.src_rank[mine], part.copy_rank]),
        src_region=np.concatenate([routes.src_region[mine], part.copy_source]),
        instance=np.full(need.shape[0] + copies, index, dtype=np.int64),
        dst_rank=np.concatenate([needs.rank[need], part.copy_rank]),
        dst_region=np.concatenate([needs.region[need], part.copy_region]),
        offset=np.concatenate([routes.offset[mine], part.copy_offset]),
        size=np.concatenate([routes.size[mine], part.copy_size]),
    )
    o = operations
    order, _ = lex_sort([o.dst_rank, o.kind, o.src_rank, o.tensor, *o.offset.T, o.dst_region])
    return operations.take(order)


def _digests(pair: Pair, sources: Sources, cells: list[Cells]) -> DigestRows:
    parts = [_trainer_digests(pair, sources, cells)]
    made: dict[int, DigestRows] = {}
    for index, (side, own) in enumerate(zip(pair.instances, cells, strict=True)):
        if id(own) not in made:
            made[id(own)] = _instance_digests(side, own)
        rows = made[id(own)]
        parts.append(
            DigestRows(np.full(len(rows), index, dtype=np.int64), *(getattr(rows, n) for n in rows.__slots__[1:]))
        )
    return DigestRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in DigestRows.__slots__))


def _trainer_digests(pair: Pair, sources: Sources, held: list[Cells]) -> DigestRows:
    """Every cell of a tensor that some instance holds, for each dtype that an instance has it in, on each of its
    holders: data-parallel copies that have drifted apart must be seen, because several of them may be sent.
    """
    cells, tensors = sources.cells, len(pair.tensors)
    wanted = np.zeros((ITEMSIZE.shape[0], tensors), dtype=np.bool_)
    for side, own in zip(pair.instances, held, strict=True):
        wanted[side.dtype[own.key], own.key] = True
    dtype, cell = np.nonzero(wanted[:, cells.key])
    order, _ = lex_sort([cells.key[cell], dtype, cell])
    dtype, cell = dtype[order], cell[order]
    holders = cells.start[cell + 1] - cells.start[cell]
    row = cells.row[ranges(cells.start[cell], holders)]
    number = np.repeat(np.arange(cell.shape[0], dtype=np.int64), holders)
    cell, dtype = cell[number], dtype[number]
    rows = DigestRows(
        np.full(cell.shape[0], TRAINER, dtype=np.int64),
        pair.trainer.rank[row], pair.trainer.region[row], cells.key[cell],
        np.take(cells.offset, cell, axis=0), np.take(cells.size, cell, axis=0), dtype, number,
    )  # fmt: skip
    return rows.take(lex_sort([rows.rank, rows.cell])[0])


def _instance_digests(side: Side, cells: Cells) -> DigestRows:
    """Every region of the instance, cut into cells where regions overlap partly, ordered by (rank, region, cell)."""
    order, _ = lex_sort([cells.row])
    cell, row = cells.cell[order], cells.row[order]
    tensor = cells.key[cell]
    return DigestRows(
        np.zeros(row.shape[0], dtype=np.int64), side.rank[row], side.region[row], tensor,
        np.take(cells.offset, cell, axis=0), np.take(cells.size, cell, axis=0), side.dtype[tensor], cell,
    )  # fmt: skip
