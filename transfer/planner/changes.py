"""Changes in the tables of instances since they were joined: of rows, not names, where names stayed the same."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import any_column, pad_boxes
from weightcast.transfer.layout.joined import UNKNOWN, JoinedPair, JoinedRanks

__all__ = ["changed_layers", "named_by_trainer", "new_sides"]


def named_by_trainer(pair: JoinedPair) -> bool:
    """True if the trainer's tables alone say which tensors there are, in which order and how wide boxes are."""
    exact_width = pair.tensors.width == max(1, int(pair.tensors.ndim.max(initial=1)))
    return exact_width and not bool((pair.trainer.dtype == UNKNOWN).any())


def new_sides(pair: JoinedPair, instances: Mapping[str, JoinedRanks]) -> list[JoinedRanks] | None:
    """Returns the sides of new tables: the old ones where nothing changed; None where one has another structure."""
    by_key: dict[tuple[tuple[str, ...], tuple[str, ...]], JoinedRanks] = {}
    sides: list[JoinedRanks] = []
    for old, new in zip(pair.instances, instances.values(), strict=True):
        if new.fingerprints == old.fingerprints:
            sides.append(old)
            continue
        key = old.fingerprints, new.fingerprints
        if key not in by_key:
            side = _new_side(pair, old, new)
            if side is None:
                return None
            by_key[key] = side
        sides.append(by_key[key] if by_key[key].name == old.name else by_key[key].renamed(old.name))
    return sides


def _new_side(pair: JoinedPair, old: JoinedRanks, new: JoinedRanks) -> JoinedRanks | None:
    """`new` in the pair's numbers; None where counts, tensors, shapes or dtypes are not those of `old`."""
    row, width = pair.rows_of(new), pair.tensors.width
    if (row < 0).any() or new.tensors.width > width or not np.array_equal(old.first, new.first):
        return None
    shape = pad_boxes(new.tensors.shape, width, 1)
    if not (
        np.array_equal(shape, np.take(pair.tensors.shape, row, axis=0))
        and np.array_equal(new.tensors.ndim, pair.tensors.ndim[row])
    ):
        return None
    side = new.renumbered(pair.tensors, row)
    return side.renamed(old.name) if np.array_equal(side.dtype, old.dtype) else None


def changed_layers(pair: JoinedPair, old: JoinedRanks, new: JoinedRanks) -> IntArray:
    """Layers of the pair that have other rows in one side than in the other, ascending."""
    difference = (old.tensor != new.tensor) | (old.slot != new.slot)
    difference |= any_column(old.offset != new.offset) | any_column(old.size != new.size)
    rows = np.flatnonzero(difference)
    return np.unique(pair.layer[np.concatenate([old.tensor[rows], new.tensor[rows]])])
