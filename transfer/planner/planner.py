"""Makes a transfer plan from the tables of both sides. Pure: no torch, no I/O, equal input gives an equal plan.

docs/planning.md explains how. `weightcast.transfer.planner.replan` makes plans one after the other, and keeps what did
not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from weightcast.transfer.boxes.algebra import Cells
from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges, volumes
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.coverage import require_cover
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.layout.joined import JoinedPair, JoinedRanks, Ranks, join_pair
from weightcast.transfer.plan.operations import (
    TRAINER,
    DigestRows,
    Kind,
    Operations,
    TransferPlan,
    join_made,
    join_rows,
)
from weightcast.transfer.plan.proof.operations import check_joined
from weightcast.transfer.planner.assign import assign_blocks, turns
from weightcast.transfer.planner.expected import Expected, expect, others_load, sums
from weightcast.transfer.planner.holders import Sources, find_sources
from weightcast.transfer.planner.locality import Reach
from weightcast.transfer.planner.receives import Receives, bind, cells_of, digest_rows
from weightcast.transfer.planner.routes import Machine, Needs, route
from weightcast.transfer.planner.rows import direct_rows, routed_rows
from weightcast.transfer.planner.topology import Hosts, Topology
from weightcast.transfer.planner.waterfill import Pools, level

__all__ = ["Asks", "Choice", "Label", "Made", "Terms", "balanced", "loads_of", "make_plan", "plan_transfer", "weights"]

_BALANCED = 1.045
"""Limit for blocks that are assigned each by itself: the busiest trainer rank's load, in multiples of the least.

The least is what that load could be if bytes were shared out in fractions. Above the limit the blocks are assigned
together.
"""


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
    return make_plan(trainer, instances, Terms(check, tuple(required), left_out or {}, hosts, topology)).plan


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a plan, as in `plan_transfer`."""

    check: bool = True
    required: tuple[str, ...] = ()
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    hosts: Hosts | None = None
    topology: Topology | None = None

    def key(self) -> tuple[object, ...]:
        """A value that is equal for equal terms."""
        left_out = {name: frozenset(names) for name, names in self.left_out.items()}
        hosts = self.hosts and (self.hosts.host.tobytes(), self.hosts.first.tobytes())
        return self.check, self.required, left_out, hosts, self.topology


_NO_TERMS = Terms()


@dataclass(frozen=True)
class Made:
    """A plan, and what a plan for changed tables can take from it.

    A block is one layer of one instance. Block `instance * layers + layer` has a row in each of `expected`, `others`,
    `asked` and `sent`. `expected` is what no map changes; `others` is the load from other blocks beside which the block
    is assigned. `asked` (blocks, pools) and `sent` (blocks, world) are the bytes that it really takes from each pool
    and rank. Where blocks are not `balanced`, all were assigned together.

    `cell_start[instance]` (layers + 1,) are the numbers of the instance's first digest cell of each layer.
    """

    pair: JoinedPair
    sources: Sources
    reach: Reach
    plan: TransferPlan
    expected: Expected
    others: FloatArray
    asked: FloatArray
    sent: FloatArray
    cell_start: tuple[IntArray, ...]
    balanced: bool


def make_plan(trainer: Ranks, instances: Mapping[str, Ranks], terms: Terms = _NO_TERMS) -> Made:
    """Makes a plan like `plan_transfer`, and returns it with what was worked out on the way."""
    hosts, topology = terms.hosts, terms.topology
    pair = join_pair(trainer, instances)
    worlds = [side.world for side in pair.instances]
    if hosts is not None:
        hosts.require([pair.trainer.world, *worlds])
    label = Label(pair)
    sources = find_sources(pair.trainer, label)
    cells: dict[tuple[str, ...], Cells] = {}
    for side in pair.instances:
        if side.fingerprints not in cells:
            cells[side.fingerprints] = cells_of(side, None, label)
    instance_cells = [cells[side.fingerprints] for side in pair.instances]
    by_name = {side.name: side_cells for side, side_cells in zip(pair.instances, instance_cells, strict=True)}
    require_cover(pair.tensors, sources.cells, by_name, _required(pair, terms.required, terms.left_out))
    bindings: dict[tuple[str, ...], tuple[Receives, IntArray]] = {}
    for side in pair.instances:
        if side.fingerprints not in bindings:
            receives = bind(side, None, sources.cells, len(pair.tensors), label)
            bindings[side.fingerprints] = receives, weights(side, receives)
    reach = Reach(sources, worlds, hosts)
    asks = [Asks(index, side, *bindings[side.fingerprints]) for index, side in enumerate(pair.instances)]
    expected = _expected(pair, sources, reach, asks)
    other_load = others_load(reach.pools, expected)
    choice = _choose(pair, sources, reach, asks, other_load)
    if choice is None or (topology is not None and hosts is not None):
        choice, operations = _route(pair, sources, reach, asks, choice, _machine(asks, hosts, topology))
    else:
        entries = zip(asks, choice.entry, strict=True)
        rows = (direct_rows(a.number, a.side, a.receives, sources, e) for a, e in entries)
        operations = join_made(Operations, sum(a.receives.row.shape[0] for a in asks), rows)
    plan = TransferPlan(
        tensors=pair.tensors,
        instances=tuple(side.name for side in pair.instances),
        instance_dtype=np.stack([side.dtype for side in pair.instances]),
        trainer_world=pair.trainer.world,
        instance_world=tuple(worlds),
        trainer_fingerprints=pair.trainer.fingerprints,
        instance_fingerprints=tuple(side.fingerprints for side in pair.instances),
        operations=operations,
        digests=_digests(pair, sources, instance_cells),
    )
    if terms.check:
        check_joined(plan, pair)
    starts = tuple(np.searchsorted(side_cells.key, pair.layer_start) for side_cells in instance_cells)
    return Made(pair, sources, reach, plan, expected, other_load, choice.asked, choice.sent, starts, bool(choice.entry))


