"""Checks of the expert slots of an instance against its placement: each is there, whole, with the right expert.

The slots to check come from the placement, never from the names of regions: a slot that an engine's loader forgets has
no region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.algebra import decompose, uncovered
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import AgreementError, CoverageError, LayoutError
from weightcast.transfer.layout.dispatch import audit_dispatch, audit_shared_dispatch
from weightcast.transfer.layout.joined import JoinedRanks, JoinedRegions, SideName
from weightcast.transfer.layout.placement import ExpertPlacement
from weightcast.transfer.layout.summaries import number_ranges, summarize
from weightcast.transfer.layout.tables import NO_SLOT, RankReport, TensorTable
from weightcast.transfer.layout.tensor_names import NONE, ParsedNames

__all__ = ["check_dispatch", "check_slots", "common_placement"]

_KEYS_NAMED = 1 << 20
"""Number of slots that are searched to name missing ones."""


def common_placement(side: SideName, reports: Sequence[RankReport]) -> ExpertPlacement | None:
    """The one placement of all ranks that report one, None when no rank does.

    Raises LayoutError, naming ranks and the first layer, where placements differ. Raises CoverageError for storage
    ranks that no rank has.
    """
    first: RankReport | None = None
    storage_ranks: set[int] = set()
    for report in reports:
        if report.placement is None:
            continue
        first = first or report
        candidate, reference = report.placement.placement, first.placement.placement  # type: ignore[union-attr]
        if candidate != reference:
            raise LayoutError(_difference(side, first.rank, reference, report.rank, candidate))
        storage_ranks.add(report.placement.storage_rank)
    if first is None or first.placement is None:
        return None
    placement = first.placement.placement
    if absent_ranks := set(range(placement.ep_size)) - storage_ranks:
        raise CoverageError(
            f"the experts of storage rank {number_ranges(absent_ranks)} of {placement.ep_size} are on no rank of {side}"
        )
    return placement


def _difference(side: SideName, first: int, other: ExpertPlacement, rank: int, mine: ExpertPlacement) -> str:
    claim = f"the placement of {side.rank(rank)} differs from that of rank {first}"
    if (mine.num_logical, mine.ep_size, mine.num_physical) != (other.num_logical, other.ep_size, other.num_physical):
        return (
            f"{claim}: {mine.num_logical} experts in {mine.num_physical} slots over {mine.ep_size} ranks, and "
            f"{other.num_logical} in {other.num_physical} over {other.ep_size}"
        )
    if mine.num_layers != other.num_layers:
        return f"{claim}: {mine.num_layers} layers and {other.num_layers}"
    layer = int(mine.changed_layers(other)[0])
    slot = int((mine.physical_to_logical[layer] != other.physical_to_logical[layer]).argmax())
    expert, first_expert = mine.logical(layer, slot), other.logical(layer, slot)
    return (
        f"{claim}: layer {layer}, physical slot {slot} holds expert {expert}, and {first_expert} there; "
        "read the placement of all ranks while no expert moves"
    )


def check_slots(
    side: SideName, reports: Sequence[RankReport], placement: ExpertPlacement, joined: JoinedRanks, parsed: ParsedNames
) -> None:
    """Checks that each routed slot of each expert layer is held whole, and by the expert of the placement.

    `parsed` has the numbers in the names of the joined tensors.

    Raises AgreementError (rank, layer, slot, expected, found) for another expert, and CoverageError for what is
    missing. Raises LayoutError for slots of ranks without a placement, and for slots past a rank's last.
    """
    slots = _routed_rows(side, reports, placement, joined, parsed)
    _check_experts(side, placement, slots)
    _check_complete(side, placement, slots)


@dataclass(frozen=True, slots=True)
class _SlotRows:
    """Regions in routed slots, with what their names say: (n,) columns beside the regions' own.

    `physical` is the slot numbered over the instance, `family` the part of one layer's experts (gate_proj of layer 3).
    `expert` is the number in the name. In a tensor that has all experts stacked in dimension 0 it is the index there,
    and `stacked` is 1. `volume` is that of the expert's whole part.
    """

    regions: JoinedRegions
    tensors: TensorTable
    physical: IntArray
    layer: IntArray
    expert: IntArray
    family: IntArray
    stacked: IntArray
    volume: IntArray

    def name(self, row: int) -> str:
        """Name of a row's tensor."""
        return self.tensors.names[int(self.regions.tensor[row])]


