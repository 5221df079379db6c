"""Whether the expert slots of an instance are what its placement says: each one there, whole, with the right expert.

Slots come from the placement, never from the names found: a slot that an engine's loader forgets has no region.
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
"""Slots that are looked at to name those that are missing."""


def common_placement(side: SideName, reports: Sequence[RankReport]) -> ExpertPlacement | None:
    """The one placement of all ranks that report one, None when no rank does.

    Raises LayoutError, naming ranks and the first layer, where they differ; CoverageError for storage ranks that are on
    no rank.
    """
    first: RankReport | None = None
    stored: set[int] = set()
    for report in reports:
        if report.placement is None:
            continue
        first = first or report
        mine, other = report.placement.placement, first.placement.placement  # type: ignore[union-attr]
        if mine != other:
            raise LayoutError(_difference(side, first.rank, other, report.rank, mine))
        stored.add(report.placement.storage_rank)
    if first is None or first.placement is None:
        return None
    placement = first.placement.placement
    if missing := set(range(placement.ep_size)) - stored:
        raise CoverageError(
            f"the experts of storage rank {number_ranges(missing)} of {placement.ep_size} are on no rank of {side}"
        )
    return placement


def _difference(side: SideName, first: int, other: ExpertPlacement, rank: int, mine: ExpertPlacement) -> str:
    who = f"the placement of {side.rank(rank)} differs from that of rank {first}"
    if (mine.num_logical, mine.ep_size, mine.num_physical) != (other.num_logical, other.ep_size, other.num_physical):
        return (
            f"{who}: {mine.num_logical} experts in {mine.num_physical} slots over {mine.ep_size} ranks, and "
            f"{other.num_logical} in {other.num_physical} over {other.ep_size}"
        )
    if mine.num_layers != other.num_layers:
        return f"{who}: {mine.num_layers} layers and {other.num_layers}"
    layer = int(mine.changed_layers(other)[0])
    slot = int((mine.physical_to_logical[layer] != other.physical_to_logical[layer]).argmax())
    found, known = mine.logical(layer, slot), other.logical(layer, slot)
    return (
        f"{who}: layer {layer}, physical slot {slot} holds expert {found}, and {known} there; "
        "read the placement of all ranks while no expert moves"
    )


def check_slots(
    side: SideName,
    reports: Sequence[RankReport],
    placement: ExpertPlacement,
    joined: JoinedRanks,
    parsed: ParsedNames,
) -> None:
    """Every routed slot of every expert layer of the instance is held, whole and by the expert of the placement.

    `parsed` are the numbers in the names of the joined tensors.

    Raises AgreementError (rank, layer, slot, expected, found) for another expert, CoverageError for what is missing,
    LayoutError for slots of ranks without a placement and slots past a rank's last.
    """
    slots = _routed_rows(side, reports, placement, joined, parsed)
    _check_experts(side, placement, slots)
    _check_complete(side, placement, slots)


@dataclass(frozen=True, slots=True)
class _SlotRows:
    """Regions in routed slots, with what their names say: (n,) columns beside the regions' own.

    `physical` is the slot numbered over the instance, `family` the part of one layer's experts (gate_proj of layer 3),
    `expert` the number in the name, or, for a tensor that has all experts stacked in dimension 0, the index there.
    `volume` is that of the expert's whole part.
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
    side: SideName,
    reports: Sequence[RankReport],
    placement: ExpertPlacement,
    joined: JoinedRanks,
    parsed: ParsedNames,
) -> _SlotRows:
    tensors, regions = joined.tensors, joined.regions
    placements = [report.placement for report in reports]
    storage = np.array([p.storage_rank if p else NONE for p in placements], dtype=np.int64)
    last = np.array([p.num_slots if p else 0 for p in placements], dtype=np.int64)
    own = regions.take(np.flatnonzero(regions.slot != NO_SLOT))
    outside = own.slot >= last[own.rank]
    if outside.any():
        row = int(outside.argmax())
        rank, name = int(own.rank[row]), tensors.names[int(own.tensor[row])]
        has = f"has {last[rank]} slots" if placements[rank] else "reported no placement"
        raise LayoutError(f"{side.rank(rank)} {has}, but a region of {name!r} in slot {int(own.slot[row])}")
    # Slots past the routed ones hold fused shared experts, which are in no map.
    own = own.take(np.flatnonzero(own.slot < placement.slots_per_rank))
    expert = parsed.expert[own.tensor]
    stacked = (expert == NONE) & (own.size[:, 0] == 1) & (tensors.shape[own.tensor, 0] == placement.num_logical)
    volume = tensors.shape.prod(axis=1)[own.tensor]
    return _SlotRows(
        regions=own,
        tensors=tensors,
        physical=storage[own.rank] * placement.slots_per_rank + own.slot,
        layer=parsed.layer[own.tensor],
        expert=np.where(stacked, own.offset[:, 0], expert),
        family=parsed.family[own.tensor],
        stacked=stacked.astype(np.int64),
        volume=np.where(stacked, volume // max(placement.num_logical, 1), volume),
    )


def _check_experts(side: SideName, placement: ExpertPlacement, slots: _SlotRows) -> None:
    """The expert in each region's name is the one that the placement has in its slot."""
    expected = _experts_in(placement, slots.layer, slots.physical)
    wrong = (slots.layer == NONE) | (slots.expert != expected)
    if not wrong.any():
        return
    row = int(wrong.argmax())
    found = "no expert number" if slots.expert[row] == NONE else f"expert {int(slots.expert[row])}"
    if slots.layer[row] == NONE:
        found = "no layer number"
    rank, slot = int(slots.regions.rank[row]), int(slots.regions.slot[row])
    raise AgreementError(
        f"{side.rank(rank)}, layer {int(slots.layer[row])}, slot {slot}: "
        f"the placement has expert {int(expected[row])} there, the region has {found} ({slots.name(row)!r}); "
        f"{int(wrong.sum())} regions differ; describe the instance anew while no expert moves"
    )


def _experts_in(placement: ExpertPlacement, layer: IntArray, physical: IntArray) -> IntArray:
    """Logical expert in (layer, physical slot) columns; layers past the map have the identity."""
    mapped = (layer >= 0) & (layer < placement.num_layers)
    inside = placement.physical_to_logical[np.where(mapped, layer, 0), physical]
    return np.where(mapped, inside, physical % placement.num_logical)


def _check_complete(side: SideName, placement: ExpertPlacement, slots: _SlotRows) -> None:
    """Every family has a region in every physical slot, and the regions of a slot make up the whole part."""
    count = placement.num_physical
    families, family = np.unique(slots.family, return_inverse=True)
    key = family * count + slots.physical
    present = _distinct(key, len(families) * count)
    if len(present) != len(families) * count:
        window = np.arange(min(len(families) * count, _KEYS_NAMED), dtype=np.int64)
        missing = np.setdiff1d(window, present, assume_unique=True)
        raise CoverageError(_missing_slots(side, placement, slots, families, missing))
    volume = slots.regions.volume
    whole = np.zeros(len(present), dtype=bool)
    dense = np.searchsorted(present, key)
    whole[dense[volume == slots.volume]] = True
    rest = np.flatnonzero(~whole[dense])
    if not len(rest):
        return
    _check_cut_slots(side, slots, rest, dense[rest])


def _distinct(key: IntArray, extent: int) -> IntArray:
    """Distinct keys of 0..extent-1, ascending; faster where most of them are there."""
    if extent > 4 * len(key):
        return np.unique(key)
    held = np.zeros(extent, dtype=np.bool_)
    held[key] = True
    return np.flatnonzero(held)


def _missing_slots(
    side: SideName, placement: ExpertPlacement, slots: _SlotRows, families: IntArray, missing: IntArray
) -> str:
    """Names what is missing in the first incomplete slot, and counts the other incomplete slots."""
    if not len(missing):
        return f"slots of {side} are missing; its placement has {placement.num_physical} in each layer"
    family, physical = np.divmod(missing, placement.num_physical)
    first = physical == physical.min()
    storage, slot = divmod(int(physical.min()), placement.slots_per_rank)
    names = []
    for one in families[family[first]].tolist():
        row = int((slots.family == one).argmax())
        expert = int(_experts_in(placement, slots.layer[row : row + 1], physical.min()[None])[0])
        names.append(slots.name(row).replace(f"experts.{int(slots.expert[row])}.", f"experts.{expert}.", 1))
    others = len(np.unique(physical)) - 1
    more = f"; {others} more slots are incomplete" if others else ""
    ranks = np.unique(slots.regions.rank[slots.physical // placement.slots_per_rank == storage]).tolist()
    who = f"rank {number_ranges(ranks)} of {side}" if ranks else f"the ranks of {side} with storage rank {storage}"
    return f"{summarize(names)}: not in slot {slot} of {who}, which the placement says holds it{more}"


def _check_cut_slots(side: SideName, slots: _SlotRows, rest: IntArray, key: IntArray) -> None:
    """Slots held in several boxes, by one rank or by several that share the storage rank: the boxes cover the part."""
    keys, first, dense = np.unique(key, return_index=True, return_inverse=True)
    own = slots.regions.take(rest)
    cells = decompose(dense, own.offset, own.size, lambda i: f"a slot of {slots.name(int(rest[first[i]]))!r} of {side}")
    shape = slots.tensors.shape[own.tensor[first]]
    shape[slots.stacked[rest[first]] == 1, 0] = 1
    short = uncovered(cells.key, cells.offset, cells.size, shape)
    if not len(short):
        return
    row = int(rest[first[short[0]]])
    ranks = number_ranges(own.rank[dense == short[0]].tolist())
    more = f"; {len(short)} of {len(keys)} such slots are incomplete" if len(short) > 1 else ""
    raise CoverageError(
        f"{slots.name(row)!r}: slot {int(slots.regions.slot[row])} of rank {ranks} of {side} holds only a part{more}"
    )


def check_dispatch(side: SideName, reports: Sequence[RankReport], placement: ExpertPlacement) -> None:
    """The dispatch audit: each rank's tokens are sent only to slots that hold their expert.

    Raises AgreementError naming rank, layer, expert and slot, also where tables differ that must not.
    """
    distinct: dict[bytes, tuple[int, IntArray]] = {}
    shared: Mapping[int, bool] = {r.rank: r.notes.dispatch_shared for r in reports if len(r.notes.dispatch)}
    for report in reports:
        if len(report.notes.dispatch):
            distinct.setdefault(report.notes.dispatch.tobytes(), (report.rank, report.notes.dispatch))
    for rank, table in distinct.values():
        try:
            audit_dispatch(placement, table)
        except AgreementError as error:
            raise AgreementError(f"{side.rank(rank)}: {error}") from None
    if len(set(shared.values())) > 1:
        apart = number_ranges(rank for rank, same in shared.items() if not same)
        raise AgreementError(f"rank {apart} of {side} says that dispatch tables may differ, others that they must not")
    if any(shared.values()) and len(distinct) > 1:
        try:
            audit_shared_dispatch(dict(distinct.values()))
        except AgreementError as error:
            raise AgreementError(f"{side}: {error}") from None