class Label:
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
class Asks:
    """Needs of an instance: its number and columns, the rows that it receives, and the bytes of each send."""

    number: int
    side: JoinedRanks
    receives: Receives
    weight: IntArray

    def columns(self, reach: Reach) -> IntArray:
        """(sends,) the host to which each send goes, as `Reach` numbers it."""
        return reach.columns(self.number, self.side.rank[self.receives.row[self.receives.sends]])


def weights(side: JoinedRanks, receives: Receives) -> IntArray:
    """Bytes of each send, in the dtype in which it travels."""
    size = np.take(receives.size, receives.sends, axis=0)
    return np.asarray(volumes(size) * ITEMSIZE[side.dtype[receives.tensor[receives.sends]]])


def _expected(pair: JoinedPair, sources: Sources, reach: Reach, asks: list[Asks]) -> Expected:
    """The expected demand of all blocks. Equal instances on hosts with the same holders are looked at once."""
    by_key: dict[tuple[tuple[str, ...], bytes], Expected] = {}
    by_instance = []
    for ask in asks:
        start, end = reach.first[ask.number], reach.first[ask.number + 1]
        key = ask.side.fingerprints, reach.column[start:end].tobytes()
        if key not in by_key:
            by_key[key] = expect(pair, sources, reach, (ask.number, ask.side), ask.receives, ask.weight)
        by_instance.append(by_key[key])
    return Expected(*(np.concatenate([getattr(e, name) for e in by_instance]) for name in Expected.__slots__))


@dataclass(frozen=True, slots=True)
class Choice:
    """Sources of all sends, and the bytes that blocks ask of pools and ranks.

    `entry` has for each instance the entries of `Sources.rank` that its sends come from. It is empty where boxes were
    cut or are relayed. `asked` is (blocks, pools), `sent` (blocks, world).
    """

    entry: list[IntArray]
    asked: FloatArray
    sent: FloatArray


def _choose(pair: JoinedPair, sources: Sources, reach: Reach, asks: list[Asks], others: FloatArray) -> Choice | None:
    """Sources for all instances, assigned block by block; None where that leaves some rank too much."""
    cell = np.concatenate([ask.receives.cell for ask in asks])
    column = np.concatenate([ask.columns(reach) for ask in asks])
    weight = np.concatenate([ask.weight for ask in asks])
    block, pool = _blocks(pair, sources, asks), reach.pool(cell, column)
    number = turns(np.arange(others.shape[0], dtype=np.int64), pair.layers.shape[0])
    choice = assign_blocks(reach.pools, pool, weight, block, others, number)
    entry = reach.entry(cell, column, choice)
    pool_bytes, rank_bytes = loads_of(reach.pools, pool, sources.rank[entry], weight, block, others.shape)
    if not balanced(reach.pools, pool_bytes, rank_bytes):
        return None
    ends = np.cumsum([ask.weight.shape[0] for ask in asks])[:-1]
    return Choice(np.split(entry, ends), pool_bytes, rank_bytes)


def _blocks(pair: JoinedPair, sources: Sources, asks: list[Asks]) -> IntArray:
    """The block of each send of all instances."""
    layers, layer = pair.layers.shape[0], pair.layer[sources.cells.key]
    return np.concatenate([ask.number * layers + layer[ask.receives.cell] for ask in asks])


def loads_of(
    pools: Pools, pool: IntArray, rank: IntArray, weight: IntArray, block: IntArray, shape: tuple[int, ...]
) -> tuple[FloatArray, FloatArray]:
    """Bytes of each block by pool and by rank: (blocks, pools) and (blocks, world) for `shape` = (blocks, world)."""
    return sums(block, pool, weight, (shape[0], len(pools))), sums(block, rank, weight, shape)