def _routed_rows(
    side: SideName, reports: Sequence[RankReport], placement: ExpertPlacement, joined: JoinedRanks, parsed: ParsedNames
) -> _SlotRows:
    tensors, regions = joined.tensors, joined.regions
    placements = [report.placement for report in reports]
    storage = np.array([p.storage_rank if p else NONE for p in placements], dtype=np.int64)
    slot_count = np.array([p.num_slots if p else 0 for p in placements], dtype=np.int64)
    rows = regions.take(np.flatnonzero(regions.slot != NO_SLOT))
    excess = rows.slot >= slot_count[rows.rank]
    if excess.any():
        row = int(excess.argmax())
        rank, name = int(rows.rank[row]), tensors.names[int(rows.tensor[row])]
        clause = f"has {slot_count[rank]} slots" if placements[rank] else "reported no placement"
        raise LayoutError(f"{side.rank(rank)} {clause}, but a region of {name!r} in slot {int(rows.slot[row])}")
    # Slots past the routed ones hold fused shared experts, which are in no map.
    rows = rows.take(np.flatnonzero(rows.slot < placement.slots_per_rank))
    expert = parsed.expert[rows.tensor]
    stacked = (expert == NONE) & (rows.size[:, 0] == 1) & (tensors.shape[rows.tensor, 0] == placement.num_logical)
    volume = tensors.shape.prod(axis=1)[rows.tensor]
    return _SlotRows(
        regions=rows,
        tensors=tensors,
        physical=storage[rows.rank] * placement.slots_per_rank + rows.slot,
        layer=parsed.layer[rows.tensor],
        expert=np.where(stacked, rows.offset[:, 0], expert),
        family=parsed.family[rows.tensor],
        stacked=stacked.astype(np.int64),
        volume=np.where(stacked, volume // max(placement.num_logical, 1), volume),
    )


def _check_experts(side: SideName, placement: ExpertPlacement, slots: _SlotRows) -> None:
    """Checks that the expert in each region's name is the one that the placement has in its slot."""
    expected = _experts_in(placement, slots.layer, slots.physical)
    mismatch = (slots.layer == NONE) | (slots.expert != expected)
    if not mismatch.any():
        return
    row = int(mismatch.argmax())
    content = "no expert number" if slots.expert[row] == NONE else f"expert {int(slots.expert[row])}"
    if slots.layer[row] == NONE:
        content = "no layer number"
    rank, slot = int(slots.regions.rank[row]), int(slots.regions.slot[row])
    raise AgreementError(
        f"{side.rank(rank)}, layer {int(slots.layer[row])}, slot {slot}: "
        f"the placement has expert {int(expected[row])} there, the region has {content} ({slots.name(row)!r}); "
        f"{int(mismatch.sum())} regions differ; describe the instance anew while no expert moves"
    )


def _experts_in(placement: ExpertPlacement, layer: IntArray, physical: IntArray) -> IntArray:
    """Logical expert of each (layer, physical slot) in two columns; layers past the map have the identity."""
    in_map = (layer >= 0) & (layer < placement.num_layers)
    expert = placement.physical_to_logical[np.where(in_map, layer, 0), physical]
    return np.where(in_map, expert, physical % placement.num_logical)


def _check_complete(side: SideName, placement: ExpertPlacement, slots: _SlotRows) -> None:
    """Checks that each family has regions in each physical slot, and that these make up the whole part."""
    count = placement.num_physical
    families, family = np.unique(slots.family, return_inverse=True)
    key = family * count + slots.physical
    present_keys = _distinct(key, len(families) * count)
    if len(present_keys) != len(families) * count:
        window = np.arange(min(len(families) * count, _KEYS_NAMED), dtype=np.int64)
        absent_keys = np.setdiff1d(window, present_keys, assume_unique=True)
        raise CoverageError(_missing_slots(side, placement, slots, families, absent_keys))
    volume = slots.regions.volume
    is_whole = np.zeros(len(present_keys), dtype=bool)
    position = np.searchsorted(present_keys, key)
    is_whole[position[volume == slots.volume]] = True
    cut_rows = np.flatnonzero(~is_whole[position])
    if not len(cut_rows):
        return
    _check_cut_slots(side, slots, cut_rows, position[cut_rows])


def _distinct(key: IntArray, extent: int) -> IntArray:
    """Distinct keys of 0..extent-1, ascending; faster where most of them occur."""
    if extent > 4 * len(key):
        return np.unique(key)
    presence = np.zeros(extent, dtype=np.bool_)
    presence[key] = True
    return np.flatnonzero(presence)


def _missing_slots(
    side: SideName, placement: ExpertPlacement, slots: _SlotRows, families: IntArray, missing: IntArray
) -> str:
    """Names what is missing in the first incomplete slot, and counts the other incomplete slots."""
    if not len(missing):
        return f"slots of {side} are missing; its placement has {placement.num_physical} in each layer"
    family, physical = np.divmod(missing, placement.num_physical)
    in_first = physical == physical.min()
    storage, slot = divmod(int(physical.min()), placement.slots_per_rank)
    names = []
    for part in families[family[in_first]].tolist():
        row = int((slots.family == part).argmax())
        expert = int(_experts_in(placement, slots.layer[row : row + 1], physical.min()[None])[0])
        names.append(slots.name(row).replace(f"experts.{int(slots.expert[row])}.", f"experts.{expert}.", 1))
    count = len(np.unique(physical)) - 1
    suffix = f"; {count} more slots are incomplete" if count else ""
    ranks = np.unique(slots.regions.rank[slots.physical // placement.slots_per_rank == storage]).tolist()
    holders = f"rank {number_ranges(ranks)} of {side}" if ranks else f"the ranks of {side} with storage rank {storage}"
    return f"{summarize(names)}: not in slot {slot} of {holders}, which the placement says holds it{suffix}"


def _check_cut_slots(side: SideName, slots: _SlotRows, rest: IntArray, key: IntArray) -> None:
    """Checks that the boxes of each cut slot cover its part, on one rank or on several that share the storage rank.

    `rest` are the rows in cut slots, and `key` has the slot of each.
    """
    keys, first, group = np.unique(key, return_index=True, return_inverse=True)
    boxes = slots.regions.take(rest)
    cells = decompose(
        group, boxes.offset, boxes.size, lambda i: f"a slot of {slots.name(int(rest[first[i]]))!r} of {side}"
    )
    shape = slots.tensors.shape[boxes.tensor[first]]
    shape[slots.stacked[rest[first]] == 1, 0] = 1
    gaps = uncovered(cells.key, cells.offset, cells.size, shape)
    if not len(gaps):
        return
    row = int(rest[first[gaps[0]]])
    ranks = number_ranges(boxes.rank[group == gaps[0]].tolist())
    suffix = f"; {len(gaps)} of {len(keys)} such slots are incomplete" if len(gaps) > 1 else ""
    raise CoverageError(
        f"{slots.name(row)!r}: slot {int(slots.regions.slot[row])} of rank {ranks} of {side} holds only a part{suffix}"
    )


def check_dispatch(side: SideName, reports: Sequence[RankReport], placement: ExpertPlacement) -> None:
    """Audits dispatch: each rank's tokens are sent only to slots that hold their expert.

    Raises AgreementError naming rank, layer, expert and slot, also where tables differ that must not.
    """
    tables: dict[bytes, tuple[int, IntArray]] = {}
    sharing: Mapping[int, bool] = {r.rank: r.notes.dispatch_shared for r in reports if len(r.notes.dispatch)}
    for report in reports:
        if len(report.notes.dispatch):
            tables.setdefault(report.notes.dispatch.tobytes(), (report.rank, report.notes.dispatch))
    for rank, table in tables.values():
        try:
            audit_dispatch(placement, table)
        except AgreementError as error:
            raise AgreementError(f"{side.rank(rank)}: {error}") from None
    if len(set(sharing.values())) > 1:
        ranks = number_ranges(rank for rank, flag in sharing.items() if not flag)
        raise AgreementError(f"rank {ranks} of {side} says that dispatch tables may differ, others that they must not")
    if any(sharing.values()) and len(tables) > 1:
        try:
            audit_shared_dispatch(dict(tables.values()))
        except AgreementError as error:
            raise AgreementError(f"{side}: {error}") from None
