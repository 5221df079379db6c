"""Copies inside one process, prepared: from parameters into messages, from messages into parameters, and between slots.

On a CPU, runs of memory are moved many at a time (`runs`). The rest, and everything on a GPU, is left to torch's calls
for many tensors.
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
        """Makes all copies of the batch."""
        for step in self.steps:
            step()
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

    They go from side 0 to side 1. `tensors` are the flat tensors of the sides, by base. If a side is `packed`, its
    tensors are messages, one for each group. The copies empty or fill them in order, wholly or in part. `scratch` has
    SCRATCH_BYTES.
    """
    remainder = ~_add_steps(copies, tensors, packed, batches, batch, scratch)
    views = [strided_views(tensors[side], copies.take(remainder), side) for side in (0, 1)]
    rows = list(zip(np.flatnonzero(remainder).tolist(), *views, strict=True))
    for message, members in groupby(rows, key=lambda row: int(copies.group[row[0]])):
        numbers, sources, targets = (list(column) for column in zip(*members, strict=True))
        target_batch = batches[int(batch[numbers[0]])]
        is_full = packed == 1 and sum(source.numel() for source in sources) == tensors[1][message].numel()
        if is_full and all(_joins(source, tensors[1][message]) for source in sources):
            target_batch.joins.append((tensors[1][message], sources))
        else:
            target_batch.targets.extend(targets)
            target_batch.sources.extend(sources)
    if packed == 1:
        kinds = [[t.dtype for t in side] for side in tensors]
        pairs = dict.fromkeys(zip(copies.base[:, 0].tolist(), copies.base[:, 1].tolist(), batch.tolist(), strict=True))
        cast_targets = dict.fromkeys(
            (base_number, number) for base, base_number, number in pairs if kinds[0][base] != kinds[1][base_number]
        )
        for base_number, number in cast_targets:
            batches[number].casts.append(tensors[1][base_number])


def _joins(source: torch.Tensor, message: torch.Tensor) -> bool:
    same_kind = source.dtype == message.dtype and source.device == message.device
    return same_kind and source.dim() == 1 and source.is_contiguous()


def _add_steps(
    copies: StridedCopies,
    tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    packed: int | None,
    batches: Sequence[CopyBatch],
    batch: IntArray,
    scratch: torch.Tensor,
) -> BoolArray:
    """Adds steps to the batches; returns a mask (k,) of the copies that they make."""
    kinds = list(dict.fromkeys(t.dtype for side in tensors for t in side))
    columns = []
    for side in (0, 1):
        base = copies.base[:, side]
        address = np.array([t.data_ptr() for t in tensors[side]], dtype=np.int64)[base]
        kind = np.array([kinds.index(t.dtype) for t in tensors[side]], dtype=np.int64)[base]
        on_cpu = np.array([t.device.type == "cpu" for t in tensors[side]], dtype=bool)[base]
        columns.append((address, kind, on_cpu))
    origin, kind, on_cpu = (np.stack(pair, axis=1) for pair in zip(*columns, strict=True))
    itemsize = np.array([t.itemsize for t in kinds], dtype=np.int64)[kind]
    candidates = on_cpu.all(axis=1) & ((kind[:, 0] == kind[:, 1]) | (packed == 1))
    runs = find_runs(copies, origin, itemsize, candidates, packed)
    pairs = list(product(kinds, kinds))
    dtype = kind[runs.copy, 0] * len(kinds) + kind[runs.copy, 1]
    steps, in_step = make_steps(runs, copies.group[runs.copy], pairs, dtype, packed, scratch)
    for row, step in steps:
        batches[int(batch[runs.copy[row]])].steps.append(step)
    mask = np.zeros(len(copies), dtype=bool)
    mask[runs.copy] = True
    mask[runs.copy[~in_step]] = False
    return mask


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
