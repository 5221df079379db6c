"""Makes a transfer plan from the tables of both sides. Pure: no torch, no I/O, equal input gives an equal plan.

How, and why so: docs/planning.md. `weightcast.transfer.planner.replan` makes plans one after the
other and keeps what did not change.
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
from weightcast.transfer.planner.assign import deal_blocks, turns
from weightcast.transfer.planner.expected import Expected, expect, others_load, sums
from weightcast.transfer.planner.holders import Sources, find_sources
from weightcast.transfer.planner.locality import Reach
from weightcast.transfer.planner.receives import Receives, bind, cells_of, digest_rows
from weightcast.transfer.planner.routes import Machine, Needs, route
from weightcast.transfer.planner.rows import direct_rows, routed_rows
from weightcast.transfer.planner.topology import Hosts, Topology
from weightcast.transfer.planner.waterfill import Pools, level

__all__ = ["Asks", "Dealt", "Label", "Made", "Terms", "balanced", "loads_of", "make_plan", "plan_transfer", "weights"]

_BALANCED = 1.045
"""Blocks dealt by themselves are kept if the busiest trainer rank has at most so many times the least load to which
bytes could be shared out in fractions."""


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
    """Who sends which box to whom, who copies what, and what each rank digests.

    `trainer[i]` is the table of trainer rank i, `instances[name][i]` that of rank i of an instance. Each instance must
    hold the whole of every tensor that it holds part of, and of those in `required` but for the ones in
    `left_out[name]`; the trainer must hold all that some instance holds. `check` also proves the invariants of the
    finished plan. With `hosts` a rank gets what it can from trainer ranks on its own host; with a `topology` as well,
    ranks of the instances pass on to each other what they receive alike where its cost model finds that faster.

    Raises LayoutError where tables contradict each other, CoverageError where something is missing (named in compact
    ranges), and PlanError if the plan were wrong.
    """
    return make_plan(trainer, instances, Terms(check, tuple(required), left_out or {}, hosts, topology)).plan


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked of a plan, as in `plan_transfer`."""

    check: bool = True
    required: tuple[str, ...] = ()
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    hosts: Hosts | None = None
    topology: Topology | None = None

    def key(self) -> tuple[object, ...]:
        """Equal for equal terms."""
        left_out = {name: frozenset(names) for name, names in self.left_out.items()}
        hosts = self.hosts and (self.hosts.host.tobytes(), self.hosts.first.tobytes())
        return self.check, self.required, left_out, hosts, self.topology


_NO_TERMS = Terms()


