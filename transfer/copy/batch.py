"""Copies inside one process, prepared: from parameters into messages, from messages into parameters, and between slots.

On a CPU, runs of memory are moved many at a time (`runs`); the rest, and everything on a GPU, by torch's calls for many
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, product

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import BoolArray, IntArray
from weightcast.transfer.boxes.strided import StridedCopies
from weightcast.transfer.copy.nan import settle_nan
from weightcast.transfer.copy.runs import Step, find_runs, make_steps

__all__ = ["CopyBatch", "make_copies", "strided_views"]


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Copies that are made together, with few calls.

    `steps` move many runs each. `targets[i]` gets `sources[i]`, converted if the dtypes differ. `joins` are (target,
    sources) where sources of the target's dtype are laid one after the other, which is faster. `casts` are targets that
    got converted values.
    """

    steps: list[Step] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    joins: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    casts: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Makes them."""
        for step in self.steps:
            step.run()
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        for target, sources in self.joins:
            torch.cat(sources, out=target)
        for target in self.casts:
            settle_nan(target)


def make_copies(
    copies: StridedCopies,
    tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    packed: int | None,
    batches: Sequence[CopyBatch],
    batch: IntArray,
    scratch: torch.Tensor,
) -> None:
    """Adds copies that came from `join` to the batches that `batch` (k,) names.

    They go from side 0 to side 1. `tensors` are the flat tensors of the sides, by base. Where a side is `packed` its
    tensors are messages, a group each, which the copies empty or fill in order, or some of it. `scratch` has
    SCRATCH_BYTES.
    """
    left = ~_add_steps(copies, tensors, packed, batches, batch, scratch)
    views = [strided_views(tensors[side], copies.take(left), side) for side in (0, 1)]
    rows = list(zip(np.flatnonzero(left).tolist(), *views, strict=True))
    for message, some in groupby(rows, key=lambda row: int(copies.group[row[0]])):
        numbers, sources, targets = (list(column) for column in zip(*some, strict=True))
        into = batches[int(batch[numbers[0]])]
        whole = packed == 1 and sum(source.numel() for source in sources) == tensors[1][message].numel()
        if whole and all(_joins(source, tensors[1][message]) for source in sources):
            into.joins.append((tensors[1][message], sources))
        else:
            into.targets.extend(targets)
            into.sources.extend(sources)
    if packed == 1:
        kinds = [[t.dtype for t in side] for side in tensors]
        pairs = dict.fromkeys(zip(copies.base[:, 0].tolist(), copies.base[:, 1].tolist(), batch.tolist(), strict=True))
        cast = dict.fromkeys((to, number) for base, to, number in pairs if kinds[0][base] != kinds[1][to])
        for to, number in cast:
            batches[number].casts.append(tensors[1][to])


def _joins(source: torch.Tensor, message: torch.Tensor) -> bool:
    alike = source.dtype == message.dtype and source.device == message.device
    return alike and source.dim() == 1 and source.is_contiguous()


def _add_steps(
    copies: StridedCopies,
    tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    packed: int | None,
    batches: Sequence[CopyBatch],
    batch: IntArray,
    scratch: torch.Tensor,
) -> BoolArray:
    """Adds steps to the batches; (k,) which copies they make."""
    kinds = list(dict.fromkeys(t.dtype for side in tensors for t in side))
    columns = []
    for side in (0, 1):
        base = copies.base[:, side]
        address = np.array([t.data_ptr() for t in tensors[side]], dtype=np.int64)[base]
        kind = np.array([kinds.index(t.dtype) for t in tensors[side]], dtype=np.int64)[base]
        here = np.array([t.device.type == "cpu" for t in tensors[side]], dtype=bool)[base]
        columns.append((address, kind, here))
    origin, kind, here = (np.stack(pair, axis=1) for pair in zip(*columns, strict=True))
    itemsize = np.array([t.itemsize for t in kinds], dtype=np.int64)[kind]
    allowed = here.all(axis=1) & ((kind[:, 0] == kind[:, 1]) | (packed == 1))
    runs = find_runs(copies, origin, itemsize, allowed, packed)
    pairs = list(product(kinds, kinds))
    dtype = kind[runs.copy, 0] * len(kinds) + kind[runs.copy, 1]
    steps, taken = make_steps(runs, copies.group[runs.copy], pairs, dtype, packed, scratch)
    for row, step in steps:
        batches[int(batch[runs.copy[row]])].steps.append(step)
    made = np.zeros(len(copies), dtype=bool)
    made[runs.copy] = True
    made[runs.copy[~taken]] = False
    return made


def strided_views(tensors: Sequence[torch.Tensor], copies: StridedCopies, side: int) -> list[torch.Tensor]:
    """One side of each copy, without dimensions of size 1."""
    out = []
    columns = (copies.base[:, side], copies.start[:, side], copies.size, copies.stride[:, :, side])
    for base, start, size, stride in zip(*(c.tolist() for c in columns), strict=True):
        steps = [(n, s) for n, s in zip(size, stride, strict=True) if n != 1] or [(1, 1)]
        # Counted from the storage, so that a base may itself be a view.
        first = start + tensors[base].storage_offset()
        out.append(tensors[base].as_strided([n for n, _ in steps], [s for _, s in steps], first))
    return out
