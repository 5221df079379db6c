"""Makes a transfer plan from the tables of both sides. Pure: no torch, no I/O, equal input gives an equal plan.

docs/planning.md explains how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from weightcast.transfer.boxes.algebra import Cells
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges, volumes
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.coverage import require_cover
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.layout.joined import JoinedPair, JoinedRanks, Ranks, join_pair
from weightcast.transfer.plan.operations import DigestRows, Kind, Operations, Party, TransferPlan, join_made
from weightcast.transfer.plan.proof.operations import check_joined
from weightcast.transfer.planner.holders import Sources, find_sources
from weightcast.transfer.planner.locality import Reach
from weightcast.transfer.planner.receives import Receives, bind, cells_of, digest_rows
from weightcast.transfer.planner.routes import Machine, Needs, route
from weightcast.transfer.planner.rows import instance_rows
from weightcast.transfer.planner.topology import Hosts, Topology

__all__ = ["plan_transfer"]


def plan_transfer(
    trainer: Ranks,
    instances: Mapping[str, Ranks],
    *,
    check: bool = True,
    required: Collection[str] = (),
    left_out: Mapping[str, Collection[str]] | None = None,
    hosts: Hosts | None = None,
    topology: Topology | None = None,
) -> TransferPlan:
    """The plan of a pair: its sends of boxes from rank to rank, its copies, and the digests of each rank.

    `trainer[i]` is the table of trainer rank i, `instances[name][i]` that of rank i of an instance. Each instance must
    hold the whole of every tensor that it holds part of. It must hold those in `required`, but for the ones in
    `left_out[name]`. The trainer must hold all that some instance holds. `check` also proves the invariants of the
    finished plan.

    With `hosts` a rank gets what it can from trainer ranks on its own host. With a `topology` as well, ranks of the
    instances relay to each other what they receive alike, where its cost model finds that faster.

    Raises LayoutError where tables contradict each other, CoverageError where something is missing (named in compact
    ranges), and PlanError if the plan were wrong.
    """
    pair = join_pair(trainer, instances)
    if hosts is not None:
        hosts.require([side.world for side in pair.sides])
    if topology is not None:
        topology = Topology.given(topology)  # one that was made in code is checked here
    label = _Label(pair)
    sources = find_sources(pair.trainer, label)
    # Equal instances are looked at once.
    sides = {side.fingerprints: side for side in pair.instances}
    cells = {key: cells_of(side, label) for key, side in sides.items()}
    by_name = {side.name: cells[side.fingerprints] for side in pair.instances}
    require_cover(pair.tensors, sources.cells, by_name, _required(pair, required, left_out or {}))
    receives = {key: bind(side, sources.cells, len(pair.tensors), label) for key, side in sides.items()}
    asks = [_Asks(number, side, receives[side.fingerprints]) for number, side in enumerate(pair.instances, start=1)]
    plan = TransferPlan(
        tensors=pair.tensors,
        parties=tuple(Party(side.name, side.dtype, side.fingerprints) for side in pair.sides),
        operations=_operations(pair, sources, asks, hosts, topology),
        digests=_digests(pair, sources, list(by_name.values())),
    )
    if check:
        check_joined(plan, pair)
    return plan


class _Label:
    """Names a tensor row in the message of an error."""

    def __init__(self, pair: JoinedPair) -> None:
        self._names = pair.tensors.names

    def __call__(self, row: int) -> str:
        return f"tensor {self._names[row % len(self._names)]!r}"


def _required(
    pair: JoinedPair, required: Collection[str], left_out: Mapping[str, Collection[str]]
) -> dict[str, IntArray]:
    """Rows of the tensors that each instance has to hold."""
    unknown_names = [name for name in required if name not in pair.tensors.index]
    if unknown_names:
        raise LayoutError(f"tensor {unknown_names[0]!r} is required but no rank declares it")
    strangers = set(left_out) - {side.name for side in pair.instances}
    if strangers:
        raise LayoutError(f"tensors are left out for {min(strangers)!r}, which is no instance")
    rows = {}
    for side in pair.instances:
        exempt_names = frozenset(left_out.get(side.name, ()))
        rows[side.name] = np.array(
            [pair.tensors.index[name] for name in required if name not in exempt_names], dtype=np.int64
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Asks:
    """Needs of an instance: its number among the parties, its columns, and the rows that it receives."""

    number: int
    side: JoinedRanks
    receives: Receives

    @property
    def rows(self) -> IntArray:
        """(sends,) rows of the side that sends write."""
        return self.receives.row[self.receives.sends]

    @property
    def dtype(self) -> IntArray:
        """(sends,) the dtype in which each send travels."""
        return self.side.dtype[self.receives.tensor[self.receives.sends]]


def _operations(
    pair: JoinedPair, sources: Sources, asks: list[_Asks], hosts: Hosts | None, topology: Topology | None
) -> Operations:
    """Chooses a source for every box that an instance receives, for all instances together."""
    reach = Reach(sources, [side.world for side in pair.sides], hosts)
    routes = route(sources, reach, _needs(reach, asks), pair.trainer.world, _machine(asks, hosts, topology))
    first = np.append(0, np.cumsum([ask.receives.sends.shape[0] for ask in asks]))
    bounds = np.searchsorted(routes.need, first).tolist()
    copies = sum(int(np.count_nonzero(ask.receives.kind == Kind.COPY)) for ask in asks)
    rows = (
        instance_rows(ask.number, ask.side, ask.receives, routes.between(*span), first_need)
        for ask, span, first_need in zip(asks, pairwise(bounds), first[:-1].tolist(), strict=True)
    )
    return join_made(Operations, routes.need.shape[0] + copies, rows)


def _machine(asks: list[_Asks], hosts: Hosts | None, topology: Topology | None) -> Machine | None:
    """The machine by which relays are weighed; None without hosts or topology."""
    if hosts is None or topology is None:
        return None
    copied_bytes = np.zeros(len(hosts), dtype=np.int64)
    for ask in asks:
        rows = np.flatnonzero(ask.receives.kind == Kind.COPY)
        nbytes = volumes(np.take(ask.receives.size, rows, axis=0)) * ITEMSIZE[ask.side.dtype[ask.receives.tensor[rows]]]
        np.add.at(copied_bytes, hosts.number(ask.number, ask.side.rank[ask.receives.row[rows]]), nbytes)
    return Machine(topology, hosts, copied_bytes)


def _needs(reach: Reach, asks: list[_Asks]) -> Needs:
    """The boxes that all instances receive, one instance after the other."""
    rank = [ask.side.rank[ask.rows] for ask in asks]
    dtype = np.concatenate([ask.dtype for ask in asks])
    return Needs(
        cell=np.concatenate([ask.receives.cell for ask in asks]),
        column=np.concatenate([reach.columns(ask.number, ranks) for ask, ranks in zip(asks, rank, strict=True)]),
        party=np.repeat([ask.number for ask in asks], [ranks.shape[0] for ranks in rank]),
        rank=np.concatenate(rank),
        region=np.concatenate([ask.side.region[ask.rows] for ask in asks]),
        offset=np.concatenate([np.take(ask.receives.offset, ask.receives.sends, axis=0) for ask in asks]),
        size=np.concatenate([np.take(ask.receives.size, ask.receives.sends, axis=0) for ask in asks]),
        dtype=dtype,
        itemsize=ITEMSIZE[dtype],
    )


def _digests(pair: JoinedPair, sources: Sources, cells: list[Cells]) -> DigestRows:
    trainer = _trainer_digests(pair, sources)

    def parts() -> Iterator[DigestRows]:
        yield trainer
        rows_of_cells: dict[int, DigestRows] = {}
        uses = Counter(map(id, cells))
        for index, (side, side_cells) in enumerate(zip(pair.instances, cells, strict=True), start=1):
            rows = rows_of_cells.get(id(side_cells)) or digest_rows(index, side, side_cells)
            if uses[id(side_cells)] > 1:
                rows_of_cells[id(side_cells)] = rows
            yield replace(rows, party=np.full(len(rows), index, dtype=np.int64))

    return join_made(DigestRows, len(trainer) + sum(side_cells.row.shape[0] for side_cells in cells), parts())


def _trainer_digests(pair: JoinedPair, sources: Sources) -> DigestRows:
    """The trainer's digest rows: each cell of a tensor that an instance holds, in each dtype there, on every holder.

    Data-parallel copies that have drifted apart must be seen, because several of them may be sent.
    """
    cells = sources.cells
    demand = np.zeros((ITEMSIZE.shape[0], len(pair.tensors)), dtype=np.bool_)
    for side in pair.instances:
        tensors = np.flatnonzero(side.holds)
        demand[side.dtype[tensors], tensors] = True
    dtype, cell = np.nonzero(demand[:, cells.key])
    order, _ = lex_sort([cells.key[cell], dtype, cell])
    dtype, cell = dtype[order], cell[order]
    holders = cells.start[cell + 1] - cells.start[cell]
    row = cells.row[ranges(cells.start[cell], holders)]
    number = np.repeat(np.arange(cell.shape[0], dtype=np.int64), holders)
    cell, dtype = cell[number], dtype[number]
    rows = DigestRows(
        np.zeros(cell.shape[0], dtype=np.int64),
        pair.trainer.rank[row], pair.trainer.region[row], cells.key[cell],
        np.take(cells.offset, cell, axis=0), np.take(cells.size, cell, axis=0), dtype, number,
    )  # fmt: skip
    return rows.take(lex_sort([rows.rank, rows.cell])[0])
