"""Plans one pair again and again: what did not change since the last plan is not planned anew.

A plan has two parts. What the trainer holds and what the layouts of the instances have in common with any expert map
(the source cells, their holders, what each layer of each instance is expected to ask for) stays; which expert is in
which slot is bound layer by layer. When the map of some layers of an instance changed, only those layers of that
instance are bound, dealt and proved again. The result is the plan that `plan_transfer` would make from scratch, to the
last row.

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
from weightcast.transfer.planner.assign import deal_blocks, turns
from weightcast.transfer.planner.changes import changed_layers, named_by_trainer, new_sides
from weightcast.transfer.planner.expected import Expected, expect
from weightcast.transfer.planner.planner import Asks, Dealt, Label, Made, Terms, balanced, loads_of, make_plan, weights
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

    `layers` are the numbers of the layers bound again, NONE for tensors outside of layers, and `instances` the
    instances for which they were; both are None for a plan made from scratch. `changes` is the plan of these layers of
    these instances alone, with the trainer's digests of the layers; for a plan made from scratch it is all of it.
    """

    layers: tuple[int, ...] | None
    instances: tuple[str, ...] | None
    changes: TransferPlan
    _made: Made
    _pieces: tuple[_Piece, ...] = ()

    @cached_property
    def plan(self) -> TransferPlan:
        """All of the plan. Put together when it is first asked for, in a time that grows with all of it."""
        return _put_together(self._made, self._pieces) if self._pieces else self._made.plan

    @cached_property
    def trainer_ranks(self) -> list[tuple[int, ...]]:
        """For each instance the trainer ranks that send to it, ascending."""
        sent = self._made.sent.reshape(len(self.changes.instances), -1, self.changes.trainer_world).sum(axis=1)
        return [tuple(np.flatnonzero(row).tolist()) for row in sent]

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
        """The plan for these tables: see `plan_transfer`. Raises what it raises. With a topology, because who passes
        on what depends on all of the plan, it is always made from scratch when anything changed."""
        terms = Terms(check, tuple(required), left_out or {}, hosts, topology)
        sender = as_joined("", trainer)
        receivers = {name: as_joined(name, ranks, sender.tensors) for name, ranks in instances.items()}
        planned = self._again(sender, receivers, check) if terms.key() == self._terms else None
        if planned is None:
            made = make_plan(sender, receivers, terms)
            planned = Planned(None, None, made.plan, made)
        self._last, self._terms = planned, terms.key()
        return planned

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
        changed = {index: (old, new) for index, (old, new) in turns if old is not new}
        if not changed:
            same = replace(last, layers=(), instances=(), changes=_nothing(last.changes))
            same.__dict__.update({name: last.__dict__[name] for name in ("plan",) if name in last.__dict__})
            return same
        if not last._made.balanced:
            return None
        # Equal instances that changed alike are compared once.
        apart = {(old.fingerprints, new.fingerprints): (old, new) for old, new in changed.values()}
        layers = np.unique(np.concatenate([changed_layers(pair, old, new) for old, new in apart.values()]))
        return _Binder(last, tuple(sides), list(changed), layers).planned(check)


def _nothing(plan: TransferPlan) -> TransferPlan:
    return replace(plan, operations=plan.operations.between(0, 0), digests=plan.digests.between(0, 0))


