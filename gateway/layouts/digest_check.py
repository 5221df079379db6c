"""Compares the digests of both sides after an update: what lies in an instance's memory is what the trainer sent.

Every digest that the plan asks for must be there, from the rank that it asks. Inside the instance all regions of one
cell must agree, so each replica of an expert is checked by itself. Then, per logical tensor and dtype, the cells of
each side add up to one number whatever its layout, and the two numbers must be equal. Nothing missing counts as equal.

A trainer's rank digests twice, and both passes must agree: else weights changed while they were sent. Its first pass
also counts values that are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np

from weightcast.gateway.records import DigestCounts, NonFinite
from weightcast.transfer.boxes.arrays import DigestArray, IntArray
from weightcast.transfer.digest.residues import add_runs, subtract
from weightcast.transfer.errors import DigestMismatchError, LayoutError, WeightsChangedError
from weightcast.transfer.layout.dtypes import dtype_name
from weightcast.transfer.layout.summaries import number_ranges
from weightcast.transfer.layout.tables import NO_SLOT
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import TRAINER, DigestRows, TransferPlan

__all__ = ["DigestCheck", "compare_digests"]

_FENCED = "the version is not committed; fence the instance and update it in full"
_SHOWN_PLACES = 4


class DigestCheck:
    """Compares instances of a plan with the trainer, whose digests are put in order once for all that it feeds."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._lock = Lock()
        self._sent: _Sent | None = None

    def compare(
        self,
        trainer: Mapping[int, DigestReport],
        instance: str,
        reports: Mapping[int, DigestReport],
        slots: Mapping[int, IntArray] | None = None,
    ) -> DigestCounts:
        """See `compare_digests`. May be called by several threads."""
        plan = self._plan
        if instance not in plan.instances:
            raise LayoutError(f"the plan has no instance {instance!r}; it has {', '.join(plan.instances)}")
        sent = self._gathered(trainer)
        held = _gather(plan, plan.instances.index(instance), instance, reports, slots)
        _check_replicas(held, sent.sums)
        _check_sums(sent.side, held, sent.sums)
        return _counts(held)

    def check_unchanged(self, first: Mapping[int, DigestReport], second: Mapping[int, DigestReport]) -> None:
        """Both passes of every trainer rank have the same digests. Raises WeightsChangedError naming tensors and ranks
        that differ, DigestMismatchError for a report that misfits.
        """
        changed: dict[str, set[int]] = {}
        for rank, report in sorted(second.items()):
            rows = self._rows_of(rank)
            for one in (first[rank], report):
                _check_report(self._plan, rows, one, rank, None)
            if report is first[rank]:
                continue
            tensors = np.unique(rows.tensor[report.digest != first[rank].digest])
            for tensor in tensors.tolist():
                changed.setdefault(self._plan.tensors.names[tensor], set()).add(rank)
        if changed:
            places = [
                f"{name!r} on trainer ranks {number_ranges(ranks)}"
                for name, ranks in list(changed.items())[:_SHOWN_PLACES]
            ]
            more = f" and {len(changed) - len(places)} tensors more" if len(changed) > len(places) else ""
            raise WeightsChangedError(
                f"the trainer's weights changed during update(): {', '.join(places)}{more} had other digests before "
                f"they were sent than afterwards; let weights stand still until update() has returned; {_FENCED}"
            )

    def non_finite(self, first: Mapping[int, DigestReport], instance: str) -> tuple[NonFinite, ...]:
        """What the trainer ranks have counted in the tensors of an instance, in its dtypes."""
        plan = self._plan
        counts: dict[tuple[int, int], dict[int, dict[int, list[int]]]] = {}
        for rank, report in first.items():
            if not len(report.values.row):
                continue
            rows = self._rows_of(rank)
            _check_report(plan, rows, report, rank, None)
            for row, *numbers in np.stack(report.values, axis=1).tolist():
                key = int(rows.tensor[row]), int(rows.dtype[row])
                counts.setdefault(key, {}).setdefault(int(rows.cell[row]), {})[rank] = numbers
        if not counts:
            return ()
        wanted = plan.digests.between(*self._between(plan.instances.index(instance)))
        keys = set(zip(wanted.tensor.tolist(), wanted.dtype.tolist(), strict=True))
        found = []
        for tensor, dtype in sorted(counts.keys() & keys):
            cells = counts[tensor, dtype].values()
            nan, inf, overflow = np.sum([np.max(list(cell.values()), axis=0) for cell in cells], axis=0).tolist()
            ranks = tuple(sorted({rank for cell in cells for rank in cell}))
            found.append(NonFinite(plan.tensors.names[tensor], dtype_name(dtype), nan, inf, overflow, ranks))
        return tuple(found)

    def _between(self, index: int) -> tuple[int, int]:
        """The digest rows of an instance, or of the trainer."""
        begin, end = np.searchsorted(self._plan.digests.instance, (index, index + 1)).tolist()
        return begin, end

    def _rows_of(self, rank: int) -> DigestRows:
        """The digest rows of a trainer rank, as it reports them."""
        rows = self._plan.digests.between(*self._between(TRAINER))
        return rows.take(np.flatnonzero(rows.rank == rank))

    def _gathered(self, trainer: Mapping[int, DigestReport]) -> _Sent:
        """The trainer's side, checked; the last one, if it is of these very reports."""
        with self._lock:
            known = self._sent
            if known is None or known.reports.keys() != trainer.keys() or not known.same(trainer):
                side = _gather(self._plan, TRAINER, None, trainer, None)
                known = _Sent(dict(trainer), side, _sums(side))
                _check_replicas(side, known.sums)
                self._sent = known
            return known


