"""Plans one pair again and again: what did not change since the last plan is not planned anew.

A plan has two parts. One depends on no expert map, and stays: source cells, their holders, and the expected demand of
each layer of each instance. The other binds experts to slots, layer by layer. When the map of some layers of an
instance changed, only those layers of that instance are bound, assigned and proved again. The result is the plan that
`plan_transfer` would make from scratch, to the last row.

    planner = Planner()
    first = planner.plan(trainer, instances).plan
    later = planner.plan(trainer, instances | {"rollout-3": tables_after_rebalance})
    later.instances, later.layers           # ("rollout-3",), (17,)
    later.changes                           # a plan of these layers alone
    later.plan                              # all of the new plan
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weightcast.transfer.boxes.algebra import Cells
from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges
from weightcast.transfer.layout.joined import JoinedRanks, Ranks, as_joined
from weightcast.transfer.plan.operations import TRAINER, DigestRows, Operations, TransferPlan, join_rows
from weightcast.transfer.plan.parts import BUCKET_BYTES, PlanParts
from weightcast.transfer.plan.proof.operations import check_joined
from weightcast.transfer.plan.proof.tiling import Scope, filled, rows_at, spans
from weightcast.transfer.planner.assign import assign_blocks, turns
from weightcast.transfer.planner.changes import changed_layers, named_by_trainer, new_sides
from weightcast.transfer.planner.expected import Expected, expect
from weightcast.transfer.planner.planner import Asks, Choice, Label, Made, Terms, balanced, loads_of, make_plan, weights
from weightcast.transfer.planner.receives import bind, cells_of, digest_rows, plan_order
from weightcast.transfer.planner.rows import direct_rows
from weightcast.transfer.planner.topology import Hosts, Topology

__all__ = ["Planned", "Planner"]

_MOST_PIECES = 64
"""After so many plans of changes the whole plan is put together, so that what is kept of old ones does not grow."""


@dataclass(frozen=True)
class _Piece:
    """A plan of some layers of some instances; `tensors` (T,) are those of the layers, `instances` the numbers."""

    tensors: BoolArray
    instances: frozenset[int]
    plan: TransferPlan


@dataclass(frozen=True)
class Planned:
    """A plan, and how it differs from the one before it.

    `layers` are the numbers of the layers bound again, NONE for tensors outside of layers. `instances` are the
    instances for which they were. `changes` is the plan of these layers of these instances alone, with the trainer's
    digests of the layers. For a plan made from scratch, `layers` and `instances` are None and `changes` is all of it.
    """

    layers: tuple[int, ...] | None
    instances: tuple[str, ...] | None
    changes: TransferPlan
    _made: Made
    _pieces: tuple[_Piece, ...] = ()

    @cached_property
    def plan(self) -> TransferPlan:
        """All of the plan, put together when it is first asked for, in a time that grows with all of it."""
        return _put_together(self._made, self._pieces) if self._pieces else self._made.plan

    @cached_property
    def trainer_ranks(self) -> list[tuple[int, ...]]:
        """For each instance the trainer ranks that send to it, ascending."""
        rank_bytes = self._made.sent.reshape(len(self.changes.instances), -1, self.changes.trainer_world).sum(axis=1)
        return [tuple(np.flatnonzero(row).tolist()) for row in rank_bytes]

    def parts_of_changes(self, bucket_bytes: int = BUCKET_BYTES) -> PlanParts:
        """The parts of `changes`, for the communicators of the whole plan."""
        return PlanParts(self.changes, bucket_bytes, self.trainer_ranks)


class Planner:
    """Makes plans and keeps what the next one can take from the last. Pure, without I/O; for one thread at a time."""

    def __init__(self) -> None:
        self._last: Planned | None = None
        self._terms: object = None

    def plan(
        self,
        trainer: Ranks,
        instances: Mapping[str, Ranks],
        *,
        check: bool = True,
        required: Collection[str] = (),
        left_out: Mapping[str, Collection[str]] | None = None,
        hosts: Hosts | None = None,
        topology: Topology | None = None,
    ) -> Planned:
        """The plan for these tables, with the arguments and errors of `plan_transfer`.

        With a topology it is made from scratch when anything changed, because relays depend on all of the plan.
        """
        terms = Terms(check, tuple(required), left_out or {}, hosts, topology)
        sender = as_joined("", trainer)
        receivers = {name: as_joined(name, ranks, sender.tensors) for name, ranks in instances.items()}
        plan = self._again(sender, receivers, check) if terms.key() == self._terms else None
        if plan is None:
            basis = make_plan(sender, receivers, terms)
            plan = Planned(None, None, basis.plan, basis)
        self._last, self._terms = plan, terms.key()
        return plan

    def _again(self, trainer: JoinedRanks, instances: Mapping[str, JoinedRanks], check: bool) -> Planned | None:
        """The last plan with what changed bound again, or None where more than the maps of some layers changed."""
        last = self._last
        if last is None:
            return None
        pair = last._made.pair
        if trainer.fingerprints != pair.trainer.fingerprints:
            return None
        if tuple(instances) != tuple(side.name for side in pair.instances) or not named_by_trainer(pair):
            return None
        sides = new_sides(pair, instances)
        if sides is None:
            return None
        turns = enumerate(zip(pair.instances, sides, strict=True))
        changes = {index: (old, new) for index, (old, new) in turns if old is not new}
        if not changes:
            repeat = replace(last, layers=(), instances=(), changes=_nothing(last.changes))
            repeat.__dict__.update({name: last.__dict__[name] for name in ("plan",) if name in last.__dict__})
            return repeat
        if not last._made.balanced:
            return None
        # Equal instances that changed alike are compared once.
        side_pairs = {(old.fingerprints, new.fingerprints): (old, new) for old, new in changes.values()}
        layers = np.unique(np.concatenate([changed_layers(pair, old, new) for old, new in side_pairs.values()]))
        return _Binder(last, tuple(sides), list(changes), layers).planned(check)


def _nothing(plan: TransferPlan) -> TransferPlan:
    return replace(plan, operations=plan.operations.between(0, 0), digests=plan.digests.between(0, 0))


@dataclass(frozen=True, slots=True)
class _Bound:
    """Some layers of an instance, bound.

    `asks` is what it receives, `digests` what it digests. `block` (sends,) is the place of each send's layer among the
    layers, and `expected` has the expected demand of each.
    """

    asks: Asks
    digests: DigestRows
    block: IntArray
    expected: Expected


class _Binder:
    """Binds some layers of the changed instances of a pair."""

    def __init__(self, last: Planned, sides: tuple[JoinedRanks, ...], changed: list[int], layers: IntArray) -> None:
        self._last, self._made, self._changed, self._layers = last, last._made, changed, layers
        self._pair = replace(last._made.pair, instances=sides)
        self._label = Label(self._pair)
        layer_mask = np.zeros(self._pair.layers.shape[0], dtype=np.bool_)
        layer_mask[layers] = True
        self._tensors = layer_mask[self._pair.layer]

    def planned(self, check: bool) -> Planned | None:
        """The plan, or None where it has to be made from scratch."""
        basis = self._made
        bindings = self._bound()
        if bindings is None:
            return None
        choice = self._deal(bindings)
        if not balanced(basis.reach.pools, choice.asked, choice.sent):
            return None
        operations = [
            direct_rows(binding.asks.number, binding.asks.side, binding.asks.receives, basis.sources, entry)
            for binding, entry in zip(bindings, choice.entry, strict=True)
        ]
        digests = [
            replace(binding.digests, instance=np.full(len(binding.digests), binding.asks.number, dtype=np.int64))
            for binding in bindings
        ]
        changes = replace(
            basis.plan,
            instance_fingerprints=tuple(side.fingerprints for side in self._pair.instances),
            operations=join_rows(Operations, operations),
            digests=join_rows(DigestRows, [self._trainer_digests(), *digests]),
        )
        if check:
            check_joined(changes, self._pair, Scope(self._tensors, frozenset(self._changed)))
        return self._next(changes, replace(basis, pair=self._pair, asked=choice.asked, sent=choice.sent))

    def _bound(self) -> list[_Bound] | None:
        """The layers of each changed instance, bound; None where one asks for other than was expected."""
        expected, count, reach = self._made.expected, self._pair.layers.shape[0], self._made.reach
        by_key: dict[tuple[tuple[str, ...], bytes, bytes], _Bound | None] = {}
        bindings = []
        for index in self._changed:
            side = self._pair.instances[index]
            hosts = reach.column[reach.first[index] : reach.first[index + 1]]
            key = side.fingerprints, self._made.cell_start[index].tobytes(), hosts.tobytes()
            if key not in by_key:
                by_key[key] = self._bind(index, side)
            binding = by_key[key]
            if binding is None or not _as_expected(binding.expected, expected, index * count + self._layers):
                return None
            bindings.append(replace(binding, asks=replace(binding.asks, number=index, side=side)))
        return bindings

    def _deal(self, bound: list[_Bound]) -> Choice:
        """Sources for the changed layers of all changed instances."""
        basis, sources, reach = self._made, self._made.sources, self._made.reach
        count = self._layers.shape[0]
        blocks = np.concatenate([index * self._pair.layers.shape[0] + self._layers for index in self._changed])
        cell = np.concatenate([b.asks.receives.cell for b in bound])
        column = np.concatenate([b.asks.columns(reach) for b in bound])
        weight = np.concatenate([b.asks.weight for b in bound])
        block, pool = np.concatenate([i * count + b.block for i, b in enumerate(bound)]), reach.pool(cell, column)
        number = turns(blocks, self._pair.layers.shape[0])
        entry = reach.entry(cell, column, assign_blocks(reach.pools, pool, weight, block, basis.others[blocks], number))
        pool_bytes, rank_bytes = basis.asked.copy(), basis.sent.copy()
        shape = blocks.shape[0], rank_bytes.shape[1]
        pool_bytes[blocks], rank_bytes[blocks] = loads_of(reach.pools, pool, sources.rank[entry], weight, block, shape)
        ends = np.cumsum([b.asks.weight.shape[0] for b in bound])[:-1]
        return Choice(np.split(entry, ends), pool_bytes, rank_bytes)

    def _next(self, changes: TransferPlan, made: Made) -> Planned:
        """The new plan, made of the last one and the changes."""
        last, pieces = self._last, self._last._pieces
        if "plan" in last.__dict__ or len(pieces) >= _MOST_PIECES:
            made, pieces = replace(made, plan=last.plan), ()
        piece = _Piece(self._tensors, frozenset(self._changed), changes)
        return Planned(
            tuple(self._pair.layers[self._layers].tolist()),
            tuple(self._pair.instances[index].name for index in self._changed),
            changes,
            made,
            (*pieces, piece),
        )

    def _trainer_digests(self) -> DigestRows:
        """The trainer's digest rows of the layers."""
        digests = self._made.plan.digests
        trainer_rows = digests.between(0, int(np.searchsorted(digests.instance, TRAINER, side="right")))
        return trainer_rows.take(np.flatnonzero(self._tensors[trainer_rows.tensor]))

    def _bind(self, index: int, side: JoinedRanks) -> _Bound | None:
        pair, sources, layers = self._pair, self._made.sources, self._layers
        rows = np.flatnonzero(self._tensors[side.tensor])
        side_cells = cells_of(side, rows, self._label)
        number = self._cell_numbers(index, side_cells)
        if number is None or not self._covers(side_cells, self._made.pair.instances[index]):
            return None
        start, end = (np.searchsorted(sources.cells.key, pair.layer_start[layers + i]) for i in (0, 1))
        part = ranges(start, end - start)
        cells = sources.cells
        boxes = np.take(cells.offset, part, axis=0), np.take(cells.size, part, axis=0)
        layer_cells = Cells(cells.key[part], *boxes, cells.start, cells.row)
        receives = bind(side, rows, layer_cells, len(pair.tensors), self._label)
        receives = replace(receives, cell=part[receives.cell])
        weight = weights(side, receives)
        expected = expect(pair, sources, self._made.reach, (index, side), receives, weight, rows)
        return _Bound(
            Asks(index, side, receives, weight),
            digest_rows(index, side, side_cells, number),
            np.searchsorted(layers, pair.layer[cells.key[receives.cell]]),
            expected.of(layers),
        )

    def _cell_numbers(self, index: int, own: Cells) -> IntArray | None:
        """The numbers of an instance's digest cells; None where a layer does not have as many as before."""
        start, layers = self._made.cell_start[index], self._layers
        low, high = (np.searchsorted(own.key, self._pair.layer_start[layers + i]) for i in (0, 1))
        if not np.array_equal(high - low, start[layers + 1] - start[layers]):
            return None
        return ranges(start[layers], high - low)

    def _covers(self, own: Cells, old: JoinedRanks) -> bool:
        """True if the instance holds the whole of the layers' tensors that it held before, and of no others."""
        tensors_before = old.holds & self._tensors
        tensors_now = np.zeros_like(tensors_before)
        tensors_now[own.key] = True
        complete = filled(own.key, own.size, tensors_before.shape[0]) == self._pair.tensors.elements
        return np.array_equal(tensors_now, tensors_before) and bool(complete[tensors_before].all())


