"""Compares the digests of both sides after an update: an instance's memory must hold what the trainer sent.

Every digest that the plan asks for must come from the rank that it names. Inside the instance all regions of one cell
must agree, so each replica of an expert is checked by itself. Then the digests of the cells are added up, per logical
tensor and dtype. The two sides must have equal sums, whatever their layouts. A missing digest never counts as equal.

A trainer rank digests twice. If its two passes differ, weights changed while they were sent. Its first pass also counts
values that are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np

from weightcast.gateway.records import DigestCounts, NonFinite
from weightcast.transfer.boxes.arrays import DigestArray, IntArray
from weightcast.transfer.digest.residues import add_runs, subtract
from weightcast.transfer.errors import DigestMismatchError, WeightsChangedError
from weightcast.transfer.layout.dtypes import dtype_name
from weightcast.transfer.layout.summaries import number_ranges
from weightcast.transfer.layout.tables import NO_SLOT
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import DigestRows, TransferPlan

__all__ = ["DigestCheck"]

_FENCED = "the version is not committed; fence the instance and update it in full"
_SHOWN_PLACES = 4


class DigestCheck:
    """Compares instances of a plan with the trainer, whose digests are sorted and added up once for all of them."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._lock = Lock()
        self._sent: tuple[Mapping[int, DigestReport], _Side] | None = None

    def compare(
        self,
        trainer: Mapping[int, DigestReport],
        instance: str,
        reports: Mapping[int, DigestReport],
        slots: Mapping[int, IntArray] | None = None,
    ) -> DigestCounts:
        """Compares one instance with the trainer; several threads may call it.

        Reports are by rank; ranks without rows in the plan need none. `slots` has the slot column of each rank's
        table, for messages and counts.

        Raises DigestMismatchError naming tensor, instance, rank, region and slot, the expected and the found digest.
        Raises PlanError for an instance that the plan lacks.
        """
        plan = self._plan
        sent = self._gathered(trainer)
        side = _gather(plan, plan.number(instance), instance, reports, slots)
        _check_replicas(side, sent.sums)
        _check_sums(sent, side)
        return _counts(side)

    def check_unchanged(self, first: Mapping[int, DigestReport], second: Mapping[int, DigestReport]) -> None:
        """Checks that both passes of every trainer rank have the same digests.

        Raises WeightsChangedError naming tensors and ranks that differ, and DigestMismatchError for a report that does
        not fit the plan.
        """
        ranks_by_name: dict[str, set[int]] = {}
        for rank, report in sorted(second.items()):
            rows = self._rows_of(rank)
            for pass_report in (first[rank], report):
                _check_report(self._plan, rows, pass_report, rank, None)
            if report is first[rank]:
                continue
            tensors = np.unique(rows.tensor[report.digest != first[rank].digest])
            for tensor in tensors.tolist():
                ranks_by_name.setdefault(self._plan.tensors.names[tensor], set()).add(rank)
        if ranks_by_name:
            places = [
                f"{name!r} on trainer ranks {number_ranges(ranks)}"
                for name, ranks in list(ranks_by_name.items())[:_SHOWN_PLACES]
            ]
            suffix = f" and {len(ranks_by_name) - len(places)} tensors more" if len(ranks_by_name) > len(places) else ""
            raise WeightsChangedError(
                f"the trainer's weights changed during update(): {', '.join(places)}{suffix} had other digests before "
                f"they were sent than afterwards; let weights stand still until update() has returned; {_FENCED}"
            )

    def non_finite(self, first: Mapping[int, DigestReport], instance: str) -> tuple[NonFinite, ...]:
        """Values that are not finite in tensors of an instance, in its dtypes, as trainer ranks have counted them."""
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
        instance_rows = _rows(plan, plan.number(instance))
        keys = set(zip(instance_rows.tensor.tolist(), instance_rows.dtype.tolist(), strict=True))
        entries = []
        for tensor, dtype in sorted(counts.keys() & keys):
            cells = counts[tensor, dtype].values()
            nan, inf, overflow = np.sum([np.max(list(cell.values()), axis=0) for cell in cells], axis=0).tolist()
            ranks = tuple(sorted({rank for cell in cells for rank in cell}))
            entries.append(NonFinite(plan.tensors.names[tensor], dtype_name(dtype), nan, inf, overflow, ranks))
        return tuple(entries)

    def _rows_of(self, rank: int) -> DigestRows:
        """The digest rows of a trainer rank, in the order of its report."""
        rows = _rows(self._plan, 0)
        return rows.take(np.flatnonzero(rows.rank == rank))

    def _gathered(self, trainer: Mapping[int, DigestReport]) -> _Side:
        """The trainer's side, checked; the one of the last call, if that had the very same reports."""
        with self._lock:
            if self._sent is None or not _same(self._sent[0], trainer):
                side = _gather(self._plan, 0, None, trainer, None)
                _check_replicas(side, side.sums)
                self._sent = dict(trainer), side
            return self._sent[1]


