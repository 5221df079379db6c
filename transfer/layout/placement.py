"""Placements of experts: the logical expert in each physical slot, and the way back.

A placement is the physical-to-logical map of every layer: `physical_to_logical[layer, p]` is the logical expert in
physical slot `p`, and `divmod(p, slots_per_rank)` is the (EP rank, local slot) where that slot lies. Everything else is
derived from this one map. Engines also keep a logical-to-physical map, but that is what the token dispatcher may
choose: with an a2a backend SGLang 0.5.23 narrows it to one slot per rank (`srt/eplb/expert_location.py`,
`_compute_logical_to_all_physical_map`), and a second replica on the same rank is lost. Slots are never taken from it.

    placement = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0]]), num_logical=4, ep_size=2)
    placement.slots(0, 3)        # (3, 4)
    placement.rank_slots(0, 3)   # [(1, 0), (1, 1)]: both replicas on EP rank 1

The layer index is the model's layer id. Layers past the map (draft and MTP layers) have the identity placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import PlacementError, PlacementIndexError

__all__ = ["ExpertPlacement", "InverseMap", "RankPlacement", "SlotTable"]

SlotTable = tuple[tuple[int, ...], ...]
"""The physical slots of each logical expert of one layer."""

_SHOWN_LAYER_GROUPS = 4


class InverseMap(NamedTuple):
    """The map from logical to physical, all layers at once, in compressed rows.

    `slots` (layers, P) has the physical slots of each layer sorted by logical expert, then by slot. Those of expert `e`
    are `slots[layer, start[layer, e]:start[layer, e + 1]]`; `start` is (layers, num_logical + 1).
    """

    slots: IntArray
    start: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class ExpertPlacement:
    """The placement of the routed experts of one instance. Immutable; equal and hashed by value.

    `physical_to_logical` is (layers, P): the logical expert in each physical slot, P counted over the whole instance.
    It is copied, because engines rewrite their own map in place when they rebalance. `num_logical` counts the experts
    of the checkpoint; `ep_size` the EP ranks that the P slots are spread over, P // ep_size each. Layers, experts,
    slots and ranks count from 0, and never from the end.

    Raises PlacementError for a map of wrong shape or type, P that `ep_size` does not divide, or a layer in which an
    expert has no slot. Raises PlacementIndexError for ids outside [0, num_logical).
    """

    physical_to_logical: IntArray
    num_logical: int
    ep_size: int
    inverse: InverseMap = field(init=False, repr=False)
    """The map from logical to physical in columns."""
    layer_fingerprints: tuple[str, ...] = field(init=False, repr=False)
    """A hash per layer of what its slots hold and how they are spread over ranks."""
    fingerprint: str = field(init=False, repr=False)
    """A hash of the whole placement; equal placements, and only those, have equal fingerprints."""
    _identity_row: IntArray = field(init=False, repr=False)
    _slot_tables: list[SlotTable] = field(default_factory=list, init=False, repr=False)
    """One per layer and the identity's at the end, made at the first look-up."""

    def __post_init__(self) -> None:
        source = np.asarray(self.physical_to_logical)
        _check_map(source, self.num_logical, self.ep_size)
        rows = np.array(source, dtype=np.int64, order="C")
        identity = np.arange(rows.shape[1], dtype=np.int64) % self.num_logical
        rows.flags.writeable = identity.flags.writeable = False
        fingerprints = tuple(self._fingerprint_of(row) for row in rows)
        fingerprint = hashlib.blake2b(" ".join(fingerprints).encode(), digest_size=16).hexdigest()
        # Slots, no cached properties: an instance dictionary would take the look-up of a slot from 0.07 us to 0.1 us.
        for name, value in (
            ("physical_to_logical", rows),
            ("inverse", _invert(rows, self.num_logical)),
            ("layer_fingerprints", fingerprints),
            ("fingerprint", fingerprint),
            ("_identity_row", identity),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def identity(cls, num_layers: int, num_logical: int, ep_size: int, num_physical: int | None = None) -> Self:
        """Placement with expert p in slot p of every layer; slots past the experts, if any, begin with expert 0
        again."""
        row = np.arange(num_logical if num_physical is None else num_physical, dtype=np.int64) % max(num_logical, 1)
        return cls(np.tile(row, (num_layers, 1)), num_logical, ep_size)

    @property
    def num_layers(self) -> int:
        """Layers in the map. Any layer id past it has the identity placement."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_physical(self) -> int:
        """P, the routed slots of the whole instance."""
        return int(self.physical_to_logical.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Routed slots of one EP rank; physical slot p is local slot p % slots_per_rank of rank p // slots_per_rank."""
        return self.num_physical // self.ep_size

    def logical(self, layer: int, physical: int) -> int:
        """The logical expert in a physical slot. Raises PlacementIndexError."""
        if not 0 <= physical < self.num_physical:
            raise self._out_of_range(layer, "physical slot", physical, self.num_physical)
        return int(self.global_slots(layer)[physical])

    def global_slots(self, layer: int) -> IntArray:
        """(P,) the logical expert of every physical slot of the instance, read-only.

        This is also what a rank holds of a tensor that keeps all slots on every rank, as SGLang's parameters flagged
        `_sglang_require_global_experts` do. (SGLang 0.5.23's own loader fills them by p % num_logical, always.)
        """
        if layer < 0:
            raise PlacementIndexError(
                f"layer {layer} is not in 0..{self.num_layers - 1} nor past the map; ids count from 0"
            )
        return self.physical_to_logical[layer] if layer < self.num_layers else self._identity_row

    def local_experts(self, layer: int, ep_rank: int) -> IntArray:
        """(slots_per_rank,) the logical expert of each routed slot of one EP rank, read-only.

        Raises PlacementIndexError.
        """
        if not 0 <= ep_rank < self.ep_size:
            raise self._out_of_range(layer, "EP rank", ep_rank, self.ep_size)
        first = ep_rank * self.slots_per_rank
        return self.global_slots(layer)[first : first + self.slots_per_rank]

    def slots(self, layer: int, expert: int) -> tuple[int, ...]:
        """Every physical slot of a logical expert, on all ranks, ascending. Raises PlacementIndexError.

        A tuple out of a table made once per placement, so that a call costs less than 0.1 us. `slot_table` is faster
        still in a loop over the experts of a layer, and `inverse` is the same in columns.
        """
        # Ids too large raise IndexError, as does a table not made yet; negative ones would count from the end.
        if layer >= 0 and expert >= 0:
            try:
                return self._slot_tables[layer][expert]
            except IndexError:
                pass
        table = self.slot_table(layer)
        if not 0 <= expert < self.num_logical:
            raise self._out_of_range(layer, "logical expert", expert, self.num_logical)
        return table[expert]

    def slot_table(self, layer: int) -> SlotTable:
        """`slots` of every logical expert of one layer, to be indexed by expert in inner loops."""
        self.global_slots(layer)  # Raises for a negative layer.
        if not self._slot_tables:
            identity = _invert(self._identity_row[None], self.num_logical)
            columns = zip(
                chain(self.inverse.slots, identity.slots), chain(self.inverse.start, identity.start), strict=True
            )
            self._slot_tables[:] = [_tuples(slots, start) for slots, start in columns]
        return self._slot_tables[min(layer, self.num_layers)]

    def same_rank_pairs(self) -> IntArray:
        """(k, 4) layer, logical expert, EP rank and number of its slots on that rank, where these are two or more."""
        layers, slots, ranks = self.num_layers, self.num_physical, self.ep_size
        layer = np.repeat(np.arange(layers), slots)
        rank = np.tile(np.arange(slots) // self.slots_per_rank, layers)
        key = (layer * self.num_logical + self.physical_to_logical.ravel()) * ranks + rank
        key, count = np.unique(key, return_counts=True)
        key, count = key[count > 1], count[count > 1]
        layer_and_expert, rank = np.divmod(key, ranks)
        layer, expert = np.divmod(layer_and_expert, self.num_logical)
        return np.stack([layer, expert, rank, count], axis=1).astype(np.int64)

    def changed_layers(self, other: ExpertPlacement) -> IntArray:
        """The layers whose fingerprints differ, ascending. Past the end of the shorter map layers count as identity."""
        count = max(self.num_layers, other.num_layers)
        hashes, other_hashes = self._fingerprints_up_to(count), other._fingerprints_up_to(count)
        return np.array(
            [i for i, (a, b) in enumerate(zip(hashes, other_hashes, strict=True)) if a != b], dtype=np.int64
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertPlacement):
            return NotImplemented
        return (
            self.num_logical == other.num_logical
            and self.ep_size == other.ep_size
            and np.array_equal(self.physical_to_logical, other.physical_to_logical)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _fingerprint_of(self, row: IntArray) -> str:
        header = f"{self.num_logical} {self.ep_size} ".encode()
        return hashlib.blake2b(header + np.ascontiguousarray(row, dtype="<i8").tobytes(), digest_size=16).hexdigest()

    def _fingerprints_up_to(self, count: int) -> tuple[str, ...]:
        extension = (self._fingerprint_of(self._identity_row),) * (count - self.num_layers)
        return self.layer_fingerprints + extension

    def _out_of_range(self, layer: int, what: str, found: int, count: int) -> PlacementIndexError:
        return PlacementIndexError(f"layer {layer}: {what} {found} is not in 0..{count - 1}")


@dataclass(frozen=True)
class RankPlacement:
    """The slots of one rank: its routed slots by the map, then its fused shared experts.

    `storage_rank` is the position in the map whose slots the rank stores (SGLang's `_expert_storage_rank`; after an
    elastic EP scale-up this is not its EP rank). Local slots 0..num_local_routed-1 are routed and follow the map; the
    `num_shared` local slots after them hold fused shared experts, are the same on every rank and are in no map.
    `num_global_routed` is the number of routed slots the rank knew when it started: after a scale-up the map has more,
    and those are routed all the same.

    Raises PlacementError when these numbers contradict each other or the map.
    """

    placement: ExpertPlacement
    storage_rank: int
    num_local_routed: int
    num_global_routed: int
    num_shared: int = 0

    def __post_init__(self) -> None:
        placement = self.placement
        if self.num_local_routed != placement.slots_per_rank:
            raise PlacementError(
                f"storage rank {self.storage_rank} stores {self.num_local_routed} routed slots, but the placement has "
                f"{placement.slots_per_rank} a rank ({placement.num_physical} over {placement.ep_size}); "
                "read both at the same time"
            )
        if not 0 <= self.storage_rank < placement.ep_size:
            raise PlacementIndexError(
                f"storage rank {self.storage_rank} is not in 0..{placement.ep_size - 1} of the placement"
            )
        if self.num_global_routed < 1 or self.num_global_routed % self.num_local_routed:
            raise PlacementError(
                f"storage rank {self.storage_rank} knows {self.num_global_routed} routed slots, expected a multiple of "
                f"its own {self.num_local_routed}"
            )
        if self.num_shared < 0:
            raise PlacementError(
                f"storage rank {self.storage_rank} has {self.num_shared} shared slots, expected 0 or more"
            )

    @property
    def num_slots(self) -> int:
        """Local slots, routed and shared: the first dimension of the rank's fused expert parameters."""
        return self.num_local_routed + self.num_shared

    def experts(self, layer: int) -> IntArray:
        """(num_local_routed,) the logical expert of each local routed slot, read-only."""
        return self.placement.local_experts(layer, self.storage_rank)

    def slot_of_physical(self, physical: int) -> int | None:
        """The local slot of a physical slot, None when another rank stores it; never a shared slot.

        Raises PlacementIndexError.
        """
        if not 0 <= physical < self.placement.num_physical:
            raise PlacementIndexError(f"physical slot {physical} is not in 0..{self.placement.num_physical - 1}")
        slot = physical - self.storage_rank * self.num_local_routed
        return slot if 0 <= slot < self.num_local_routed else None


def _check_map(given: npt.NDArray[np.integer], num_logical: int, ep_size: int) -> None:
    if given.ndim != 2 or given.dtype.kind not in "iu":
        raise PlacementError(
            f"physical_to_logical is {given.dtype} of shape {given.shape}, expected integers of shape (layers, slots)"
        )
    layers, slots = given.shape
    if layers < 1 or num_logical < 1 or ep_size < 1:
        raise PlacementError(
            f"placement has {layers} layers, {num_logical} logical experts, EP size {ep_size}; expected 1 or more each"
        )
    if slots % ep_size:
        raise PlacementError(f"placement has {slots} physical slots a layer, which EP size {ep_size} does not divide")
    outliers = (given < 0) | (given >= num_logical)
    if outliers.any():
        layer, slot = (int(i) for i in np.argwhere(outliers)[0])
        raise PlacementIndexError(
            f"layer {layer}, physical slot {slot} holds logical expert {given[layer, slot]}, "
            f"which is not in 0..{num_logical - 1}"
        )
    if slots < num_logical:
        raise PlacementError(f"placement has {slots} physical slots a layer, too few for {num_logical} logical experts")
    has_slot = np.zeros((layers, num_logical), dtype=bool)
    has_slot[np.arange(layers)[:, None], given] = True
    if not has_slot.all():
        raise PlacementError(
            f"logical experts without a slot: {_describe_missing(~has_slot)}; every expert of a layer needs one"
        )


def _describe_missing(missing: npt.NDArray[np.bool_]) -> str:
    """Layers that miss the same experts together: "layers 0-47: experts 32-127; layer 50: experts 3"."""
    layers = np.flatnonzero(missing.any(axis=1))
    groups: dict[str, list[int]] = {}
    for layer in layers:
        groups.setdefault(_ranges(np.flatnonzero(missing[layer])), []).append(int(layer))
    texts = [
        f"layer{'s' if len(rows) > 1 else ''} {_ranges(rows)}: experts {experts}"
        for experts, rows in list(groups.items())[:_SHOWN_LAYER_GROUPS]
    ]
    remainder = sum(len(rows) for rows in list(groups.values())[_SHOWN_LAYER_GROUPS:])
    return "; ".join([*texts, f"and in {remainder} more layers"] if remainder else texts)


def _ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> "0-2,5"."""
    values = np.unique(np.fromiter(numbers, dtype=np.int64))
    runs = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _invert(physical_to_logical: IntArray, num_logical: int) -> InverseMap:
    layers = physical_to_logical.shape[0]
    slots = np.argsort(physical_to_logical, axis=1, kind="stable").astype(np.int64)
    key = physical_to_logical + np.arange(layers)[:, None] * num_logical
    count = np.bincount(key.ravel(), minlength=layers * num_logical).reshape(layers, num_logical)
    start = np.zeros((layers, num_logical + 1), dtype=np.int64)
    np.cumsum(count, axis=1, out=start[:, 1:])
    return InverseMap(slots, start)


def _tuples(slots: IntArray, start: IntArray) -> SlotTable:
    flat, edges = slots.tolist(), start.tolist()
    return tuple(tuple(flat[a:b]) for a, b in pairwise(edges))
