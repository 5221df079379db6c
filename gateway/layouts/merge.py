"""Joins the reports of all ranks of one instance, or of the trainer, and refuses what does not fit together.

Regions are joined by name within one instance; instances are never merged into one another. Every region of every rank
is kept. Replicas of an expert are rows of their own, also two on one rank: no key lets one hide another.

    trainer = merge_trainer(trainer_reports)
    layout = merge_instance("rollout-0", reports, trainer.tensors)
    plan_transfer(trainer.joined, {layout.name: layout.joined})
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightcast.gateway.layouts.experts import check_dispatch, check_slots, common_placement
from weightcast.transfer.boxes.algebra import decompose, uncovered
from weightcast.transfer.errors import CoverageError, LayoutError
from weightcast.transfer.layout.coverage import describe_gaps
from weightcast.transfer.layout.dtypes import cast_allowed, dtype_name
from weightcast.transfer.layout.joined import JoinedRanks, SideName, join_ranks
from weightcast.transfer.layout.placement import ExpertPlacement
from weightcast.transfer.layout.summaries import number_ranges, summarize
from weightcast.transfer.layout.tables import RankReport, RegionTable, TensorSpec, TensorTable

__all__ = ["InstanceLayout", "TrainerLayout", "merge_instance", "merge_trainer"]

_SINGLE_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.[A-Za-z_]+$")
"""Names of one expert's tensor in a checkpoint, and of the tensor of all experts of a layer, with the layer first."""

_LEFT_OUT = "; LayoutNotes(left_out=...) of its description names what it is not to have"