@dataclass(frozen=True, slots=True)
class _Side:
    """The digest rows of one side with their digests, ordered by (tensor, dtype, cell), then as in the plan.

    `first` has the first row of each cell, and `sums` the digest of each (tensor, dtype), added up from these.
    `instance` is None for the trainer.
    """

    plan: TransferPlan
    instance: str | None
    rows: DigestRows
    digest: DigestArray
    first: IntArray
    sums: dict[tuple[int, int], int]
    slots: Mapping[int, IntArray] | None

    def rows_of(self, key: tuple[int, int]) -> IntArray:
        """Rows of a (tensor, dtype)."""
        return np.flatnonzero((self.rows.tensor == key[0]) & (self.rows.dtype == key[1]))

    def place(self, row: int) -> str:
        """Place of a row, for messages: side, rank, region and slot."""
        rank, region = int(self.rows.rank[row]), int(self.rows.region[row])
        slot = NO_SLOT if self.slots is None else int(self.slots[rank][region])
        location = f"rank {rank} region {region}" + (f" (slot {slot})" if slot != NO_SLOT else "")
        return f"{self.instance} {location}" if self.instance else f"trainer {location}"

    def tensor(self, row: int) -> str:
        """Name and dtype of a row's tensor, for messages."""
        return f"{self.plan.tensors.names[int(self.rows.tensor[row])]!r} ({dtype_name(int(self.rows.dtype[row]))})"

    def box(self, row: int) -> str:
        """The box of a row, for messages."""
        ndim = int(self.plan.tensors.ndim[int(self.rows.tensor[row])])
        low, size = self.rows.offset[row, :ndim].tolist(), self.rows.size[row, :ndim].tolist()
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(low, size, strict=True)) + "]"


def _same(reports: Mapping[int, DigestReport], known: Mapping[int, DigestReport]) -> bool:
    """True if these are the very same reports."""
    return reports.keys() == known.keys() and all(reports[rank] is report for rank, report in known.items())


def _rows(plan: TransferPlan, party: int) -> DigestRows:
    """The digest rows of a party."""
    return plan.digests.between(*np.searchsorted(plan.digests.party, (party, party + 1)).tolist())


def _gather(
    plan: TransferPlan,
    party: int,
    instance: str | None,
    reports: Mapping[int, DigestReport],
    slots: Mapping[int, IntArray] | None,
) -> _Side:
    """The rows of one side with the digests of its ranks. Raises DigestMismatchError for a report that does not fit."""
    rows = _rows(plan, party)
    by_rank = np.argsort(rows.rank, kind="stable")
    ranks, start = np.unique(rows.rank[by_rank], return_index=True)
    digest = np.empty(len(rows), dtype=np.uint64)
    owner = instance or "the trainer"
    for rank, picks in zip(ranks.tolist(), np.split(by_rank, start[1:]) if len(ranks) else [], strict=True):
        report = reports.get(rank)
        if report is None:
            name = plan.tensors.names[int(rows.tensor[picks[0]])]
            raise DigestMismatchError(
                f"rank {rank} of {owner} reported no digests, expected {len(picks)}, the first of {name!r}; {_FENCED}"
            )
        _check_report(plan, rows.take(picks), report, rank, instance)
        digest[picks] = report.digest
    for rank in reports.keys() - set(ranks.tolist()):
        if count := len(reports[rank]):
            raise DigestMismatchError(f"rank {rank} of {owner} reported {count} digests, expected none; {_FENCED}")
    order = np.lexsort((rows.cell, rows.dtype, rows.tensor))
    rows, digest = rows.take(order), digest[order]
    first = _starts(rows.tensor, rows.dtype, rows.cell)
    return _Side(plan, instance, rows, digest, first, _sums(rows.take(first), digest[first]), slots)


def _check_report(plan: TransferPlan, rows: DigestRows, report: DigestReport, rank: int, instance: str | None) -> None:
    sender = f"rank {rank} of {instance or 'the trainer'}"
    if report.rank != rank or report.instance != instance:
        owner = f"rank {report.rank} of {report.instance or 'the trainer'}"
        raise DigestMismatchError(f"{sender} handed in the digests of {owner}; {_FENCED}")
    overlap = min(len(rows), len(report))
    mismatches = np.flatnonzero(rows.cell[:overlap] != report.cell[:overlap])
    if not len(mismatches) and len(rows) == len(report) == len(report.digest):
        return
    row = int(mismatches[0]) if len(mismatches) else overlap
    if row < len(rows):
        name, region = plan.tensors.names[int(rows.tensor[row])], int(rows.region[row])
        detail = f"the first that is missing is of {name!r} region {region} (cell {int(rows.cell[row])})"
    else:
        detail = "those at the end were not asked for"
    raise DigestMismatchError(f"{sender} reported {len(report)} digests, expected {len(rows)}; {detail}; {_FENCED}")


