"""Joins the reports of all ranks of one instance, or of the trainer, and refuses what does not fit together.

Everything is joined by name and per instance; instances are never merged into one another. Every region of every rank
is kept: replicas of an expert, also two on one rank, are rows of their own, and nothing is keyed so that one hides
another.

    trainer = merge_trainer(trainer_reports)
    layout = merge_instance("rollout-0", reports, trainer.tensors)
    plan_transfer(trainer.tables, {layout.name: layout.tables})
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightcast.gateway.experts import check_dispatch, check_slots, common_placement
from weightcast.gateway.join import JoinedRegions, SideName, join_reports, order_reports
from weightcast.transfer.columns import find_names
from weightcast.transfer.coverage import describe_gaps
from weightcast.transfer.dtypes import cast_allowed, dtype_name
from weightcast.transfer.errors import CoverageError, LayoutError
from weightcast.transfer.layout import IntArray, RankReport, RegionTable, TensorSpec, TensorTable, pad_boxes
from weightcast.transfer.names import summarize
from weightcast.transfer.placement import ExpertPlacement
from weightcast.transfer.regions import decompose, uncovered

__all__ = ["InstanceLayout", "TrainerLayout", "merge_instance", "merge_trainer"]


@dataclass(frozen=True)
class _SideLayout:
    """All that the ranks of one side hold. `reports` are by rank, `tensors` all their tensors."""

    reports: tuple[RankReport, ...]
    tensors: TensorTable

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.reports)

    @property
    def tables(self) -> tuple[RegionTable, ...]:
        """Region tables by rank."""
        return tuple(report.table for report in self.reports)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names by rank, empty where unknown."""
        return tuple(report.host for report in self.reports)

    @property
    def table_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the tables by rank."""
        return tuple(table.fingerprint for table in self.tables)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tables; sides with equal layouts, and only those, have equal fingerprints."""
        return hashlib.blake2b(" ".join(self.table_fingerprints).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class TrainerLayout(_SideLayout):
    """All that the trainer's ranks hold. `reports` are by rank, `tensors` all their tensors."""


@dataclass(frozen=True)
class InstanceLayout(_SideLayout):
    """All that the ranks of one instance hold. `placement` is that of its routed experts, if ranks reported one.

    Instances whose layouts have one fingerprint are of one class: a plan for one fits the other.
    """

    name: str
    placement: ExpertPlacement | None

    @property
    def left_out(self) -> dict[str, str]:
        """Tensors that no rank holds on purpose, with the reason."""
        held = frozenset(self.tensors.names)
        declared = (pair for report in self.reports for pair in report.notes.left_out)
        return {tensor: reason for tensor, reason in declared if tensor not in held}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tables and of the placement, not of name and hosts."""
        parts = [*self.table_fingerprints, self.placement.fingerprint if self.placement else "none"]
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def merge_trainer(reports: Sequence[RankReport]) -> TrainerLayout:
    """The trainer's layout from the reports of its ranks in any order.

    Raises LayoutError for missing, repeated or disagreeing ranks, CoverageError where the ranks together do not hold
    the whole of a tensor that one of them names.
    """
    side = SideName(None)
    ordered = order_reports(side, reports)
    tensors, regions = join_reports(side, ordered)
    if gaps := _gaps(side, tensors, regions):
        raise CoverageError(gaps)
    return TrainerLayout(ordered, tensors)


def merge_instance(
    instance: str, reports: Sequence[RankReport], catalog: TensorTable | Mapping[str, TensorSpec] | None = None
) -> InstanceLayout:
    """The layout of one instance from the reports of its ranks in any order.

    `catalog` are the tensors of the trainer; the instance must hold all of them that no rank declares as left out, and
    no others. Without it the tensors that its own ranks know are taken for complete.

    Raises LayoutError for missing, repeated or disagreeing ranks, for shapes that differ from the catalog's, and for
    dtypes that its values cannot be cast to; CoverageError, naming all gaps in compact ranges, for what no rank or slot
    holds; AgreementError where regions or dispatch tables contradict the placement.
    """
    side = SideName(instance)
    ordered = order_reports(side, reports)
    known = None if catalog is None else _table_of(catalog)
    tensors, regions = join_reports(side, ordered, known)
    placement = common_placement(side, ordered)
    layout = InstanceLayout(ordered, tensors, instance, placement)
    row = None if known is None else _rows_in(known, tensors)
    gaps = [_gaps(side, tensors, regions)]
    if known is not None and row is not None:
        gaps += _compare_catalog(layout, known, row)
    if any(gaps):
        raise CoverageError("; ".join(gap for gap in gaps if gap))
    if placement is not None:
        # The trainer's names are parsed once for all instances.
        parsed = tensors.parsed_names if known is None or row is None else known.parsed_names.take(row)
        check_slots(side, ordered, placement, tensors, regions, parsed)
        check_dispatch(side, ordered, placement)
    return layout


def _table_of(catalog: TensorTable | Mapping[str, TensorSpec]) -> TensorTable:
    return catalog if isinstance(catalog, TensorTable) else TensorTable.from_specs(catalog)


def _rows_in(known: TensorTable, tensors: TensorTable) -> IntArray:
    """(n,) the row of each tensor in a table, -1 for those that it does not have."""
    if tensors.place is not None:
        return tensors.place[1]
    return find_names(known.index, tensors.names)


def _gaps(side: SideName, tensors: TensorTable, regions: JoinedRegions) -> str:
    """What the regions together do not cover, in words; empty when they cover every tensor."""
    volume = tensors.shape.prod(axis=1)
    done = volume == 0
    done[regions.tensor[regions.volume == volume[regions.tensor]]] = True
    rest = regions.take(np.flatnonzero(~done[regions.tensor]))
    cells = decompose(rest.tensor, rest.offset, rest.size, lambda row: f"tensor {tensors.names[row]!r} of {side}")
    short = uncovered(cells.key, cells.offset, cells.size, tensors.shape)
    short = short[~done[short]]
    if not len(short):
        return ""
    where = "on no trainer rank" if side.instance is None else f"on no rank of {side}"
    return f"{describe_gaps(tensors, cells, short)}: {where}"


def _compare_catalog(layout: InstanceLayout, known: TensorTable, row: IntArray) -> list[str]:
    """Gaps between the trainer's tensors and the instance's, which are rows `row` of the trainer's, in words. Raises
    LayoutError for shapes that differ, and for dtypes that do not go together."""
    held = layout.tensors
    _compare_shapes(layout, known, np.flatnonzero(row >= 0), row[row >= 0])
    _compare_dtypes(layout, known, np.flatnonzero(row >= 0), row[row >= 0])
    here = np.zeros(len(known), dtype=bool)
    here[row[row >= 0]] = True
    left_out = layout.left_out
    missing = [name for i in np.flatnonzero(~here).tolist() if (name := known.names[i]) not in left_out]
    extra = [held.names[i] for i in np.flatnonzero(row < 0).tolist()]
    gaps = []
    if missing:
        gaps.append(f"{summarize(missing)}: on no rank of {layout.name}")
    if extra:
        gaps.append(f"{summarize(extra)}: on {layout.name}, but on no trainer rank, so it would never be updated")
    return gaps


def _compare_shapes(layout: InstanceLayout, known: TensorTable, mine: IntArray, theirs: IntArray) -> None:
    """Tensors `mine` of the instance have the shapes of `theirs` of the trainer."""
    width = max(layout.tensors.width, known.width)
    shape, other = pad_boxes(layout.tensors.shape[mine], width, 1), pad_boxes(known.shape[theirs], width, 1)
    differs = (shape != other).any(axis=1) | (layout.tensors.ndim[mine] != known.ndim[theirs])
    if differs.any():
        at = int(differs.argmax())
        row = int(mine[at])
        raise LayoutError(
            f"tensor {layout.tensors.names[row]!r} has shape {list(known.spec(int(theirs[at])).shape)} on the trainer "
            f"and {list(layout.tensors.spec(row).shape)} on {layout.name}"
        )


def _compare_dtypes(layout: InstanceLayout, known: TensorTable, mine: IntArray, theirs: IntArray) -> None:
    """Values of tensors `theirs` of the trainer can be cast to the dtypes of `mine` of the instance."""
    wrong = np.flatnonzero(~cast_allowed(known.dtype[theirs], layout.tensors.dtype[mine]))
    if len(wrong):
        name = layout.tensors.names[int(mine[wrong[0]])]
        held, wanted = (
            dtype_name(int(known.dtype[theirs[wrong[0]]])),
            dtype_name(int(layout.tensors.dtype[mine[wrong[0]]])),
        )
        more = f"; {len(wrong) - 1} tensors more are like it" if len(wrong) > 1 else ""
        raise LayoutError(
            f"tensor {name!r} has dtype {held} on the trainer and {wanted} on {layout.name}: a cast would change its "
            f"values unseen; load the engine with the trainer's dtype, or convert the tensor on the trainer{more}"
        )