def compare_digests(
    plan: TransferPlan,
    trainer: Mapping[int, DigestReport],
    instance: str,
    reports: Mapping[int, DigestReport],
    slots: Mapping[int, IntArray] | None = None,
) -> DigestCounts:
    """Compares one instance with the trainer. Reports are by rank; ranks without rows in the plan need none.

    `slots` has the slot column of each rank's table, for messages and counts. Raises DigestMismatchError naming tensor,
    instance, rank, region and slot, the expected and the found digest; LayoutError for an instance that the plan lacks.
    """
    return DigestCheck(plan).compare(trainer, instance, reports, slots)


@dataclass(frozen=True, slots=True)
class _Side:
    """The digest rows of one side with their digests, ordered by (tensor, dtype, cell), then as in the plan.

    `first` are the rows that begin a cell. `instance` is None for the trainer.
    """

    plan: TransferPlan
    instance: str | None
    rows: DigestRows
    digest: DigestArray
    first: IntArray
    slots: Mapping[int, IntArray] | None

    def place(self, row: int) -> str:
        """Where a row lies, for messages."""
        rank, region = int(self.rows.rank[row]), int(self.rows.region[row])
        slot = NO_SLOT if self.slots is None else int(self.slots[rank][region])
        where = f"rank {rank} region {region}" + (f" (slot {slot})" if slot != NO_SLOT else "")
        return f"{self.instance} {where}" if self.instance else f"trainer {where}"

    def tensor(self, row: int) -> str:
        """Name and dtype of a row's tensor, for messages."""
        return f"{self.plan.tensors.names[int(self.rows.tensor[row])]!r} ({dtype_name(int(self.rows.dtype[row]))})"

    def box(self, row: int) -> str:
        """The box of a row, for messages."""
        ndim = int(self.plan.tensors.ndim[int(self.rows.tensor[row])])
        low, size = self.rows.offset[row, :ndim].tolist(), self.rows.size[row, :ndim].tolist()
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(low, size, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class _Sent:
    """The trainer's side as gathered from `reports`, and its sums."""

    reports: Mapping[int, DigestReport]
    side: _Side
    sums: dict[tuple[int, int], int]

    def same(self, reports: Mapping[int, DigestReport]) -> bool:
        """Whether these are the very same reports."""
        return all(self.reports[rank] is report for rank, report in reports.items())


def _gather(
    plan: TransferPlan,
    index: int,
    instance: str | None,
    reports: Mapping[int, DigestReport],
    slots: Mapping[int, IntArray] | None,
) -> _Side:
    """The rows of one side with the digests reported for them. Raises DigestMismatchError for a report that misfits."""
    rows = plan.digests.between(*np.searchsorted(plan.digests.instance, (index, index + 1)).tolist())
    by_rank = np.argsort(rows.rank, kind="stable")
    ranks, start = np.unique(rows.rank[by_rank], return_index=True)
    digest = np.empty(len(rows), dtype=np.uint64)
    who = instance or "the trainer"
    for rank, own in zip(ranks.tolist(), np.split(by_rank, start[1:]) if len(ranks) else [], strict=True):
        report = reports.get(rank)
        if report is None:
            name = plan.tensors.names[int(rows.tensor[own[0]])]
            raise DigestMismatchError(
                f"rank {rank} of {who} reported no digests, expected {len(own)}, the first of {name!r}; {_FENCED}"
            )
        _check_report(plan, rows.take(own), report, rank, instance)
        digest[own] = report.digest
    for rank in reports.keys() - set(ranks.tolist()):
        if count := len(reports[rank]):
            raise DigestMismatchError(f"rank {rank} of {who} reported {count} digests, expected none; {_FENCED}")
    order = np.lexsort((rows.cell, rows.dtype, rows.tensor))
    rows, digest = rows.take(order), digest[order]
    return _Side(plan, instance, rows, digest, _starts(rows.tensor, rows.dtype, rows.cell), slots)


def _check_report(plan: TransferPlan, rows: DigestRows, report: DigestReport, rank: int, instance: str | None) -> None:
    who = f"rank {rank} of {instance or 'the trainer'}"
    if report.rank != rank or report.instance != instance:
        other = f"rank {report.rank} of {report.instance or 'the trainer'}"
        raise DigestMismatchError(f"{who} handed in the digests of {other}; {_FENCED}")
    common = min(len(rows), len(report))
    differs = np.flatnonzero(rows.cell[:common] != report.cell[:common])
    if not len(differs) and len(rows) == len(report) == len(report.digest):
        return
    row = int(differs[0]) if len(differs) else common
    if row < len(rows):
        name, region = plan.tensors.names[int(rows.tensor[row])], int(rows.region[row])
        missing = f"the first that is missing is of {name!r} region {region} (cell {int(rows.cell[row])})"
    else:
        missing = "those at the end were not asked for"
    raise DigestMismatchError(f"{who} reported {len(report)} digests, expected {len(rows)}; {missing}; {_FENCED}")


def _starts(*columns: IntArray) -> IntArray:
    """Rows that differ from the row before in any of the sorted columns; the first row is one."""
    new = np.zeros(len(columns[0]), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new).astype(np.int64)


def _sums(side: _Side) -> dict[tuple[int, int], int]:
    """Digest of each (tensor, dtype) of a side: one row of each cell added up."""
    rows = side.rows.take(side.first)
    start = _starts(rows.tensor, rows.dtype)
    sums = add_runs(side.digest[side.first], start)
    keys = zip(rows.tensor[start].tolist(), rows.dtype[start].tolist(), strict=True)
    return dict(zip(keys, sums.tolist(), strict=True))


def _check_replicas(side: _Side, wanted: Mapping[tuple[int, int], int]) -> None:
    """All rows of a cell have one digest. Where the sums can tell which of them is wrong, that one is named."""
    length = np.diff(np.append(side.first, len(side.rows)))
    expected = np.repeat(side.digest[side.first], length)
    differs = np.flatnonzero(side.digest != expected)
    if not len(differs):
        return
    wrong = int(differs[0])
    first = int(side.first[np.searchsorted(side.first, wrong, side="right") - 1])
    truth = _expected_of_cell(side, first, wanted)
    if truth == int(side.digest[wrong]):
        wrong, right = first, wrong
    else:
        right = first
    raise DigestMismatchError(
        f"{side.tensor(wrong)} box {side.box(wrong)} on {side.place(wrong)}: digest {_hex(side.digest[wrong])}, "
        f"expected {_hex(side.digest[right])} as on {side.place(right)}; {len(differs)} of {len(side.rows)} digests "
        f"differ from a replica; {_FENCED}"
    )


def _expected_of_cell(side: _Side, first: int, wanted: Mapping[tuple[int, int], int]) -> int | None:
    """What the digest of a cell should be if all other cells of its tensor are right; None for an unknown tensor."""
    r = side.rows
    total = wanted.get((int(r.tensor[first]), int(r.dtype[first])))
    if total is None:
        return None
    same = (r.tensor[side.first] == r.tensor[first]) & (r.dtype[side.first] == r.dtype[first])
    others = side.digest[side.first[same & (side.first != first)]]
    return subtract(total, int(add_runs(others, np.zeros(1, dtype=np.int64))[0]) if len(others) else 0)


def _check_sums(sent: _Side, held: _Side, wanted: Mapping[tuple[int, int], int]) -> None:
    """Both sides have the same sum for each tensor and dtype of the instance."""
    found = _sums(held)
    wrong = [key for key, value in found.items() if wanted.get(key) != value]
    if not wrong:
        return
    key = wrong[0]
    own = np.flatnonzero((held.rows.tensor == key[0]) & (held.rows.dtype == key[1]))
    name = held.tensor(int(own[0]))
    more = f"; {len(wrong)} of {len(found)} tensors differ" if len(wrong) > 1 else ""
    if key not in wanted:
        dtypes = [dtype_name(dtype) for tensor, dtype in wanted if tensor == key[0]]
        said = f"the trainer digested it in {', '.join(dtypes)}" if dtypes else "the trainer digested no cell of it"
        raise DigestMismatchError(f"{name} on {held.place(int(own[0]))}: {said}{more}; plan again, {_FENCED}")
    located = _differing_rows(sent, held, key)
    rows = located if len(located) else own
    places = ", ".join(held.place(int(row)) for row in rows[:_SHOWN_PLACES])
    if len(rows) > _SHOWN_PLACES:
        places += f" and {len(rows) - _SHOWN_PLACES} more"
    where = "on" if len(located) or len(own) == 1 else "somewhere on"
    raise DigestMismatchError(
        f"{name} {where} {places}: digest {_hex(found[key])}, "
        f"expected {_hex(wanted[key])} as on the trainer{more}; {_FENCED}"
    )


def _differing_rows(sent: _Side, held: _Side, key: tuple[int, int]) -> IntArray:
    """Rows of the instance whose box is also a cell of the trainer, with another digest there."""
    truth: dict[tuple[int, ...], int] = {}
    for row in np.flatnonzero((sent.rows.tensor == key[0]) & (sent.rows.dtype == key[1])).tolist():
        truth[(*sent.rows.offset[row].tolist(), *sent.rows.size[row].tolist())] = int(sent.digest[row])
    wrong = []
    for row in np.flatnonzero((held.rows.tensor == key[0]) & (held.rows.dtype == key[1])).tolist():
        box = (*held.rows.offset[row].tolist(), *held.rows.size[row].tolist())
        if truth.get(box, int(held.digest[row])) != int(held.digest[row]):
            wrong.append(row)
    return np.array(wrong, dtype=np.int64)


def _counts(held: _Side) -> DigestCounts:
    r = held.rows
    distinct = np.lexsort((r.region, r.rank))
    distinct = distinct[_starts(r.rank[distinct], r.region[distinct])]
    rank, region = r.rank[distinct], r.region[distinct]
    in_slot = 0
    if held.slots is not None:
        for one in np.unique(rank).tolist():
            in_slot += int((held.slots[one][region[rank == one]] != NO_SLOT).sum())
    return DigestCounts(
        tensors=len(_starts(r.tensor)),
        rows=len(r),
        regions=len(distinct),
        slot_regions=in_slot,
        replicas=len(r) - len(held.first),
    )


def _hex(digest: int | np.uint64) -> str:
    return f"{int(digest):016x}"