def balanced(pools: Pools, asked: FloatArray, sent: FloatArray) -> bool:
    """True if the busiest rank has little more than the least that it could have."""
    _, bound = level(pools, asked.sum(axis=0), sent.shape[1])
    return bool(sent.sum(axis=0).max(initial=0.0) <= _BALANCED * bound)


def _route(
    pair: JoinedPair,
    sources: Sources,
    reach: Reach,
    asks: list[Asks],
    block_choice: Choice | None,
    machine: Machine | None,
) -> tuple[Choice, Operations]:
    """Routes all instances together: boxes are cut between holders, or relayed where that beats `block_choice`."""
    needs = _needs(sources, reach, asks)
    direct = None if block_choice is None else np.concatenate(block_choice.entry)
    routes = route(sources, reach, needs, pair.trainer.world, machine, direct)
    first = np.append(0, np.cumsum([ask.weight.shape[0] for ask in asks]))
    bounds = np.searchsorted(routes.need, first).tolist()
    operations = [
        routed_rows(ask.number, ask.side, ask.receives, routes.between(*span), int(first[ask.number]))
        for ask, span in zip(asks, pairwise(bounds), strict=True)
    ]
    send_rows = np.flatnonzero(routes.src_instance == TRAINER)
    need = routes.need[send_rows]
    weight = volumes(np.take(routes.size, send_rows, axis=0)) * needs.itemsize[need]
    shape = len(asks) * pair.layers.shape[0], pair.trainer.world
    block, pool = _blocks(pair, sources, asks)[need], reach.pool(needs.cell, needs.column)[need]
    loads = loads_of(reach.pools, pool, routes.src_rank[send_rows], weight, block, shape)
    return Choice([], *loads), join_rows(Operations, operations)


def _machine(asks: list[Asks], hosts: Hosts | None, topology: Topology | None) -> Machine | None:
    """The machine by which relays are weighed; None without hosts or topology."""
    if hosts is None or topology is None:
        return None
    copied_bytes = np.zeros(len(hosts), dtype=np.int64)
    for ask in asks:
        rows = np.flatnonzero(ask.receives.kind == Kind.COPY)
        nbytes = volumes(np.take(ask.receives.size, rows, axis=0)) * ITEMSIZE[ask.side.dtype[ask.receives.tensor[rows]]]
        np.add.at(copied_bytes, hosts.number(ask.number, ask.side.rank[ask.receives.row[rows]]), nbytes)
    return Machine(topology, hosts, copied_bytes)


def _needs(sources: Sources, reach: Reach, asks: list[Asks]) -> Needs:
    cell = np.concatenate([ask.receives.cell for ask in asks])
    row = [ask.receives.row[ask.receives.sends] for ask in asks]
    offset = np.concatenate([np.take(ask.receives.offset, ask.receives.sends, axis=0) for ask in asks])
    size = np.concatenate([np.take(ask.receives.size, ask.receives.sends, axis=0) for ask in asks])
    dtype = np.concatenate([ask.side.dtype[sources.cells.key[ask.receives.cell]] for ask in asks])
    return Needs(
        cell=cell,
        column=np.concatenate([ask.columns(reach) for ask in asks]),
        instance=np.repeat([ask.number for ask in asks], [ask.weight.shape[0] for ask in asks]),
        rank=np.concatenate([ask.side.rank[rows] for ask, rows in zip(asks, row, strict=True)]),
        region=np.concatenate([ask.side.region[rows] for ask, rows in zip(asks, row, strict=True)]),
        offset=offset,
        size=size,
        dtype=dtype,
        itemsize=ITEMSIZE[dtype],
    )


def _digests(pair: JoinedPair, sources: Sources, cells: list[Cells]) -> DigestRows:
    trainer = _trainer_digests(pair, sources)

    def parts() -> Iterator[DigestRows]:
        yield trainer
        rows_of_cells: dict[int, DigestRows] = {}
        uses = Counter(map(id, cells))
        for index, (side, side_cells) in enumerate(zip(pair.instances, cells, strict=True)):
            rows = rows_of_cells.get(id(side_cells)) or digest_rows(index, side, side_cells)
            if uses[id(side_cells)] > 1:
                rows_of_cells[id(side_cells)] = rows
            yield replace(rows, instance=np.full(len(rows), index, dtype=np.int64))

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
        np.full(cell.shape[0], TRAINER, dtype=np.int64),
        pair.trainer.rank[row], pair.trainer.region[row], cells.key[cell],
        np.take(cells.offset, cell, axis=0), np.take(cells.size, cell, axis=0), dtype, number,
    )  # fmt: skip
    return rows.take(lex_sort([rows.rank, rows.cell])[0])