@dataclass(frozen=True)
class Made:
    """A plan, and what a plan for changed tables can take from it.

    A block is one layer of one instance; block `instance * layers + layer` has a row in each of `expected` (what no map
    changes), `others` (the load from other blocks beside which it is dealt), `asked` (blocks, pools) and `sent`
    (blocks, world), the bytes that it really takes from each pool and rank. `cell_start[instance]` (layers + 1,) are
    the numbers of the instance's first digest cell of each layer. Where blocks are not `balanced`, all were dealt
    together.
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
    """plan_transfer, with what it worked out on the way."""
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
    own = [cells[side.fingerprints] for side in pair.instances]
    by_name = {side.name: one for side, one in zip(pair.instances, own, strict=True)}
    require_cover(pair.tensors, sources.cells, by_name, _required(pair, terms.required, terms.left_out))
    bound: dict[tuple[str, ...], tuple[Receives, IntArray]] = {}
    for side in pair.instances:
        if side.fingerprints not in bound:
            receives = bind(side, None, sources.cells, len(pair.tensors), label)
            bound[side.fingerprints] = receives, weights(side, receives)
    reach = Reach(sources, worlds, hosts)
    asks = [Asks(index, side, *bound[side.fingerprints]) for index, side in enumerate(pair.instances)]
    expected = _expected(pair, sources, reach, asks)
    others = others_load(reach.pools, expected)
    dealt = _deal(pair, sources, reach, asks, others)
    if dealt is None or (topology is not None and hosts is not None):
        dealt, operations = _route(pair, sources, reach, asks, dealt, _machine(asks, hosts, topology))
    else:
        entries = zip(asks, dealt.entry, strict=True)
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
        digests=_digests(pair, sources, own),
    )
    if terms.check:
        check_joined(plan, pair)
    starts = tuple(np.searchsorted(one.key, pair.layer_start) for one in own)
    return Made(pair, sources, reach, plan, expected, others, dealt.asked, dealt.sent, starts, bool(dealt.entry))


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
    unknown = [name for name in required if name not in pair.tensors.index]
    if unknown:
        raise LayoutError(f"tensor {unknown[0]!r} is required but no rank declares it")
    strangers = set(left_out) - {side.name for side in pair.instances}
    if strangers:
        raise LayoutError(f"tensors are left out for {min(strangers)!r}, which is no instance")
    rows = {}
    for side in pair.instances:
        exempt = frozenset(left_out.get(side.name, ()))
        rows[side.name] = np.array(
            [pair.tensors.index[name] for name in required if name not in exempt], dtype=np.int64
        )
    return rows


@dataclass(frozen=True, slots=True)
class Asks:
    """What an instance receives: its number and columns, the rows, and the bytes of each send."""

    number: int
    side: JoinedRanks
    receives: Receives
    weight: IntArray

    def columns(self, reach: Reach) -> IntArray:
        """The host to which each send goes."""
        return reach.columns(self.number, self.side.rank[self.receives.row[self.receives.sends]])


def weights(side: JoinedRanks, receives: Receives) -> IntArray:
    """Bytes of each send, in the dtype in which it travels."""
    size = np.take(receives.size, receives.sends, axis=0)
    return np.asarray(volumes(size) * ITEMSIZE[side.dtype[receives.tensor[receives.sends]]])


def _expected(pair: JoinedPair, sources: Sources, reach: Reach, asks: list[Asks]) -> Expected:
    """What all blocks are expected to ask for. Equal instances on hosts with the same holders are looked at once."""
    found: dict[tuple[tuple[str, ...], bytes], Expected] = {}
    each = []
    for one in asks:
        begin, end = reach.first[one.number], reach.first[one.number + 1]
        key = one.side.fingerprints, reach.column[begin:end].tobytes()
        if key not in found:
            found[key] = expect(pair, sources, reach, (one.number, one.side), one.receives, one.weight)
        each.append(found[key])
    return Expected(*(np.concatenate([getattr(one, name) for one in each]) for name in Expected.__slots__))


@dataclass(frozen=True, slots=True)
class Dealt:
    """For each instance the sources of its sends, entries of `Sources.rank`, or nothing where boxes were cut or are
    relayed; and what blocks ask of pools and ranks."""

    entry: list[IntArray]
    asked: FloatArray
    sent: FloatArray


def _deal(pair: JoinedPair, sources: Sources, reach: Reach, asks: list[Asks], others: FloatArray) -> Dealt | None:
    """Sources for all instances, dealt block by block; None where that leaves some rank too much."""
    cell = np.concatenate([one.receives.cell for one in asks])
    column = np.concatenate([one.columns(reach) for one in asks])
    weight = np.concatenate([one.weight for one in asks])
    block, pool = _blocks(pair, sources, asks), reach.pool(cell, column)
    number = turns(np.arange(others.shape[0], dtype=np.int64), pair.layers.shape[0])
    choice = deal_blocks(reach.pools, pool, weight, block, others, number)
    entry = reach.entry(cell, column, choice)
    asked, sent = loads_of(reach.pools, pool, sources.rank[entry], weight, block, others.shape)
    if not balanced(reach.pools, asked, sent):
        return None
    ends = np.cumsum([one.weight.shape[0] for one in asks])[:-1]
    return Dealt(np.split(entry, ends), asked, sent)


def _blocks(pair: JoinedPair, sources: Sources, asks: list[Asks]) -> IntArray:
    """The block of each send of all instances."""
    layers, layer = pair.layers.shape[0], pair.layer[sources.cells.key]
    return np.concatenate([one.number * layers + layer[one.receives.cell] for one in asks])


def loads_of(
    pools: Pools, pool: IntArray, rank: IntArray, weight: IntArray, block: IntArray, shape: tuple[int, ...]
) -> tuple[FloatArray, FloatArray]:
    """Bytes of each block by pool and by rank: (blocks, pools) and (blocks, world) for `shape` = (blocks, world)."""
    return sums(block, pool, weight, (shape[0], len(pools))), sums(block, rank, weight, shape)


def balanced(pools: Pools, asked: FloatArray, sent: FloatArray) -> bool:
    """Whether the busiest rank has little more than the least that it could have."""
    _, best = level(pools, asked.sum(axis=0), sent.shape[1])
    return bool(sent.sum(axis=0).max(initial=0.0) <= _BALANCED * best)


def _route(
    pair: JoinedPair, sources: Sources, reach: Reach, asks: list[Asks], dealt: Dealt | None, machine: Machine | None
) -> tuple[Dealt, Operations]:
    """All instances together: boxes cut between holders, and passed on from rank to rank where that is faster than what
    was dealt."""
    needs = _needs(sources, reach, asks)
    direct = None if dealt is None else np.concatenate(dealt.entry)
    routes = route(sources, reach, needs, pair.trainer.world, machine, direct)
    first = np.append(0, np.cumsum([one.weight.shape[0] for one in asks]))
    bounds = np.searchsorted(routes.need, first).tolist()
    operations = [
        routed_rows(one.number, one.side, one.receives, routes.between(*span), int(first[one.number]))
        for one, span in zip(asks, pairwise(bounds), strict=True)
    ]
    sent = np.flatnonzero(routes.src_instance == TRAINER)
    need = routes.need[sent]
    weight = volumes(np.take(routes.size, sent, axis=0)) * needs.itemsize[need]
    shape = len(asks) * pair.layers.shape[0], pair.trainer.world
    block, pool = _blocks(pair, sources, asks)[need], reach.pool(needs.cell, needs.column)[need]
    loads = loads_of(reach.pools, pool, routes.src_rank[sent], weight, block, shape)
    return Dealt([], *loads), join_rows(Operations, operations)


def _machine(asks: list[Asks], hosts: Hosts | None, topology: Topology | None) -> Machine | None:
    """What relays are weighed by, where they can be."""
    if hosts is None or topology is None:
        return None
    copied = np.zeros(len(hosts), dtype=np.int64)
    for one in asks:
        rows = np.flatnonzero(one.receives.kind == Kind.COPY)
        nbytes = volumes(np.take(one.receives.size, rows, axis=0)) * ITEMSIZE[one.side.dtype[one.receives.tensor[rows]]]
        np.add.at(copied, hosts.number(one.number, one.side.rank[one.receives.row[rows]]), nbytes)
    return Machine(topology, hosts, copied)


def _needs(sources: Sources, reach: Reach, asks: list[Asks]) -> Needs:
    cell = np.concatenate([one.receives.cell for one in asks])
    row = [one.receives.row[one.receives.sends] for one in asks]
    offset = np.concatenate([np.take(one.receives.offset, one.receives.sends, axis=0) for one in asks])
    size = np.concatenate([np.take(one.receives.size, one.receives.sends, axis=0) for one in asks])
    dtype = np.concatenate([one.side.dtype[sources.cells.key[one.receives.cell]] for one in asks])
    return Needs(
        cell=cell,
        column=np.concatenate([one.columns(reach) for one in asks]),
        instance=np.repeat([one.number for one in asks], [one.weight.shape[0] for one in asks]),
        rank=np.concatenate([one.side.rank[rows] for one, rows in zip(asks, row, strict=True)]),
        region=np.concatenate([one.side.region[rows] for one, rows in zip(asks, row, strict=True)]),
        offset=offset,
        size=size,
        dtype=dtype,
        itemsize=ITEMSIZE[dtype],
    )


def _digests(pair: JoinedPair, sources: Sources, cells: list[Cells]) -> DigestRows:
    trainer = _trainer_digests(pair, sources)

    def parts() -> Iterator[DigestRows]:
        yield trainer
        made: dict[int, DigestRows] = {}
        uses = Counter(map(id, cells))
        for index, (side, own) in enumerate(zip(pair.instances, cells, strict=True)):
            rows = made.get(id(own)) or digest_rows(index, side, own)
            if uses[id(own)] > 1:
                made[id(own)] = rows
            yield replace(rows, instance=np.full(len(rows), index, dtype=np.int64))

    return join_made(DigestRows, len(trainer) + sum(one.row.shape[0] for one in cells), parts())


def _trainer_digests(pair: JoinedPair, sources: Sources) -> DigestRows:
    """Every cell of a tensor that some instance holds, for each dtype that an instance has it in, on each of its
    holders: data-parallel copies that have drifted apart must be seen, because several of them may be sent.
    """
    cells = sources.cells
    wanted = np.zeros((ITEMSIZE.shape[0], len(pair.tensors)), dtype=np.bool_)
    for side in pair.instances:
        held = np.flatnonzero(side.holds)
        wanted[side.dtype[held], held] = True
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
