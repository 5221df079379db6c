"""Table of an instance for `weightcast inspect`: bytes of each rank, slots, replicas, same-rank pairs, dispatch.

`merge_instance` makes a layout only if it is complete and its ranks agree, so the table says what was proven. Where
there is no layout, `ReportsTable` says what each rank has reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weightcast.gateway.layouts.merge import InstanceLayout
from weightcast.transfer.layout.summaries import number_ranges, summarize
from weightcast.transfer.layout.tables import NO_SLOT, RankReport
from weightcast.transfer.layout.tensor_names import NONE, parse_names

__all__ = [
    "DispatchAudit",
    "InspectTable",
    "RankSummary",
    "ReportsTable",
    "SameRankPair",
    "SlotSummary",
    "inspect_instance",
    "inspect_reports",
]

_SHOWN_PAIRS = 20


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Figures of one rank: bytes of its regions, of its parameters, and of those that its engine pads.

    `slots_per_layer` has pairs of a number of routed slots and the layers in which the rank has that many.
    """

    rank: int
    host: str
    storage_rank: int | None
    regions: int
    region_bytes: int
    parameter_bytes: int
    padding_bytes: int
    slots_per_layer: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """The routed slots of an instance. `replicated` counts (layer, expert) pairs that have more than one slot."""

    layers: int
    logical_experts: int
    physical_slots: int
    ep_size: int
    replicated: int


@dataclass(frozen=True, slots=True)
class SameRankPair:
    """A logical expert that has several slots on one rank."""

    layer: int
    expert: int
    rank: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DispatchAudit:
    """Number of entries in all dispatch tables; each points at a slot with its expert. `shared`: all ranks have one."""

    ranks: int
    entries: int
    shared: bool


@dataclass(frozen=True, slots=True)
class InspectTable:
    """Plain data about one instance; `to_json` and `to_text` show all of it."""

    instance: str
    fingerprint: str
    tensors: int
    tensor_bytes: int
    ranks: tuple[RankSummary, ...]
    slots: SlotSummary | None
    same_rank_pairs: tuple[SameRankPair, ...]
    dispatch: DispatchAudit | None
    derived: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """The table as plain values, for `json.dumps`."""
        return {**asdict(self), "complete": True, "left_out": dict(self.left_out)}

    def to_text(self) -> str:
        """The table as lines of text, for people."""
        lines = [
            f"instance {self.instance}, layout {self.fingerprint}",
            f"coverage: complete, {self.tensors} tensors of {_bytes(self.tensor_bytes)}",
            "",
            *_rank_lines(self.ranks),
            "",
            *self._expert_lines(),
        ]
        if self.derived:
            lines.append(f"computed from parameters after an update: {summarize(self.derived)}")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out:
            reasons.setdefault(reason, []).append(name)
        lines += [f"left out: {summarize(names)} ({reason})" for reason, names in reasons.items()]
        return "\n".join(lines)

    def _expert_lines(self) -> list[str]:
        if self.slots is None:
            return ["no routed experts"]
        s = self.slots
        lines = [
            f"experts: {s.logical_experts} in {s.physical_slots} slots over {s.ep_size} EP ranks, "
            f"{s.layers} layers in the map; {s.replicated} times an expert of a layer has replicas, "
            f"{len(self.same_rank_pairs)} times on one rank"
        ]
        pairs = [(p.layer, p.expert, p.rank, ",".join(map(str, p.slots))) for p in self.same_rank_pairs[:_SHOWN_PAIRS]]
        if pairs:
            lines += ["", *_columns(("layer", "expert", "rank", "slots"), pairs), ""]
        if remainder := len(self.same_rank_pairs) - len(pairs):
            lines[-1] = f"and {remainder} more same-rank pairs"
        if self.dispatch is None:
            return [*lines, "dispatch audit: no rank reported a dispatch table"]
        note = "all ranks have the same table" if self.dispatch.shared else "each rank may have its own"
        return [*lines, f"dispatch audit: {self.dispatch.entries} entries of {self.dispatch.ranks} ranks agree, {note}"]


