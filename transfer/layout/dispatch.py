"""The dispatch audit: a token dispatcher may only choose slots that hold the expert it wants.

Tables are (n, 3) rows of (layer, logical expert, physical slot), as in `LayoutNotes.dispatch`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import AgreementError
from weightcast.transfer.layout.placement import ExpertPlacement

__all__ = ["audit_dispatch", "audit_shared_dispatch"]


def audit_dispatch(placement: ExpertPlacement, dispatch: IntArray) -> None:
    """Checks that every row points at a slot that holds the row's expert by the placement. Raises AgreementError."""
    if len(dispatch) == 0:
        return
    layer, expert, slot = dispatch.T
    outliers = (layer < 0) | (expert < 0) | (slot < 0)
    outliers |= (expert >= placement.num_logical) | (slot >= placement.num_physical)
    if outliers.any():
        row = dispatch[int(outliers.argmax())]
        raise AgreementError(
            f"layer {row[0]}: the dispatcher may send logical expert {row[1]} to physical slot {row[2]}, expected "
            f"experts 0..{placement.num_logical - 1} and slots 0..{placement.num_physical - 1}"
        )
    is_past = layer >= placement.num_layers
    map_layer = np.where(is_past, 0, layer)
    occupant = np.where(is_past, slot % placement.num_logical, placement.physical_to_logical[map_layer, slot])
    mismatch = occupant != expert
    if mismatch.any():
        at = int(mismatch.argmax())
        row = dispatch[at]
        rank, local = divmod(int(row[2]), placement.slots_per_rank)
        raise AgreementError(
            f"layer {row[0]}: the dispatcher may send logical expert {row[1]} to physical slot {row[2]} (EP rank "
            f"{rank}, local slot {local}), which holds logical expert {occupant[at]} by the placement; "
            f"{int(mismatch.sum())} such entries"
        )


def audit_shared_dispatch(tables: Mapping[int, IntArray]) -> None:
    """Checks that ranks have the same rows in layers they share; for engines whose EP ranks must agree on a replica.

    `tables` are by rank. Raises AgreementError naming two ranks, layer and expert, which would be summed twice.
    """
    by_layer: dict[int, tuple[int, IntArray]] = {}
    for rank, table in sorted(tables.items()):
        rows = np.unique(table, axis=0)
        cuts = np.flatnonzero(np.diff(rows[:, 0])) + 1
        for part in np.split(rows, cuts) if len(rows) else []:
            layer = int(part[0, 0])
            first_rank, first_part = by_layer.setdefault(layer, (rank, part))
            if np.array_equal(first_part, part):
                continue
            choices, first_choices = {tuple(r) for r in part.tolist()}, {tuple(r) for r in first_part.tolist()}
            _, expert, _ = min(choices ^ first_choices)
            raise AgreementError(
                f"layer {layer}, logical expert {expert}: the dispatcher of rank {rank} may choose physical slots "
                f"{_slots(choices, expert)}, that of rank {first_rank} {_slots(first_choices, expert)}; without an "
                "all-to-all backend all EP ranks must have the same table, or the expert is summed twice"
            )


def _slots(rows: set[tuple[int, ...]], expert: int) -> list[int]:
    return sorted(slot for _, e, slot in rows if e == expert)
