"""Makes a transfer plan from the tables of both sides. Pure: no torch, no I/O, equal input gives an equal plan.

How, and why so: docs/architecture.md, "How a plan is made". `weightcast.transfer.replan` makes plans one after the
other and keeps what did not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightcast.transfer.binding import Receives, bind, cells_of, digest_rows
from weightcast.transfer.columns import lex_sort, ranges, volumes
from weightcast.transfer.coverage import require_cover
from weightcast.transfer.dealing import Expected, FloatArray, deal_blocks, others_load, shared_pools, water_level
from weightcast.transfer.dtypes import ITEMSIZE
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.invariants import check_joined
from weightcast.transfer.layout import NO_SLOT, IntArray, RegionTable
from weightcast.transfer.plan import TRAINER, DigestRows, Operations, TransferPlan, join_rows
from weightcast.transfer.regions import Cells
from weightcast.transfer.sides import Pair, Side, join_sides
from weightcast.transfer.sources import Sources, deal, find_sources

__all__ = [
    "Dealt",
    "Label",
    "Made",
    "balanced",
    "expect",
    "instance_operations",
    "loads_of",
    "make_plan",
    "plan_transfer",
    "weights",
]

_BALANCED = 1.045
"""Blocks dealt by themselves are kept if the busiest trainer rank has at most so many times the load of bytes shared
out in fractions."""


def plan_transfer(
    trainer: Sequence[RegionTable],
    instances: Mapping[str, Sequence[RegionTable]],
    *,
    check: bool = True,
    required: Collection[str] = (),
    left_out: Mapping[str, Collection[str]] | None = None,
) -> TransferPlan:
    """Who sends which box to whom, who copies what, and what each rank digests.

    `trainer[i]` is the table of trainer rank i, `instances[name][i]` that of rank i of an instance. Each instance must
    hold the whole of every tensor that it holds part of, and of those in `required` but for the ones in
    `left_out[name]`; the trainer must hold all that some instance holds. `check` also proves the invariants of the
    finished plan.

    Raises LayoutError where tables contradict each other, CoverageError where something is missing (named in compact
    ranges), and PlanError if the plan were wrong.
    """
    return make_plan(trainer, instances, check=check, required=required, left_out=left_out).plan


@dataclass(frozen=True)
class Made:
    """A plan, and what a plan for changed tables can take from it.

    A block is one layer of one instance; block `instance * layers + layer` has a row in each of `expected` (what no map
    changes), `others` (the load from other blocks beside which it is dealt), `asked` (blocks, pools) and `sent`
    (blocks, world), the bytes that it really takes from each pool and rank. `cell_start[instance]` (layers + 1,) are
    the numbers of the instance's first digest cell of each layer. Where blocks are not `balanced`, all were dealt
    together.
    """

    pair: Pair
    sources: Sources
    plan: TransferPlan
    expected: Expected
    others: FloatArray
    asked: FloatArray
    sent: FloatArray
    cell_start: tuple[IntArray, ...]
    balanced: bool


def make_plan(
    trainer: Sequence[RegionTable],
    instances: Mapping[str, Sequence[RegionTable]],
    *,
    check: bool = True,
    required: Collection[str] = (),
    left_out: Mapping[str, Collection[str]] | None = None,
) -> Made:
    """plan_transfer, with what it worked out on the way."""
    pair = join_sides(trainer, instances)
    label = Label(pair)
    sources = find_sources(pair.trainer, label)
    cells: dict[tuple[str, ...], Cells] = {}
    for side in pair.instances:
        if side.fingerprints not in cells:
            cells[side.fingerprints] = cells_of(side, None, label)
    own = [cells[side.fingerprints] for side in pair.instances]
    by_name = {side.name: one for side, one in zip(pair.instances, own, strict=True)}
    require_cover(pair.tensors, sources.cells, by_name, _required(pair, required, left_out or {}))
    made: dict[tuple[str, ...], tuple[Receives, Expected]] = {}
    for side in pair.instances:
        if side.fingerprints not in made:
            receives = bind(side, None, sources.cells, len(pair.tensors), label)
            made[side.fingerprints] = receives, expect(pair, sources, side, receives)
    received = [made[side.fingerprints][0] for side in pair.instances]
    each = [made[side.fingerprints][1] for side in pair.instances]
    expected = Expected(*(np.concatenate([getattr(one, name) for one in each]) for name in Expected.__slots__))
    others = others_load(sources.pools, expected)
    dealt, level = _deal(pair, sources, received, others)
    plan = TransferPlan(
        tensors=pair.tensors,
        instances=tuple(side.name for side in pair.instances),
        instance_dtype=np.stack([side.dtype for side in pair.instances]),
        trainer_world=pair.trainer.world,
        instance_world=tuple(side.world for side in pair.instances),
        trainer_fingerprints=pair.trainer.fingerprints,
        instance_fingerprints=tuple(side.fingerprints for side in pair.instances),
        operations=join_rows(
            Operations,
            [
                instance_operations(index, side, part, sources, entry)
                for index, (side, part, entry) in enumerate(zip(pair.instances, received, dealt.entry, strict=True))
            ],
        ),
        digests=_digests(pair, sources, own),
    )
    if check:
        check_joined(plan, pair)
    starts = tuple(np.searchsorted(one.key, pair.layer_start) for one in own)
    return Made(pair, sources, plan, expected, others, dealt.asked, dealt.sent, starts, level)


class Label:
    """Names a tensor row in the message of an error."""

    def __init__(self, pair: Pair) -> None:
        self._names = pair.tensors.names

    def __call__(self, row: int) -> str:
        return f"tensor {self._names[row % len(self._names)]!r}"


def _required(pair: Pair, required: Collection[str], left_out: Mapping[str, Collection[str]]) -> dict[str, IntArray]:
    """Rows of the tensors that each instance has to hold."""
    unknown = [name for name in required if name not in pair.index]
    if unknown:
        raise LayoutError(f"tensor {unknown[0]!r} is required but no rank declares it")
    strangers = set(left_out) - {side.name for side in pair.instances}
    if strangers:
        raise LayoutError(f"tensors are left out for {min(strangers)!r}, which is no instance")
    rows = {}
    for side in pair.instances:
        exempt = frozenset(left_out.get(side.name, ()))
        rows[side.name] = np.array([pair.index[name] for name in required if name not in exempt], dtype=np.int64)
    return rows


def expect(pair: Pair, sources: Sources, side: Side, receives: Receives, rows: IntArray | None = None) -> Expected:
    """What an instance is expected to ask for, by layer: for its slots, as much of each expert of a layer as of others.

    How large the regions in slots are counts, which expert is in them does not. `rows` are those of the side that were
    bound, None for all.
    """
    cells, world = sources.cells, pair.trainer.world
    layers = pair.layers.shape[0]
    shape = layers, len(sources.pools)
    fixed = side.slot[receives.row[receives.sends]] == NO_SLOT
    cell, weight = receives.cell[fixed], weights(side, receives)[fixed].astype(np.float64)
    asked = _sums(pair.layer[cells.key[cell]], sources.pool[cell], weight, shape)
    squares = _sums(pair.layer[cells.key[cell]], sources.pool[cell], weight**2, shape)
    in_slot = np.flatnonzero(side.slot != NO_SLOT) if rows is None else rows[side.slot[rows] != NO_SLOT]
    if in_slot.size:
        tensor = side.tensor[in_slot]
        nbytes = volumes(np.take(side.size, in_slot, axis=0)) * ITEMSIZE[side.dtype[tensor]]
        total = _sums(pair.layer[tensor], np.zeros_like(tensor), nbytes, (layers, 1))
        routed = np.zeros(len(pair.tensors), dtype=np.bool_)
        routed[tensor] = True
        cell = np.flatnonzero(routed[cells.key])
        held = (volumes(np.take(cells.size, cell, axis=0)) * ITEMSIZE[side.dtype[cells.key[cell]]]).astype(np.float64)
        once = _sums(pair.layer[cells.key[cell]], sources.pool[cell], held, shape)
        times = total / np.maximum(once.sum(axis=1, keepdims=True), 1.0)
        asked += np.rint(once * times)
        squares += times * _sums(pair.layer[cells.key[cell]], sources.pool[cell], held**2, shape)
    many = shared_pools(sources.pools)
    single = np.flatnonzero(np.diff(sources.pools.start) == 1)
    alone = np.zeros((layers, world))
    alone[:, sources.pools.rank[sources.pools.start[single]]] = asked[:, single]
    return Expected(alone, asked[:, many], (asked**2 / np.maximum(squares, 1.0))[:, many])


@dataclass(frozen=True, slots=True)
class Dealt:
    """For each instance the sources of its sends, entries of `Sources.rank`; and what blocks ask of pools and ranks."""

    entry: list[IntArray]
    asked: FloatArray
    sent: FloatArray


def _deal(pair: Pair, sources: Sources, receives: list[Receives], others: FloatArray) -> tuple[Dealt, bool]:
    """Sources for all instances, and whether it was possible block by block."""
    cell = np.concatenate([part.cell for part in receives])
    pool = sources.pool[cell]
    layers = pair.layers.shape[0]
    layer = pair.layer[sources.cells.key]
    block = np.concatenate([index * layers + layer[part.cell] for index, part in enumerate(receives)])
    weight = np.concatenate([weights(side, part) for side, part in zip(pair.instances, receives, strict=True)])
    choice = deal_blocks(sources.pools, pool, weight, block, others, np.arange(others.shape[0], dtype=np.int64))
    asked, sent = loads_of(sources, cell, choice, weight, block, others.shape)
    level = balanced(sources, asked, sent)
    if not level:
        choice = deal(sources.pools, pool, weight, pair.trainer.world)
    ends = np.cumsum([part.cell.shape[0] for part in receives])[:-1]
    return Dealt(np.split(sources.start[cell] + choice, ends), asked, sent), level


def weights(side: Side, receives: Receives) -> IntArray:
    """Bytes of each send, in the dtype in which it travels."""
    size = np.take(receives.size, receives.sends, axis=0)
    return np.asarray(volumes(size) * ITEMSIZE[side.dtype[receives.tensor[receives.sends]]])


def loads_of(
    sources: Sources, cell: IntArray, choice: IntArray, weight: IntArray, block: IntArray, shape: tuple[int, ...]
) -> tuple[FloatArray, FloatArray]:
    """Bytes of each block by pool and by rank: (blocks, pools) and (blocks, world) for `shape` = (blocks, world)."""
    asked = _sums(block, sources.pool[cell], weight, (shape[0], len(sources.pools)))
    return asked, _sums(block, sources.rank[sources.start[cell] + choice], weight, shape)


def _sums(row: IntArray, column: IntArray, weight: IntArray | FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """A matrix of sums of weights."""
    sums = np.bincount(row * shape[1] + column, weights=weight, minlength=shape[0] * shape[1])
    return sums.astype(np.float64).reshape(shape)


def balanced(sources: Sources, asked: FloatArray, sent: FloatArray) -> bool:
    """Whether the busiest rank has little more than it would have if all bytes could be shared out in fractions."""
    best = water_level(sources.pools, asked.sum(axis=0), sent.shape[1]).max(initial=0.0)
    return bool(sent.sum(axis=0).max(initial=0.0) <= _BALANCED * best)


def instance_operations(index: int, side: Side, receives: Receives, sources: Sources, entry: IntArray) -> Operations:
    """What an instance receives, from the chosen holders, and copies."""
    dst_rank = side.rank[receives.row]
    src_instance = np.full(dst_rank.shape[0], index, dtype=np.int64)
    src_rank, src_region = dst_rank.copy(), side.region[receives.source]
    src_instance[receives.sends] = TRAINER
    src_rank[receives.sends], src_region[receives.sends] = sources.rank[entry], sources.region[entry]
    return Operations(
        kind=receives.kind,
        tensor=receives.tensor,
        src_instance=src_instance,
        src_rank=src_rank,
        src_region=src_region,
        instance=np.full(dst_rank.shape[0], index, dtype=np.int64),
        dst_rank=dst_rank,
        dst_region=side.region[receives.row],
        offset=receives.offset,
        size=receives.size,
    )


def _digests(pair: Pair, sources: Sources, cells: list[Cells]) -> DigestRows:
    parts = [_trainer_digests(pair, sources)]
    made: dict[int, DigestRows] = {}
    for index, (side, own) in enumerate(zip(pair.instances, cells, strict=True)):
        if id(own) not in made:
            made[id(own)] = digest_rows(index, side, own)
        rows = made[id(own)]
        parts.append(replace(rows, instance=np.full(len(rows), index, dtype=np.int64)))
    return join_rows(DigestRows, parts)


def _trainer_digests(pair: Pair, sources: Sources) -> DigestRows:
    """Every cell of a tensor that some instance holds, for each dtype that an instance has it in, on each of its
    holders: data-parallel copies that have drifted apart must be seen, because several of them may be sent.
    """
    cells = sources.cells
    wanted = np.zeros((ITEMSIZE.shape[0], len(pair.tensors)), dtype=np.bool_)
    for side in pair.instances:
        held = np.flatnonzero(side.held)
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