@dataclass(frozen=True)
class _SideLayout:
    """Layout of one side: the `reports` of its ranks, by rank, and their tables `joined`."""

    reports: tuple[RankReport, ...]
    joined: JoinedRanks

    @property
    def tensors(self) -> TensorTable:
        """All tensors that ranks of the side hold."""
        return self.joined.tensors

    @property
    def world_size(self) -> int:
        """Number of ranks of the side."""
        return len(self.reports)

    @property
    def tables(self) -> tuple[RegionTable, ...]:
        """Region tables of all ranks, by rank."""
        return tuple(report.table for report in self.reports)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names by rank, empty where unknown."""
        return tuple(report.host for report in self.reports)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tables: two sides have equal fingerprints exactly if their layouts are equal."""
        return hashlib.blake2b(" ".join(self.joined.fingerprints).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class TrainerLayout(_SideLayout):
    """Layout of the trainer: all that its ranks hold."""


@dataclass(frozen=True)
class InstanceLayout(_SideLayout):
    """Layout of one instance. `placement` is that of its routed experts, None if no rank reported one.

    Instances with equal fingerprints are of one class: a plan for one fits the other.
    """

    name: str
    placement: ExpertPlacement | None

    @property
    def left_out(self) -> dict[str, str]:
        """Tensors that no rank holds on purpose, with the reason."""
        names = frozenset(self.tensors.names)
        entries = (pair for report in self.reports for pair in report.notes.left_out)
        return {tensor: reason for tensor, reason in entries if tensor not in names}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tables and of the placement, not of name and hosts."""
        parts = [*self.joined.fingerprints, self.placement.fingerprint if self.placement else "none"]
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def merge_trainer(reports: Sequence[RankReport]) -> TrainerLayout:
    """The trainer's layout from the reports of its ranks in any order.

    Raises LayoutError for missing, repeated or disagreeing ranks, and CoverageError for a tensor that the ranks
    together do not hold whole.
    """
    side = SideName("")
    ordered = _order_reports(side, reports)
    joined = join_ranks(side.name, [report.table for report in ordered])
    if gaps := _gaps(joined):
        raise CoverageError(gaps)
    return TrainerLayout(ordered, joined)


def merge_instance(
    instance: str, reports: Sequence[RankReport], catalog: TensorTable | Mapping[str, TensorSpec] | None = None
) -> InstanceLayout:
    """The layout of one instance from the reports of its ranks in any order.

    `catalog` has the tensors of the trainer. The instance must hold exactly these, but for those that a rank declares
    as left out. Without a catalog the tensors that its own ranks name count as complete.

    Raises LayoutError for missing, repeated or disagreeing ranks, for other shapes than the catalog's, and for dtypes
    that its values cannot be cast to. Raises CoverageError, naming all gaps in compact ranges, for what no rank or slot
    holds. Raises AgreementError where regions or dispatch tables contradict the placement.
    """
    side = SideName(instance)
    ordered = _order_reports(side, reports)
    table = TensorTable.from_specs(catalog) if isinstance(catalog, Mapping) else catalog
    joined = join_ranks(instance, [report.table for report in ordered], table)
    placement = common_placement(side, ordered)
    layout = InstanceLayout(ordered, joined, instance, placement)
    _require_casts(layout)
    gaps = [_gaps(joined), *_catalog_gaps(layout)]
    if any(gaps):
        raise CoverageError("; ".join(gap for gap in gaps if gap))
    if placement is not None:
        # The trainer's names are parsed once for all instances.
        row = joined.catalog_row
        parsed = joined.tensors.parsed_names if table is None or row is None else table.parsed_names.take(row)
        check_slots(side, ordered, placement, joined, parsed)
        check_dispatch(side, ordered, placement)
    return layout


def _order_reports(side: SideName, reports: Iterable[RankReport]) -> tuple[RankReport, ...]:
    """Returns the reports by rank. Raises LayoutError naming missing, repeated and disagreeing ranks."""
    by_rank: dict[int, RankReport] = {}
    first: RankReport | None = None
    for report in reports:
        first = first or report
        if report.world_size != first.world_size:
            raise LayoutError(
                f"{side.rank(report.rank)} says there are {report.world_size} ranks, "
                f"{side.rank(first.rank)} says {first.world_size}"
            )
        if not 0 <= report.rank < report.world_size:
            raise LayoutError(f"{side.rank(report.rank)} is not in 0..{report.world_size - 1}")
        if report.rank in by_rank:
            hosts = f"{by_rank[report.rank].host or 'unknown'} and {report.host or 'unknown'}"
            raise LayoutError(f"{side.rank(report.rank)} reported twice (hosts {hosts}); each process has its own")
        by_rank[report.rank] = report
    if first is None:
        raise LayoutError(f"no rank of {side} reported")
    if absent_ranks := set(range(first.world_size)) - by_rank.keys():
        raise LayoutError(
            f"of the {first.world_size} ranks of {side} these did not report: {number_ranges(absent_ranks)}"
        )
    return tuple(by_rank[rank] for rank in range(first.world_size))


def _gaps(joined: JoinedRanks) -> str:
    """Describes what the regions together do not cover; empty when they cover every tensor."""
    tensors, side = joined.tensors, SideName(joined.name)
    volume = tensors.elements
    is_whole = volume == 0
    is_whole[joined.tensor[joined.volume == volume[joined.tensor]]] = True
    regions = joined.regions.take(np.flatnonzero(~is_whole[joined.tensor]))
    cells = decompose(
        regions.tensor, regions.offset, regions.size, lambda row: f"tensor {tensors.names[row]!r} of {side}"
    )
    gap_tensors = uncovered(cells.key, cells.offset, cells.size, tensors.shape)
    gap_tensors = gap_tensors[~is_whole[gap_tensors]]
    if not len(gap_tensors):
        return ""
    location = f"on no rank of {side}" if side.name else "on no trainer rank"
    return f"{describe_gaps(tensors, cells, gap_tensors)}: {location}"


def _catalog_gaps(layout: InstanceLayout) -> list[str]:
    """Describes the gaps between the trainer's tensors and the instance's."""
    catalog, row = layout.joined.catalog, layout.joined.catalog_row
    if catalog is None or row is None:
        return []
    presence = np.zeros(len(catalog), dtype=bool)
    presence[row[row >= 0]] = True
    left_out = layout.left_out
    absent_names = [name for i in np.flatnonzero(~presence).tolist() if (name := catalog.names[i]) not in left_out]
    extra_names = [layout.tensors.names[i] for i in np.flatnonzero(row < 0).tolist()]
    gaps = []
    if absent_names:
        gaps.append(f"{summarize(absent_names)}: on no rank of {layout.name}{_LEFT_OUT}")
    if extra_names:
        gaps.append(f"{summarize(extra_names)}: on {layout.name}, but on no trainer rank, so it would never be updated")
    gaps += _fused_hint(absent_names, extra_names, layout.name) + _fused_hint(extra_names, absent_names, "the trainer")
    return gaps


def _fused_hint(names: Sequence[str], other_names: Sequence[str], other_side: str) -> list[str]:
    """A remedy where the other side has the experts of a layer as one tensor, as Transformers keeps them in memory."""
    layers = {match[1] for name in names if (match := _SINGLE_EXPERT.match(name))}
    fused_names = [name for name in other_names if (match := _FUSED_EXPERTS.match(name)) and match[1] in layers]
    if not fused_names:
        return []
    return [
        f"{fused_names[0]!r} of {other_side} is all experts of a layer in one tensor: use checkpoint names, "
        "FsdpSource(model) gives them"
    ]


def _require_casts(layout: InstanceLayout) -> None:
    """Raises LayoutError where the trainer's values cannot be cast to the dtype of the instance."""
    catalog, catalog_row = layout.joined.catalog, layout.joined.catalog_row
    if catalog is None or catalog_row is None:
        return
    rows = np.flatnonzero(catalog_row >= 0)
    wrong_rows = rows[~cast_allowed(catalog.dtype[catalog_row[rows]], layout.tensors.dtype[rows])]
    if len(wrong_rows):
        first = int(wrong_rows[0])
        trainer_dtype, instance_dtype = (
            dtype_name(int(code)) for code in (catalog.dtype[catalog_row[first]], layout.tensors.dtype[first])
        )
        suffix = f"; {len(wrong_rows) - 1} tensors more are like it" if len(wrong_rows) > 1 else ""
        raise LayoutError(
            f"tensor {layout.tensors.names[first]!r} has dtype {trainer_dtype} on the trainer and {instance_dtype} on "
            f"{layout.name}: a cast would change its values unseen; load the engine with the trainer's dtype, or "
            f"convert the tensor on the trainer{suffix}"
        )