def _as_expected(found: Expected, known: Expected, blocks: IntArray) -> bool:
    return all(np.array_equal(getattr(found, n), getattr(known.of(blocks), n)) for n in Expected.__slots__)


def _put_together(made: Made, pieces: tuple[_Piece, ...]) -> TransferPlan:
    """Joins a plan and its pieces: each piece replaces the rows of its layers and instances in all before it."""
    base = made.plan
    count = len(base.instances)
    sources = [base, *(piece.plan for piece in pieces)]
    operations = [spans(plan.operations.instance, 0, count) for plan in sources]
    digests = [spans(plan.digests.instance, TRAINER, count - TRAINER) for plan in sources]
    instance_operations: list[Operations] = []
    side_digests = [rows_at(base.digests, digests[0][0])]
    for index in range(count):
        replaced_tensors = np.zeros(len(base.tensors), dtype=np.bool_)
        operation_pieces: list[Operations] = []
        digest_pieces: list[DigestRows] = []
        for number in reversed(range(len(sources))):
            operation_rows = rows_at(sources[number].operations, operations[number][index])
            rows = rows_at(sources[number].digests, digests[number][index - TRAINER])
            if replaced_tensors.any():
                operation_rows = operation_rows.take(np.flatnonzero(~replaced_tensors[operation_rows.tensor]))
                rows = rows.take(np.flatnonzero(~replaced_tensors[rows.tensor]))
            operation_pieces.append(operation_rows)
            digest_pieces.append(rows)
            if number and index in pieces[number - 1].instances:
                replaced_tensors |= pieces[number - 1].tensors
        instance_operations.append(_in_order(operation_pieces))
        side_digests.append(_digests_in_order(digest_pieces))
    return replace(
        base,
        instance_fingerprints=tuple(side.fingerprints for side in made.pair.instances),
        operations=join_rows(Operations, instance_operations),
        digests=join_rows(DigestRows, side_digests),
    )


def _in_order(parts: list[Operations]) -> Operations:
    """The operations of one instance, sorted."""
    o = join_rows(Operations, parts)
    order = plan_order(o.dst_rank, o.kind, o.tensor, o.offset, o.dst_region)
    return o.take(order)


def _digests_in_order(parts: list[DigestRows]) -> DigestRows:
    d = join_rows(DigestRows, parts)
    return d.take(lex_sort([d.rank, d.region, d.cell])[0])
