"""Placements of experts: the logical expert in each physical slot.

A placement is the physical-to-logical map of every layer: `physical_to_logical[layer, p]` is the logical expert in
physical slot `p`, and `divmod(p, slots_per_rank)` is the (EP rank, local slot) where that slot lies. Everything else is
derived from this one map. Engines also keep a logical-to-physical map, but that is what the token dispatcher may
choose: with an a2a backend SGLang 0.5.23 narrows it to one slot per rank (`srt/eplb/expert_location.py`,
`_compute_logical_to_all_physical_map`), and a second replica on the same rank is lost. Slots are never taken from it.

    placement = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0]]), num_logical=4, ep_size=2)
    placement.local_experts(0, 1)   # [3, 3, 0]: both replicas of expert 3 on EP rank 1

The layer index is the model's layer id. Layers past the map (draft and MTP layers) have the identity placement.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import PlacementError, PlacementIndexError
from weightcast.transfer.layout.summaries import number_ranges

__all__ = ["ExpertPlacement", "RankPlacement"]

_SHOWN_LAYER_GROUPS = 4


@dataclass(frozen=True, eq=False)
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

    def __post_init__(self) -> None:
        source = np.asarray(self.physical_to_logical)
        _check_map(source, self.num_logical, self.ep_size)
        rows = np.array(source, dtype=np.int64, order="C")
        rows.flags.writeable = False
        object.__setattr__(self, "physical_to_logical", rows)

    @classmethod
    def identity(cls, num_layers: int, num_logical: int, ep_size: int) -> Self:
        """Placement with expert p in slot p of every layer."""
        return cls(np.tile(np.arange(num_logical), (num_layers, 1)), num_logical, ep_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole placement; equal placements, and only those, have equal fingerprints."""
        header = f"{self.num_logical} {self.ep_size} ".encode()
        hashes = [_hash(header + row.astype("<i8").tobytes()) for row in self.physical_to_logical]
        return _hash(" ".join(hashes).encode())

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

    @cached_property
    def _identity_row(self) -> IntArray:
        row = np.arange(self.num_physical, dtype=np.int64) % self.num_logical
        row.flags.writeable = False
        return row

    def local_experts(self, layer: int, ep_rank: int) -> IntArray:
        """(slots_per_rank,) the logical expert of each routed slot of one EP rank, read-only.

        Raises PlacementIndexError.
        """
        if not 0 <= ep_rank < self.ep_size:
            raise self._out_of_range(layer, "EP rank", ep_rank, self.ep_size)
        first = ep_rank * self.slots_per_rank
        return self.global_slots(layer)[first : first + self.slots_per_rank]

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
        """The layers whose slots hold other experts or are spread over ranks otherwise, ascending.

        Past the end of the shorter map layers count as identity.
        """
        layers = max(self.num_layers, other.num_layers)
        spreads = [(p.num_logical, p.num_physical, p.ep_size) for p in (self, other)]
        if spreads[0] != spreads[1]:
            return np.arange(layers)
        return np.flatnonzero((self._extended(layers) != other._extended(layers)).any(axis=1))

    def _extended(self, layers: int) -> IntArray:
        """(layers, P) the map, with identity for the layers past its end."""
        return np.vstack([self.physical_to_logical, np.tile(self._identity_row, (layers - self.num_layers, 1))])

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
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer in np.flatnonzero(missing.any(axis=1)).tolist():
        groups.setdefault(tuple(np.flatnonzero(missing[layer]).tolist()), []).append(layer)
    texts = [
        f"layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)}: experts {number_ranges(experts)}"
        for experts, layers in list(groups.items())[:_SHOWN_LAYER_GROUPS]
    ]
    remainder = sum(len(layers) for layers in list(groups.values())[_SHOWN_LAYER_GROUPS:])
    return "; ".join([*texts, f"and in {remainder} more layers"] if remainder else texts)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