@dataclass(frozen=True, slots=True)
class _Bound:
    """Some layers of an instance, bound: what is received and digested; for each send its block's place among the
    layers; what each layer is expected to ask for."""

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
        chosen = np.zeros(self._pair.layers.shape[0], dtype=np.bool_)
        chosen[layers] = True
        self._tensors = chosen[self._pair.layer]

    def planned(self, check: bool) -> Planned | None:
        """The plan, or None where it has to be made from scratch."""
        old = self._made
        bound = self._bound()
        if bound is None:
            return None
        dealt = self._deal(bound)
        if not balanced(old.reach.pools, dealt.asked, dealt.sent):
            return None
        operations = [
            direct_rows(made.asks.number, made.asks.side, made.asks.receives, old.sources, entry)
            for made, entry in zip(bound, dealt.entry, strict=True)
        ]
        digests = [
            replace(made.digests, instance=np.full(len(made.digests), made.asks.number, dtype=np.int64))
            for made in bound
        ]
        changes = replace(
            old.plan,
            instance_fingerprints=tuple(side.fingerprints for side in self._pair.instances),
            operations=join_rows(Operations, operations),
            digests=join_rows(DigestRows, [self._trainer_digests(), *digests]),
        )
        if check:
            check_joined(changes, self._pair, Scope(self._tensors, frozenset(self._changed)))
        return self._next(changes, replace(old, pair=self._pair, asked=dealt.asked, sent=dealt.sent))

    def _bound(self) -> list[_Bound] | None:
        """The layers of each changed instance, bound; None where one asks for other than was expected."""
        expected, count, reach = self._made.expected, self._pair.layers.shape[0], self._made.reach
        found: dict[tuple[tuple[str, ...], bytes, bytes], _Bound | None] = {}
        bound = []
        for index in self._changed:
            side = self._pair.instances[index]
            hosts = reach.column[reach.first[index] : reach.first[index + 1]]
            key = side.fingerprints, self._made.cell_start[index].tobytes(), hosts.tobytes()
            if key not in found:
                found[key] = self._bind(index, side)
            made = found[key]
            if made is None or not _as_expected(made.expected, expected, index * count + self._layers):
                return None
            bound.append(replace(made, asks=replace(made.asks, number=index, side=side)))
        return bound

    def _deal(self, bound: list[_Bound]) -> Dealt:
        """Sources for the changed layers of all changed instances."""
        old, sources, reach = self._made, self._made.sources, self._made.reach
        count = self._layers.shape[0]
        blocks = np.concatenate([index * self._pair.layers.shape[0] + self._layers for index in self._changed])
        cell = np.concatenate([made.asks.receives.cell for made in bound])
        column = np.concatenate([made.asks.columns(reach) for made in bound])
        weight = np.concatenate([made.asks.weight for made in bound])
        block, pool = np.concatenate([i * count + made.block for i, made in enumerate(bound)]), reach.pool(cell, column)
        number = turns(blocks, self._pair.layers.shape[0])
        entry = reach.entry(cell, column, deal_blocks(reach.pools, pool, weight, block, old.others[blocks], number))
        asked, sent = old.asked.copy(), old.sent.copy()
        shape = blocks.shape[0], sent.shape[1]
        asked[blocks], sent[blocks] = loads_of(reach.pools, pool, sources.rank[entry], weight, block, shape)
        ends = np.cumsum([made.asks.weight.shape[0] for made in bound])[:-1]
        return Dealt(np.split(entry, ends), asked, sent)

    def _next(self, changes: TransferPlan, made: Made) -> Planned:
        """The new plan, as what was known before and the changes."""
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
        """The trainer's rows of the layers."""
        digests = self._made.plan.digests
        own = digests.between(0, int(np.searchsorted(digests.instance, TRAINER, side="right")))
        return own.take(np.flatnonzero(self._tensors[own.tensor]))

    def _bind(self, index: int, side: JoinedRanks) -> _Bound | None:
        pair, sources, layers = self._pair, self._made.sources, self._layers
        rows = np.flatnonzero(self._tensors[side.tensor])
        own = cells_of(side, rows, self._label)
        number = self._cell_numbers(index, own)
        if number is None or not self._covers(own, self._made.pair.instances[index]):
            return None
        begin, end = (np.searchsorted(sources.cells.key, pair.layer_start[layers + i]) for i in (0, 1))
        part = ranges(begin, end - begin)
        cells = sources.cells
        boxes = np.take(cells.offset, part, axis=0), np.take(cells.size, part, axis=0)
        some = Cells(cells.key[part], *boxes, cells.start, cells.row)
        receives = bind(side, rows, some, len(pair.tensors), self._label)
        receives = replace(receives, cell=part[receives.cell])
        weight = weights(side, receives)
        expected = expect(pair, sources, self._made.reach, (index, side), receives, weight, rows)
        return _Bound(
            Asks(index, side, receives, weight),
            digest_rows(index, side, own, number),
            np.searchsorted(layers, pair.layer[cells.key[receives.cell]]),
            expected.of(layers),
        )

    def _cell_numbers(self, index: int, own: Cells) -> IntArray | None:
        """The numbers of an instance's digest cells; None where a layer has not as many as before."""
        start, layers = self._made.cell_start[index], self._layers
        begin, end = (np.searchsorted(own.key, self._pair.layer_start[layers + i]) for i in (0, 1))
        if not np.array_equal(end - begin, start[layers + 1] - start[layers]):
            return None
        return ranges(start[layers], end - begin)

    def _covers(self, own: Cells, old: JoinedRanks) -> bool:
        """Whether the instance holds the whole of the tensors of the layers that it held before, and of no others."""
        wanted = old.holds & self._tensors
        held = np.zeros_like(wanted)
        held[own.key] = True
        whole = filled(own.key, own.size, wanted.shape[0]) == self._pair.tensors.elements
        return np.array_equal(held, wanted) and bool(whole[wanted].all())


def _as_expected(found: Expected, known: Expected, blocks: IntArray) -> bool:
    return all(np.array_equal(getattr(found, n), getattr(known.of(blocks), n)) for n in Expected.__slots__)


def _put_together(made: Made, pieces: tuple[_Piece, ...]) -> TransferPlan:
    """The rows of a plan but for those that pieces replace, and of each piece but for those that later ones replace."""
    base = made.plan
    count = len(base.instances)
    sources = [base, *(piece.plan for piece in pieces)]
    operations = [spans(plan.operations.instance, 0, count) for plan in sources]
    digests = [spans(plan.digests.instance, TRAINER, count - TRAINER) for plan in sources]
    made_operations: list[Operations] = []
    made_digests = [rows_at(base.digests, digests[0][0])]
    for index in range(count):
        replaced = np.zeros(len(base.tensors), dtype=np.bool_)
        some_operations: list[Operations] = []
        some_digests: list[DigestRows] = []
        for number in reversed(range(len(sources))):
            own = rows_at(sources[number].operations, operations[number][index])
            rows = rows_at(sources[number].digests, digests[number][index - TRAINER])
            if replaced.any():
                own = own.take(np.flatnonzero(~replaced[own.tensor]))
                rows = rows.take(np.flatnonzero(~replaced[rows.tensor]))
            some_operations.append(own)
            some_digests.append(rows)
            if number and index in pieces[number - 1].instances:
                replaced |= pieces[number - 1].tensors
        made_operations.append(_in_order(some_operations))
        made_digests.append(_digests_in_order(some_digests))
    return replace(
        base,
        instance_fingerprints=tuple(side.fingerprints for side in made.pair.instances),
        operations=join_rows(Operations, made_operations),
        digests=join_rows(DigestRows, made_digests),
    )


def _in_order(parts: list[Operations]) -> Operations:
    """The operations of one instance, sorted."""
    o = join_rows(Operations, parts)
    order = plan_order(o.dst_rank, o.kind, o.tensor, o.offset, o.dst_region)
    return o.take(order)


def _digests_in_order(parts: list[DigestRows]) -> DigestRows:
    d = join_rows(DigestRows, parts)
    return d.take(lex_sort([d.rank, d.region, d.cell])[0])