@dataclass(frozen=True, slots=True)
class ReportsTable:
    """The reports of an instance that has no layout, and the reason. `missing` are ranks that have not reported.

    `names` has the tensors of each rank, in words.
    """

    instance: str
    reason: str
    missing: tuple[int, ...]
    ranks: tuple[RankSummary, ...]
    names: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The table as plain values, for `json.dumps`."""
        return {**asdict(self), "complete": False}

    def to_text(self) -> str:
        """The table as lines of text, for people."""
        lines = [f"instance {self.instance} has no layout: {self.reason}"]
        if self.missing:
            lines.append(f"ranks that have not reported: {number_ranges(self.missing)}")
        lines += ["", *_rank_lines(self.ranks), ""]
        lines += [f"rank {rank.rank} holds {names}" for rank, names in zip(self.ranks, self.names, strict=True)]
        return "\n".join(lines)


def inspect_reports(instance: str, world: int, reports: Mapping[int, RankReport], reason: str) -> ReportsTable:
    """The table of an instance of `world` ranks whose connect has not come to a layout, for a reason."""
    ordered = [reports[rank] for rank in sorted(reports)]
    missing = tuple(rank for rank in range(world) if rank not in reports)
    names = tuple(summarize(report.table.tensors.names) or "nothing" for report in ordered)
    return ReportsTable(instance, reason, missing, tuple(_summary(report) for report in ordered), names)


def inspect_instance(layout: InstanceLayout) -> InspectTable:
    """The table of one instance, from its merged layout."""
    reports = layout.reports
    tables = [report.notes.dispatch for report in reports if len(report.notes.dispatch)]
    audit = DispatchAudit(len(tables), sum(map(len, tables)), any(r.notes.dispatch_shared for r in reports))
    return InspectTable(
        instance=layout.name,
        fingerprint=layout.fingerprint,
        tensors=len(layout.tensors),
        tensor_bytes=int(layout.tensors.nbytes.sum()),
        ranks=tuple(_summary(report) for report in reports),
        slots=_slots(layout),
        same_rank_pairs=tuple(_pairs(layout)),
        dispatch=audit if tables else None,
        derived=tuple(dict.fromkeys(name for report in reports for name in report.notes.derived)),
        left_out=tuple(layout.left_out.items()),
    )


def _summary(report: RankReport) -> RankSummary:
    table, notes = report.table, report.notes
    return RankSummary(
        rank=report.rank,
        host=report.host,
        storage_rank=report.placement.storage_rank if report.placement else None,
        regions=len(table),
        region_bytes=int(table.nbytes.sum()),
        parameter_bytes=notes.parameter_bytes,
        padding_bytes=notes.padding_bytes,
        slots_per_layer=_slots_per_layer(report),
    )


def _slots_per_layer(report: RankReport) -> tuple[tuple[int, tuple[int, ...]], ...]:
    table = report.table
    in_slot = np.flatnonzero(table.slot != NO_SLOT)
    layer, slot = parse_names(table.tensors.names).layer[table.tensor[in_slot]], table.slot[in_slot]
    slot_layers = np.unique(np.stack([layer, slot], axis=1), axis=0)[:, 0]
    layers, counts = np.unique(slot_layers[slot_layers != NONE], return_counts=True)
    return tuple((count, tuple(layers[counts == count].tolist())) for count in np.unique(counts).tolist())


def _slots(layout: InstanceLayout) -> SlotSummary | None:
    placement = layout.placement
    if placement is None:
        return None
    rows = np.arange(placement.num_layers)[:, None] * placement.num_logical + placement.physical_to_logical
    replicated = int((np.unique(rows, return_counts=True)[1] > 1).sum())
    return SlotSummary(
        placement.num_layers, placement.num_logical, placement.num_physical, placement.ep_size, replicated
    )


def _pairs(layout: InstanceLayout) -> list[SameRankPair]:
    """Same-rank pairs by layer, expert and rank, in the layers whose slots the rank holds."""
    if layout.placement is None:
        return []
    by_storage: dict[int, list[tuple[int, frozenset[int]]]] = {}
    for report in layout.reports:
        if report.placement is not None:
            rank_layers = frozenset(layer for _, layers in _slots_per_layer(report) for layer in layers)
            by_storage.setdefault(report.placement.storage_rank, []).append((report.rank, rank_layers))
    pairs = []
    for layer, expert, storage, _ in layout.placement.same_rank_pairs().tolist():
        slots = tuple(np.flatnonzero(layout.placement.local_experts(layer, storage) == expert).tolist())
        pairs += [
            SameRankPair(layer, expert, rank, slots)
            for rank, rank_layers in by_storage[storage]
            if layer in rank_layers
        ]
    return pairs


def _rank_lines(ranks: Sequence[RankSummary]) -> list[str]:
    titles = ("rank", "host", "storage rank", "regions", "bytes", "parameters", "padding", "slots")
    return _columns(titles, [_rank_cells(rank) for rank in ranks])


def _rank_cells(rank: RankSummary) -> tuple[object, ...]:
    slots = "; ".join(f"{count} in layers {number_ranges(layers)}" for count, layers in rank.slots_per_layer)
    storage = "-" if rank.storage_rank is None else rank.storage_rank
    sizes = (_bytes(rank.region_bytes), _bytes(rank.parameter_bytes), _bytes(rank.padding_bytes))
    return (rank.rank, rank.host or "-", storage, rank.regions, *sizes, slots or "-")


def _columns(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table, columns aligned to the left."""
    cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _bytes(count: int) -> str:
    """A number of bytes in binary units, for people: 1536 is "1.5 KiB"."""
    size, unit = float(count), 0
    while size >= 1024 and unit < 5:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {'KMGTP'[unit - 1]}iB"