def _starts(*columns: IntArray) -> IntArray:
    """Rows that differ from the row before in any of the sorted columns; the first row counts as one."""
    is_start = np.zeros(len(columns[0]), dtype=bool)
    is_start[:1] = True
    for column in columns:
        is_start[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(is_start).astype(np.int64)


def _sums(rows: DigestRows, digest: DigestArray) -> dict[tuple[int, int], int]:
    """Digest of each (tensor, dtype), added up from one row of each cell."""
    start = _starts(rows.tensor, rows.dtype)
    sums = add_runs(digest, start)
    keys = zip(rows.tensor[start].tolist(), rows.dtype[start].tolist(), strict=True)
    return dict(zip(keys, sums.tolist(), strict=True))


def _check_replicas(side: _Side, wanted: Mapping[tuple[int, int], int]) -> None:
    """Checks that all rows of a cell have one digest. If the sums tell which row is wrong, the error names that one."""
    length = np.diff(np.append(side.first, len(side.rows)))
    expected = np.repeat(side.digest[side.first], length)
    mismatches = np.flatnonzero(side.digest != expected)
    if not len(mismatches):
        return
    row = int(mismatches[0])
    peer = int(side.first[np.searchsorted(side.first, row, side="right") - 1])
    if _expected_of_cell(side, peer, wanted) == int(side.digest[row]):
        row, peer = peer, row
    raise DigestMismatchError(
        f"{side.tensor(row)} box {side.box(row)} on {side.place(row)}: digest {_hex(side.digest[row])}, "
        f"expected {_hex(side.digest[peer])} as on {side.place(peer)}; "
        f"{len(mismatches)} of {len(side.rows)} digests differ from a replica; {_FENCED}"
    )


def _expected_of_cell(side: _Side, first: int, wanted: Mapping[tuple[int, int], int]) -> int | None:
    """Digest of a cell that fits the sum if all other cells of its tensor are right; None for an unknown tensor."""
    r = side.rows
    total = wanted.get((int(r.tensor[first]), int(r.dtype[first])))
    if total is None:
        return None
    in_tensor = (r.tensor[side.first] == r.tensor[first]) & (r.dtype[side.first] == r.dtype[first])
    digests = side.digest[side.first[in_tensor & (side.first != first)]]
    return subtract(total, int(add_runs(digests, np.zeros(1, dtype=np.int64))[0]) if len(digests) else 0)


def _check_sums(sent: _Side, side: _Side) -> None:
    """Checks that both sides have the same sum for each tensor and dtype of the instance."""
    sums, wanted = side.sums, sent.sums
    wrong_keys = [key for key, value in sums.items() if wanted.get(key) != value]
    if not wrong_keys:
        return
    key = wrong_keys[0]
    tensor_rows = side.rows_of(key)
    name = side.tensor(int(tensor_rows[0]))
    suffix = f"; {len(wrong_keys)} of {len(sums)} tensors differ" if len(wrong_keys) > 1 else ""
    if key not in wanted:
        dtypes = [dtype_name(dtype) for tensor, dtype in wanted if tensor == key[0]]
        reason = f"the trainer digested it in {', '.join(dtypes)}" if dtypes else "the trainer digested no cell of it"
        raise DigestMismatchError(
            f"{name} on {side.place(int(tensor_rows[0]))}: {reason}{suffix}; plan again, {_FENCED}"
        )
    differing_rows = _differing_rows(sent, side, key)
    rows = differing_rows if len(differing_rows) else tensor_rows
    places = ", ".join(side.place(int(row)) for row in rows[:_SHOWN_PLACES])
    if len(rows) > _SHOWN_PLACES:
        places += f" and {len(rows) - _SHOWN_PLACES} more"
    preposition = "on" if len(differing_rows) or len(tensor_rows) == 1 else "somewhere on"
    raise DigestMismatchError(
        f"{name} {preposition} {places}: digest {_hex(sums[key])}, "
        f"expected {_hex(wanted[key])} as on the trainer{suffix}; {_FENCED}"
    )


def _differing_rows(sent: _Side, side: _Side, key: tuple[int, int]) -> IntArray:
    """Rows of the instance whose box is a cell of the trainer too, with another digest there."""
    truth = {_box(sent, row): int(sent.digest[row]) for row in sent.rows_of(key).tolist()}
    rows = [
        row
        for row in side.rows_of(key).tolist()
        if truth.get(_box(side, row), int(side.digest[row])) != int(side.digest[row])
    ]
    return np.array(rows, dtype=np.int64)


def _box(side: _Side, row: int) -> tuple[int, ...]:
    return (*side.rows.offset[row].tolist(), *side.rows.size[row].tolist())


def _counts(held: _Side) -> DigestCounts:
    r = held.rows
    region_rows = np.lexsort((r.region, r.rank))
    region_rows = region_rows[_starts(r.rank[region_rows], r.region[region_rows])]
    rank, region = r.rank[region_rows], r.region[region_rows]
    in_slot = 0
    if held.slots is not None:
        for number in np.unique(rank).tolist():
            in_slot += int((held.slots[number][region[rank == number]] != NO_SLOT).sum())
    return DigestCounts(
        tensors=len(_starts(r.tensor)),
        rows=len(r),
        regions=len(region_rows),
        slot_regions=in_slot,
        replicas=len(r) - len(held.first),
    )


def _hex(digest: int | np.uint64) -> str:
    return f"{int(digest):016x}"
